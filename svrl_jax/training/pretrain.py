"""Demonstrations -> the embedded default's initial policy, by next-token prediction on policy
tokens.

A curriculum (config.pretrain.phases, in the order of their names): copy; look and name; read one or
two results; read all of them; whole episodes with deliberate bad habits. Demonstrations are packed
into rows of a fixed length, kept apart by the attention's group ids.
"""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from svrl_jax.models.qwen_vl import QwenVL, QwenVLConfig, plan_vision
from svrl_jax.models.qwen_vl.weights import save_folder
from svrl_jax.training.demos import Demo, DemoMaker


def pretrain(
    model: QwenVL, maker: DemoMaker, config: ConfigDict, log: Callable[[str], None]
) -> QwenVL:
    """Trains `model` on every phase in turn and returns it.

    Each phase starts a new optimiser, so that a phase run again alone from the weights before it
    gives what the whole run gives.

    Args:
      model: random weights; or, with `start_at`, the weights after the phase before it.
      maker: draws demonstrations.
      config: `config.pretrain`.
      log: takes a line of progress.
    Raises:
      ValueError: `start_at` names no phase.
    """
    names = phases_to_run(config)
    graph, params = nnx.split(model)
    copies = None
    for name in names:
        phase = config.phases[name]
        optimiser = _optimiser(config, phase)
        opt_state = optimiser.init(params)
        step_fn = jax.jit(functools.partial(_train_step, graph, optimiser), donate_argnums=(0, 1))
        batches = packed_batches(maker, name, phase, config, model.config)
        started, figures = time.time(), []
        for i in range(phase.steps):
            params, opt_state, figure = step_fn(params, opt_state, next(batches))
            figures.append(figure)
            if (i + 1) % 50 == 0 or i + 1 == phase.steps:
                loss, right = np.mean(jax.device_get(figures[-50:]), axis=0)
                log(
                    f"{name} {i + 1}/{phase.steps} loss {loss:.4f} tokens right {right:.3f}, "
                    f"{time.time() - started:.0f} s"
                )
        copies = copies or _copy_batch(maker, config, model.config)
        _, right = jax.jit(functools.partial(_loss, graph))(params, copies)
        log(f"{name} done: copies {float(right):.3f} of random ids that stand above")
        if config.keep_phases:
            kept = pathlib.Path(config.keep_phases) / name
            save_folder(nnx.merge(graph, params), kept, dtype="float32")
    return nnx.merge(graph, params)


def phases_to_run(config: ConfigDict) -> list[str]:
    """Names of the phases from `start_at` on, in order; "" is the first."""
    names = sorted(config.phases)
    if config.start_at and config.start_at not in names:
        raise ValueError(f"pretrain.start_at={config.start_at!r} is none of {', '.join(names)}")
    return names[names.index(config.start_at) :] if config.start_at else names


def _copy_batch(maker: DemoMaker, config: ConfigDict, model: QwenVLConfig) -> dict:
    """Random ids of the whole vocabulary written twice, the same ones after every phase."""
    phase = config.phases[sorted(config.phases)[0]].copy_and_resolve_references()
    phase.unlock()
    phase.update(copy_share=1.0, copy_doubling=0)
    return next(packed_batches(maker, "copies", phase, config, model))


def _optimiser(config: ConfigDict, phase: ConfigDict) -> optax.GradientTransformation:
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, phase.rate_from * config.learning_rate, config.warmup_steps),
            optax.linear_schedule(
                phase.rate_from * config.learning_rate,
                phase.rate_to * config.learning_rate,
                max(1, phase.steps - config.warmup_steps),
            ),
        ],
        [config.warmup_steps],
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule, b2=0.98, weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
    )  # fmt: skip


def _train_step(graph, optimiser, params, opt_state, batch):
    (loss, right), grads = jax.value_and_grad(functools.partial(_loss, graph), has_aux=True)(
        params, batch
    )
    updates, opt_state = optimiser.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jnp.stack([loss, right])


