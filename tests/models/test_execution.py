"""How a model computes: backend, dtype of activations, what the backward pass keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from svrl_jax.models.qwen_vl import QwenVL, default_image_index, mrope_positions, plan_vision
from svrl_jax.models.qwen_vl.execution import Execution
from svrl_jax.models.qwen_vl.vision import attend_segments
from tests.grpo import tiny
from tests.models.test_attention import largest_square

GRIDS = np.asarray([(1, 4, 6)])
IDS = np.asarray([[1, 2, *[tiny.IMAGE] * 6, 3, 4, 5, 6]], np.int32)


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def model():
    return QwenVL(tiny.CONFIG, rngs=nnx.Rngs(0))


def forward(model, remat="none"):
    """Hidden states float[B, T, D] and logits of one row with a picture."""
    plan = plan_vision(GRIDS, tiny.CONFIG.vision_config)
    pixels = tiny.picture((1, 4, 6), 0)
    positions = mrope_positions(IDS[0], GRIDS, tiny.CONFIG)[0][:, None]
    embeds = model.encode_images(pixels, plan, remat=remat)
    zeros = np.zeros_like(IDS)
    index = default_image_index(IDS, tiny.IMAGE)
    hidden = model(IDS, positions, zeros, zeros, embeds, index, remat=remat)
    return hidden, model.logits(hidden)


def run(model, execution):
    graphdef, params = nnx.split(model)
    other = nnx.merge(graphdef, params)
    other.set_execution(execution)
    return nnx.jit(forward)(other)


def test_bfloat16_compute_over_float32_weights_equals_bfloat16_weights(model):
    hidden, logits = run(model, Execution(compute_dtype="bfloat16"))
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    graphdef, params = nnx.split(model)
    small = nnx.merge(graphdef, jax.tree.map(lambda p: p.astype(jnp.bfloat16), params))
    expected, expected_logits = run(small, Execution())
    np.testing.assert_array_equal(np.float32(hidden), np.float32(expected))
    np.testing.assert_array_equal(logits, expected_logits)
    whole, _ = run(model, Execution())
    assert whole.dtype == jnp.float32
    assert 0 < np.abs(np.float32(hidden) - whole).max() < 0.1


def test_the_backend_changes_nothing(model):
    expected = run(model, Execution(attention="dense"))
    found = run(model, Execution(attention="blockwise"))
    np.testing.assert_allclose(found[1], expected[1], atol=1e-5)
    assert not np.array_equal(found[1], expected[1])  # another program did it
    grids = np.asarray([(1, 20, 16), (1, 10, 12)])  # a large picture and a small one
    segments = plan_vision(grids, tiny.CONFIG.vision_config).frames
    qkv = jnp.asarray(np.random.default_rng(0).normal(size=(440, 3, 2, 8)), jnp.float32)
    attend = jax.jit(attend_segments, static_argnums=2)
    expected, found = (attend(qkv, segments, name) for name in ("dense", "blockwise"))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not np.array_equal(found, expected)
    with pytest.raises(ValueError, match="'flash' is none of"):
        Execution(attention="flash")


@pytest.mark.parametrize("remat", ["dots", "layer"])
def test_what_is_kept_changes_no_gradient(model, remat):
    graphdef, params = nnx.split(model)

    def loss(params, remat):
        return jnp.square(forward(nnx.merge(graphdef, params), remat)[1]).mean()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    plain, again = gradient(params, "none"), gradient(params, remat)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * max(1.0, float(np.abs(a).max())))
    programs = [
        str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(params, r)) for r in ("none", remat)
    ]
    assert ["remat2[" in text for text in programs] == [False, True]


def test_the_whole_model_has_no_array_of_t_times_t_at_8192_tokens(model):
    graphdef, params = nnx.split(model)
    ids = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    positions = jax.ShapeDtypeStruct((3, 1, 8192), jnp.int32)

    def loss(params, ids, positions, group, branch):
        hidden = nnx.merge(graphdef, params)(ids, positions, group, branch, remat="layer")
        return hidden.sum()

    assert largest_square(jax.grad(loss), params, ids, positions, ids, ids) <= 512
