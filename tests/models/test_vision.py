import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from svrl_jax.models.qwen_vl.config import VisionConfig
from svrl_jax.models.qwen_vl.vision import PatchEmbed, VisionTower
from svrl_jax.models.qwen_vl.vision_plan import pad_pixel_values, plan_vision
from tests.models.conftest import random_pixels

SMALL = VisionConfig(
    hidden_size=32,
    num_heads=2,
    intermediate_size=48,
    out_hidden_size=64,
    depth=4,
    fullatt_block_indexes=(1, 3),
)


@nnx.jit
def encode(tower, pixels, plan):
    return tower(pixels, plan)


def boundaries(segments):
    return [0, *np.cumsum(np.asarray(segments.valid).sum(axis=1)).tolist()]


def order_in_cells(segments):
    patch, valid = np.asarray(segments.patch), np.asarray(segments.valid)
    return (patch[valid][::4] // 4).tolist()


@pytest.mark.parametrize(
    ("grids", "windows", "frames"),
    [
        ([(1, 4, 6)], [0, 24], [0, 24]),
        pytest.param([(1, 8, 8)], [0, 64], [0, 64], marks=pytest.mark.case("A-M2")),
        pytest.param(
            [(1, 12, 12)], [0, 64, 96, 128, 144], [0, 144], marks=pytest.mark.case("A-M2")
        ),
        ([(1, 10, 12)], [0, 64, 96, 112, 120], [0, 120]),
        (
            [(1, 36, 28)],
            [*range(0, 193, 64), 224, 288, 352, 416, 448, 512, 576, 640, 672, 736, 800, 864]
            + [896, 928, 960, 992, 1008],
            [0, 1008],
        ),
        ([(1, 4, 6), (1, 10, 12)], [0, 24, 88, 120, 136, 144], [0, 24, 144]),
    ],
)
def test_segments_are_the_references(grids, windows, frames):
    plan = plan_vision(np.asarray(grids), SMALL)
    assert boundaries(plan.windows) == windows
    assert boundaries(plan.frames) == frames


def test_windows_take_cells_window_by_window():
    plan = plan_vision(np.asarray([(1, 10, 12)]), SMALL)
    expected = [0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 18, 19, 20, 21]
    expected += [4, 5, 10, 11, 16, 17, 22, 23, *range(24, 30)]
    assert order_in_cells(plan.windows) == expected


def test_patch_positions_come_in_merge_blocks():
    plan = plan_vision(np.asarray([(1, 4, 6)]), SMALL)
    expected = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert plan.position_hw[:8].tolist() == expected


@pytest.mark.parametrize(
    "grids",
    [
        [(1, 4, 6)],
        [(1, 4, 6), (1, 12, 20)],  # one window, and several with ragged edges
        [(1, 8, 8), (1, 8, 8)],
        [(1, 6, 4), (1, 18, 2), (1, 10, 12)],
    ],
)
def test_features_equal_the_reference(pair, grids):
    pixels = pair.pixels(grids)
    with torch.no_grad():
        expected = pair.torch_model.model.visual(
            torch.tensor(pixels), grid_thw=torch.tensor(grids)
        ).pooler_output.numpy()
    plan = plan_vision(np.asarray(grids), pair.config.vision_config)
    found = np.asarray(encode(pair.model.visual, pixels, plan))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.case("A-M5")
def test_patch_embedding_sums_both_time_slices(pair):
    pixels = random_pixels([(1, 2, 2)])
    with torch.no_grad():
        expected = pair.torch_model.model.visual.patch_embed(torch.tensor(pixels)).numpy()
    embed: PatchEmbed = pair.model.visual.patch_embed
    np.testing.assert_allclose(np.asarray(embed(pixels, len(pixels))), expected, atol=1e-5)
    weight = np.asarray(embed.proj.weight[...]).reshape(32, 3, 2, 14, 14)
    assert not np.allclose(weight[:, :, 0], weight[:, :, 1])


@pytest.mark.case("A-M3")
@pytest.mark.parametrize("indexes", [(1, 3), ("1", "3")])
def test_a_full_layer_carries_a_change_into_the_other_window(indexes):
    """Layer 0 is windowed, layer 1 full; so the first window hears of the second after layer 1."""
    from svrl_jax.models.qwen_vl.config import _read_vision

    settings = dataclasses.asdict(SMALL) | {"fullatt_block_indexes": indexes}
    grids = np.asarray([(1, 8, 16)])
    pixels = random_pixels(grids)
    nudged = pixels.copy()
    nudged[-1] += 1.0  # last patch: second window
    first_window = np.asarray(plan_vision(grids, SMALL).windows.patch)[0, ::4] // 4
    changed = {}
    for depth in (1, 2):
        config = _read_vision(settings | {"depth": depth})
        tower = VisionTower(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
        plan = plan_vision(grids, config)
        difference = np.asarray(encode(tower, pixels, plan) - encode(tower, nudged, plan))
        assert np.abs(difference).max() > 1e-4
        changed[depth] = bool(np.abs(difference[first_window]).max() > 1e-7)
    assert changed == {1: False, 2: True}


def test_padding_changes_no_feature(pair):
    grids = np.asarray([(1, 4, 6), (1, 12, 20), (1, 8, 8)])
    pixels = pair.pixels(grids)
    config = pair.config.vision_config
    expected = np.asarray(encode(pair.model.visual, pixels, plan_vision(grids, config)))
    plan = plan_vision(grids, config, pad_patches_to=512)
    found = np.asarray(encode(pair.model.visual, pad_pixel_values(pixels, plan), plan))
    assert found.shape == (128, 64) and np.isfinite(found).all()
    np.testing.assert_allclose(found[: len(expected)], expected, atol=1e-5)


def test_recomputing_layers_changes_no_gradient(pair):
    grids = np.asarray([(1, 4, 6), (1, 10, 12)])
    pixels = pair.pixels(grids)
    plan = plan_vision(grids, pair.config.vision_config)

    def gradient(remat):
        def loss(tower):
            return jnp.sum(tower(pixels, plan, remat=remat) ** 2)

        return nnx.jit(nnx.grad(loss))(pair.model.visual)

    plain, again = gradient(False), gradient(True)
    for (path, a), (_, b) in zip(nnx.to_flat_state(plain), nnx.to_flat_state(again), strict=True):
        scale = np.abs(np.asarray(a[...])).max()
        assert np.isfinite(scale) and scale > 0, path
        np.testing.assert_allclose(np.asarray(a[...]), np.asarray(b[...]), atol=1e-5 * scale)


@pytest.mark.parametrize(
    ("grids", "pad", "message"),
    [
        (np.zeros((0, 3)), None, "no picture"),
        ([(1, 3, 4)], None, "multiples of 2"),
        ([(1, 8, 8)], 32, "at least the 64"),
        ([(1, 8, 8)], 100, "multiple of a window"),
    ],
)
def test_grids_that_cannot_be_planned_are_an_error(grids, pad, message):
    with pytest.raises(ValueError, match=message):
        plan_vision(np.asarray(grids), SMALL, pad)


def test_more_patches_than_planned_are_an_error(pair):
    plan = plan_vision(np.asarray([(1, 4, 6)]), pair.config.vision_config)
    with pytest.raises(ValueError, match="28 patch rows, plan for 24"):
        pair.model.encode_images(np.zeros((28, 1176), np.float32), plan)
