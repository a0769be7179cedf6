"""The joined model against transformers, its cache, and its masks."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from svrl_jax.models.qwen_vl import (
    QwenVL,
    default_image_index,
    init_cache,
    mrope_positions,
    plan_vision,
)
from svrl_jax.models.qwen_vl.weights import load_weights
from tests.models.conftest import IMAGE, close, row

GRIDS = [(1, 4, 6), (1, 10, 12), (1, 6, 2), (1, 4, 10)]
# Three pictures, one, none; all of different sizes.
ROWS = [row(3, GRIDS[0], 4, GRIDS[1], 2, GRIDS[2], 6), row(2, GRIDS[3], 5), row(9)]
ROW_GRIDS = [GRIDS[:3], GRIDS[3:], []]
STEPS = 16


def text(count, seed):
    return np.random.default_rng(seed).integers(0, 90, count).astype(np.int32)


def batch(config, rows=ROWS, row_grids=ROW_GRIDS, *, side="right", start=0, length=None):
    """Padded ids [B, T], positions [3, B, T], group_id [B, T]; padding token 0."""
    length = length or max(map(len, rows))
    ids = np.zeros((len(rows), length), np.int32)
    positions = np.zeros((3, len(rows), length), np.int32)
    group = np.full((len(rows), length), -1, np.int32)
    for i, (tokens, grids) in enumerate(zip(rows, row_grids, strict=True)):
        at = slice(len(tokens)) if side == "right" else slice(length - len(tokens), length)
        grids = np.asarray(grids).reshape(-1, 3)
        ids[i, at], group[i, at] = tokens, i
        positions[:, i, at] = mrope_positions(tokens, grids, config, start=start)[0]
    return ids, positions, group


@nnx.jit
def encode(model, pixels, plan):
    return model.encode_images(pixels, plan)


def features(pair, grids=GRIDS):
    plan = plan_vision(np.asarray(grids), pair.config.vision_config)
    return encode(pair.model, pair.pixels(grids), plan)


@nnx.jit
def forward(model, *inputs):
    return model.logits(model(*inputs))


@nnx.jit
def extend(model, *inputs):
    hidden, k, v = model.extend(*inputs)
    return model.logits(hidden), k, v


def full_logits(model, ids, positions, group, embeds=None, index=None):
    return np.asarray(forward(model, ids, positions, group, np.zeros_like(ids), embeds, index))


def reference_inputs(ids, mask, pixels, grids):
    inputs = {
        "input_ids": torch.tensor(ids, dtype=torch.long),
        "attention_mask": torch.tensor(mask, dtype=torch.long),
        "mm_token_type_ids": torch.tensor(ids == IMAGE, dtype=torch.long),
    }
    if grids:
        inputs |= {"pixel_values": torch.tensor(pixels), "image_grid_thw": torch.tensor(grids)}
    return inputs


def reference_logits(pair, ids, group, **changes):
    inputs = reference_inputs(ids, group >= 0, pair.pixels(GRIDS), GRIDS)
    with torch.no_grad():
        return pair.torch_model(**inputs | changes).logits.numpy()


@pytest.mark.parametrize("side", ["right", "left"])
def test_joined_logits_equal_the_reference(pair, side):
    """Rows with three, one and no pictures of odd sizes, padded on either side."""
    ids, positions, group = batch(pair.config, side=side)
    expected = reference_logits(pair, ids, group)
    index = default_image_index(ids, IMAGE)
    found = full_logits(pair.model, ids, positions, group, features(pair), index)
    real = group >= 0
    assert len(set(real.sum(axis=1))) == 3 and expected[real].std() > 0.5
    close(f"{pair.family} joined, {side}-padded", found[real], expected[real], atol=5e-5)


@pytest.mark.case("A-M9")
def test_packed_rows_equal_the_reference_unpacked(pair):
    """All rows end to end in one, each with its own group and with positions from 0."""
    ids, positions, group = batch(pair.config)
    real = group >= 0
    expected = reference_logits(pair, ids, group)[real]
    packed_ids, packed_group = ids[real][None], group[real][None]
    starts = np.flatnonzero(np.diff(packed_group[0])) + 1
    packed_positions = positions[:, real][:, None]
    assert (packed_positions[:, 0, starts] == 0).all()
    index = default_image_index(packed_ids, IMAGE)
    found = full_logits(
        pair.model, packed_ids, packed_positions, packed_group, features(pair), index
    )
    close(f"{pair.family} packed", found[0], expected, atol=5e-5)
    unpacked = full_logits(
        pair.model, ids, positions, group, features(pair), default_image_index(ids, IMAGE)
    )
    np.testing.assert_allclose(found[0], unpacked[real], atol=1e-5)


@pytest.mark.case("A-M10")
def test_padding_to_a_multiple_changes_nothing(pair):
    """61 tokens padded to 64, ids, positions (3 axes), groups and picture index alike."""
    rows, grids = ROWS[:1], ROW_GRIDS[:1]
    length = -(-(len(rows[0]) + 1) // 8) * 8
    embeds, found = features(pair), []
    for size in (len(rows[0]), length):
        ids, positions, group = batch(pair.config, rows, grids, length=size)
        index = default_image_index(ids, IMAGE)
        shapes = {ids.shape, positions.shape[1:], group.shape, index.shape}
        assert shapes == {(1, size)}
        found.append(full_logits(pair.model, ids, positions, group, embeds, index))
    np.testing.assert_allclose(found[1][:, : len(rows[0])], found[0], atol=1e-5)


def test_positions_above_8000_equal_the_reference(pair):
    ids, positions, group = batch(pair.config, start=8200)
    expected = reference_logits(
        pair, ids, group, position_ids=torch.tensor(positions, dtype=torch.long)
    )
    index = default_image_index(ids, IMAGE)
    found = full_logits(pair.model, ids, positions, group, features(pair), index)
    real = group >= 0
    close(f"{pair.family} at position 8200", found[real], expected[real])


@pytest.mark.case("A-M6")
def test_the_other_familys_rotary_rule_gives_other_logits(pair):
    """With a picture; on text alone the two rules are one."""
    own = pair.config.text_config
    other = dataclasses.replace(
        own, model_type={"qwen2_5_vl": "qwen3_vl"}.get(own.model_type, "qwen2_5_vl")
    )
    ids, positions, group = batch(pair.config)
    index = default_image_index(ids, IMAGE)
    logits = []
    for config in (own, other):
        pair.model.language_model.config = config
        inputs = (ids, positions, group, np.zeros_like(ids), features(pair), index)
        logits.append(np.asarray(pair.model.logits(pair.model(*inputs))))
    pair.model.language_model.config = own
    apart = np.abs(logits[0] - logits[1]).max(axis=-1)
    assert apart[2][group[2] >= 0].max() < 1e-4  # no picture
    assert apart[:2][group[:2] >= 0].max() > 0.05


def greedy(pair, rows, row_grids, steps):
    """Prefill in one call, then one token a call, all rows in one cache. -> ids, step logits."""
    model, config = pair.model, pair.config
    ids, positions, _ = batch(config, rows, row_grids)
    lengths = np.asarray([len(tokens) for tokens in rows], np.int32)
    cache = init_cache(config, len(rows), ids.shape[1] + steps)
    index = default_image_index(ids, IMAGE)
    starts = np.zeros_like(lengths)
    logits, k, v = extend(model, ids, positions, cache.k, cache.v, starts, features(pair), index)
    logits = logits[np.arange(len(rows)), lengths - 1]
    following = np.asarray(
        [
            mrope_positions(tokens, np.asarray(grids).reshape(-1, 3), config)[1]
            for tokens, grids in zip(rows, row_grids, strict=True)
        ]
    )
    tokens, all_logits = [], []
    for step in range(steps):
        all_logits.append(np.asarray(logits))
        tokens.append(np.asarray(logits)[:, :IMAGE].argmax(-1).astype(np.int32))  # text only
        position = np.broadcast_to(following + step, (3, len(rows)))[:, :, None].astype(np.int32)
        logits, k, v = extend(model, tokens[-1][:, None], position, k, v, lengths + step)
        logits = logits[:, 0]
    return np.stack(tokens, 1), np.stack(all_logits, 1)


def test_greedy_decoding_with_a_cache_equals_generate(pair):
    tokens, _ = greedy(pair, ROWS, ROW_GRIDS, STEPS)
    pixels = pair.pixels(GRIDS)
    for i, (ids, grids) in enumerate(zip(ROWS, ROW_GRIDS, strict=True)):
        count = sum(int(np.prod(grid)) for grid in grids)
        inputs = reference_inputs(ids[None], np.ones((1, len(ids))), pixels[:count], grids)
        pixels = pixels[count:]
        expected = pair.torch_model.generate(
            **inputs,
            max_new_tokens=STEPS,
            do_sample=False,
            pad_token_id=0,
            suppress_tokens=list(range(IMAGE, pair.config.text_config.vocab_size)),
        )[0, len(ids) :]
        assert len(expected) == STEPS
        assert tokens[i].tolist() == expected.tolist()


@pytest.mark.case("A-M11")
def test_each_cached_step_equals_a_fresh_pass(pair):
    tokens, step_logits = greedy(pair, ROWS, ROW_GRIDS, STEPS)
    whole = [np.concatenate([r, t]) for r, t in zip(ROWS, tokens, strict=True)]
    ids, positions, group = batch(pair.config, whole)
    for i, tokens_before in enumerate(ROWS[:2]):
        assert positions[0, i, len(tokens_before)] != len(tokens_before)  # the delta is not 0
    index = default_image_index(ids, IMAGE)
    fresh = full_logits(pair.model, ids, positions, group, features(pair), index)
    for i, before in enumerate(ROWS):
        expected = fresh[i, len(before) - 1 : len(before) - 1 + STEPS]
        close(f"{pair.family} cached steps", step_logits[i], expected, atol=5e-5)


@pytest.mark.case("A-S5")
def test_turns_appended_to_a_cache_continue_the_positions(pair):
    """5 text, a picture of 2 x 2 cells, 3 text; 2 sampled; 4 tool tokens; then a tool's picture of
    2 x 3 cells between text. Each in a call of its own."""
    grids = [(1, 4, 4), (1, 4, 6)]
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 90, 5), [IMAGE] * 4, rng.integers(0, 90, 10), [IMAGE] * 6]
    ids = np.concatenate([*parts, rng.integers(0, 90, 3)])[None].astype(np.int32)
    model, config = pair.model, pair.config
    positions, _ = mrope_positions(ids[0], np.asarray(grids), config)
    assert positions[:, 14].tolist() == [12, 12, 12]
    embeds, index = features(pair, grids), default_image_index(ids, IMAGE)
    expected = full_logits(model, ids, positions[:, None], np.zeros_like(ids), embeds, index)
    cache = init_cache(config, 1, 32)
    k, v, found = cache.k, cache.v, []
    for start, stop in ((0, 12), (12, 13), (13, 14), (14, 18), (18, 28)):
        has_picture = (index[:, start:stop] >= 0).any()
        picture = (embeds, index[:, start:stop]) if has_picture else (None, None)
        chunk, places = ids[:, start:stop], positions[:, None, start:stop]
        logits, k, v = extend(model, chunk, places, k, v, np.asarray([start]), *picture)
        found.append(np.asarray(logits))
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=5e-5)


def test_rows_append_at_their_own_places(pair):
    """Rows of unequal length take a chunk each; garbage behind a row's end is overwritten."""
    model, config = pair.model, pair.config
    rows = [text(7, 0), text(4, 1), text(12, 2)]
    whole = [np.concatenate([r, text(5, 3)]) for r in rows]
    ids, positions, group = batch(config, whole, [[]] * 3)
    expected = full_logits(model, ids, positions, group)
    lengths = np.asarray([len(r) for r in rows], np.int32)
    cache = init_cache(config, 3, 20)
    first = np.zeros((3, 12), np.int32)
    for i, r in enumerate(rows):
        first[i, : len(r)] = r
    starts = np.zeros_like(lengths)
    _, k, v = extend(model, first, positions[:, :, :12], cache.k, cache.v, starts)
    at = lengths[:, None] + np.arange(5)
    chunk = np.take_along_axis(ids, at, axis=1)
    chunk_positions = np.take_along_axis(positions, np.broadcast_to(at, (3, 3, 5)), axis=2)
    found, _, _ = extend(model, chunk, chunk_positions, k, v, lengths)
    for i in range(3):
        np.testing.assert_allclose(found[i], expected[i, at[i]], atol=2e-5)


