"""A run folder on disk and back as cases."""

import dataclasses
import json

import pytest

from svrl_jax.evals import calibration
from svrl_jax.evals.cases import read_run
from tests.evals.twelve import twelve, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("twelve") / "run")


def test_cases_come_back_as_they_were(run):
    initial, trained = read_run(run)
    assert initial.title == "initial, agent, test, greedy"
    for one, other in zip(initial.cases, twelve(), strict=True):
        assert one.episode.turns == other.episode.turns and one.task == other.task
        assert one.labels == other.labels and one.verdicts == other.verdicts
        assert (one.search_free, one.rate) == (other.search_free, other.rate)
        assert one.score == other.score and one.item == other.item
    assert [c.is_right for c in trained.cases][1:3] == [True, True]
    assert calibration.search_calibration(initial.cases) == calibration.search_calibration(twelve())


def test_a_run_without_groups_is_empty_and_training_evals_are_none(tmp_path):
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "step_000010.json").write_text("{}")
    assert read_run(tmp_path) == []
    with pytest.raises(ValueError, match="source"):
        read_run(tmp_path, source="guess")


def test_labels_of_need_from_other_sources(run, tmp_path):
    by_category = read_run(run, source="category")[0]
    assert {c.search_free for c in by_category.cases} == {None}  # no set of that kind
    by_self = read_run(run, source="self")[0]
    assert {c.search_free for c in by_self.cases} == {None}  # no tool-free episodes here
    copy = write_run(tmp_path / "copy", policies=("initial",))
    path = next((copy / "evals").glob("*.json"))
    about = json.loads(path.read_text()) | {"regime": "direct"}
    direct = path.with_name("eval_initial_direct_test_greedy.json")
    direct.write_text(json.dumps(about))
    for old in (copy / "episodes").glob("eval_initial_agent_test_greedy_0000.*"):
        new = old.with_name(old.name.replace("agent", "direct"))
        new.write_bytes(old.read_bytes())
    agent = next(g for g in read_run(copy, source="self") if g.about["regime"] == "agent")
    assert [c.search_free for c in agent.cases] == [c.is_right for c in twelve()]


def test_the_scorer_can_be_chosen_and_one_that_is_missing_leaves_all_unscored(run):
    group = read_run(run, scorer="em")[0]
    assert {c.is_right for c in group.cases} == {None}
    assert dataclasses.replace(group.cases[0], scorer="judge").is_right is True


def test_an_external_judges_view_may_stand_alone_or_beside(tmp_path):
    folder = write_run(tmp_path / "run", policies=("initial",))
    path = next((folder / "episodes").glob("*.labels.jsonl"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    judged = {"query_judge": [None], "query_judge_name": "j"}
    lines[8] |= judged
    lines[9] = {k: lines[9][k] for k in ("task_id", "sample")} | judged | {"query_judge": [0]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cases = read_run(folder)[0].cases
    assert cases[8].query_verdicts == (None,) and cases[8].labels == twelve()[8].labels
    assert cases[9].query_verdicts == (0,) and cases[9].labels is None and cases[9].oracle == ""
