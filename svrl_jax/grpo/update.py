"""A step's minibatches -> new parameters, metrics and the trainer's log-probs.

Gradients of loss numerators are summed over the microbatches of an optimiser step and divided by
its one denominator, so the result does not depend on the split. Compiled programs are keyed by an
`UpdateSpec` and a microbatch's shapes, both from small sets.
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

from svrl_jax.grpo import figures
from svrl_jax.grpo.batch import MiniBatch, StepBatch, power_of_two
from svrl_jax.grpo.logps import per_token_logps
from svrl_jax.grpo.loss import LossOptions, loss_denominator, loss_sums
from svrl_jax.grpo.optimizer import OptimOptions, steps_done, with_frozen
from svrl_jax.models.qwen_vl import QwenVL, QwenVLConfig, VisionPlan, plan_vision
from svrl_jax.models.qwen_vl.attention_backends import are_plain_rows
from svrl_jax.models.qwen_vl.lora import ADAPTERS, has_lora
from svrl_jax.models.qwen_vl.sharding import (
    constrain_params,
    on_mesh,
    param_shardings,
    path_name,
    place,
    place_params,
)
from svrl_jax.models.qwen_vl.vision_plan import few_sizes
from svrl_jax.protocol.spans import SPANS
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
      config: its sizes, for planning pictures and counting operations.
      temperature: the sampler's, above 0.
      banned_ids: ids masked in the sampler.
      remat: what the backward pass computes again, see `layers.scan_layers`.
      needs_plain_rows: the attention backend knows no packing.
    """

    graphdef: Any
    config: QwenVLConfig
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
      inner_steps: passes over the minibatches of a step.
      ref_dtype: of the frozen initial policy.
      mesh: devices that parameters and rows are spread over; None is the default device.
    """

    model: ModelSpec
    loss: LossOptions
    optim: OptimOptions
    inner_steps: int
    ref_dtype: str
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
            config=model.config,
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
            kl_estimator=config.kl_estimator,
            importance_cap=config.importance_cap,
            budget=budget,
        ),
        optim=OptimOptions(**optim, only=ADAPTERS if has_lora(model) else ()),
        inner_steps=config.inner_steps,
        ref_dtype=config.ref_dtype,
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
    """One step of GRPO: `inner_steps` passes over a batch of episodes, each an optimiser step a
    minibatch.

    Ratios are taken against the sampler's recorded log-probs, which stay frozen over all of them.
    With importance weights they are taken against the trainer's own log-probs before the first
    optimiser step, and the weights carry the gap to the sampler.

    Args:
      state: donated; do not use it afterwards.
      ref_params: of the frozen initial policy, see `reference_params`; read only when kl_coef > 0.
      batch: the whole step's rows.
      spec: from `make_spec`.
    Returns:
      The new state; metrics (fractions in [0, 1], nats, counts; None where nothing was trained);
      and for each episode [P][G] the trainer's log-probs before the update, float32[T], 0 off the
      trained tokens, or None if the episode was left out of the batch.
    """
    with on_mesh(spec.mesh):
        return _update(state, ref_params, batch, spec)


def _update(state: TrainState, ref_params: nnx.State, batch: StepBatch, spec: UpdateSpec):
    minis = [place_rows(mini, ref_params, spec) for mini in batch.minibatches]
    before: list[list[jax.Array]] = []
    if len(minis) > 1:  # later minibatches meet a policy that has moved
        before = [[_logps_of(spec.model, state.params, row) for row in rows] for rows in minis]
    steps: list[figures.OptimiserStep] = []
    for inner in range(spec.inner_steps):
        for number, rows in enumerate(minis):
            if not rows:
                continue
            proximal = [row.batch.old_per_token_logps for row in rows]
            if spec.loss.importance_cap > 0:
                proximal = before[number] if before else [None] * len(rows)
            grads, sums, logps = gradients(state.params, rows, proximal, spec)
            state, outcome = _apply(spec.optim, state, grads)
            steps.append(figures.OptimiserStep(inner, sums, outcome))
            if not before:
                before = [logps]
    state = dataclasses.replace(state, step=state.step + 1)
    metrics = figures.of_update(batch, jax.device_get(steps), spec.model.config, spec.loss.kl_coef)
    return state, metrics, _by_episode(batch, jax.device_get(before))


def reference_params(params: nnx.State, spec: UpdateSpec) -> nnx.State:
    """The frozen initial policy as the KL term keeps it: in `ref_dtype`; with LoRA the policy's own
    frozen weights, its adapters at 0, so that only those are new.

    Args:
      params: of the initial policy; left as they are.
    """

    def one(path, leaf):
        name = path_name(path)
        if name.endswith("lora_b"):
            return jnp.zeros_like(leaf)
        return leaf if leaf.dtype == spec.ref_dtype else leaf.astype(spec.ref_dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def compile_count() -> int:
    """Number of gradient programs compiled so far in this process."""
    return _gradient._cache_size()


@dataclasses.dataclass(frozen=True)
class Rows:
    """A microbatch on the device.

    Attributes:
      batch: its pictures padded, its grids emptied.
      plan: of its pictures, or None.
      denominator: of the optimiser step that it belongs to.
    """

    batch: TrainBatch
    plan: VisionPlan | None
    denominator: float


def place_rows(mini: MiniBatch, ref_params: nnx.State, spec: UpdateSpec) -> list[Rows]:
    """Puts microbatches on the device and, if kl_coef > 0, fills their reference log-probs."""
    denominator = loss_denominator(spec.loss, mini.num_episodes, mini.num_tokens)
    placed = []
    for micro in mini.microbatches:
        if spec.model.needs_plain_rows and not are_plain_rows(micro.group_id, micro.branch_id):
            raise ValueError(
                "config.model.attention is 'cudnn', which cannot attend rows that share a prompt "
                "or hold several episodes; set it to 'auto', or config.grpo.layout to 'single'"
            )
        pixel_values, plan = _padded_pictures(micro, spec.model.config.vision_config)
        micro = dataclasses.replace(micro, pixel_values=pixel_values, image_grid_thw=())
        row = Rows(*_place(micro, plan, spec.mesh), denominator)
        if spec.loss.kl_coef > 0:
            logps = _logps_of(spec.model, ref_params, row)
            micro = dataclasses.replace(row.batch, ref_per_token_logps=logps)
            row = dataclasses.replace(row, batch=micro)
        placed.append(row)
    return placed


def _place(batch: TrainBatch, plan: VisionPlan | None, mesh: Mesh | None):
    """Rows spread over the mesh; a plan is small and copied."""
    if mesh is None:
        return jax.device_put((batch, plan))
    axes = {
        "positions": (None, "batch", None),
        "pixel_values": ("patches", None),
        "advantages": (None,),
    }
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
    spec: UpdateSpec,
) -> tuple[nnx.State, list[dict[str, jax.Array]], list[jax.Array]]:
    """Gradient of an optimiser step's loss, summed over its microbatches.

    Args:
      params: of the policy.
      rows: every microbatch of the optimiser step, at least one.
      proximal: for each of them float32[B, M], see `loss_sums`.
    Returns:
      The gradient in float32 (without frozen parameters, as `OptimOptions.trainable`), and for each
      microbatch its metric sums and log-probs float32[B, M].
    """
    grads, sums, logps = None, [], []
    for row, old in zip(rows, proximal, strict=True):
        new, row_sums, row_logps = _gradient(
            spec.model, spec.loss, spec.optim, params, row.batch, row.plan, old, row.denominator
        )
        grads = new if grads is None else _add(grads, new)
        sums.append(row_sums)
        logps.append(row_logps)
    return grads, sums, logps


def _padded_pictures(batch: TrainBatch, config) -> tuple[np.ndarray, VisionPlan | None]:
    """Pads pictures to few shapes: their number to a power of two, at least that of the rows, and
    their patches to a few sizes (`few_sizes`), at least as many as if every row had the largest
    picture. Added pictures are as large as the largest where they fit, so that pictures of one size
    give one plan however many there are; else of one merged cell. Features of real pictures keep
    their rows."""
    if not batch.image_grid_thw:
        return np.zeros((0, config.patch_dim), np.float32), None
    merge, count, rows = config.spatial_merge_size, len(batch.image_grid_thw), len(batch.ids)
    grids = list(batch.image_grid_thw)
    missing = power_of_two(max(rows, count)) - count
    largest = max(grids, key=np.prod)
    used, most = int(np.prod(grids, axis=1).sum()), int(np.prod(largest))
    least = max(used + missing * merge**2, most * rows)
    total = config.pad_unit * few_sizes(-(-least // config.pad_unit))
    fits = used + missing * most <= total
    grids += [largest if fits else (1, merge, merge)] * missing
    padded = np.zeros((total, config.patch_dim), np.float32)
    padded[: len(batch.pixel_values)] = batch.pixel_values
    return padded, plan_vision(np.array(grids), config, pad_patches_to=total)


def _row_logps(spec: ModelSpec, params, batch: TrainBatch, plan):
    return per_token_logps(
        nnx.merge(spec.graphdef, params),
        batch,
        plan,
        temperature=spec.temperature,
        banned_ids=spec.banned_ids,
        remat=spec.remat,
    )


def _logps_of(spec: ModelSpec, params, row: Rows) -> jax.Array:
    return _forward_logps(spec, params, row.batch, row.plan)


@partial(jax.jit, static_argnums=0)
def _forward_logps(spec: ModelSpec, params, batch: TrainBatch, plan):
    return _row_logps(spec, params, batch, plan)[0]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _gradient(
    spec: ModelSpec,
    options: LossOptions,
    optim: OptimOptions,
    params,
    batch: TrainBatch,
    plan: VisionPlan | None,
    proximal: jax.Array | None,
    denominator: float,
):
    """One microbatch's gradient in float32, metric sums and log-probs."""

    def numerator(logps, entropy):
        return loss_sums(
            logps,
            entropy,
            proximal_logps=proximal,
            sampler_logps=batch.old_per_token_logps,
            ref_logps=batch.ref_per_token_logps,
            advantages=batch.advantages,
            episode_index=batch.episode_index,
            loss_mask=batch.loss_mask,
            options=options,
        )

    def loss(trainable):
        whole = with_frozen(trainable, params)
        logps, entropy = _row_logps(spec, whole, batch, plan)
        total, sums = numerator(logps, entropy)
        share = total / denominator
        return share, (sums | {"loss": share}, logps, entropy)

    trainable = optim.trainable(params)
    (_, (sums, logps, entropy)), grads = jax.value_and_grad(loss, has_aux=True)(trainable)
    # What each part of a turn contributes: the size of the loss's slope at its log-probs.
    slopes = jnp.abs(jax.grad(lambda x: numerator(x, entropy)[0])(logps)).reshape(-1)
    by_span = jax.ops.segment_sum(slopes, batch.span_index.reshape(-1), len(SPANS))
    sums |= {f"slope_{name}": by_span[i] for i, name in enumerate(SPANS)}
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    return constrain_params(grads), sums, logps


