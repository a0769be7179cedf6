"""Model, engine, grammar and tools together: real episodes of a random model over phrases."""

import time

import numpy as np
import pytest
from rollout_toys import (
    ALL_BUT_PHRASES,
    ANSWER,
    CONFIG,
    IMAGE_SEARCH,
    MODEL,
    REASON,
    TOKENIZER,
    VERIFY,
    ToyTools,
    full_logps,
    make_prompt,
    make_task,
    rollout_config,
    search_config,
)

from svrl_jax.rollout.episodes import run_episodes
from svrl_jax.rollout.figures import NAMES, RolloutFigures
from svrl_jax.rollout.policy import ScriptedPolicy
from svrl_jax.rollout.scheduler import EnginePolicy
from svrl_jax.search.errors import SearchStopped, ToolError

BUDGET = 400  # room for results that are spelt byte by byte


def make_policy(**changes):
    return EnginePolicy(MODEL, ALL_BUT_PHRASES, rollout_config(budget=BUDGET, **changes))


def play(
    policy, tasks, *, tools=None, temperature=0.7, group_size=4, step=0, query_choice="random",
    **changes,
):  # fmt: skip
    named = {k: changes.pop(k) for k in ("attempt", "figures") if k in changes}
    return run_episodes(
        tasks,
        [make_prompt(t, grids=[(1, 4, 6)]) for t in tasks],
        policy,
        tools or ToyTools(),
        TOKENIZER,
        CONFIG,
        rollout_config(budget=BUDGET, **changes),
        search_config(),
        seed=1,
        step=step,
        group_size=group_size,
        regime="agent",
        temperature=temperature,
        query_choice=query_choice,
        policy_name="toy",
        **named,
    )


TASKS = [make_task(i) for i in range(5)]


@pytest.fixture(scope="module")
def policy():
    return make_policy()


@pytest.fixture(scope="module")
def groups(policy):
    return play(policy, TASKS)


def assert_same(some, others):
    for one, other in zip(sum(some, []), sum(others, []), strict=True):
        assert (one.task_id, one.sample) == (other.task_id, other.sample)
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
        np.testing.assert_allclose(one.sampler_logps, other.sampler_logps, atol=1e-4)
        assert [c.query for c in one.calls] == [c.query for c in other.calls]
        assert one.end_reason == other.end_reason


@pytest.mark.case("A-S11")
def test_sampler_log_probs_are_those_of_one_full_pass(groups):
    episodes = sum(groups, [])
    # What makes the test worth something: pictures, several tool turns, different lengths and ends.
    two_turns = [e for e in episodes if len(e.calls) >= 2 and e.end_reason == "answered"]
    assert two_turns and len({e.end_reason for e in episodes}) >= 2
    chosen = two_turns[:3] + episodes[:3]
    for e in chosen:
        expected = full_logps(
        e.ids, e.positions, e.pixel_values, e.image_grid_thw,
            temperature=0.7, banned=ALL_BUT_PHRASES,
        )  # fmt: skip
        is_policy = e.loss_mask == 1
        np.testing.assert_allclose(e.sampler_logps[is_policy], expected[is_policy], atol=1e-4)
        assert (e.sampler_logps[is_policy] < 0).all() and not e.sampler_logps[~is_policy].any()


@pytest.mark.parametrize("changes", [{"decode_chunk": 3, "lanes": 1}, {"slots": 20, "lanes": 16}])
def test_chunks_lanes_and_slots_change_no_episode(groups, changes):
    assert_same(play(make_policy(**changes), TASKS, **changes), groups)


