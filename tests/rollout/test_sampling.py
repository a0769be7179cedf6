"""Draws: frequencies, log-probs, temperature 0, banned ids, truncation."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from svrl_jax import rng
from svrl_jax.rollout import sampling


def draw(logits, *, temperature=1.0, banned=(), count=1, **kwargs):
    """Draws `count` tokens from one row of logits, at positions 0, 1, ... of one turn."""
    logits = np.asarray(logits, np.float32)
    keys = np.tile(rng.turn_keys([(0, 0, 1, 0, 0, 0)]), (count, 1))
    mask = np.zeros(logits.shape[-1], bool)
    mask[list(banned)] = True
    ids, logps = jax.jit(sampling.draw_tokens, static_argnames=("top_k", "top_p"))(
        np.tile(logits, (count, 1)),
        keys,
        np.arange(count, dtype=np.int32),
        np.full(count, temperature, np.float32),
        mask,
        **kwargs,
    )
    return np.asarray(ids), np.asarray(logps)


@pytest.mark.parametrize("size", [2, 7, 50, 333])
def test_frequencies_follow_the_distribution(size):
    logits = np.random.default_rng(size).normal(size=size) * 1.5
    ids, _ = draw(logits, count=20_000, temperature=0.8, banned=(1,))
    expected = np.exp(logits / 0.8)
    expected[1] = 0
    expected /= expected.sum()
    found = np.bincount(ids, minlength=size) / len(ids)
    spread = np.sqrt(expected * (1 - expected) / len(ids))
    assert found[1] == 0
    assert np.all(np.abs(found - expected) <= 5 * spread + 1e-12)


def test_log_prob_is_that_of_the_masked_tempered_distribution():
    logits = np.random.default_rng(0).normal(size=40).astype(np.float32) * 3
    ids, logps = draw(logits, count=300, temperature=0.7, banned=(3, 39))
    scaled = logits / 0.7
    scaled[[3, 39]] = -np.inf
    expected = np.asarray(jax.nn.log_softmax(scaled))
    np.testing.assert_allclose(logps, expected[ids], atol=1e-5)


def test_an_entry_without_mass_is_never_drawn():
    mass = jnp.asarray([[0, 0, 0.5, 0, 0, 0.5, 0, 0, 0.0]] * 5, jnp.float32)
    uniform = jnp.asarray([0.0, 0.49999, 0.5, 0.99999994, 1.0], jnp.float32)
    assert sampling.draw_from_mass(mass, uniform).tolist() == [2, 2, 5, 5, 5]


def test_a_vocabulary_of_one_token():
    assert sampling.draw_from_mass(jnp.ones((1, 1)), jnp.asarray([0.7])).tolist() == [0]


def test_a_draw_depends_on_its_own_key_and_position_only():
    logits = np.random.default_rng(1).normal(size=60)
    many, _ = draw(logits, count=9)
    keys = rng.turn_keys([(0, 0, 1, 0, 0, 0)])
    for position in range(9):
        one, _ = sampling.draw_tokens(
            jnp.asarray(logits, jnp.float32)[None],
            keys,
            jnp.asarray([position]),
            jnp.ones(1),
            jnp.zeros(60, bool),
        )
        assert one[0] == many[position]


@pytest.mark.case("A-S9")
@pytest.mark.parametrize(
    "top_p, kept", [(0.6, {0, 1}), (0.85, {0, 1, 2}), (0.8, {0, 1}), (1.0, {0, 1, 2, 3})]
)
def test_nucleus_keeps_the_crossing_token(top_p, kept):
    probs = np.array([0.5, 0.3, 0.15, 0.05], np.float32)
    ids, _ = draw(np.log(probs), count=500, top_p=top_p)
    assert set(ids.tolist()) == kept


def test_top_k_keeps_k_and_leaves_log_probs_alone():
    probs = np.array([0.05, 0.5, 0.15, 0.3], np.float32)
    ids, logps = draw(np.log(probs), count=200, top_k=2)
    assert set(ids.tolist()) == {1, 3}
    np.testing.assert_allclose(logps, np.log(probs)[ids], atol=1e-6)


@pytest.mark.parametrize("kwargs", [{"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_senseless_truncation_is_refused(kwargs):
    with pytest.raises(ValueError, match="top_k must be"):
        draw([1.0, 0.0], **kwargs)


@pytest.mark.case("A-S10")
@pytest.mark.parametrize("kwargs", [{}, {"top_p": 0.9}])
def test_temperature_zero_takes_the_likeliest_with_a_finite_log_prob(kwargs):
    ids, logps = draw([2.0, 1.0, 0.0], temperature=0.0, count=8, **kwargs)
    assert ids.tolist() == [0] * 8
    np.testing.assert_allclose(logps, -0.40760596, atol=1e-6)


@pytest.mark.case("A-S11")
def test_log_prob_carries_the_temperature():
    ids, logps = draw([2.0, 1.0, 0.0], temperature=0.5, count=50)
    np.testing.assert_allclose(logps[ids == 0], -0.1429, atol=1e-4)
    assert (ids == 0).any()


@pytest.mark.case("A-S12")
def test_defaults_do_not_mean_greedy():
    ids, _ = draw(np.zeros(8), count=200)
    assert len(set(ids.tolist())) == 8


@pytest.mark.case("A-S18")
def test_keys_are_distinct_and_the_same_whatever_the_number_of_hosts():
    tasks = [f"task-{i}" for i in range(4)]
    rows = [(7, 3, rng.task_hash(t), s, 0, 0) for t in tasks for s in range(4)]
    whole = rng.turn_keys(rows)
    assert len({tuple(k) for k in whole.tolist()}) == 16
    for hosts in (2, 4):
        share = len(rows) // hosts
        parts = [rng.turn_keys(rows[i * share : (i + 1) * share]) for i in range(hosts)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(
        rng.turn_keys(rows[5:6]), whole[5:6]
    )  # drawn again after a resume


@pytest.mark.parametrize("size", [40, 2560, 151_936])
def test_blocks_cut_the_vocabulary_evenly(size):
    width = sampling.block_width(size)
    assert size % width == 0 and size**0.5 / 8 <= width <= 8 * size**0.5


SHARDED = """
import jax, numpy as np, jax.numpy as jnp
from functools import partial
from jax.sharding import PartitionSpec as P
from svrl_jax import rng
from svrl_jax.rollout import sampling
mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
V, count = 64, 20000
logits = np.random.default_rng(0).normal(size=V).astype(np.float32) * 1.5
banned = np.zeros(V, bool); banned[[3, *range(32, 48)]] = True  # the third slice as a whole
rows = np.tile(logits, (count, 1))
keys = np.tile(rng.turn_keys([(0, 0, 1, 0, 0, 0)]), (count, 1))
places = np.arange(count, dtype=np.int32)
draw = jax.jit(jax.shard_map(
    partial(sampling.draw_from_shards, axis_name="tensor"), mesh=mesh, check_vma=False,
    in_specs=(P(None, "tensor"), P(), P(), P(), P("tensor")), out_specs=(P(), P())))
for t in (0.8, 0.0):
    temperature = np.full(count, t, np.float32)
    ids, logps = map(np.asarray, draw(rows, keys, places, temperature, banned))
    whole, whole_logps = map(np.asarray, jax.jit(sampling.draw_tokens)(
        rows, keys, places, temperature, banned))
    same = ids == whole
    assert same.mean() > 0.999, same.mean()
    assert np.abs(logps - whole_logps)[same].max() < 1e-5
    if t:
        expected = np.exp(logits / t) * ~banned; expected /= expected.sum()
        found = np.bincount(ids, minlength=V) / count
        spread = np.sqrt(expected * (1 - expected) / count)
        assert (np.abs(found - expected) <= 5 * spread + 1e-12).all()
    else:
        assert set(ids) == {int(np.where(banned, -9e9, logits).argmax())}
print("done")
"""


def test_a_draw_across_vocabulary_shards_is_the_whole_draw():
    run = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0 and "done" in run.stdout, run.stderr[-2000:]
