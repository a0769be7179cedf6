"""Frozen parameters: no change, no gradient, no optimiser state."""

import jax
import numpy as np
import pytest
from flax import nnx

from svrl_jax import checkpoint
from svrl_jax.grpo.optimizer import OptimOptions
from svrl_jax.grpo.update import gradients, init_state, place_rows, update
from svrl_jax.models.qwen_vl.sharding import path_name
from tests.grpo.test_update import ADVANTAGES, batch_of, params_of, spec_of

FROZEN = ("visual.*", "language_model.embed_tokens.weight")


def named(tree) -> dict[str, np.ndarray]:
    """Leaves that belong to a parameter, by its name; of optimiser states the last moment."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): np.asarray(leaf) for path, leaf in leaves if path_name(path)}


@pytest.fixture
def frozen_spec(model, config):
    config.grpo.length_buckets = (40,)
    config.optim.learning_rate = 1e-4  # Adam turns rounding of tiny gradients into whole steps
    config.optim.freeze = FROZEN
    return spec_of(model, config)


def test_frozen_parameters_stay_and_the_others_move_as_before(model, sampled, config, frozen_spec):
    batch = batch_of(sampled, ADVANTAGES, config)
    params = params_of(model)
    state, metrics, _ = update(init_state(params, frozen_spec), params, batch, frozen_spec)
    config.optim.freeze = ()
    spec = spec_of(model, config)
    free, free_metrics, _ = update(init_state(params, spec), params, batch, spec)
    before, after, others = named(params), named(state.params), named(free.params)
    assert before.keys() == after.keys()
    for name in before:
        if name.startswith("visual.") or name == "language_model.embed_tokens.weight":
            assert np.array_equal(after[name], before[name])
            assert not np.array_equal(others[name], before[name])
        else:
            np.testing.assert_allclose(after[name], others[name], atol=1e-5)
    assert 0 < metrics["grad_norm"] < free_metrics["grad_norm"]


def test_frozen_parameters_have_no_gradient_and_no_state(model, sampled, config, frozen_spec):
    params = params_of(model)
    state = init_state(params, frozen_spec)
    kept = {n for n in named(params) if n.startswith("language_model.")} - set(FROZEN)
    assert set(named(state.opt_state)) == kept
    assert len(jax.tree.leaves(state.opt_state)) == 2 * len(kept) + 2  # and two counters
    batch = batch_of(sampled, ADVANTAGES, config)
    rows = place_rows(batch.minibatches[0], params, frozen_spec)
    old = [r.batch.old_per_token_logps for r in rows]
    grads, _, _ = gradients(params, rows, old, frozen_spec)
    assert set(named(grads)) == kept


def test_a_state_with_frozen_parameters_is_saved_and_restored(model, frozen_spec, tmp_path):
    state = init_state(params_of(model), frozen_spec)
    with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, data_position=0, config={}, host={})
        found = checkpoints.restore(state).state
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_patterns_that_mean_nothing_are_an_error(model):
    params = nnx.split(model)[1]
    with pytest.raises(ValueError, match=r"freeze has 'vision\.\*', which names no parameter"):
        OptimOptions(0.1, 0, 0.0, 0.9, 0.95, 1.0, ("visual.*", "vision.*")).trainable(params)
    with pytest.raises(ValueError, match="nothing to train"):
        OptimOptions(0.1, 0, 0.0, 0.9, 0.95, 1.0, ("*",)).trainable(params)