@partial(jax.jit, donate_argnums=0)
def _add(grads, more):
    return jax.tree.map(jnp.add, grads, more)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _apply(optim: OptimOptions, state: TrainState, grads):
    """One optimiser step; a gradient that is not finite changes nothing and is counted."""
    norms = figures.norms_by_module(grads)
    is_finite = jnp.isfinite(norms["grad_norm"])
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
    return state, norms | {"skipped": ~is_finite, "learning_rate": rate}


def _by_episode(batch: StepBatch, logps: Sequence[Sequence[np.ndarray]]) -> list[list]:
    """Log-probs float32[B, M] of each microbatch back to [P][G], each as long as its episode."""
    num_prompts, group_size = batch.lengths.shape
    found: list[list[np.ndarray | None]] = [[None] * group_size for _ in range(num_prompts)]
    for mini, values in zip(batch.minibatches, logps):
        for micro, origin, places, of_rows in zip(
            mini.microbatches, mini.origins, mini.places, values, strict=True
        ):
            for number in origin[origin >= 0]:
                p, g = divmod(int(number), group_size)
                found[p][g] = np.zeros(batch.lengths[p, g], np.float32)
            for row, column in np.argwhere(micro.loss_mask > 0):
                p, g = divmod(int(origin[micro.episode_index[row, column]]), group_size)
                found[p][g][places[row, column]] = of_rows[row, column]
    return found
