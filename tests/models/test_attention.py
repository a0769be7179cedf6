"""Every attention backend against the dense one, on random layouts of groups and branches."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from svrl_jax.models.qwen_vl.attention import attend, attention_mask
from svrl_jax.models.qwen_vl.attention_backends import (
    are_plain_rows,
    attend_packed,
    choose_backend,
    plain_rows_attention,
)
from svrl_jax.models.qwen_vl.attention_blockwise import blockwise_attention
from svrl_jax.models.qwen_vl.attention_pallas import pallas_attention

B, T, N, K, H = 2, 45, 4, 2, 8  # T is no multiple of the block
BLOCK = 16
BACKENDS = {
    "blockwise": partial(blockwise_attention, block=BLOCK),
    "pallas": partial(pallas_attention, block=BLOCK, interpret=True),
}


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def dense(q, k, v, group, branch, causal=True):
    return attend(q, k, v, attention_mask(group, branch, group, branch, causal=causal))


@partial(jax.jit, static_argnums=(0, 1))
def value_and_gradients(attention, causal, q, k, v, group, branch, weight):
    """Output with padding blanked, and gradients of a weighted sum over real tokens."""
    real = (group >= 0)[:, :, None, None]

    def loss(q, k, v):
        out = attention(q, k, v, group, branch, causal=causal)
        return jnp.where(real, out * weight, 0).sum(), out

    grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return jnp.where(real, out, 0), out, grads


def arrays(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((B, T, n, H)), dtype) for n in (N, K, K, N)]


def layout(seed):
    """Random packed rows: groups of a shared prompt and a few branches, padding at the end."""
    rng = np.random.default_rng(seed)
    group, branch = np.full((B, T), -1, np.int32), np.zeros((B, T), np.int32)
    for row in range(B):
        place, number = 0, int(rng.integers(0, 5))
        end = int(rng.integers(T // 2, T + 1))
        while place < end:
            for part in range(int(rng.integers(1, 4))):
                stop = min(end, place + int(rng.integers(1, 12)))
                group[row, place:stop], branch[row, place:stop] = number, part
                place = stop
            number += int(rng.integers(1, 3))
    return group, branch


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_values_and_gradients_equal_the_dense_ones(name, causal):
    for seed in range(6):
        given = (*arrays(seed)[:3], *layout(seed), arrays(seed)[3])
        expected, _, expected_grads = value_and_gradients(dense, causal, *given)
        found, raw, grads = value_and_gradients(BACKENDS[name], causal, *given)
        np.testing.assert_allclose(found, expected, atol=2e-6)
        assert np.isfinite(raw).all()  # padding too
        for a, b in zip(grads, expected_grads, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_of_padding_alone_stays_finite(name):
    group, branch = layout(0)
    group[1] = -1
    _, raw, grads = value_and_gradients(
        BACKENDS[name], True, *arrays(1)[:3], group, branch, arrays(1)[3]
    )
    assert np.isfinite(raw).all() and all(np.isfinite(g).all() for g in grads)
    assert all(np.abs(g[0]).max() > 0 and not g[1].any() for g in grads)


@pytest.mark.case("A-M4")
@pytest.mark.parametrize("name", BACKENDS)
def test_huge_16_bit_scores_stay_finite_and_causal(name):
    q, k, v, weight = arrays(2, jnp.bfloat16)
    group, branch = np.zeros((2, B, T), np.int32)
    first, _, _ = value_and_gradients(
        BACKENDS[name], True, q * 200, k * 200, v, group, branch, weight
    )
    # The last key becomes what its own query looks for, so that the last output must change.
    changed = [(k * 200).at[:, -1].set(q[:, -1, ::2] * 4000), v.at[:, -1].add(1)]
    second, _, grads = value_and_gradients(
        BACKENDS[name], True, q * 200, *changed, group, branch, weight
    )
    assert first.dtype == jnp.bfloat16
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (first, *grads))
    assert np.array_equal(first[:, :-1], second[:, :-1])
    assert not np.array_equal(first[:, -1], second[:, -1])


@pytest.mark.parametrize("name", BACKENDS)
def test_sixteen_bits_are_near_the_dense_result(name):
    given = (*arrays(3, jnp.bfloat16)[:3], *layout(3), arrays(3, jnp.bfloat16)[3])
    expected = value_and_gradients(dense, True, *given)
    found = value_and_gradients(BACKENDS[name], True, *given)
    for a, b in zip(
        jax.tree.leaves((found[0], found[2])), jax.tree.leaves((expected[0], expected[2]))
    ):
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=0.06)


def test_plain_rows_on_the_path_that_gpus_take():
    """Its mask, by the other implementation of the same call."""
    group = np.zeros((B, T), np.int32)
    group[1, 30:] = -1
    branch = np.zeros_like(group)
    assert are_plain_rows(group, branch)
    q, k, v, _ = arrays(4)
    expected = dense(q, k, v, group, branch)
    found = plain_rows_attention(q, k, v, jnp.asarray(group), "xla")
    real = group >= 0
    np.testing.assert_allclose(found[real], expected[real], atol=2e-6)


def test_what_a_plain_row_is():
    zeros = np.zeros((1, 4), np.int32)
    assert are_plain_rows(zeros + 3, zeros) and are_plain_rows(zeros - 1, zeros)
    assert not are_plain_rows(np.array([[0, 0, 1, 1]]), zeros)
    assert not are_plain_rows(np.array([[-1, -1, 0, 0]]), zeros)
    assert not are_plain_rows(zeros, np.array([[0, 1, 1, 1]]))


def test_the_choice_by_platform_and_length():
    chosen = [choose_backend("auto", n, p) for n in (384, 8192) for p in ("cpu", "gpu", "tpu")]
    assert chosen == ["dense"] * 3 + ["blockwise", "blockwise", "pallas"]
    assert choose_backend("dense", 8192, "tpu") == "dense"
    q, k, v, _ = arrays(0)
    group, branch = layout(0)
    with pytest.raises(ValueError, match="'flash' is none of auto, dense"):
        attend_packed(q, k, v, group, branch, backend="flash")
    with pytest.raises(ValueError, match="cudnn backend is causal"):
        attend_packed(q, k, v, group, branch, causal=False, backend="cudnn")
    np.testing.assert_array_equal(
        attend_packed(q, k, v, group, branch), dense(q, k, v, group, branch)
    )


def largest_square(function, *args) -> int:
    """The largest of the second-largest dimensions over every array of a program."""
    found = 0

    def walk(jaxpr):
        nonlocal found
        for equation in jaxpr.eqns:
            for var in equation.outvars:
                found = max(found, *sorted([0, 0, *getattr(var.aval, "shape", ())])[-2:-1])
            for value in equation.params.values():
                for inner in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns")):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return found


@pytest.mark.parametrize("name", ["dense", "blockwise", "pallas"])
def test_no_array_of_t_times_t_at_8192_tokens(name):
    length = 8192
    q = jax.ShapeDtypeStruct((1, length, N, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, length, K, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q, k, v, group, branch):
        out = attend_packed(q, k, v, group, branch, backend=name)
        return out.astype(jnp.float32).sum()

    square = largest_square(jax.value_and_grad(loss, (0, 1, 2)), q, k, k, ids, ids)
    assert (square == length) if name == "dense" else (square <= 512)


TPU_PROGRAM = """
import json, sys, jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from svrl_jax.models.qwen_vl.attention_backends import attend_packed

report = {}
for name in sys.argv[1:]:
    device = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
    place = SingleDeviceSharding(device)
    def spec(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    q, k = (spec((1, 8192, n, 128), jnp.bfloat16) for n in (28, 4))
    ids = spec((1, 8192), jnp.int32)
    def loss(q, k, v, group, branch):
        out = attend_packed(q, k, v, group, branch, backend="pallas")
        return out.astype(jnp.float32).sum()
    program = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(q, k, k, ids, ids).compile()
    report[name] = program.memory_analysis().temp_size_in_bytes
print(json.dumps(report))
"""


@pytest.mark.slow
def test_the_kernels_compile_for_tpus_that_are_not_here():
    """The 7B's head layout at 8,192 tokens, forward and backward, for v5p and v6e."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the plan extra: pip install -e '.[plan]'")
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    found = subprocess.run(
        [sys.executable, "-c", TPU_PROGRAM, "v5p:2x2x1", "v6e:2x2"],
        env=env, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    report = json.loads(found.stdout.splitlines()[-1])
    # Scores alone would be 28 * 8192 * 8192 * 4 = 7.5 GB.
    assert len(report) == 2 and all(size < 1e9 for size in report.values())