def test_rows_that_share_a_prompt_equal_separate_rows(pair):
    model, config = pair.model, pair.config
    prompt, tails = text(6, 0), [text(4, 1), text(3, 2)]
    separate = []
    for tail in tails:
        ids, positions, group = batch(config, [np.concatenate([prompt, tail])], [[]])
        separate.append(full_logits(model, ids, positions, group)[0])
    other = text(5, 3)  # another group in the same row
    ids = np.concatenate([prompt, *tails, other])[None]
    branch = np.repeat([0, 1, 2, 0], [6, len(tails[0]), len(tails[1]), 5])[None]
    group = np.repeat([0, 7], [ids.shape[1] - 5, 5])[None]
    places = [np.arange(6), *(6 + np.arange(len(t)) for t in tails), np.arange(5)]
    positions = np.broadcast_to(np.concatenate(places), (3, 1, ids.shape[1]))
    packed = np.asarray(forward(model, ids, positions, group, branch))[0]
    np.testing.assert_allclose(packed[:10], separate[0], atol=2e-5)
    np.testing.assert_allclose(packed[10:13], separate[1][6:], atol=2e-5)
    ids, positions, group = batch(config, [other], [[]])
    alone = full_logits(model, ids, positions, group)[0]
    np.testing.assert_allclose(packed[13:], alone, atol=2e-5)


