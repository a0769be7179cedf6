"""Thirty real traces of MMSearch-R1-7B as an evaluated run; counts are those of the file, by hand.

Five runs broke off in their text search, five answered at once (1696 783 904 1956 1072), three
searched the picture alone (2890 2076 1007), the others picture and text.
"""

import csv
import json

import pytest

from svrl_jax.evals import calibration, errors
from svrl_jax.evals.calibration import Share
from svrl_jax.evals.cases import read_run
from tests.data.published_files import PUBLISHED
from tests.experiments.conftest import CONFIG

TRACES = PUBLISHED / "fvqa_traces_30.jsonl"
NAME = "eval_MMSearch-R1-7B_agent_traces_sampled"


@pytest.fixture(scope="module")
def run(untrained_folder, tmp_path_factory):
    from experiments.__main__ import main

    folder = tmp_path_factory.mktemp("traces") / "run"
    arguments = [
        "import_traces", CONFIG, f"--config.model.folder={untrained_folder}",
        f"--workdir={folder}", f"--traces={TRACES}",
        "--config.eval.scorers=('em','em_published')",
    ]  # fmt: skip
    assert main(["experiments", *arguments]) == 0
    assert main(["experiments", "annotate", str(folder)]) == 0
    assert main(["experiments", "analyse", str(folder), "--search_free=category"]) == 0
    return folder


def test_acc_by_the_files_own_verdict_and_by_ours(run):
    (group,) = read_run(run)
    right = {
        scorer: {c.task.id for c in group.cases if c.verdicts[scorer].value == 1.0}
        for scorer in ("source", "em", "em_published")
    }
    assert len(group.cases) == 30 and len(right["source"]) == 14
    # The file compares with the truth alone; both answers are among the row's other answers:
    # "Muhammad Ali Jinnah" and "September 26, 2003".
    explained = {"fvqa_train_2791", "fvqa_train_3112"}
    assert right["em"] - right["source"] == right["em_published"] - right["source"] == explained
    assert right["source"] < right["em"] == right["em_published"]
    for case in group.cases:
        if case.task.id in explained:
            assert case.episode.answer.lower() != case.task.golds[0].lower()


def test_calls_routes_and_both_meanings_of_sr(run):
    (group,) = read_run(run, scorer="source", source="category")
    routes: dict[tuple, int] = {}
    for case in group.cases:
        route = tuple(c.tool for c in case.episode.calls)
        routes[route] = routes.get(route, 0) + 1
    assert routes == {
        (): 5, ("image_search",): 3, ("image_search", "text_search"): 22,
    }  # fmt: skip
    found = calibration.search_calibration(group.cases)
    assert found["acc"] == Share(14, 30)
    assert found["sr"] == Share(25, 30)
    assert found["sr_calls"] == Share(25 + 22, 60)  # two calls are allowed
    # The file calls 15 rows search_free; 1696 783 1956 1072 of them did not search.
    assert found["over_search"] == Share(11, 15)
    assert found["under_search"] == Share(1, 15)  # 904
    failed = [c for c in group.cases if c.episode.tool_failures]
    assert len(failed) == 5 and {errors.cause_of(c) for c in failed} == {"not answered"}


def test_the_report_and_the_failure_report(run):
    folder = run / "analysis"
    with (folder / "search_calibration.csv").open() as file:
        row = next(r for r in csv.DictReader(file) if r["SR by calls"] != "-")
    assert row["SR"] == "0.833 (25/30)" and row["SR by calls"] == "0.783 (47/60)"
    text = (folder / "failures.md").read_text()
    assert "### search decision: 0.400 (12/30)" in text
    assert "### noise: -" in text and "labels are missing" in text  # it writes no masks
    assert "* did not search, though it cannot answer without tools: 1\n" in text  # 904
    assert text.count("task: fvqa_train_") == 6  # three examples of each mode that occurs
    assert (folder / "report.md").read_text().count("|---") >= 8


def test_rescoring_needs_no_traces(run, cli):
    code, out, _ = cli("rescore", run, "--scorers=sub_em,em")
    assert code == 0 and f"{NAME}: acc by sub_em" in out and "of 30" in out
    (group,) = read_run(run)
    assert group.about["scorers"][:2] == ["sub_em", "em"] and group.cases[0].scorer == "sub_em"
    assert set(group.cases[0].verdicts) == {"sub_em", "em", "em_published", "source"}
    assert sum(c.verdicts["source"].value for c in group.cases) == 14  # kept as it was


def test_a_bad_file_is_a_sentence(cli, untrained_folder, tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"data_id": "a"}) + "\n")
    flags = (CONFIG, f"--config.model.folder={untrained_folder}", f"--workdir={tmp_path / 'r'}")
    code, _, err = cli("import_traces", *flags, f"--traces={tmp_path / 't.jsonl'}")
    assert code == 2 and "terminal_status" in err
    code, _, err = cli("import_traces", *flags)
    assert code == 2 and "--traces" in err and not (tmp_path / "r").exists()
