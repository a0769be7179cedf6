"""Sums of an update's programs -> its metrics: per-token means, norms by module, operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from svrl_jax.grpo.batch import StepBatch
from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.models.qwen_vl.flops import attended_pairs, forward_flops
from svrl_jax.models.qwen_vl.sharding import path_name
from svrl_jax.protocol.spans import SPANS
from svrl_jax.types import TrainBatch

# Module of a parameter, by a part of its name; the first match counts.
MODULES = (
    ("visual.", "vision"),
    ("embed_tokens", "vocabulary"),
    ("lm_head", "vocabulary"),
    ("self_attn", "attention"),
    ("mlp", "mlp"),
    ("", "norms"),
)


class OptimiserStep(NamedTuple):
    """What one optimiser step left: its inner epoch, a dict of sums a microbatch, its outcome."""

    inner: int
    sums: Sequence[dict[str, Any]]
    outcome: dict[str, Any]


def norms_by_module(grads: Any) -> dict[str, jax.Array]:
    """Global norm of a gradient as `grad_norm`, and that of each module as `grad_norm_MODULE`."""
    squares = {f"grad_norm_{name}": jnp.zeros(()) for _, name in MODULES}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        name = path_name(path)
        module = next(m for part, m in MODULES if part in name)
        squares[f"grad_norm_{module}"] += jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    total = sum(squares.values())
    return {"grad_norm": jnp.sqrt(total)} | {k: jnp.sqrt(v) for k, v in squares.items()}


def of_update(
    batch: StepBatch, steps: Sequence[OptimiserStep], config: QwenVLConfig, kl_coef: float
) -> dict[str, float | None]:
    """Metrics of one update.

    Args:
      batch: its rows.
      steps: of all inner epochs, on the host.
      config: of the model, for counting operations.
      kl_coef: above 0, the reference policy made a pass too.
    Returns:
      Fractions in [0, 1], nats a token, counts, operations; None where nothing was trained. The
      sampler gap is of the first optimiser step, where sampler and trainer hold the same
      parameters; the rest is over all of them.
    """
    first = steps[0].sums if steps else []
    every = [sums for step in steps for sums in step.sums]
    last = steps[-1].outcome if steps else None
    slopes = sum(float(s[f"slope_{name}"]) for s in every for name in SPANS)
    line = {
        "loss": _mean(every, "loss", over=len(steps)),
        "kl": _mean(every, "kl"),
        "kl_capped_share": _mean(every, "kl_capped"),
        "entropy": _mean(every, "entropy"),
        "clip_low_share": _mean(every, "clipped_low", over="ratios"),
        "clip_high_share": _mean(every, "clipped_high", over="ratios"),
        "ratio_mean": _mean(every, "ratio", over="ratios"),
        "ratio_max": _highest(every, "ratio_max"),
        "logp_gap_mean": _mean(first, "gap"),
        "logp_gap_max": _highest(first, "gap_max"),
        "sampler_kl": _mean(first, "sampler_kl"),
        "importance_capped_share": _mean(first, "importance_capped", over="ratios"),
        "learning_rate": float(last["learning_rate"]) if last else None,
        "optimiser_steps": len(steps),
        "skipped_updates": sum(int(step.outcome["skipped"]) for step in steps),
        "trained_episodes": int(sum((o >= 0).sum() for m in batch.minibatches for o in m.origins)),
        "trained_tokens": int(sum(s["tokens"] for t in steps if not t.inner for s in t.sums)),
        "row_waste": 1 - batch.num_real / batch.num_slots if batch.num_slots else None,
        "shared_tokens": batch.num_saved,
        "invalid_episodes": batch.num_invalid,
        "overlong_episodes": batch.num_overlong,
        "equal_groups": batch.num_equal_groups,
        "update_flops": _flops(batch, steps, config, kl_coef),
    }
    low, high = line["clip_low_share"], line["clip_high_share"]
    line["clip_share"] = None if low is None else low + high
    for name in ["grad_norm", *dict.fromkeys(f"grad_norm_{module}" for _, module in MODULES)]:
        line[name] = float(last[name]) if last else None
    for name in SPANS:
        total = sum(float(s[f"slope_{name}"]) for s in every)
        line[f"grad_share_{name}"] = total / slopes if slopes else None
    return line


def batch_flops(batch: TrainBatch, config: QwenVLConfig) -> float:
    """Operations of one forward pass over a microbatch, padding excluded, each picture once."""
    return forward_flops(
        config,
        int((batch.group_id >= 0).sum()),
        batch.image_grid_thw,
        int((batch.loss_mask > 0).sum()),
        attended_pairs(batch.group_id, batch.branch_id),
    )


def _flops(batch: StepBatch, steps, config: QwenVLConfig, kl_coef: float) -> float:
    """Of a whole update: a backward pass is two forward passes; what is computed again to save
    memory does not count."""
    forward = sum(batch_flops(micro, config) for micro in batch.microbatches)
    epochs = 1 + max((step.inner for step in steps), default=-1)
    before = (kl_coef > 0) + (len(batch.minibatches) > 1)
    return forward * (3 * epochs + before)


def _mean(sums, key: str, over: float | str = "tokens") -> float | None:
    """Sum of a key divided by that of another one, or by a number; None where that is 0."""
    if isinstance(over, str):
        over = sum(float(s[over]) for s in sums)
    return sum(float(s[key]) for s in sums) / over if over else None


def _highest(sums, key: str) -> float | None:
    return max(float(s[key]) for s in sums) if any(float(s["tokens"]) for s in sums) else None
