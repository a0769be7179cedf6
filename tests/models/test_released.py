"""The released sizes, traced without memory: parameter counts, and whole forward passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from svrl_jax.models.qwen_vl import QwenVL, init_cache, plan_vision
from svrl_jax.models.qwen_vl.released import RELEASED
from tests.models.conftest import CLASSES

# Parameters as the hub counts them from the safetensors' headers. Tied heads count once.
PUBLISHED = {
    "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen3-VL-8B-Instruct": 8_767_123_696,
}


def abstract(name):
    config = RELEASED[name]
    return nnx.eval_shape(lambda: QwenVL(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    sizes = [np.prod(p.shape, dtype=np.int64) for p in jax.tree.leaves(nnx.state(abstract(name)))]
    assert sum(sizes) == PUBLISHED[name]
    kind, model = CLASSES[RELEASED[name].model_type]
    with torch.device("meta"):
        reference = model(kind(**RELEASED[name].to_hf()))
    assert reference.num_parameters() == PUBLISHED[name]


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct"])
def test_the_full_model_traces(name):
    """Two rows of 1,024 tokens with two pictures of 40 x 30 patches; then one decode step."""
    config = RELEASED[name]
    plan = plan_vision(np.asarray([(1, 40, 30)] * 2), config.vision_config)
    pixels = jax.ShapeDtypeStruct((2400, config.vision_config.patch_dim), jnp.float32)
    graphdef, params = nnx.split(abstract(name))
    ids = jnp.zeros((2, 1024), jnp.int32)
    positions = jnp.zeros((3, 2, 1024), jnp.int32)

    def forward(params, pixels):
        model = nnx.merge(graphdef, params)
        embeds = model.encode_images(pixels, plan)
        hidden = model(ids, positions, ids, ids, embeds, ids, remat="layer")
        return embeds, model.logits(hidden)

    embeds, logits = jax.eval_shape(forward, params, pixels)
    assert embeds.shape == (600, config.image_feature_size) and embeds.dtype == jnp.bfloat16
    levels = {"Qwen2.5-VL-7B-Instruct": 0, "Qwen3-VL-8B-Instruct": 3}[name]
    assert config.image_feature_size == (1 + levels) * config.text_config.hidden_size
    assert logits.shape == (2, 1024, config.text_config.vocab_size)
    assert logits.dtype == jnp.float32

    def step(params, embeds):
        model = nnx.merge(graphdef, params)
        cache = init_cache(config, 2, 2048, jnp.bfloat16)
        starts = jnp.asarray([3, 5])
        part = ids[:, :1]
        return model.extend(part, positions[:, :, :1], cache.k, cache.v, starts, embeds, part)

    hidden, k, _ = jax.eval_shape(step, params, embeds)
    assert hidden.shape == (2, 1, config.text_config.hidden_size)
    text = config.text_config
    assert k.shape == (text.num_hidden_layers, 2, 2048, text.num_key_value_heads, 128)
