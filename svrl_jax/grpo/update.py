"""A step's microbatches -> new parameters, metrics and the trainer's log-probs.

Gradients of loss numerators are summed over microbatches of different shapes and divided by the
step's one denominator, so the result does not depend on the split. Compiled programs are keyed by
an `UpdateSpec` and a microbatch's shapes, both from small sets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from svrl_jax.grpo.batch import StepBatch, trained_positions
from svrl_jax.grpo.logps import per_token_logps
from svrl_jax.grpo.loss import LossOptions, loss_denominator, loss_sums
from svrl_jax.grpo.optimizer import OptimOptions, steps_done, trained_part, with_frozen
from svrl_jax.models.qwen_vl import (
    Qwen3VisionConfig,
    QwenVL,
    VisionConfig,
    VisionPlan,
    plan_vision,
)
from svrl_jax.models.qwen_vl.attention_backends import are_plain_rows
from svrl_jax.models.qwen_vl.sharding import on_mesh, param_shardings, place, place_params
from svrl_jax.types import TrainBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What training changes.

    Attributes:
      params: nnx.State of the policy, as `nnx.split(model)[1]`.
      opt_state: optax state.
      step: int32[], steps of the run that are done, skipped ones included.
    """

    params: Any
    opt_state: Any
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What a log-prob depends on beside arrays; hashable, a static argument of jitted functions.

    Attributes:
      graphdef: the model's static half, `nnx.split(model)[0]`.
      vision_config: for planning pictures.
      temperature: the sampler's, above 0.
      banned_ids: ids masked in the sampler.
      remat: what the backward pass computes again, see `layers.scan_layers`.
      needs_plain_rows: the attention backend knows no packing.
    """

    graphdef: Any
    vision_config: VisionConfig | Qwen3VisionConfig
    temperature: float
    banned_ids: tuple[int, ...]
    remat: str
    needs_plain_rows: bool


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """Everything static of an update. Each program is keyed by the part it reads.

    Attributes:
      model: log-probs.
      loss: the objective.
      optim: the optimiser.
      inner_steps: optimiser steps a batch.
      mesh: devices that parameters and rows are spread over; None is the default device.
    """

    model: ModelSpec
    loss: LossOptions
    optim: OptimOptions
    inner_steps: int
    mesh: Mesh | None


def make_spec(
    model: QwenVL,
    config: ConfigDict,
    optim: ConfigDict,
    *,
    temperature: float,
    budget: int,
    banned_ids: Sequence[int],
    remat: str = "none",
    mesh: Mesh | None = None,
) -> UpdateSpec:
    """Gathers what an update needs.

    Args:
      model: the policy; only its static half is kept.
      config: config.grpo.
      optim: config.optim.
      temperature: config.rollout.temperature.
      budget: config.rollout.budget, Dr. GRPO's constant length.
      banned_ids: the sampler's.
      remat: see ModelSpec.
      mesh: see UpdateSpec.
    """
    return UpdateSpec(
        model=ModelSpec(
            graphdef=nnx.split(model)[0],
            vision_config=model.config.vision_config,
            temperature=temperature,
            banned_ids=tuple(sorted(int(i) for i in banned_ids)),
            remat=remat,
            needs_plain_rows=model.execution.attention == "cudnn",
        ),
        loss=LossOptions(
            objective=config.objective,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef,
            importance_cap=config.importance_cap,
            budget=budget,
        ),
        optim=OptimOptions(**optim),
        inner_steps=config.inner_steps,
        mesh=mesh,
    )


def init_state(params: nnx.State, spec: UpdateSpec) -> TrainState:
    """State before the first step. Copies `params`: an update donates its buffers, and the caller
    keeps the initial policy as the KL term's reference. With a mesh everything is spread over it;
    frozen parameters have no optimiser state."""
    params = place_params(jax.tree.map(jnp.copy, params), spec.mesh)
    init, trainable = spec.optim.make().init, spec.optim.trainable(params)
    if spec.mesh is None:
        return TrainState(params, init(trainable), jnp.zeros((), jnp.int32))
    # Zeros depend on nothing, so XLA would copy them to every device.
    shardings = param_shardings(jax.eval_shape(init, trainable), spec.mesh)
    opt_state = jax.jit(init, out_shardings=shardings)(trainable)
    return TrainState(params, opt_state, place(np.int32(0), (), spec.mesh))


def update(
    state: TrainState, ref_params: nnx.State, batch: StepBatch, spec: UpdateSpec
) -> tuple[TrainState, dict[str, float | None], list[list[np.ndarray | None]]]:
    """One step of GRPO: `inner_steps` optimiser steps on one batch of episodes.

    Ratios are taken against the sampler's recorded log-probs, which stay frozen over inner steps.
    With importance weights they are taken against the trainer's own log-probs of the first inner
    step, frozen after it, and the weights carry the gap to the sampler.

    Args:
      state: donated; do not use it afterwards.
      ref_params: of the frozen initial policy; read only when kl_coef > 0.
      batch: the whole step's rows.
      spec: from `make_spec`.
    Returns:
      The new state; metrics (fractions in [0, 1], nats, counts; None where nothing was trained);
      and for each episode [P][G] the trainer's log-probs before the update, float32[T], 0 off the
      policy tokens, or None if the episode was left out of the batch.
    """
    with on_mesh(spec.mesh):
        return _update(state, ref_params, batch, spec)


def _update(state: TrainState, ref_params: nnx.State, batch: StepBatch, spec: UpdateSpec):
    rows = place_rows(batch, ref_params, spec)
    denominator = loss_denominator(spec.loss, batch.num_rows, batch.num_tokens)
    proximal = [None if spec.loss.importance_cap > 0 else r.batch.old_per_token_logps for r in rows]
    logps: list[jax.Array] = []
    sums, applied = [], []
    for inner in range(spec.inner_steps if rows else 0):
        grads, new_sums, new_logps = gradients(state.params, rows, proximal, denominator, spec)
        state, outcome = _apply(spec.optim, state, grads)
        sums.append(new_sums)
        applied.append(outcome)
        if inner == 0:
            logps = new_logps
            if spec.loss.importance_cap > 0:
                proximal = list(new_logps)
    state = dataclasses.replace(state, step=state.step + 1)
    metrics = _metrics(batch, jax.device_get(sums), jax.device_get(applied))
    return state, metrics, _by_episode(batch, jax.device_get(logps))


def compile_count() -> int:
    """Number of gradient programs compiled so far in this process."""
    return _accumulate._cache_size()


@dataclasses.dataclass(frozen=True)
class Rows:
    """A microbatch on the device.

    Attributes:
      batch: its pictures padded, its grids emptied.
      plan: of its pictures, or None.
      num_positions: static number of positions the head is applied to.
    """

    batch: TrainBatch
    plan: VisionPlan | None
    num_positions: int


def place_rows(batch: StepBatch, ref_params: nnx.State, spec: UpdateSpec) -> list[Rows]:
    """Puts microbatches on the device and, if kl_coef > 0, fills their reference log-probs."""
    placed = []
    for micro in batch.microbatches:
        if spec.model.needs_plain_rows and not are_plain_rows(micro.group_id, micro.branch_id):
            raise ValueError(
                "config.model.attention is 'cudnn', which cannot attend rows that share a prompt "
                "or hold several episodes; set it to 'auto'"
            )
        num_positions = trained_positions(micro)
        pixel_values, plan = _padded_pictures(micro, spec.model.vision_config)
        micro = dataclasses.replace(micro, pixel_values=pixel_values, image_grid_thw=())
        micro, plan = _place(micro, plan, spec.mesh)
        if spec.loss.kl_coef > 0:
            logps = _reference_logps(spec.model, num_positions, ref_params, micro, plan)
            micro = dataclasses.replace(micro, ref_per_token_logps=logps)
        placed.append(Rows(micro, plan, num_positions))
    return placed


def _place(batch: TrainBatch, plan: VisionPlan | None, mesh: Mesh | None):
    """Rows spread over the mesh; a plan is small and copied."""
    if mesh is None:
        return jax.device_put((batch, plan))
    axes = {"positions": (None, "batch", None), "pixel_values": ("patches", None)}
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    placed = {
        name: place(x, axes.get(name, ("batch", *(None,) * (x.ndim - 1))), mesh)
        for name, x in fields.items()
        if name != "image_grid_thw"
    }
    plan = jax.tree.map(lambda x: place(x, (None,) * x.ndim, mesh), plan)
    return dataclasses.replace(batch, **placed), plan


def gradients(
    params: nnx.State,
    rows: Sequence[Rows],
    proximal: Sequence[jax.Array | None],
    denominator: float,
    spec: UpdateSpec,
) -> tuple[nnx.State, list[dict[str, jax.Array]], list[jax.Array]]:
    """Gradient of a whole step's loss, summed over its microbatches.

    Args:
      params: of the policy.
      rows: every microbatch of the step.
      proximal: for each of them float32[B, T], see `loss_sums`.
      denominator: of the whole step, see `loss_denominator`.
    Returns:
      The gradient in float32 (without frozen parameters, as `OptimOptions.trainable`), and for each
      microbatch its metric sums and log-probs float32[B, T].
    """
    grads = jax.tree.map(_zeros, spec.optim.trainable(params))
    sums, logps = [], []
    for row, old in zip(rows, proximal):
        grads, row_sums, row_logps = _accumulate(
            spec.model,
            spec.loss,
            row.num_positions,
            params,
            grads,
            row.batch,
            row.plan,
            old,
            denominator,
        )
        sums.append(row_sums)
        logps.append(row_logps)
    return grads, sums, logps


def _zeros(param: jax.Array) -> jax.Array:
    """float32 zeros that lie where the parameter lies."""
    place = param.sharding if isinstance(param.sharding, jax.sharding.NamedSharding) else None
    return jnp.zeros(param.shape, jnp.float32, device=place)


def _padded_pictures(
    batch: TrainBatch, config: VisionConfig | Qwen3VisionConfig
) -> tuple[np.ndarray, VisionPlan | None]:
    """Pads pictures to few shapes: their number to that of the rows, by pictures of one merged
    cell, and their patches to a power of two of pad units, at least as many as the largest
    picture would have in half of the rows. Features of real pictures keep their rows."""
    if not batch.image_grid_thw:
        return np.zeros((0, config.patch_dim), np.float32), None
    merge, count, rows = config.spatial_merge_size, len(batch.image_grid_thw), len(batch.ids)
    grids = list(batch.image_grid_thw) + [(1, merge, merge)] * (
        _power_of_two(max(rows, count)) - count
    )
    sizes = np.prod(grids, axis=1)
    patches = max(int(sizes.sum()), int(sizes.max()) * rows // 2)
    total = config.pad_unit * _power_of_two(-(-patches // config.pad_unit))
    padded = np.zeros((total, config.patch_dim), np.float32)
    padded[: len(batch.pixel_values)] = batch.pixel_values
    return padded, plan_vision(np.array(grids), config, pad_patches_to=total)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _row_logps(spec: ModelSpec, num_positions: int, params, batch: TrainBatch, plan):
    return per_token_logps(
        nnx.merge(spec.graphdef, params),
        batch,
        plan,
        temperature=spec.temperature,
        banned_ids=spec.banned_ids,
        num_positions=num_positions,
        remat=spec.remat,
    )


@partial(jax.jit, static_argnums=(0, 1))
def _reference_logps(spec: ModelSpec, num_positions: int, params, batch: TrainBatch, plan):
    return _row_logps(spec, num_positions, params, batch, plan)[0]


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _accumulate(
    spec: ModelSpec,
    options: LossOptions,
    num_positions: int,
    params,
    grads,
    batch: TrainBatch,
    plan: VisionPlan | None,
    proximal: jax.Array | None,
    denominator: float,
):
    """Adds one microbatch's gradient to `grads` (float32, donated), of the leaves that it has."""

    def loss(trainable):
        whole = with_frozen(trainable, params)
        logps, entropy = _row_logps(spec, num_positions, whole, batch, plan)
        numerator, sums = loss_sums(
            logps,
            entropy,
            proximal_logps=proximal,
            sampler_logps=batch.old_per_token_logps,
            ref_logps=batch.ref_per_token_logps,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            options=options,
        )
        share = numerator / denominator
        return share, (sums | {"loss": share}, logps)

    trainable = trained_part(grads, params)
    (_, (sums, logps)), new = jax.value_and_grad(loss, has_aux=True)(trainable)
    return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), grads, new), sums, logps


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _apply(optim: OptimOptions, state: TrainState, grads):
    """One optimiser step; a gradient that is not finite changes nothing and is counted."""
    norm = optax.global_norm(grads)
    is_finite = jnp.isfinite(norm)
    rate = optim.rate(steps_done(state.opt_state))
    trainable = optim.trainable(state.params)
    updates, opt_state = optim.make().update(grads, state.opt_state, trainable)
    params = with_frozen(optax.apply_updates(trainable, updates), state.params)

    def keep(new, old):
        return jnp.where(is_finite, new, old)

    state = dataclasses.replace(
        state,
        params=jax.tree.map(keep, params, state.params),
        opt_state=jax.tree.map(keep, opt_state, state.opt_state),
    )
    return state, {"grad_norm": norm, "skipped": ~is_finite, "learning_rate": rate}


