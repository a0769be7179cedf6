"""eval as a command: regimes, a kill in the middle, scaling and masks, each on the tiny policy."""

import json
import shutil

import pytest

from svrl_jax.evals import actors, evaluate
from svrl_jax.evals.cases import read_run
from svrl_jax.evals.store import Chunk
from svrl_jax.records import read_records
from tests.experiments.conftest import CONFIG

FEW = ("--config.eval.splits=('test',)", "--config.eval.modes=('greedy',)")


@pytest.fixture(scope="module")
def evaluated(policy_flag, tmp_path_factory):
    """A folder with all regimes, scaling and mask effect. Read only."""
    from experiments.__main__ import main

    folder = tmp_path_factory.mktemp("evaluated") / "run"
    arguments = [
        "eval", CONFIG, policy_flag, *FEW, f"--workdir={folder}", "--config.eval.num_items=4",
        "--regime=direct,rag,agent,agent_verifier", "--config.eval.filter=words",
        "--config.eval.scorers=('em','sub_em')", "--scaling=1,3", "--mask_effect", "--name=tiny",
    ]  # fmt: skip
    assert main(["experiments", *arguments]) == 0
    return folder


def test_every_regime_is_evaluated_and_kept(evaluated):
    groups = {g.about["regime"]: g for g in read_run(evaluated)}
    assert set(groups) == set(evaluate.REGIMES)
    for regime, group in groups.items():
        assert len(group.cases) == 4 and {c.episode.regime for c in group.cases} == {regime}
        assert {c.episode.policy for c in group.cases} == {"tiny"}
        assert all(set(c.verdicts) == {"em", "sub_em"} for c in group.cases)
        assert all(c.search_free is not None for c in group.cases)
    assert not any(c.episode.calls for c in groups["direct"].cases)
    for case in groups["rag"].cases:
        tools = [c.tool for c in case.episode.calls]
        assert tools == ["image_search", "text_search"][: len(tools)]
        assert tools or case.episode.end_reason != "answered"  # a turn that was cut has no action
    assert groups["agent"].about["allowed_calls"] == 3
    assert groups["rag"].about["allowed_calls"] == 2
    assert groups["agent_verifier"].about["filter"] == "words"


def test_one_search_is_plain_evaluation(evaluated):
    (path,) = (evaluated / "scaling").glob("eval_*greedy.json")
    found = json.loads(path.read_text())
    plain = next(g for g in read_run(evaluated) if g.about["regime"] == "agent")
    first, third = found["widths"]
    assert (first["k"], third["k"]) == (1, 3) and first["n"] == 4
    assert first["acc"] == sum(c.is_right for c in plain.cases) / 4
    assert first["tokens"] == sum(int(c.episode.loss_mask.sum()) for c in plain.cases) / 4
    assert first["branches"] <= third["branches"] and first["searches"] <= third["searches"]


def test_the_mask_effect_counts_what_it_rests_on(evaluated):
    (path,) = (evaluated / "mask_effect").glob("*.json")
    found = json.loads(path.read_text())
    assert found["n"] == 4 and 0 <= found["n_mixed"] <= 4
    assert set(found["acc"]) == {"all", "kept", "dropped"}


def test_a_second_start_runs_nothing(cli, policy_flag, evaluated, monkeypatch):
    monkeypatch.setattr(Chunk, "add", lambda *_: pytest.fail("an episode was run again"))
    code, out, _ = cli(
        "eval", CONFIG, policy_flag, *FEW, f"--workdir={evaluated}", "--config.eval.num_items=4",
        "--regime=direct,agent", "--name=tiny", "--config.eval.filter=words",
    )  # fmt: skip
    assert code == 0 and out.count("acc") == 2


def test_a_kill_in_the_middle_repeats_and_loses_no_question(
    cli, policy_flag, tmp_path, monkeypatch
):
    arguments = (
        "eval", CONFIG, policy_flag, *FEW, f"--workdir={tmp_path / 'run'}",
        "--config.eval.num_items=6",
    )  # fmt: skip
    added: list[str] = []
    add = Chunk.add

    def counted(chunk, episode):
        add(chunk, episode)
        added.append(episode.task_id)
        if len(added) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Chunk, "add", counted)
    with pytest.raises(KeyboardInterrupt):
        cli(*arguments)
    assert cli(*arguments)[0] == 0
    assert len(added) == len(set(added)) == 6
    (path,) = (tmp_path / "run" / "episodes").glob("*.verdicts.jsonl")
    records = read_records(path.with_name(path.name.replace(".verdicts", "")))
    assert sorted(r.task.id for r in records) == sorted(added)


def test_another_policy_under_the_same_name_is_refused(cli, policy_flag, evaluated, trained):
    code, _, err = cli(
        "eval", CONFIG, policy_flag, *FEW, f"--workdir={evaluated}", "--name=tiny",
        f"--policy={trained / 'export'}",
    )  # fmt: skip
    assert code == 2 and "digest" in err and "--name" in err


@pytest.mark.parametrize(
    "flag, said",
    [
        ("--regime=agent,oracle", "oracle"),
        ("--scaling=0", "--scaling"),
        ("--scaling=many", "--scaling"),
        ("--config.eval.scorers=('guess',)", "guess"),
        ("--config.eval.samples=0", "eval.samples"),
        ("--config.eval.filter=none", "eval.filter"),
    ],
)
def test_mistakes_are_a_sentence(cli, policy_flag, tmp_path, flag, said):
    code, _, err = cli("eval", CONFIG, policy_flag, f"--workdir={tmp_path / 'run'}", flag)
    assert code == 2 and err.count("\n") == 1 and said in err
    assert not (tmp_path / "run").exists()


def test_checkpoints_and_run_folders_are_policies(bench, trained, tmp_path):
    newest = actors.load(bench, str(trained))
    assert newest.name == "run-2"
    named = actors.load(bench, str(trained / "checkpoints" / "1"), "first")
    assert named.name == "first" and named.digest != newest.digest
    assert actors.load(bench, str(trained / "checkpoints" / "2")).digest == newest.digest
    bare = tmp_path / "run"
    shutil.copytree(trained / "export", bare / "export")
    assert actors.load(bench, str(trained / "export")).name == "export"
    assert actors.load(bench, None).digest == actors.digest_of(bench.folder)
