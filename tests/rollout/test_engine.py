"""The engine and its scheduler with a real (tiny, random, float32) model, turn by turn."""

import numpy as np
import pytest
from flax import nnx
from rollout_toys import (
    CONFIG,
    MODEL,
    TOKENIZER,
    full_logps,
    make_prompt,
    make_task,
    rollout_config,
)

from svrl_jax import rng
from svrl_jax.models.qwen_vl.model import QwenVL
from svrl_jax.models.qwen_vl.rope import mrope_positions
from svrl_jax.rollout import picture_features
from svrl_jax.rollout.policy import Request
from svrl_jax.rollout.scheduler import EnginePolicy, banned_ids

BANNED = banned_ids(CONFIG, len(TOKENIZER))
NO_PIXELS, NO_GRIDS = np.zeros((0, 0), np.float32), np.zeros((0, 3), np.int32)


def make_policy(**changes) -> EnginePolicy:
    return EnginePolicy(MODEL, BANNED, rollout_config(**changes))


def stop_after(count):
    return lambda ids, start: (count, "action") if len(ids) >= count else None


def never(ids, start):
    return None


def first_request(prompt, slot=0, *, keep=never, limit=40, sample=0, temperature=1.0, share=None):
    return Request(
        slot=slot,
        ids=prompt.ids,
        positions=prompt.positions,
        next_position=int(prompt.positions.max()) + 1,
        pixel_values=prompt.pixel_values,
        image_grid_thw=prompt.image_grid_thw,
        key=rng.turn_keys([(0, 0, rng.task_hash(prompt.task_id), sample, 0, 0)])[0],
        temperature=temperature,
        max_new_tokens=limit,
        is_new=True,
        keep=keep,
        view=None,
        share_key=share,
    )


def next_request(slot, ids, start, *, keep=never, limit=40, turn=1, temperature=1.0):
    ids = np.asarray(ids, np.int32)
    positions, next_position = mrope_positions(ids, NO_GRIDS, CONFIG, start=start)
    return Request(
        slot=slot,
        ids=ids,
        positions=positions,
        next_position=next_position,
        pixel_values=NO_PIXELS,
        image_grid_thw=NO_GRIDS,
        key=rng.turn_keys([(0, 0, 5, 0, turn, 0)])[0],
        temperature=temperature,
        max_new_tokens=limit,
        is_new=False,
        keep=keep,
        view=None,
    )


def run(policy, requests):
    """Submits all, collects all; by slot."""
    for request in requests:
        policy.submit(request)
    turns = {}
    while found := policy.collect():
        turns |= {turn.slot: turn for turn in found}
    return turns


@pytest.fixture(scope="module")
def policy():
    return make_policy()


@pytest.mark.case("A-S5")
def test_positions_go_on_behind_a_picture_and_cached_steps_equal_a_fresh_forward(policy):
    prompt = make_prompt(make_task(), grids=[(1, 4, 4)])  # 5 text, 2x2 merged cells, 3 text
    first = run(policy, [first_request(prompt, keep=stop_after(2))])[0]
    assert policy.engine.lengths[0] == 14 and len(first.ids) == 2
    tool = np.array([11, 12, 13, 14])
    request = next_request(0, tool, start=int(prompt.positions.max()) + 1 + 2, keep=stop_after(3))
    assert request.positions[:, 0].tolist() == [12, 12, 12]
    second = run(policy, [request])[0]
    ids = np.concatenate([prompt.ids, first.ids, tool, second.ids])
    positions, _ = mrope_positions(ids, prompt.image_grid_thw, CONFIG)
    np.testing.assert_array_equal(positions[:, 14:18], request.positions)
    expected = full_logps(
        ids, positions, prompt.pixel_values, prompt.image_grid_thw,
        temperature=1.0, banned=BANNED,
    )  # fmt: skip
    np.testing.assert_allclose(first.logps, expected[12:14], atol=1e-4)
    np.testing.assert_allclose(second.logps, expected[18:21], atol=1e-4)


