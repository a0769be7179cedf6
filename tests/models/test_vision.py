"""Both vision towers, whole, against transformers; their blocks are in test_blocks.py."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from svrl_jax.models.qwen_vl.config import QwenVLConfig, VisionConfig
from svrl_jax.models.qwen_vl.vision import VisionTower
from svrl_jax.models.qwen_vl.vision_plan import pad_pixel_values, plan_vision
from tests.models.conftest import close, random_pixels, reference_config

SMALL = VisionConfig(hidden_size=32, num_heads=2, intermediate_size=48, out_hidden_size=64, depth=4)


@nnx.jit
def encode(tower, pixels, plan):
    return tower(pixels, plan)


def reference_features(pair, pixels, grids):
    """float32[M, F]: the last merger's features, then each deepstack level's."""
    with torch.no_grad():
        found = pair.torch_model.model.visual(
            torch.tensor(pixels), grid_thw=torch.tensor(np.asarray(grids))
        )
    levels = [found.pooler_output, *getattr(found, "deepstack_features", [])]
    return torch.cat(levels, dim=1).numpy()


@pytest.mark.parametrize(
    "grids",
    [
        [(1, 4, 6)],  # one window
        [(1, 6, 4), (1, 18, 2), (1, 12, 20)],  # and several with ragged edges
        [(1, 8, 8), (1, 8, 8)],  # windows that are whole pictures
    ],
)
def test_features_equal_the_reference(pair, grids):
    pixels = pair.pixels(grids)
    expected = reference_features(pair, pixels, grids)
    plan = plan_vision(np.asarray(grids), pair.config.vision_config)
    found = np.asarray(encode(pair.model.visual, pixels, plan))
    assert found.shape[1] == pair.config.image_feature_size
    for level in np.split(expected, expected.shape[1] // 64, axis=1):
        assert level.std() > 0.3
    close(f"{pair.family} vision tower", found, expected, atol=2e-5)


@pytest.mark.case("A-M5")
def test_patch_embedding_sums_both_time_slices_and_adds_its_bias(pair):
    pixels = pair.pixels([(1, 2, 2)])
    with torch.no_grad():
        expected = pair.torch_model.model.visual.patch_embed(torch.tensor(pixels)).numpy()
    embed = pair.model.visual.patch_embed
    close(f"{pair.family} patch_embed", embed(pixels, len(pixels)), expected, atol=1e-5)
    size = pair.config.vision_config.patch_size
    weight = np.asarray(embed.proj.weight[...]).reshape(32, 3, 2, size, size)
    assert not np.allclose(weight[:, :, 0], weight[:, :, 1])
    if pair.family == "qwen3_vl":
        assert np.abs(embed.proj.bias[...]).min() > 1e-4


@pytest.mark.case("A-M3")
@pytest.mark.parametrize("indexes", [[1, 3], ["1", "3"]])
def test_a_full_layer_carries_a_change_into_the_other_window(indexes):
    """Layer 0 is windowed, layer 1 full; so the first window hears of the second after layer 1."""
    settings = reference_config().to_dict()
    grids = np.asarray([(1, 8, 16)])
    pixels = random_pixels(grids)
    nudged = pixels.copy()
    nudged[-1] += 1.0  # last patch: second window
    first_window = np.asarray(plan_vision(grids, SMALL).windows.patch)[0, ::4] // 4
    changed = {}
    for depth in (1, 2):
        settings["vision_config"] |= {"fullatt_block_indexes": indexes, "depth": depth}
        config = QwenVLConfig.from_hf(settings).vision_config
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
    expected = reference_features(pair, pixels, grids)
    plan = plan_vision(grids, config, pad_patches_to=512)
    found = np.asarray(encode(pair.model.visual, pad_pixel_values(pixels, plan), plan))
    assert found.shape == (128, pair.config.image_feature_size) and np.isfinite(found).all()
    np.testing.assert_allclose(found[: len(expected)], expected, atol=2e-5)


def test_a_stored_position_table_that_is_no_square_is_refused(pair3):
    vision = dataclasses.replace(pair3.config.vision_config, num_position_embeddings=60)
    with pytest.raises(ValueError, match="60 is no square"):
        dataclasses.replace(pair3.config, vision_config=vision)


def test_more_patches_than_planned_are_an_error(pair):
    plan = plan_vision(np.asarray([(1, 4, 6)]), pair.config.vision_config)
    with pytest.raises(ValueError, match="28 patch rows, plan for 24"):
        pair.model.encode_images(pair.pixels([(1, 4, 7)]), plan)