@pytest.mark.case("A-S18")
@pytest.mark.parametrize("hosts", [1, 2])
def test_an_episode_does_not_depend_on_its_batch(policy, groups, hosts):
    size = -(-len(TASKS) // hosts)
    parts = [play(policy, TASKS[i : i + size]) for i in range(0, len(TASKS), size)]
    assert_same(sum(parts, []), groups)


def test_steps_and_samples_draw_anew(policy, groups):
    other = play(policy, TASKS[:1], step=1)
    assert any(a.ids.tolist() != b.ids.tolist() for a, b in zip(other[0], groups[0], strict=True))
    assert len({tuple(e.ids) for e in groups[0]}) > 1


def test_greedy_samples_are_equal_and_finite(policy):
    (group,) = play(policy, TASKS[:1], temperature=0.0, group_size=2, query_choice="first")
    np.testing.assert_array_equal(group[0].ids, group[1].ids)
    assert np.isfinite(group[0].sampler_logps).all()


class DeadTools:
    """Tools whose key is not accepted."""

    def image_search(self, task):
        raise ToolError("the key is not accepted", "auth")

    def text_search(self, query, task):
        raise ToolError("the key is not accepted", "auth")


def test_a_policy_serves_again_after_a_rollout_that_stopped(policy, groups):
    with pytest.raises(SearchStopped, match="not accepted"):
        play(policy, TASKS, tools=DeadTools())
    assert_same(play(policy, TASKS), groups)


def test_another_attempt_draws_anew_and_says_so(policy, groups):
    again = play(policy, TASKS[:1], attempt=1)
    assert {e.attempt for e in again[0]} == {1} and {e.attempt for e in groups[0]} == {0}
    pairs = list(zip(again[0], groups[0], strict=True))
    assert any(a.ids.tolist() != b.ids.tolist() for a, b in pairs)
    assert_same(play(policy, TASKS[:1], attempt=1), again)


class SlowTools(ToyTools):
    """Takes a random while, another one each time it is asked."""

    def __init__(self, seed):
        super().__init__()
        self._draw = np.random.default_rng(seed)

    def _answer(self, tool, query, task):
        time.sleep(float(self._draw.uniform(0, 0.02)))
        return super()._answer(tool, query, task)


def test_deterministic_rollouts_do_not_depend_on_how_long_tools_take(policy):
    runs = [
        play(policy, TASKS, tools=SlowTools(seed), deterministic=True, slots=6, lanes=4)
        for seed in range(3)
    ]
    for other in runs[1:]:
        for a, b in zip(sum(runs[0], []), sum(other, []), strict=True):
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_array_equal(a.sampler_logps, b.sampler_logps)  # to the bit
    assert any(e.calls for e in sum(runs[0], []))


def test_figures_say_what_the_rollout_did(policy):
    figures = RolloutFigures()
    episodes = sum(play(policy, TASKS, figures=figures), [])
    n, line = figures.counts, figures.line()
    assert n["sampled"] == sum(int(e.loss_mask.sum()) for e in episodes) <= n["decoded"]
    prompts = sum(e.prompt_length for e in episodes)
    appended = sum(len(e.ids) for e in episodes) - prompts - n["sampled"]
    # A prompt once a group, then each tool text once; what stands behind the last turn never.
    last = sum(e.turns[-1].end - e.turns[-1].stop for e in episodes)
    needed = prompts // 4 + appended - last
    assert n["prefilled"] + n["copied"] == prompts + appended - last
    assert needed <= n["prefilled"] <= 1.05 * needed
    shares = [v for k, v in line.items() if k not in ("tokens_per_s", "compiles")]
    assert set(line) == set(NAMES) and all(0.0 <= v <= 1.0 for v in shares)
    assert line["saved_by_sharing"] > 0 and line["saved_by_warm_caches"] > 0


def test_waiting_for_tools_is_measured():
    tools, figures = ToyTools(), RolloutFigures()
    tools.image_search = lambda task: time.sleep(0.2) or []
    texts = (REASON + VERIFY + IMAGE_SEARCH, REASON + VERIFY + ANSWER)
    script = ScriptedPolicy(lambda view: texts[len(view.turns)], TOKENIZER)
    play(script, TASKS[:1], tools=tools, figures=figures, max_turn_tokens=80)
    assert 0.19 < figures.counts["tool_wait_s"] <= figures.seconds
    assert figures.line()["tool_wait_share"] > 0.5 and figures.line()["prefill_padding"] is None