def test_overshoot_is_rolled_back_by_length_alone(policy):
    prompt = make_prompt(make_task(1))
    kept = run(policy, [first_request(prompt, keep=stop_after(3))])[0]  # of a chunk of 8
    assert policy.engine.lengths[0] == len(prompt.ids) + 3
    start = int(prompt.positions.max()) + 4
    after = run(policy, [next_request(0, [7, 8], start, keep=stop_after(5))])[0]
    # The same context, never overshot: the kept tokens come in as a prompt.
    fresh = make_prompt(make_task(1))
    ids = np.concatenate([fresh.ids, kept.ids, [7, 8]]).astype(np.int32)
    positions, next_position = mrope_positions(ids, fresh.image_grid_thw, CONFIG)
    request = next_request(1, [7, 8], start, keep=stop_after(5))
    whole = first_request(fresh, slot=1, keep=stop_after(5))
    fields = whole.__dict__ | {
        "ids": ids,
        "positions": positions,
        "next_position": next_position,
        "key": request.key,
    }
    again = run(policy, [Request(**fields)])[1]
    np.testing.assert_array_equal(after.ids, again.ids)
    np.testing.assert_allclose(after.logps, again.logps, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"decode_chunk": 3, "lanes": 1},
        {"decode_chunk": 16, "lanes": 8},
        {"slots": 3, "lanes": 2},
    ],
)
def test_chunks_lanes_and_slots_change_no_token(policy, changes):
    prompts = [make_prompt(make_task(i), before=1 + 3 * i, after=2) for i in range(3)]
    lengths = [1, 9, 20]

    def play(policy):
        requests = [
            first_request(p, slot=i, keep=stop_after(n))
            for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        return run(policy, requests)

    expected, found = play(policy), play(make_policy(**changes))
    for slot, length in enumerate(lengths):
        assert len(found[slot].ids) == length
        np.testing.assert_array_equal(found[slot].ids, expected[slot].ids)
        np.testing.assert_allclose(found[slot].logps, expected[slot].logps, atol=1e-5)


@pytest.mark.case("A-S6")
@pytest.mark.case("A-S8")
def test_each_row_of_an_unequal_batch_equals_its_own_run(policy):
    prompts = [make_prompt(make_task(n), grids=[], before=n, after=0) for n in (1, 2, 3, 5, 8, 13)]
    requests = [first_request(p, slot=i, temperature=0.0, limit=6) for i, p in enumerate(prompts)]
    together = run(policy, requests)
    alone = {i: run(policy, [r])[i] for i, r in enumerate(requests)}
    longer = first_request(make_prompt(make_task(99), grids=[], before=90), slot=7, limit=6)
    with_longer = run(policy, [*requests, longer])
    pair = run(policy, requests[:2])
    for slot in range(6):
        for other in (alone, with_longer) + ((pair,) if slot < 2 else ()):
            np.testing.assert_array_equal(together[slot].ids, other[slot].ids)


@pytest.mark.case("A-S7")
def test_a_row_that_ends_early_leaves_the_others_alone(policy):
    prompts = [make_prompt(make_task(i)) for i in (3, 4)]
    alone = run(policy, [first_request(prompts[1], slot=1, keep=stop_after(5))])[1]
    turns = run(
        policy,
        [
            first_request(prompts[0], slot=0, keep=stop_after(1)),
            first_request(prompts[1], slot=1, keep=stop_after(5)),
        ],
    )
    assert [len(turns[i].ids) for i in (0, 1)] == [1, 5]
    assert policy.engine.lengths[0] == len(prompts[0].ids) + 1
    np.testing.assert_array_equal(turns[1].ids, alone.ids)


@pytest.mark.case("A-S15")
@pytest.mark.parametrize("at, length, ended", [(1, 1, "eos"), (24, 24, "eos"), (25, 24, "length")])
def test_the_limit_is_exact(policy, at, length, ended):
    def keep(ids, start):
        return (at, "eos") if len(ids) >= at else None

    turn = run(policy, [first_request(make_prompt(make_task()), keep=keep, limit=24)])[0]
    assert (len(turn.ids), len(turn.logps), turn.ended) == (length, length, ended)
    assert policy.engine.lengths[0] == 12 + length


def test_a_shared_prompt_gives_what_own_prompts_give(policy):
    prompt = make_prompt(make_task(2))
    own = run(policy, [first_request(prompt, slot=i, sample=i, limit=9) for i in range(4)])
    shared = run(
        policy, [first_request(prompt, slot=i, sample=i, limit=9, share="p") for i in range(4)]
    )
    assert len({tuple(t.ids) for t in own.values()}) == 4  # samples differ
    for slot in range(4):
        np.testing.assert_array_equal(own[slot].ids, shared[slot].ids)
        np.testing.assert_allclose(own[slot].logps, shared[slot].logps, atol=1e-6)


def test_banned_ids_are_never_drawn(policy):
    prompts = [make_prompt(make_task(i)) for i in range(8)]
    turns = run(policy, [first_request(p, slot=i, temperature=50.0) for i, p in enumerate(prompts)])
    drawn = np.concatenate([t.ids for t in turns.values()])
    assert len(drawn) == 320 and not set(drawn.tolist()) & set(BANNED)
    assert CONFIG.image_token_id in BANNED and set(range(len(TOKENIZER), 320)) <= set(BANNED)


def check_against_one_pass(prompt, turn):
    ids = np.concatenate([prompt.ids, turn.ids])
    positions, _ = mrope_positions(ids, prompt.image_grid_thw, CONFIG)
    expected = full_logps(
        ids, positions, prompt.pixel_values, prompt.image_grid_thw, temperature=1.0, banned=BANNED
    )
    np.testing.assert_allclose(turn.logps, expected[-len(turn.ids) :], atol=1e-4)


@pytest.mark.parametrize("before", [31, 32, 70])
def test_a_prompt_in_pieces_equals_one_pass(policy, before):
    # The picture lies across the border of two pieces.
    prompt = make_prompt(make_task(), grids=[(1, 8, 12)], before=before, after=20)
    check_against_one_pass(prompt, run(policy, [first_request(prompt, limit=4)])[0])


def test_a_long_context_takes_longer_pieces():
    policy = make_policy(budget=1100, slots=2, lanes=2)
    prompt = make_prompt(make_task(), grids=[(1, 8, 12)], before=250, after=400)
    check_against_one_pass(prompt, run(policy, [first_request(prompt, limit=4)])[0])


def test_pictures_of_any_number_and_size_keep_their_features(monkeypatch):
    monkeypatch.setattr(picture_features, "PATCHES_PER_CALL", 128)
    monkeypatch.setattr(picture_features, "PICTURES_PER_CALL", 4)
    policy = make_policy(slots=12, lanes=4)
    grids = [[(1, 4, 4)], [(1, 12, 12)], [], [(1, 2, 6), (1, 4, 2)]] + [[(1, 4, 6)]] * 6
    prompts = [make_prompt(make_task(i), grids=g) for i, g in enumerate(grids)]
    turns = run(policy, [first_request(p, slot=i, limit=2) for i, p in enumerate(prompts)])
    for slot in (0, 1, 2, 3, 4, 9):
        check_against_one_pass(prompts[slot], turns[slot])


def test_the_number_of_programs_is_small_and_stays(policy):
    prompts = [make_prompt(make_task(i), before=5 + 9 * i) for i in range(8)]
    for _ in range(2):
        run(policy, [first_request(p, slot=i) for i, p in enumerate(prompts)])
        before = policy.engine.num_compiles
        for count in (1, 3, 5, 8):
            run(policy, [first_request(p, slot=i) for i, p in enumerate(prompts[:count])])
    assert policy.engine.num_compiles == before <= 10


def test_new_parameters_are_used_and_old_contexts_forgotten(policy):
    other = QwenVL(CONFIG, rngs=nnx.Rngs(1))
    prompt = make_prompt(make_task())
    request = first_request(prompt, limit=5)
    old = run(policy, [request])[0]
    policy.set_params(nnx.split(other)[1])
    assert not policy.engine.lengths.any()
    new = run(policy, [request])[0]
    policy.set_params(nnx.split(MODEL)[1])
    again = run(policy, [request])[0]
    assert old.ids.tolist() != new.ids.tolist()
    np.testing.assert_array_equal(old.ids, again.ids)


def test_parameters_cannot_change_under_queued_turns(policy):
    policy.submit(first_request(make_prompt(make_task()), limit=2))
    with pytest.raises(ValueError, match="collect them first"):
        policy.set_params(nnx.split(MODEL)[1])
    while policy.collect():
        pass


def test_a_turn_without_room_is_refused(policy):
    prompt = make_prompt(make_task(), before=200)
    with pytest.raises(ValueError, match="are more than 256"):
        policy.submit(first_request(prompt, limit=60))


@pytest.mark.case("A-S17")
def test_picture_tokens_without_their_features_are_an_error(policy):
    prompt = make_prompt(make_task())
    cut = (
        first_request(prompt).__dict__
        | {
            "ids": prompt.ids[:7],  # in the middle of the picture
            "positions": prompt.positions[:, :7],
        }
    )
    policy.submit(Request(**cut))
    with pytest.raises(ValueError, match="2 picture tokens and 16 patches"):
        policy.collect()


def test_lanes_read_a_shared_prompt_together_and_take_no_other_for_it(monkeypatch):
    """Groups of unequal size, a lane without one, and a slot that is used anew in between."""
    policy = make_policy(slots=12, lanes=12, budget=700)
    found, plan = [], policy.engine._pods

    def note(slots, size):
        order, starts, pods = plan(slots, size)
        found.append((int(pods.count), pods.length[: pods.count].tolist()))
        return order, starts, pods

    monkeypatch.setattr(policy.engine, "_pods", note)
    prompts = [make_prompt(make_task(n), before=b) for n, b in enumerate((300, 150, 40))]
    groups = [(0, range(9), "a"), (1, range(9, 11), "b"), (2, [11], None)]

    def requests(share):
        return [
            first_request(prompts[p], slot=i, sample=i, limit=9, share=key if share else None)
            for p, slots, key in groups
            for i in slots
        ]

    shared, own = run(policy, requests(True)), run(policy, requests(False))
    # Of nine lanes eight are a pod and one is another, which reads as much.
    assert found[0] == (3, [len(prompts[0].ids)] * 2 + [len(prompts[1].ids)])
    assert found[-1] == (0, [])
    for slot in range(12):
        np.testing.assert_array_equal(own[slot].ids, shared[slot].ids)
        np.testing.assert_allclose(own[slot].logps, shared[slot].logps, atol=1e-5)
    check_against_one_pass(prompts[0], shared[8])