def _loss(graph, params, batch):
    """Mean cross-entropy over the policy's tokens, and the share of them that comes out first."""
    model = nnx.merge(graph, params)
    embeds = model.encode_images(batch["pixel_values"], batch["plan"])
    hidden = model(
        batch["ids"], batch["positions"], batch["group_id"], batch["branch_id"],
        embeds, batch["image_index"],
    )  # fmt: skip
    # The head sees only the tokens that predict a policy token: fewer than half.
    before = hidden[:, :-1].reshape(-1, hidden.shape[-1])[batch["targets_at"]]
    labels = batch["ids"][:, 1:].reshape(-1)[batch["targets_at"]]
    logits = model.logits(before)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    weights = batch["target_weights"]
    count = jnp.maximum(weights.sum(), 1.0)
    right = ((jnp.argmax(logits, -1) == labels) * weights).sum() / count
    return (losses * weights).sum() / count, right


def packed_batches(
    maker: DemoMaker, name: str, phase: ConfigDict, config: ConfigDict, model: QwenVLConfig
) -> Iterator[dict]:
    """Endless batches of a phase; each demonstration whole, in the first row with room."""
    index = 0
    held: Demo | None = None
    while True:
        rows: list[list[Demo]] = [[] for _ in range(config.rows)]
        room = [config.row_tokens] * config.rows
        misses = 0
        while misses < 4:
            demo = held if held is not None else maker.draw(name, phase, index)
            index += held is None
            held = None
            if len(demo.ids) > config.row_tokens:
                continue  # too long to learn from here; rare, and only a demonstration
            row = next((r for r in range(config.rows) if room[r] >= len(demo.ids)), None)
            if row is None:
                misses += 1
                held = demo if misses == 4 else None
                continue
            rows[row].append(demo)
            room[row] -= len(demo.ids)
        yield _collate(rows, config.row_tokens, model, maker.picture_grid)


def _collate(
    rows: list[list[Demo]], length: int, model: QwenVLConfig, picture_grid: np.ndarray
) -> dict:
    count = len(rows)
    ids = np.zeros((count, length), np.int32)
    positions = np.zeros((3, count, length), np.int32)
    group = np.full((count, length), -1, np.int32)
    mask = np.zeros((count, length), np.int32)
    pixels, grids = [], []
    image_index = np.full((count, length), -1, np.int32)
    features = 0
    for r, demos in enumerate(rows):
        start = 0
        for g, demo in enumerate(demos):
            stop = start + len(demo.ids)
            ids[r, start:stop] = demo.ids
            positions[:, r, start:stop] = demo.positions
            group[r, start:stop] = g
            mask[r, start:stop] = demo.loss_mask
            where = start + np.flatnonzero(demo.ids == model.image_token_id)
            image_index[r, where] = features + np.arange(len(where))
            features += len(where)
            pixels.append(demo.pixel_values)
            grids.append(demo.image_grid_thw)
            start = stop
    # Blank pictures up to a bucket, so that few shapes are compiled.
    grid = np.concatenate(grids)
    extra = max(1, -(-len(grid) // 32)) * 32 - len(grid)
    blank = np.zeros((extra * int(picture_grid.prod()), pixels[0].shape[1]), np.float32)
    pixels.append(blank)
    grid = np.concatenate([grid, np.tile(picture_grid, (extra, 1))])
    targets = np.flatnonzero(mask[:, 1:].reshape(-1))
    padded = -(-len(targets) // 2048) * 2048
    weights = np.zeros(padded, np.float32)
    weights[: len(targets)] = 1.0
    return {
        "ids": ids,
        "positions": positions,
        "group_id": group,
        "branch_id": np.zeros_like(group),
        "pixel_values": np.concatenate(pixels),
        "plan": plan_vision(grid, model.vision_config),
        "image_index": image_index,
        "targets_at": np.pad(targets, (0, padded - len(targets))).astype(np.int32),
        "target_weights": weights,
    }