def test_padding_gives_no_nan_and_no_gradient(pair):
    ids, positions, group = batch(pair.config)
    real = jnp.asarray(group >= 0)
    index = default_image_index(ids, IMAGE)
    graphdef, params = nnx.split(pair.model)
    embeds = features(pair)

    def loss(params, ids):
        model = nnx.merge(graphdef, params)
        hidden = model(ids, positions, group, jnp.zeros_like(ids), embeds, index)
        return jnp.sum(jax.nn.logsumexp(model.logits(hidden), axis=-1) * real)

    gradient = jax.jit(jax.grad(loss))
    plain, other = gradient(params, ids), gradient(params, np.where(group >= 0, ids, 77))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1.0, float(np.abs(a).max())))


def test_every_gradient_equals_the_reference(pair, tmp_path):
    """Of a loss on all real tokens, through pictures and levels, layers recomputed."""
    ids, positions, group = batch(pair.config)
    real, index = group >= 0, default_image_index(ids, IMAGE)
    reference = copy.deepcopy(pair.torch_model)
    inputs = reference_inputs(ids, real, pair.pixels(GRIDS), GRIDS)
    reference(**inputs).logits[torch.tensor(real)].square().mean().backward()
    with torch.no_grad():
        for param in reference.parameters():
            param.copy_(param.grad)
    reference.save_pretrained(tmp_path)  # so that our loader puts each where it belongs
    expected = dict(nnx.to_flat_state(nnx.state(load_weights(tmp_path)[0])))
    graphdef, params = nnx.split(pair.model)
    plan = plan_vision(np.asarray(GRIDS), pair.config.vision_config)

    @jax.jit
    def gradient(params, pixels, plan):
        def loss(params):
            model = nnx.merge(graphdef, params)
            embeds = model.encode_images(pixels, plan, remat="layer")
            zeros = np.zeros_like(ids)
            hidden = model(ids, positions, group, zeros, embeds, index, remat="layer")
            return jnp.mean(model.logits(hidden[real]) ** 2)

        return jax.grad(loss)(params)

    found = gradient(params, pair.pixels(GRIDS), plan)
    for path, param in nnx.to_flat_state(found):
        wanted = np.asarray(expected[path][...])
        scale = np.abs(wanted).max()
        assert scale > 1e-6, path
        np.testing.assert_allclose(np.asarray(param[...]) / scale, wanted / scale, atol=2e-4)


