"""Everything `analyse` writes, from the twelve hand-made episodes."""

import csv
import dataclasses
import re
import time

import numpy as np
import pytest
from PIL import Image

from svrl_jax.analysis import blocks, report
from svrl_jax.analysis.tables import Block, block_markdown
from svrl_jax.evals.cases import Group
from tests.evals.twelve import about, group, twelve, write_run


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("report") / "run")
    lines = [{"step": s, "reward": 0.1 * s, "acc": 0.2, "kl": None} for s in range(4)]
    (folder / "metrics.jsonl").write_text("".join(f"{_json(line)}\n" for line in lines))
    out = folder / "analysis"
    report.write([report.load(folder)], out)
    return out


def _json(line):
    return str(line).replace("'", '"').replace("None", "null")


def cells(path):
    with path.open() as file:
        return list(csv.reader(file))


def test_every_table_and_figure_is_there(written):
    names = {p.name for p in written.iterdir()}
    assert {
        "report.md", "failures.md", "flips.csv", "benchmark.csv", "search_calibration.csv",
        "query_diversity.csv", "errors_given_what_went_right.csv", "causes_of_wrong_answers.csv",
        "verifier_quality.csv", "published_acc_sr_percent.csv",
        "searches_against_the_tool_free_success_rate.csv",
    } <= names  # fmt: skip
    for name in (
        "dynamics",
        "acc_and_sr",
        "calibration_curve",
        "unique_queries",
        "causes",
        "verifier",
    ):
        assert np.asarray(Image.open(written / f"{name}.png").convert("L")).std() > 5
        assert (written / f"{name}.svg").read_text().lstrip().startswith("<?xml")
    text = (written / "report.md").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (written / link).is_file()


def test_the_tables_say_what_was_worked_out(written):
    row = next(r for r in cells(written / "search_calibration.csv") if r[0].startswith("initial"))
    assert row[1] == "0.455 (5/11)" and row[8] == "0.333 (1/3)" and row[9] == "0.125 (1/8)"
    assert row[-1] == f"{20.5 / 28:.3f}"
    rows = {r[0]: r for r in cells(written / "verifier_quality.csv")}
    assert rows["initial, agent, test, greedy: all"][1:4] == ["22", "0.682", "0.723"]
    assert rows["initial, agent, test, greedy: all"][-1] == "2"
    assert rows["SVRL-7B, published"][2] == "0.713"
    calibration = cells(written / "search_calibration.csv")
    assert next(r for r in calibration if r[0].startswith("SVRL-7B"))[1] == "0.653"
    bench = next(r for r in cells(written / "benchmark.csv") if r[0].startswith("initial"))
    assert bench[1:3] == ["12", "1"] and bench[3].startswith("0.455 [")


def test_two_policies_are_compared_question_by_question(written):
    flips = cells(written / "flips.csv")[1:]
    assert [(r[2], r[-1]) for r in flips] == [("t2", "gained"), ("t3", "gained"), ("t7", "lost")]
    text = (written / "report.md").read_text()
    assert "only before 1, only after 2; McNemar's exact p = 1." in text
    assert "11 questions, paired" in text  # 12 is unscored


def test_rows_that_are_not_comparable_are_marked():
    other = Group("eval_b", about(policy="b", prompt="ffffffffffff"), twelve())
    block = blocks.benchmark([group(), other, group(policy="c")])
    assert [re.search(r"\((\w)\)$", row[0])[1] for row in block.rows] == ["a", "b", "a"]
    assert "prompt 0123456789ab" in block.note and "prompt ffffffffffff" in block.note
    assert "judge j (1)" in block.note and "local" in block.note


def test_hostile_text_stays_text():
    case = twelve()[4]
    bad = "```\n# head <script>alert(1)</script> | [x](javascript:alert(1))"
    episode = dataclasses.replace(case.episode, answer=bad)
    task = dataclasses.replace(case.task, question=bad)
    hostile = dataclasses.replace(case, episode=episode, task=task)
    text = report.failure_report([Group("g", about(), (hostile,))])
    fence = re.search(r"(`{4,})text\n(.*?)\n\1\n", text, re.DOTALL)
    assert fence and "<script>" in fence[2]  # inside a fence longer than its own
    assert "<script>" not in re.sub(r"(`{3,})text\n.*?\n\1\n", "", text, flags=re.DOTALL)
    block = Block("flips", ("question",), ((bad,),))
    (line,) = [x for x in block_markdown(block).splitlines() if "head" in x]
    assert "<script>" not in line and "](javascript" not in line and "\\|" in line


def test_groups_without_labels_or_verdicts_are_no_error(tmp_path):
    bare = tuple(
        dataclasses.replace(c, labels=None, verdicts={}, search_free=None, rate=None)
        for c in twelve()
    )
    empty = Group("eval_none", about(policy="none"), ())
    run = report.Run("bare", tmp_path, (Group("eval_bare", about(), bare), empty), ())
    report.write([run], tmp_path / "out")
    text = (tmp_path / "out" / "failures.md").read_text()
    assert text.count("labels are missing") == 6
    row = cells(tmp_path / "out" / "benchmark.csv")[1]
    assert row[1:4] == ["12", "12", "-"]


@pytest.mark.slow
def test_a_thousand_episodes_take_less_than_half_a_minute(tmp_path):
    folder = write_run(tmp_path / "run", copies=42)  # 2 policies x 504
    start = time.process_time()
    report.write([report.load(folder)], folder / "analysis")
    assert time.process_time() - start < 30