def _metrics(batch: StepBatch, sums, applied) -> dict[str, float | None]:
    """Per-token means over the step; the sampler gap from the first inner step, where sampler and
    trainer hold the same parameters, the rest over all inner steps. `sums`: [inner][microbatch]."""
    first = sums[0] if sums else []
    every = [micro for inner in sums for micro in inner]
    return {
        "loss": _mean(every, "loss", over=len(sums)),
        "kl": _mean(every, "kl"),
        "kl_capped_share": _mean(every, "kl_capped"),
        "entropy": _mean(every, "entropy"),
        "clip_share": _mean(every, "clipped"),
        "ratio_mean": _mean(every, "ratio"),
        "ratio_max": _highest(every, "ratio_max"),
        "logp_gap_mean": _mean(first, "gap"),
        "logp_gap_max": _highest(first, "gap_max"),
        "grad_norm": float(applied[-1]["grad_norm"]) if applied else None,
        "learning_rate": float(applied[-1]["learning_rate"]) if applied else None,
        "skipped_updates": sum(int(a["skipped"]) for a in applied),
        "trained_rows": int(sum((o >= 0).sum() for o in batch.origins)),
        "trained_tokens": int(sum(s["tokens"] for s in first)),
        "invalid_episodes": batch.num_invalid,
        "equal_groups": batch.num_equal_groups,
    }


def _mean(sums, key: str, over: float | None = None) -> float | None:
    """Sum of a key divided by `over`, by default the tokens; None where that is 0."""
    over = sum(float(s["tokens"]) for s in sums) if over is None else over
    return sum(float(s[key]) for s in sums) / over if over else None


def _highest(sums, key: str) -> float | None:
    return max(float(s[key]) for s in sums) if any(float(s["tokens"]) for s in sums) else None


def _by_episode(batch: StepBatch, logps: Sequence[np.ndarray]) -> list[list[np.ndarray | None]]:
    """Rows back to [P][G], each cut to its episode's length."""
    num_prompts, group_size = batch.lengths.shape
    found: list[list[np.ndarray | None]] = [[None] * group_size for _ in range(num_prompts)]
    for origin, rows in zip(batch.origins, logps):
        for number, row in zip(origin, rows):
            if number >= 0:
                p, g = divmod(int(number), group_size)
                found[p][g] = np.array(row[: batch.lengths[p, g]])
    return found