@pytest.mark.case("A-M4")
def test_huge_16_bit_scores_stay_finite_and_causal(pair):
    graphdef, params = nnx.split(pair.model)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    model: QwenVL = nnx.merge(graphdef, params)
    attention = model.language_model.layers.self_attn
    attention.q_proj.weight[...] *= 200
    attention.k_proj.weight[...] *= 200
    ids = row(12)[None]
    positions = np.broadcast_to(np.arange(12), (3, 1, 12))
    first = full_logits(model, ids, positions, np.zeros_like(ids))
    changed = ids.copy()
    changed[0, -1] = (changed[0, -1] + 1) % 90
    second = full_logits(model, changed, positions, np.zeros_like(ids))
    assert np.isfinite(first).all() and first.dtype == np.float32
    assert np.array_equal(first[:, :-1], second[:, :-1])
    assert not np.array_equal(first[:, -1], second[:, -1])


def test_image_index_counts_over_rows_in_reading_order():
    ids = np.asarray([[1, IMAGE, IMAGE, 2], [IMAGE, 3, IMAGE, 4]])
    assert default_image_index(ids, IMAGE).tolist() == [[-1, 0, 1, -1], [2, -1, 3, -1]]


def test_features_without_their_index_are_an_error(pair):
    ids, positions, group = batch(pair.config)
    with pytest.raises(ValueError, match="image_index"):
        pair.model(ids, positions, group, np.zeros_like(ids), features(pair))
