"""Counted operations against XLA's own count of an unrolled model."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from svrl_jax.models.qwen_vl import QwenVL, plan_vision
from svrl_jax.models.qwen_vl.flops import forward_flops
from tests.grpo import tiny

GRIDS = np.asarray([(1, 8, 8)])
LENGTH = 256


def counted(function, *shapes) -> float:
    """XLA's count; it takes a scanned layer once, so the model must have one layer a tower."""
    compiled = jax.jit(function).lower(*shapes).compile()
    return compiled.cost_analysis()["flops"]


def test_the_count_is_near_xla_s():
    config = dataclasses.replace(
        tiny.CONFIG,
        text_config=dataclasses.replace(
            tiny.CONFIG.text_config, num_hidden_layers=1, intermediate_size=512
        ),
        vision_config=dataclasses.replace(
            tiny.CONFIG.vision_config, depth=1, fullatt_block_indexes=(0,), intermediate_size=256
        ),
    )
    model = nnx.eval_shape(lambda: QwenVL(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    plan = plan_vision(GRIDS, config.vision_config)
    ids = jax.ShapeDtypeStruct((1, LENGTH), np.int32)
    positions = jax.ShapeDtypeStruct((3, 1, LENGTH), np.int32)
    pixels = jax.ShapeDtypeStruct((64, config.vision_config.patch_dim), np.float32)

    def text(params, ids, positions):
        model = nnx.merge(graphdef, params)
        return model.logits(model(ids, positions, ids, ids))

    def vision(params, pixels):
        return nnx.merge(graphdef, params).encode_images(pixels, plan)

    nothing = np.zeros((0, 3), np.int64)
    text_flops = forward_flops(config, [LENGTH], nothing, LENGTH)
    # Dense attention computes the masked half too, and XLA counts elementwise work.
    attention = 4 * 32 * LENGTH * (LENGTH - 1) / 2
    assert counted(text, params, ids, positions) == pytest.approx(text_flops + attention, rel=0.2)
    vision_flops = forward_flops(config, [], GRIDS, 0)
    assert counted(vision, params, pixels) == pytest.approx(vision_flops, rel=0.25)
