"""A run of three steps: unbroken, stopped and resumed, and from a half-written checkpoint."""

import dataclasses
import io
import re
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console

from svrl_jax import checkpoint, grpo
from svrl_jax.records import read_records
from svrl_jax.rewards.oracle import RuleOracle
from svrl_jax.training import loop, task_source
from svrl_jax.training.draw import draw_groups
from svrl_jax.training.labels import SearchFree
from svrl_jax.training.metrics import FACTORS, Clock
from svrl_jax.training.progress import Progress
from svrl_jax.training.run_folder import RunFolder, read_metrics
from tests.conftest import changed


@dataclasses.dataclass
class Done:
    """A run as it was left."""

    state: grpo.TrainState
    run: RunFolder
    said: str

    @property
    def lines(self):
        return read_metrics(self.run.metrics)


def train(bench, workdir, num_steps, **changes) -> Done:
    """What the mode `train` does before its evaluation."""
    bench = dataclasses.replace(bench, config=changed(bench.config, num_steps=num_steps, **changes))
    config = bench.config
    spec = grpo.make_spec(
        bench.model, config.grpo, config.optim, temperature=config.rollout.temperature,
        budget=config.rollout.budget, banned_ids=bench.banned,
    )  # fmt: skip
    run = RunFolder(workdir, config)
    console = Console(file=io.StringIO(), width=400)
    with checkpoint.Checkpoints(run.checkpoints, keep=2) as checkpoints:
        state, position = loop.restore(checkpoints, grpo.init_state(bench.initial_params, spec))
        start = int(state.step)
        run.start_at(start)
        with Progress(num_steps, start, console) as progress:
            state = loop.train(
                bench, run, checkpoints, state, spec,
                task_source.train_stream(config, bench.builder, position),
                SearchFree(bench, run.path / "search_free.json", progress.say),
                RuleOracle(config.reward.min_alias_chars), progress,
            )  # fmt: skip
    return Done(state, run, console.file.getvalue())


@pytest.fixture(scope="module")
def unbroken(bench, tmp_path_factory) -> Done:
    return train(bench, tmp_path_factory.mktemp("unbroken"), 3)


def without_times(line):
    is_speed = re.compile(r"rollout_|.*(_s|_of_rate)$").match
    return {k: v for k, v in line.items() if not is_speed(k)}


