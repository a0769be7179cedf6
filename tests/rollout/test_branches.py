"""Branches of finished episodes: the past is the trunk's and computed once, the future is new."""

import dataclasses

import numpy as np
import pytest
from rollout_toys import (
    ALL_BUT_PHRASES,
    CONFIG,
    MODEL,
    TOKENIZER,
    ToyTools,
    full_logps,
    make_prompt,
    make_task,
    rollout_config,
    search_config,
)

from svrl_jax.rollout.branches import Branch, run_branches
from svrl_jax.rollout.episodes import run_episodes
from svrl_jax.rollout.scheduler import EnginePolicy

BUDGET = 400
TASKS = [make_task(i) for i in range(8)]
PROMPTS = [make_prompt(t, grids=[(1, 4, 6)]) for t in TASKS]


@pytest.fixture(scope="module")
def policy():
    return EnginePolicy(MODEL, ALL_BUT_PHRASES, rollout_config(budget=BUDGET))


@pytest.fixture(scope="module")
def trunks(policy):
    groups = run_episodes(
        TASKS, PROMPTS, policy, ToyTools(), TOKENIZER, CONFIG, rollout_config(budget=BUDGET),
        search_config(), seed=1, step=0, group_size=4, regime="agent", temperature=0.7,
        query_choice="first", policy_name="toy",
    )  # fmt: skip
    return [
        (task, prompt, e) for task, prompt, g in zip(TASKS, PROMPTS, groups, strict=True) for e in g
    ]


def run(branches, policy, temperature=0.7, tools=None):
    return run_branches(
        branches, policy, tools or ToyTools(), TOKENIZER, CONFIG, rollout_config(budget=BUDGET),
        search_config(), temperature=temperature, query_choice="first",
    )  # fmt: skip


def first_search(episode):
    return next((i for i, t in enumerate(episode.turns) if t.parsed.action == "text_search"), None)


@pytest.fixture(scope="module")
def searching(trunks):
    found = [
        (t, p, e)
        for t, p, e in trunks
        if first_search(e) is not None and e.turns[first_search(e)].call
    ]
    assert len(found) >= 4
    return found


def test_the_same_query_gives_the_same_episode(policy, searching):
    """Its draws are named by the sample; everything up to the next draw is the trunk's."""
    branches = [
        Branch(t, p, e, first_search(e) + 1, e.sample, query=e.turns[first_search(e)].call.query)
        for t, p, e in searching
    ]
    for (_, _, trunk), branch in zip(searching, run(branches, policy), strict=True):
        np.testing.assert_array_equal(branch.ids, trunk.ids)
        np.testing.assert_array_equal(branch.positions, trunk.positions)
        np.testing.assert_array_equal(branch.loss_mask, trunk.loss_mask)
        np.testing.assert_array_equal(branch.image_grid_thw, trunk.image_grid_thw)
        np.testing.assert_allclose(branch.sampler_logps, trunk.sampler_logps, atol=1e-4)
        assert branch.end_reason == trunk.end_reason and branch.answer == trunk.answer
        assert [c.query for c in branch.calls] == [c.query for c in trunk.calls]


def test_another_query_shares_the_past_and_is_scored_as_one_pass_would(policy, searching):
    task, prompt, trunk = searching[0]
    turn = first_search(trunk)
    proposals = trunk.turns[turn].parsed.proposals
    branches = [
        Branch(task, prompt, trunk, turn + 1, 10 + k, query=q) for k, q in enumerate(proposals)
    ]
    stop = trunk.turns[turn].stop
    for query, one in zip(proposals, run(branches, policy), strict=True):
        np.testing.assert_array_equal(one.ids[:stop], trunk.ids[:stop])
        assert one.turns[turn].call.query == query
        is_policy = one.loss_mask == 1
        expected = full_logps(
            one.ids, one.positions, one.pixel_values, one.image_grid_thw,
            temperature=0.7, banned=ALL_BUT_PHRASES,
        )  # fmt: skip
        np.testing.assert_allclose(one.sampler_logps[is_policy], expected[is_policy], atol=1e-4)


def test_a_shared_past_is_computed_once(searching, monkeypatch):
    policy = EnginePolicy(MODEL, ALL_BUT_PHRASES, rollout_config(budget=BUDGET))
    counted = []
    append = policy.engine.append
    monkeypatch.setattr(
        policy.engine,
        "append",
        lambda parts: (counted.append(sum(len(p.ids) for p in parts)), append(parts)),
    )
    task, prompt, trunk = searching[0]
    turn = first_search(trunk)
    branches = [Branch(task, prompt, trunk, turn + 1, k, query=f"query {k}") for k in range(4)]
    run(branches, policy)
    shared, behind = counted[:2]
    assert shared == trunk.turns[turn].stop + len(TOKENIZER.encode("<|im_end|>\n"))
    assert 0 < behind and sum(counted) < 4 * shared + behind


def test_other_items_are_shown_and_no_tool_is_asked(policy, searching):
    class Silent:
        def __getattr__(self, name):
            raise AssertionError("a tool was asked")

    task, prompt, trunk = searching[0]
    turn = first_search(trunk)
    call = trunk.turns[turn].call
    for kept in (call.items[:1], ()):
        branch = Branch(task, prompt, trunk, turn + 1, 0, items=kept)
        try:
            (one,) = run([branch], policy, tools=Silent())
        except AssertionError:  # it searched again by itself
            (one,) = run([branch], policy)
        assert one.turns[turn].call.items == kept and one.turns[turn].call.query == call.query
        assert one.turns[turn].call.status == ("ok" if kept else "empty")
        if len(one.turns) > turn + 1:
            assert one.turns[turn + 1].items_to_verify == len(kept)


def test_a_turn_can_be_drawn_again_alone(policy, trunks):
    task, prompt, trunk = trunks[0]
    branches = [
        Branch(task, prompt, trunk, 0, k, temperature=1.0, only_turn=True) for k in range(6)
    ]
    drawn = run(branches, policy)
    assert all(len(e.turns) == 1 and not e.calls for e in drawn)
    assert len({tuple(e.ids) for e in drawn}) > 1
    again = run(branches, policy)
    assert [e.ids.tolist() for e in again] == [e.ids.tolist() for e in drawn]


def test_what_does_not_fit_is_refused(trunks):
    task, prompt, trunk = trunks[0]
    with pytest.raises(ValueError, match="turns"):
        Branch(task, prompt, trunk, 99, 0)
    with pytest.raises(ValueError, match="not both"):
        Branch(task, prompt, trunk, 1, 0, query="a", items=())
    with pytest.raises(ValueError, match="only a turn that searches"):
        Branch(task, prompt, trunk, 0, 0, query="a")
    answered = next(e for _, _, e in trunks if e.end_reason == "answered")
    with pytest.raises(ValueError, match="only a turn that searches"):
        Branch(task, prompt, answered, len(answered.turns), 0, items=())
    assert dataclasses.replace(Branch(task, prompt, trunk, 0, 0), sample=3).sample == 3
