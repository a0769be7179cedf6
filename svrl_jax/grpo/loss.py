"""Per-token log-probs and advantages -> the numerator of the GRPO loss, with its metrics.

One function for all variants: the clipped objective of PPO (arXiv:1707.06347, eq. 7) with GRPO's k3
KL (arXiv:2402.03300, eq. 4), aggregated as Dr. GRPO (arXiv:2503.20783), GRPO or DAPO
(arXiv:2503.14476).

A microbatch returns sums only. The sums of a whole step are divided once by the step's denominator,
so how rows are split over microbatches changes nothing: one token of loss 3 beside three of loss 1
is 6 / 4, not the mean of 3 and 1.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

OBJECTIVES = ("dr_grpo", "grpo", "dapo")

# exp of a log-ratio is cut at +-20: e^20 is far outside any clip range, e^89 is outside float32.
MAX_LOG_RATIO = 20.0
# Above this log-ratio k3 goes on as its tangent: still pulling towards the reference policy, but
# one stray token cannot be the whole gradient (at 20 it would weigh 4.9e8 ordinary ones).
MAX_KL_LOG_RATIO = 10.0


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """What of config.grpo the loss reads; hashable, so that it can be static under jit.

    Attributes:
      objective: one of OBJECTIVES; sets how token losses are aggregated.
      clip_low, clip_high: epsilon below and above 1. DAPO's asymmetric clip is clip_high >
        clip_low.
      kl_coef: beta; 0 leaves the KL term and the reference policy out.
      importance_cap: largest truncated importance weight; 0 turns the weights off.
      budget: tokens of an episode, Dr. GRPO's constant length.
    """

    objective: str
    clip_low: float
    clip_high: float
    kl_coef: float
    importance_cap: float
    budget: int

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise ValueError(f"unknown grpo.objective {self.objective!r}; one of {OBJECTIVES}")


def loss_denominator(options: LossOptions, num_rows: int, num_tokens: int) -> float:
    """What the step's summed numerators are divided by. At least 1, so that an empty step gives 0.

    Args:
      options: the objective and the budget.
      num_rows: valid episodes of the *whole step*, over all microbatches and hosts.
      num_tokens: their policy tokens.
    """
    by_objective = {
        "dr_grpo": options.budget * num_rows,
        "grpo": num_rows,
        "dapo": num_tokens,
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


def loss_sums(
    logps: jax.Array,
    entropy: jax.Array,
    *,
    proximal_logps: jax.Array | None,
    sampler_logps: jax.Array,
    ref_logps: jax.Array,
    advantages: jax.Array,
    loss_mask: jax.Array,
    options: LossOptions,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss numerator of some rows, and the sums that the metrics are made of.

    All log-probs are under the sampler's distribution: raw logits over the temperature, banned ids
    masked. Values where loss_mask is 0 are never read, not even through exp.

    Args:
      logps: float32[B, T], the current policy's, differentiable.
      entropy: float32[B, T], of the same distribution; reported only.
      proximal_logps: float32[B, T], what the ratio is taken against, frozen over inner steps; None
        means the current policy (ratio 1, gradient kept).
      sampler_logps: float32[B, T], recorded at sampling.
      ref_logps: float32[B, T], the frozen initial policy's; not read when kl_coef is 0.
      advantages: float32[B].
      loss_mask: float32[B, T], 1 on policy tokens that are trained.
      options: the variant.
    Returns:
      numerator float32[], to be divided by `loss_denominator` of the whole step, and a dict of
      float32[] sums over tokens (keys ending in `_max` are maxima).
    """
    trained = loss_mask > 0
    proximal = jax.lax.stop_gradient(logps) if proximal_logps is None else proximal_logps
    log_ratio = jnp.clip(_masked(logps - proximal, trained), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)  # [B, T]
    clipped = jnp.clip(ratio, 1.0 - options.clip_low, 1.0 + options.clip_high)
    gain = advantages[:, None]  # [B, 1]
    losses = -jnp.minimum(ratio * gain, clipped * gain)  # [B, T]

    gap = jax.lax.stop_gradient(_masked(logps - sampler_logps, trained))
    if options.importance_cap > 0:
        drift = jax.lax.stop_gradient(_masked(proximal - sampler_logps, trained))
        losses = losses * jnp.minimum(
            jnp.exp(jnp.clip(drift, -MAX_LOG_RATIO, MAX_LOG_RATIO)), options.importance_cap
        )

    kl = jnp.zeros_like(losses)
    ref_log_ratio = kl
    if options.kl_coef > 0:
        ref_log_ratio = _masked(ref_logps - logps, trained)
        kl = k3_kl(ref_log_ratio)
        losses = losses + options.kl_coef * kl

    mask = trained.astype(losses.dtype)
    tokens = mask.sum(axis=1)  # [B]
    row_sums = jnp.where(trained, losses, 0.0).sum(axis=1)  # [B]
    if options.objective == "grpo":
        numerator = (row_sums / jnp.maximum(tokens, 1.0)).sum()  # a row without tokens adds 0
    else:
        numerator = row_sums.sum()

    was_clipped = ratio * gain > clipped * gain  # where the min took the clipped branch
    sums = {
        "tokens": tokens.sum(),
        "kl": (kl * mask).sum(),
        "kl_capped": ((ref_log_ratio > MAX_KL_LOG_RATIO) * mask).sum(),
        "entropy": jnp.where(trained, entropy, 0.0).sum(),
        "clipped": (was_clipped * mask).sum(),
        "ratio": (ratio * mask).sum(),
        "ratio_max": (ratio * mask).max(),
        "gap": (jnp.abs(gap) * mask).sum(),
        "gap_max": (jnp.abs(gap) * mask).max(),
    }
    return numerator, jax.lax.stop_gradient(sums)


def _masked(values: jax.Array, trained: jax.Array) -> jax.Array:
    """0 where untrained. Before any exp: a where behind it would still pass NaN gradients back."""
    return jnp.where(trained, values, 0.0)