def assert_same_line(found, expected):
    found, expected = without_times(found), without_times(expected)
    assert found.keys() == expected.keys() and len(found) > 20
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            # Which requests share a program may round differently.
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def assert_same_params(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_each_step_is_written_once_with_every_figure(unbroken):
    assert [line["step"] for line in unbroken.lines] == [0, 1, 2]
    for line in unbroken.lines:
        assert {"reward", *FACTORS, "acc", "sr", "kl", "entropy", "tokens_per_s"} <= line.keys()
        assert 0.0 <= line["r_format"] <= 1.0 and line["tokens_per_s"] > 0
        assert sum(v for k, v in line.items() if k.startswith("ended_")) == pytest.approx(1.0)


def test_the_policy_moves_and_the_reference_stays(unbroken, bench):
    before = np.concatenate([np.ravel(x) for x in jax.tree.leaves(bench.initial_params)])
    after = np.concatenate([np.ravel(x) for x in jax.tree.leaves(unbroken.state.params)])
    assert np.isfinite(after).all() and np.abs(after - before).max() > 1e-4
    assert int(unbroken.state.step) == 3
    assert unbroken.lines[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert unbroken.lines[2]["kl"] > 1e-5


def test_progress_is_a_line_a_step(unbroken):
    lines = [x for x in unbroken.said.splitlines() if x.startswith("step ")]
    assert len(lines) == 3 and lines[2].startswith("step 3/3")
    for word in ("reward", "Acc", "SR", "count", "qalign", "salign", "format", "tokens/s", "left"):
        assert all(word in line for line in lines)


def test_episodes_are_recorded_with_scores_and_advantages(unbroken):
    for step in range(3):
        records = read_records(unbroken.run.episodes / f"step_{step:06d}.jsonl")
        assert len(records) == 2 * 2
        assert {r.episode.step for r in records} == {step}
        assert len({r.task.id for r in records}) == 2
        line = unbroken.lines[step]
        assert np.mean([r.score.total for r in records]) == pytest.approx(line["reward"])
        for record in records:
            mask = record.episode.loss_mask > 0
            gap = record.per_token_logps[mask] - record.episode.sampler_logps[mask]
            assert np.abs(gap).max() < 1e-3  # on policy: sampler and trainer agree
        for first in (0, 2):
            assert sum(r.advantage for r in records[first : first + 2]) == pytest.approx(
                0, abs=1e-6
            )


@pytest.mark.case("A-C3")
def test_a_stopped_run_goes_on_as_if_it_had_not(bench, unbroken, tmp_path):
    stopped = train(bench, tmp_path / "run", 2)
    assert [line["step"] for line in stopped.lines] == [0, 1]
    resumed = train(bench, tmp_path / "run", 3)
    assert [line["step"] for line in resumed.lines] == [0, 1, 2]
    for found, expected in zip(resumed.lines, unbroken.lines, strict=True):
        assert_same_line(found, expected)
    assert_same_params(resumed.state, unbroken.state)
    records = read_records(resumed.run.episodes / "step_000002.jsonl")
    expected = read_records(unbroken.run.episodes / "step_000002.jsonl")
    assert [r.task for r in records] == [r.task for r in expected]


@pytest.mark.case("A-C3")
def test_deterministic_rollouts_make_a_resumed_run_bit_equal(bench, tmp_path):
    keys = {"rollout.deterministic": True}
    whole = train(bench, tmp_path / "whole", 3, **keys)
    train(bench, tmp_path / "run", 1, **keys)
    resumed = train(bench, tmp_path / "run", 3, **keys)
    for a, b in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(a, b)
    for found, expected in zip(resumed.lines, whole.lines, strict=True):
        assert without_times(found) == without_times(expected)
    for step in range(3):
        name = f"step_{step:06d}.jsonl"
        pair = [read_records(done.run.episodes / name) for done in (resumed, whole)]
        for one, other in zip(*pair, strict=True):
            assert (one.task.id, one.advantage) == (other.task.id, other.advantage)
            for array in ("ids", "loss_mask", "positions", "sampler_logps"):
                np.testing.assert_array_equal(
                    getattr(one.episode, array), getattr(other.episode, array)
                )
            np.testing.assert_array_equal(one.per_token_logps, other.per_token_logps)


@pytest.mark.case("A-C1")
def test_a_half_written_checkpoint_is_passed_over(bench, unbroken, tmp_path):
    shutil.copytree(unbroken.run.path, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "3" / checkpoint.COMMIT_MARK).unlink()
    again = train(bench, tmp_path / "run", 3)
    assert [line["step"] for line in again.lines] == [0, 1, 2]
    assert again.said.count("step 3/3") == 1 and "step 2/3" not in again.said
    assert_same_line(again.lines[2], unbroken.lines[2])
    assert_same_params(again.state, unbroken.state)


def test_a_finished_run_has_nothing_to_do(bench, unbroken):
    before = unbroken.run.metrics.read_bytes()
    again = train(bench, unbroken.run.path, 3)
    assert unbroken.run.metrics.read_bytes() == before and "step" not in again.said
    assert_same_params(again.state, unbroken.state)


def test_episodes_need_not_be_kept_and_evaluation_can_come_in_between(bench, tmp_path):
    done = train(
        bench, tmp_path / "run", 1,
        **{"log_episodes": False, "eval.every": 1, "eval.splits": ("ood",), "eval.num_items": 1},
    )  # fmt: skip
    assert list(done.run.episodes.iterdir()) == []
    assert (done.run.path / "evals" / "step_000001.json").is_file()


def test_equal_groups_are_drawn_again_up_to_a_bound(bench, unbroken):
    """The toy policy's groups are often equal: every draw is a new one, and the bound holds."""
    tasks, prompts = next(task_source.train_stream(bench.config, bench.builder, 0))
    bench.sampler.set_params(bench.initial_params)
    oracle, clock = RuleOracle(bench.config.reward.min_alias_chars), Clock()
    drawn = []
    for most in (0, 2):
        config = changed(bench.config, **{"grpo.max_resamples": most, "grpo.equal_tolerance": 2.0})
        drawn.append(
            draw_groups(
                dataclasses.replace(bench, config=config), tasks, prompts, [False] * len(tasks),
                oracle, 0, clock,
            )
        )  # fmt: skip
    once, again = drawn
    assert once.num_resampled == 0 and again.num_resampled == 2 * len(tasks)
    assert {e.attempt for g in again.episodes for e in g} == {2}
    assert {e.attempt for g in once.episodes for e in g} == {0}
    pairs = zip(once.episodes, again.episodes, strict=True)
    assert any(not np.array_equal(a[0].ids, b[0].ids) for a, b in pairs)
    assert {"rollout", "reward"} <= set(clock.seconds)
