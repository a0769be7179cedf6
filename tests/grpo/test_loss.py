import jax
import jax.numpy as jnp
import numpy as np
import pytest

from svrl_jax.grpo.loss import LossOptions, k3_kl, loss_denominator, loss_sums


def options(**changes):
    values = {
        "objective": "dr_grpo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.0,
        "kl_estimator": "k3",
        "importance_cap": 0.0,
        "budget": 128,
    }
    return LossOptions(**values | changes)


def sums(logps, opts, *, advantages=None, mask=None, proximal=0.0, ref=0.0, sampler=None):
    """`loss_sums` of [B, T] log-probs; scalars stand for whole arrays."""
    logps = jnp.asarray(logps, jnp.float32)
    full = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), logps.shape)  # noqa: E731
    return loss_sums(
        logps,
        jnp.zeros_like(logps),
        proximal_logps=None if proximal is None else full(proximal),
        sampler_logps=full(proximal if sampler is None else sampler),
        ref_logps=full(ref),
        advantages=jnp.asarray(np.ones(len(logps)) if advantages is None else advantages),
        episode_index=jnp.broadcast_to(jnp.arange(len(logps))[:, None], logps.shape),
        loss_mask=full(1.0 if mask is None else mask),
        options=opts,
    )


def loss(logps, opts, *, mask=None, **kwargs):
    """The loss of one microbatch that is the whole step."""
    logps = jnp.asarray(logps, jnp.float32)
    tokens = int(np.broadcast_to(1.0 if mask is None else mask, logps.shape).sum())
    numerator, _ = sums(logps, opts, mask=mask, **kwargs)
    return numerator / loss_denominator(opts, len(logps), tokens)


@pytest.mark.parametrize(
    ("ratio", "advantage", "want", "slope"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.5, 1.0, -1.2, 0.0),  # clipped above: no gradient
        (0.5, 1.0, -0.5, -0.5),  # below, but the min keeps the true ratio
        (0.5, -1.0, 0.8, 0.0),
        (1.5, -1.0, 1.5, 1.5),
    ],
)
def test_clipped_objective_by_hand(ratio, advantage, want, slope):
    opts = options(objective="dapo")
    f = lambda x: loss(x, opts, advantages=[advantage])  # noqa: E731
    value, grad = jax.value_and_grad(f)(jnp.array([[np.log(ratio)]], jnp.float32))
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(grad, [[slope]], atol=1e-6)  # d ratio / d logp = ratio


def test_asymmetric_clip():
    opts = options(objective="dapo", clip_high=0.28)
    got = loss(jnp.log(jnp.array([[1.25], [1.5]])), opts)
    np.testing.assert_allclose(got, -(1.25 + 1.28) / 2, rtol=1e-6)


def test_huge_log_ratios_stay_finite():
    x = jnp.array([[500.0, -500.0, 1e9]])
    for advantage in (1.0, -1.0, 0.0):
        f = lambda x: loss(x, options(kl_coef=0.1), advantages=[advantage])  # noqa: E731, B023
        value, grad = jax.value_and_grad(f)(x)
        assert np.isfinite(value) and np.isfinite(grad).all()


@pytest.mark.case("A-G11")
@pytest.mark.parametrize("width", [100, 128, 1000])
@pytest.mark.parametrize(
    ("objective", "want"), [("grpo", 0.5), ("dapo", 1 / 101), ("dr_grpo", 1 / 256)]
)
def test_length_weighting_by_hand_at_any_pad_width(objective, want, width):
    # Row 1: one token of loss 1. Row 2: a hundred of loss 0.
    mask = np.zeros((2, width), np.float32)
    mask[0, 0] = mask[1, :100] = 1.0
    got = loss(np.zeros((2, width)), options(objective=objective), mask=mask, advantages=[-1.0, 0])
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.case("A-G3")
def test_masked_tokens_are_in_no_denominator():
    mask = np.ones((2, 4), np.float32)
    mask[1] = 0.0  # row 2 cut off
    opts = options(objective="dapo")
    assert float(loss(np.zeros((2, 4)), opts, mask=mask, advantages=[-1.0, -1.0])) == 1.0
    mask[0, 1:3] = 0.0  # two tool tokens of row 1
    value, metrics = sums(np.zeros((2, 4)), opts, mask=mask, advantages=[-1.0, -1.0])
    assert float(value / loss_denominator(opts, 2, int(mask.sum()))) == 1.0
    assert float(metrics["tokens"]) == 2.0


@pytest.mark.case("A-G5")
@pytest.mark.parametrize("sizes", [(1, 1), (2,)])
def test_unequal_microbatches_are_divided_once(sizes):
    # One token of loss 3 beside three of loss 1: 6 / 4, where the mean of means would give 2.
    mask = np.array([[1, 0, 0], [1, 1, 1]], np.float32)
    advantages = np.array([-3.0, -1.0], np.float32)
    opts = options(objective="dapo")
    total, row = 0.0, 0
    for size in sizes:
        part = slice(row, row + size)
        total += sums(np.zeros((size, 3)), opts, mask=mask[part], advantages=advantages[part])[0]
        row += size
    np.testing.assert_allclose(total / loss_denominator(opts, 2, 4), 1.5, atol=1e-6)


