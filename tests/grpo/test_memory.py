"""Memory of the update's program, by the compiler's own analysis; nothing is run."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from svrl_jax.bench.rollout import small_config
from svrl_jax.bench.train import grpo_config, make_update
from svrl_jax.grpo.update import _gradient
from svrl_jax.models.qwen_vl import QwenVL
from svrl_jax.types import TrainBatch

TOKENS = 8192


def temporary_bytes(vocab: int, remat: str) -> int:
    """Of one row of 8,192 tokens, an eighth trained."""
    config = small_config()
    text = dataclasses.replace(config.text_config, vocab_size=vocab)
    config = dataclasses.replace(config, text_config=text, image_token_id=vocab - 1)
    config = dataclasses.replace(config, video_token_id=vocab - 2, vision_start_token_id=vocab - 3)
    model = nnx.eval_shape(lambda: QwenVL(config, rngs=nnx.Rngs(0)))
    _, spec = make_update(model, grpo_config(TOKENS, 1), TOKENS, remat, is_abstract=True)
    array = jax.ShapeDtypeStruct
    ids, targets = array((1, TOKENS), jnp.int32), array((1, TOKENS // 8), jnp.int32)
    values = array((1, TOKENS // 8), jnp.float32)
    batch = TrainBatch(
        ids=ids, positions=array((3, 1, TOKENS), jnp.int32), group_id=ids, branch_id=ids,
        target_index=targets, predictor_index=targets, episode_index=targets, span_index=targets,
        loss_mask=values, advantages=array((8,), jnp.float32), old_per_token_logps=values,
        ref_per_token_logps=values, pixel_values=array((0, 1176), jnp.float32),
        image_grid_thw=(), image_index=ids,
    )  # fmt: skip
    params = nnx.split(model)[1]
    lowered = _gradient.lower(spec.model, spec.loss, spec.optim, params, batch, None, values, 1.0)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.case("A-J5")
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_temporary_memory_hardly_grows_with_the_vocabulary(remat):
    small, large = (temporary_bytes(v, remat) for v in (32_768, 151_936))
    print(remat, small / 2**20, large / 2**20, large / small)
    assert large < 1.2 * small
    assert large < TOKENS * 151_936 * 4 / 2  # and whole logits would take twice as much
