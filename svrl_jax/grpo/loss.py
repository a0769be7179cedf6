"""Per-token log-probs and advantages -> the numerator of the GRPO loss, with its metrics.

One function for all variants: the clipped objective of PPO (arXiv:1707.06347, eq. 7) with a KL term
(GRPO, arXiv:2402.03300, eq. 4), aggregated by one of

    dr_grpo   sum of token losses / (budget * episodes)           arXiv:2503.20783
    grpo      mean over episodes of the mean over their tokens    arXiv:2402.03300
    dapo      mean over the tokens of the step                    arXiv:2503.14476
    gspo      mean over episodes of one loss each, whose ratio is
              exp of the mean log-ratio over its tokens           arXiv:2507.18071, eq. 5 to 7

A microbatch returns sums only. The sums of a whole step are divided once by the step's denominator,
so how episodes are split over rows and microbatches changes nothing: one token of loss 3 beside
three of loss 1 is 6 / 4, not the mean of 3 and 1.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

OBJECTIVES = ("dr_grpo", "grpo", "dapo", "gspo")
KL_ESTIMATORS = ("k1", "k2", "k3")

# exp of a log-ratio is cut at +-20: e^20 is far outside any clip range, e^89 is outside float32.
MAX_LOG_RATIO = 20.0
# Beyond this log-ratio k2 and k3 go on as their tangent: still pulling towards the reference
# policy, but one stray token cannot be the whole gradient (k3 at 20 would weigh 4.9e8 others).
MAX_KL_LOG_RATIO = 10.0


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """What of config.grpo the loss reads; hashable, so that it can be static under jit.

    Attributes:
      objective: one of OBJECTIVES; sets how token losses are aggregated.
      clip_low, clip_high: epsilon below and above 1. DAPO's asymmetric clip is clip_high >
        clip_low; GSPO's ratio is of a whole episode and wants both near 4e-4.
      kl_coef: beta; 0 leaves the KL term and the reference policy out.
      kl_estimator: one of KL_ESTIMATORS, see `kl_estimate`.
      importance_cap: largest truncated importance weight; 0 turns the weights off.
      budget: tokens of an episode, Dr. GRPO's constant length.
    """

    objective: str
    clip_low: float
    clip_high: float
    kl_coef: float
    kl_estimator: str
    importance_cap: float
    budget: int

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise ValueError(f"unknown grpo.objective {self.objective!r}; one of {OBJECTIVES}")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(
                f"unknown grpo.kl_estimator {self.kl_estimator!r}; one of {KL_ESTIMATORS}"
            )


def loss_denominator(options: LossOptions, num_episodes: int, num_tokens: int) -> float:
    """What the summed numerators are divided by. At least 1, so that an empty step gives 0.

    Args:
      options: the objective and the budget.
      num_episodes: trained episodes of the *whole optimiser step*, over all microbatches and hosts.
      num_tokens: their policy tokens.
    """
    by_objective = {
        "dr_grpo": options.budget * num_episodes,
        "grpo": num_episodes,
        "dapo": num_tokens,
        "gspo": num_episodes,
    }
    return float(max(by_objective[options.objective], 1))


def k3_kl(log_ratio: jax.Array) -> jax.Array:
    """k3 estimate of KL(policy || reference) at tokens drawn from the policy, never negative.

    Args:
      log_ratio: float32, log reference - log policy.
    Returns:
      exp(x) - x - 1, and for x > MAX_KL_LOG_RATIO the tangent of that curve there, in which value
      and gradient are finite for every finite x. expm1 keeps the small values exact.
    """
    inside = jnp.minimum(log_ratio, MAX_KL_LOG_RATIO)
    beyond = jnp.maximum(log_ratio - MAX_KL_LOG_RATIO, 0.0)
    return jnp.expm1(inside) + jnp.exp(MAX_KL_LOG_RATIO) * beyond - log_ratio


def k2_kl(log_ratio: jax.Array) -> jax.Array:
    """x^2 / 2, never negative, its gradient that of the true KL; a tangent beyond
    +-MAX_KL_LOG_RATIO."""
    size = jnp.abs(log_ratio)
    inside = jnp.minimum(size, MAX_KL_LOG_RATIO)
    return 0.5 * inside**2 + MAX_KL_LOG_RATIO * (size - inside)


def kl_estimate(log_ratio: jax.Array, estimator: str) -> jax.Array:
    """Estimate a token of KL(policy || reference), by Schulman's names.

    k1 is -x: unbiased in value, but its gradient has mean zero on policy, so as a loss it does
    nothing but add noise; for comparison. k2 and k3: see there. x is log reference - log policy.
    """
    if estimator == "k1":
        return -log_ratio
    return k2_kl(log_ratio) if estimator == "k2" else k3_kl(log_ratio)


def loss_sums(
    logps: jax.Array,
    entropy: jax.Array,
    *,
    proximal_logps: jax.Array | None,
    sampler_logps: jax.Array,
    ref_logps: jax.Array,
    advantages: jax.Array,
    episode_index: jax.Array,
    loss_mask: jax.Array,
    options: LossOptions,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss numerator of some rows, and the sums that the metrics are made of.

    All log-probs are under the sampler's distribution: raw logits over the temperature, banned ids
    masked. Values where loss_mask is 0 are never read, not even through exp.

    Args:
      logps: float32[B, M], the current policy's at trained tokens, differentiable.
      entropy: float32[B, M], of the same distribution; reported only.
      proximal_logps: float32[B, M], what the ratio is taken against, frozen over inner steps; None
        means the current policy (ratio 1, gradient kept).
      sampler_logps: float32[B, M], recorded at sampling.
      ref_logps: float32[B, M], the frozen initial policy's; not read when kl_coef is 0.
      advantages: float32[E].
      episode_index: int32[B, M], in [0, E).
      loss_mask: float32[B, M], 1 on trained tokens, 0 on padding.
      options: the variant.
    Returns:
      numerator float32[], to be divided by `loss_denominator` of the whole optimiser step, and a
      dict of float32[] sums over tokens (keys ending in `_max` are maxima).
    """
    trained = loss_mask > 0
    mask = trained.astype(logps.dtype)
    tokens = _by_episode(mask, episode_index, advantages)  # [E]
    proximal = jax.lax.stop_gradient(logps) if proximal_logps is None else proximal_logps
    log_ratio = _masked(logps - proximal, trained)
    drift = jax.lax.stop_gradient(_masked(proximal - sampler_logps, trained))
    gain, weights = advantages[episode_index], mask  # [B, M]
    if options.objective == "gspo":
        mean = lambda x: _by_episode(x, episode_index, advantages) / jnp.maximum(tokens, 1.0)  # noqa: E731
        log_ratio, drift = mean(log_ratio), mean(drift)  # [E]
        gain, weights = advantages, (tokens > 0).astype(logps.dtype)

    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped = jnp.clip(ratio, 1.0 - options.clip_low, 1.0 + options.clip_high)
    losses = -jnp.minimum(ratio * gain, clipped * gain)
    raw_weight = jnp.exp(jnp.clip(drift, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if options.importance_cap > 0:
        losses = losses * jnp.minimum(raw_weight, options.importance_cap)
    losses = losses * weights

    ref_log_ratio = kl = jnp.zeros_like(logps)
    if options.kl_coef > 0:
        ref_log_ratio = _masked(ref_logps - logps, trained)
        kl = kl_estimate(ref_log_ratio, options.kl_estimator)

    if options.objective in ("grpo", "gspo"):  # each episode's mean; one without tokens adds 0
        per_token = options.kl_coef * kl + (losses if options.objective == "grpo" else 0.0)
        sums = _by_episode(per_token * mask, episode_index, advantages)
        numerator = (sums / jnp.maximum(tokens, 1.0)).sum()
        numerator += losses.sum() if options.objective == "gspo" else 0.0
    else:
        numerator = (losses + options.kl_coef * kl * mask).sum()

    gap = jax.lax.stop_gradient(_masked(sampler_logps - logps, trained))
    was_clipped = ratio * gain > clipped * gain  # where the min took the clipped branch
    over = (raw_weight > options.importance_cap) & (options.importance_cap > 0)
    sums = {
        "tokens": mask.sum(),
        "ratios": weights.sum(),  # tokens, or episodes under gspo
        "kl": (kl * mask).sum(),
        "kl_capped": ((jnp.abs(ref_log_ratio) > MAX_KL_LOG_RATIO) * mask).sum(),
        "entropy": jnp.where(trained, entropy, 0.0).sum(),
        "clipped_low": (was_clipped * (ratio < 1.0) * weights).sum(),
        "clipped_high": (was_clipped * (ratio > 1.0) * weights).sum(),
        "ratio": (ratio * weights).sum(),
        "ratio_max": (ratio * weights).max(),
        "gap": (jnp.abs(gap) * mask).sum(),
        "gap_max": (jnp.abs(gap) * mask).max(),
        "sampler_kl": (k3_kl(-gap) * mask).sum(),  # KL(sampler || trainer), on sampled tokens
        "importance_capped": (over * weights).sum(),
    }
    return numerator, jax.lax.stop_gradient(sums)


def _by_episode(values: jax.Array, episode_index: jax.Array, advantages: jax.Array) -> jax.Array:
    """Sums float32[B, M] over the tokens of each episode, float32[E]."""
    return jax.ops.segment_sum(values.reshape(-1), episode_index.reshape(-1), advantages.shape[0])


def _masked(values: jax.Array, trained: jax.Array) -> jax.Array:
    """0 where untrained. Before any exp: a where behind it would still pass NaN gradients back."""
    return jnp.where(trained, values, 0.0)