@pytest.mark.case("A-G2")
@pytest.mark.parametrize("objective", ["dr_grpo", "grpo", "dapo"])
def test_rows_without_tokens_give_zero_and_leave_others_alone(objective):
    opts = options(objective=objective, kl_coef=0.1, importance_cap=2.0)
    # What stands under the mask may be anything, even inf and NaN.
    logps = jnp.array([[-1.0, -2.0], [jnp.nan, -jnp.inf]])
    mask = np.array([[1.0, 1.0], [0.0, 0.0]])
    step = jax.jit(jax.value_and_grad(lambda x, m: sums(x, opts, mask=m, proximal=-1.5)[0]))
    value, grad = step(logps, mask)
    alone, alone_grad = step(logps[:1], mask[:1])
    np.testing.assert_allclose(value, alone)
    np.testing.assert_allclose(grad, [alone_grad[0], [0.0, 0.0]])
    value, grad = step(logps, np.zeros((2, 2)))
    assert float(value) == 0.0 and (np.asarray(grad) == 0.0).all()
    assert loss_denominator(opts, 0, 0) == 1.0


@pytest.mark.case("A-G1")
def test_zero_advantage_leaves_exactly_the_kl_gradient():
    logps, ref = jnp.array([[-1.0, -2.0, -0.5]]), jnp.array([[-1.5, -1.0, -0.5]])
    for kl_coef in (0.0, 0.04):
        opts = options(kl_coef=kl_coef)
        f = lambda x: sums(x, opts, advantages=[0.0], ref=ref, proximal=-1.0)[0]  # noqa: E731, B023
        grad = jax.grad(f)(logps)
        want = kl_coef * (1.0 - np.exp(ref - logps))  # d k3 / d logp
        if kl_coef == 0.0:
            assert (np.asarray(grad) == 0.0).all()
        np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-8)


@pytest.mark.case("A-G6")
def test_k3_is_exact_when_small_and_finite_when_huge():
    x = jnp.array([0.1, 0.0, -3.0, 20.0, 89.0, 100.0])
    value, grad = jax.vmap(jax.value_and_grad(k3_kl))(x)
    np.testing.assert_allclose(value[0], 0.0051709, atol=1e-7)
    assert float(value[1]) == 0.0 and float(grad[1]) == 0.0
    np.testing.assert_allclose(value[2], np.exp(-3.0) + 3.0 - 1.0, rtol=1e-6)
    assert np.isfinite(value).all() and np.isfinite(grad).all()
    assert (np.diff(value[3:]) > 0).all()  # still a pull towards the reference
    assert (np.asarray(value) >= 0).all()


@pytest.mark.case("A-G6")
def test_tokens_beyond_the_kl_bound_are_counted():
    logps = jnp.array([[0.0, 0.0, 0.0]])
    _, metrics = sums(logps, options(kl_coef=0.1), ref=jnp.array([[0.1, 20.0, 100.0]]))
    assert float(metrics["kl_capped"]) == 2.0 and np.isfinite(metrics["kl"])


def test_importance_weights_are_truncated_and_carry_no_gradient():
    sampler = jnp.array([[-1.0, -1.0]])
    proximal = jnp.array([[-1.0 + np.log(1.5), -1.0 + np.log(8.0)]])
    opts = options(objective="dapo", importance_cap=2.0)
    f = lambda x: loss(x, opts, proximal=proximal, sampler=sampler)  # noqa: E731
    value, grad = jax.value_and_grad(f)(proximal)
    np.testing.assert_allclose(value, -(1.5 + 2.0) / 2, rtol=1e-5)
    np.testing.assert_allclose(grad, [[-0.75, -1.0]], rtol=1e-5)
    plain = loss(proximal, options(objective="dapo"), proximal=proximal, sampler=sampler)
    np.testing.assert_allclose(plain, -1.0, rtol=1e-6)


def test_own_policy_as_proximal_has_ratio_one_and_a_gradient():
    f = lambda x: loss(x, options(objective="dapo"), proximal=None, sampler=-1.0)  # noqa: E731
    value, grad = jax.value_and_grad(f)(jnp.array([[-2.0, -3.0]]))
    assert float(value) == -1.0
    np.testing.assert_allclose(grad, [[-0.5, -0.5]])


def test_metrics_are_sums_over_trained_tokens():
    logps = jnp.log(jnp.array([[1.5, 0.9, 1.0, 7.0]]))
    mask = np.array([[1, 1, 1, 0]], np.float32)
    _, got = sums(logps, options(), mask=mask)
    np.testing.assert_allclose(got["ratio"], 3.4, rtol=1e-6)
    np.testing.assert_allclose(got["ratio_max"], 1.5, rtol=1e-6)
    np.testing.assert_allclose(got["gap"], np.log(1.5) - np.log(0.9), rtol=1e-5)
    np.testing.assert_allclose(got["gap_max"], np.log(1.5), rtol=1e-5)
    assert float(got["clipped_high"]) == 1.0  # 1.5 at advantage 1; 0.9 is inside


def test_unknown_objective_is_refused():
    with pytest.raises(ValueError, match=r"grpo\.objective 'ppo'"):
        options(objective="ppo")
