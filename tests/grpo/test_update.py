import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from svrl_jax.grpo.batch import make_batches
from svrl_jax.grpo.optimizer import OptimOptions, decays
from svrl_jax.grpo.update import (
    compile_count,
    gradients,
    init_state,
    make_spec,
    place_rows,
    update,
)
from tests.grpo import tiny

ADVANTAGES = np.array([[0.5, -0.5], [0.3, -0.4], [0.0, 0.0]], np.float32)


def batch_of(episodes, advantages, config, valid=None):
    valid = np.ones(np.shape(advantages), bool) if valid is None else valid
    return make_batches(
        episodes,
        advantages,
        valid,
        config.grpo,
        merge_size=2,
        image_token_id=tiny.IMAGE,
        pad_id=tiny.PAD,
    )


def spec_of(model, config):
    return make_spec(
        model,
        config.grpo,
        config.optim,
        temperature=tiny.TEMPERATURE,
        budget=tiny.BUDGET,
        banned_ids=tiny.BANNED,
    )


def params_of(model, shift=0.0):
    """The model's parameters, moved a little so that ratio and KL are not trivial."""
    rng = np.random.default_rng(1)
    noise = lambda p: p + shift * rng.normal(size=p.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(noise, nnx.split(model)[1])


def gradient_of(model, batch, config, shift=0.05):
    """The whole step's gradient as one vector, at parameters `shift` away from the reference."""
    spec = spec_of(model, config)
    rows = place_rows(batch.minibatches[0], params_of(model), spec)
    old = [r.batch.old_per_token_logps for r in rows]
    grads, sums, _ = gradients(params_of(model, shift), rows, old, spec)
    return tiny.flat(grads), sum(float(s["loss"]) for s in sums)


def with_microbatch(batch, micro):
    """The same step with another first microbatch."""
    mini = dataclasses.replace(batch.minibatches[0], microbatches=(micro,))
    return dataclasses.replace(batch, minibatches=(mini,))


def assert_same_gradient(a, b):
    np.testing.assert_allclose(a[1], b[1], atol=1e-6)
    np.testing.assert_allclose(a[0], b[0], atol=5e-6 * max(1.0, np.abs(b[0]).max()))


@pytest.fixture(scope="module")
def reference(model, sampled):
    """Gradient and loss of the default split: one microbatch of eight rows, forty tokens wide."""
    from configs.base import get_config

    config = get_config()
    config.grpo.layout = "single"
    config.grpo.length_buckets, config.grpo.microbatch_rows, config.grpo.kl_coef = (40,), 8, 0.05
    config.optim.clip_norm = 0.0
    return gradient_of(model, batch_of(sampled, ADVANTAGES, config), config)


@pytest.mark.case("A-G12")
@pytest.mark.case("A-D3")
def test_first_ratio_is_one_and_log_probs_are_the_samplers(model, sampled, config):
    """Picture rows, a tool picture and text-only rows in one batch, against one plain row each."""
    config.grpo.length_buckets = (40,)
    spec = spec_of(model, config)
    params = params_of(model)
    batch = batch_of(sampled, ADVANTAGES, config)
    state, metrics, logps = update(init_state(params, spec), params, batch, spec)
    for p in range(3):
        for g in range(2):
            np.testing.assert_allclose(logps[p][g], sampled[p][g].sampler_logps, atol=2e-5)
    assert abs(metrics["ratio_mean"] - 1) < 1e-5 and abs(metrics["ratio_max"] - 1) < 1e-4
    assert metrics["logp_gap_max"] < 2e-5 and metrics["clip_share"] == 0.0
    assert abs(metrics["kl"]) < 1e-8 and metrics["entropy"] > 1.0
    assert metrics["trained_tokens"] == sum(int(e.loss_mask.sum()) for x in sampled for e in x)
    assert metrics["equal_groups"] == 1 and metrics["skipped_updates"] == 0
    # The second step on the same batch: the old log-probs stayed frozen, so the ratio moved.
    assert int(state.step) == 1
    programs = compile_count()
    state, metrics, _ = update(state, params, batch, spec)
    assert compile_count() == programs
    assert abs(metrics["ratio_max"] - 1) > 1e-2 and metrics["kl"] > 1e-4
    # The reference kept its buffers, although the state was donated.
    assert np.isfinite(tiny.flat(params)).all()


@pytest.mark.case("A-G12")
def test_inner_steps_are_steps_on_frozen_log_probs(model, sampled, config):
    config.grpo.length_buckets = (40,)
    params = params_of(model)
    batch = batch_of(sampled, ADVANTAGES, config)
    one = spec_of(model, config)
    state = init_state(params, one)
    for _ in range(2):
        state, _, _ = update(state, params, batch, one)
    config.grpo.inner_steps = 2
    two = spec_of(model, config)
    both, metrics, logps = update(init_state(params, two), params, batch, two)
    np.testing.assert_allclose(tiny.flat(both.params), tiny.flat(state.params), atol=1e-7)
    assert int(both.step) == 1 and metrics["logp_gap_max"] < 2e-5
    np.testing.assert_allclose(logps[0][0], sampled[0][0].sampler_logps, atol=2e-5)


@pytest.mark.case("A-G5")
def test_microbatches_change_nothing(model, episodes, config):
    """Six text rows as one microbatch (filled up with zero-weight rows), three, and six."""
    config.grpo.length_buckets, config.grpo.kl_coef = (40,), 0.0
    texts = [episodes[2][:2], episodes[2][2:], episodes[2][1:3]]
    found = []
    for rows in (8, 2, 1):
        config.grpo.microbatch_rows = rows
        batch = batch_of(texts, ADVANTAGES, config)
        assert len(batch.microbatches) == -(-6 // rows)
        found.append(gradient_of(model, batch, config))
    assert_same_gradient(found[1], found[0])
    assert_same_gradient(found[2], found[0])
    assert np.abs(found[0][0]).max() > 1e-3


@pytest.mark.case("A-G11")
def test_padding_changes_nothing(model, sampled, config, reference):
    config.grpo.length_buckets, config.grpo.microbatch_rows = (56,), 6
    batch = batch_of(sampled, ADVANTAGES, config)
    assert [m.ids.shape for m in batch.microbatches] == [(6, 56)]
    assert_same_gradient(gradient_of(model, batch, config), reference)


def test_gradient_equals_that_of_the_plainest_loss(model, sampled, config, reference):
    """Dr. GRPO with k3, written out over single rows without padding or packing."""
    graphdef, _ = nnx.split(model)

    def loss(params):
        total = 0.0
        for group, weights in zip(sampled, ADVANTAGES):
            for episode, advantage in zip(group, weights):
                logps = tiny.naive_logps(nnx.merge(graphdef, params), episode)
                before = episode.sampler_logps  # the reference policy sampled them
                ratio = jnp.exp(logps - before)
                gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
                k3 = jnp.exp(before - logps) - (before - logps) - 1
                total += ((-gain + 0.05 * k3) * episode.loss_mask).sum()
        return total / (tiny.BUDGET * 6)

    value, grads = jax.jit(jax.value_and_grad(loss))(params_of(model, 0.05))
    np.testing.assert_allclose(reference[1], value, atol=1e-6)
    np.testing.assert_allclose(reference[0], tiny.flat(grads), atol=2e-6)
    assert np.abs(reference[0]).max() > 1e-3


@pytest.mark.case("A-G7")
def test_tool_and_prompt_tokens_are_not_in_the_loss(model, sampled, config, reference):
    config.grpo.length_buckets = (40,)
    batch = batch_of(sampled, ADVANTAGES, config)
    (micro,) = batch.microbatches
    lift = np.where(micro.loss_mask > 0, 0.0, 10.0).astype(np.float32)
    changed = dataclasses.replace(micro, old_per_token_logps=micro.old_per_token_logps + lift)
    got = gradient_of(model, with_microbatch(batch, changed), config)
    np.testing.assert_array_equal(got[0], reference[0])
    assert got[1] == reference[1]


@pytest.mark.case("A-G1")
def test_equal_rewards_give_exactly_zero_policy_gradient(model, sampled, config):
    config.grpo.length_buckets = (40,)
    batch = batch_of(sampled, np.zeros((3, 2), np.float32), config)
    config.grpo.kl_coef = 0.0
    grads, loss = gradient_of(model, batch, config)
    assert (grads == 0.0).all() and loss == 0.0
    config.grpo.kl_coef = 0.05
    grads, _ = gradient_of(model, batch, config)  # the KL term stays
    assert np.abs(grads).max() > 1e-4


def test_leaving_equal_groups_out_keeps_the_policy_gradient(model, sampled, config):
    config.grpo.length_buckets, config.grpo.kl_coef = (40,), 0.0
    kept = gradient_of(model, batch_of(sampled, ADVANTAGES, config), config)
    config.grpo.drop_equal_groups = True
    batch = batch_of(sampled, ADVANTAGES, config)
    assert sum((o >= 0).sum() for o in batch.minibatches[0].origins) == 4
    assert_same_gradient(gradient_of(model, batch, config), kept)


def test_gradient_that_is_not_finite_changes_nothing_and_is_counted(model, sampled, config):
    config.grpo.length_buckets = (40,)
    spec = spec_of(model, config)
    params = params_of(model)
    batch = batch_of(sampled, ADVANTAGES, config)
    (micro,) = batch.microbatches
    poisoned = dataclasses.replace(micro, advantages=micro.advantages * np.float32(np.nan))
    bad = with_microbatch(batch, poisoned)
    state, metrics, _ = update(init_state(params, spec), params, bad, spec)
    assert metrics["skipped_updates"] == 1 and int(state.step) == 1
    np.testing.assert_array_equal(tiny.flat(state.params), tiny.flat(params))
    # And the next good batch is as if nothing had been: Adam's moments stayed clean.
    after, _, _ = update(state, params, batch, spec)
    clean, _, _ = update(init_state(params, spec), params, batch, spec)
    np.testing.assert_array_equal(tiny.flat(after.params), tiny.flat(clean.params))


@pytest.mark.case("A-G10")
def test_step_with_nothing_to_train_on_leaves_the_parameters(model, sampled, config):
    spec = spec_of(model, config)
    params = params_of(model)
    batch = batch_of(sampled, ADVANTAGES, config, np.zeros((3, 2), bool))
    state, metrics, logps = update(init_state(params, spec), params, batch, spec)
    np.testing.assert_array_equal(tiny.flat(state.params), tiny.flat(params))
    assert int(state.step) == 1 and metrics["kl"] is None and metrics["loss"] is None
    assert metrics["invalid_episodes"] == 6 and logps == [[None] * 2] * 3


def test_invalid_episode_has_no_influence(model, sampled, config, reference):
    config.grpo.length_buckets = (40,)
    valid = np.ones((3, 2), bool)
    valid[1, 1] = False
    results = []
    for logps in (0.0, -5.0):
        changed = [list(group) for group in sampled]
        old = np.full_like(sampled[1][1].sampler_logps, logps)
        changed[1][1] = dataclasses.replace(sampled[1][1], sampler_logps=old)
        results.append(gradient_of(model, batch_of(changed, ADVANTAGES, config, valid), config))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert np.abs(results[0][0] - reference[0]).max() > 1e-4


def test_importance_weights_leave_an_exact_sampler_alone(model, sampled, config):
    config.grpo.length_buckets = (40,)
    batch = batch_of(sampled, ADVANTAGES, config)
    params = params_of(model)
    spec = spec_of(model, config)
    plain, _, _ = update(init_state(params, spec), params, batch, spec)
    config.grpo.importance_cap = 2.0
    spec = spec_of(model, config)
    weighted, metrics, _ = update(init_state(params, spec), params, batch, spec)
    assert metrics["ratio_max"] == 1.0
    # Adam turns a rounding difference of a tiny gradient into a visible one; most agree closely.
    difference = np.abs(tiny.flat(plain.params) - tiny.flat(weighted.params))
    assert np.quantile(difference, 0.99) < 1e-4


@pytest.mark.case("A-J4")
def test_shapes_come_from_a_small_set(model, config):
    """Lengths from 85 to 135, ten picture sizes, groups of two to ten: few programs."""
    config.grpo.microbatch_rows, config.grpo.length_buckets = 16, (128, 160)
    config.grpo.kl_coef = 0.0
    spec = spec_of(model, config)
    grids = [(1, 2 * h, 2 * w) for h in (1, 2, 3, 4, 5) for w in (2, 3)]
    epochs = []
    for order in (range(30), reversed(range(30))):
        seen = set()
        for number in order:
            rng = np.random.default_rng(number)
            group = [
                tiny.make_episode(
                    "a", g, g, (grid,), tiny.picture(grid, g), ((20, int(rng.integers(60, 95))),)
                )
                for g, grid in enumerate(rng.permutation(grids)[: rng.integers(2, 11)].tolist())
            ]
            batch = batch_of([group[:: 1 if number % 2 else -1]], np.ones((1, len(group))), config)
            for rows in place_rows(batch.minibatches[0], None, spec):
                leaves, structure = jax.tree.flatten((rows.batch, rows.plan))
                shapes = tuple((x.shape, str(x.dtype)) for x in leaves)
                seen.add((shapes, structure))
        epochs.append(seen)
    # Two lengths by two numbers of rows, each with a few sizes of the picture arrays.
    assert len(epochs[0]) <= 16
    assert epochs[1] == epochs[0]


def test_warm_up_rises_to_the_rate_and_stays():
    options = OptimOptions(2.0, 4, 0.0, 0.9, 0.95, 1.0)
    assert [float(options.rate(i)) for i in (0, 1, 3, 4, 100)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert float(OptimOptions(2.0, 0, 0.0, 0.9, 0.95, 1.0).rate(0)) == 2.0


def test_clip_and_decay_by_hand():
    params = {"norm": {"weight": jnp.ones(2)}, "proj": {"weight": jnp.ones(2), "bias": jnp.ones(2)}}
    assert decays(params) == {
        "norm": {"weight": False},
        "proj": {"weight": True, "bias": False},
    }
    optimizer = OptimOptions(0.1, 0, 0.5, 0.9, 0.95, 1.0).make()
    grads = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(updates["proj"]["weight"], -0.1 * 0.5 * np.ones(2), rtol=1e-6)
    assert (np.asarray(updates["norm"]["weight"]) == 0).all()
    clipped = OptimOptions(0.1, 0, 0.0, 0.9, 0.95, 1.0).make()
    params = {"w": jnp.zeros(2)}
    _, state = clipped.update({"w": jnp.array([30.0, 40.0])}, clipped.init(params), params)
    np.testing.assert_allclose(state[1].mu["w"], 0.1 * np.array([0.6, 0.8]), rtol=1e-5)
