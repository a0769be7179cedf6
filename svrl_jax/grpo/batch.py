"""Episodes and advantages -> rows of static shapes for one update.

One episode a row; rows are sorted by length, so that a microbatch is padded little, and shapes come
from a small set: lengths from `grpo.length_buckets`, numbers of rows from powers of two. Nothing
that the loss computes depends on these choices.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from svrl_jax.types import Episode, TrainBatch

# Fewest rows of a microbatch that is not full; smaller ones are filled with zero-weight rows.
MIN_ROWS = 8

# The picture grids are a host value that changes from batch to batch. The update empties them
# before a batch enters jit (the vision plan carries them as arrays), else every new set would
# compile anew.
jax.tree_util.register_dataclass(
    TrainBatch,
    data_fields=[f.name for f in dataclasses.fields(TrainBatch) if f.name != "image_grid_thw"],
    meta_fields=["image_grid_thw"],
)


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """All rows of one step, host side.

    Attributes:
      microbatches: TrainBatch of NumPy arrays, longest rows first; () if nothing is left to train.
      origins: for each microbatch int32[B], flat episode number p * G + g, -1 for zero-weight rows.
      lengths: int32[P, G], tokens of each episode.
      num_rows, num_tokens: valid episodes of the step and their policy tokens, rows left out for
        want of spread included: leaving them out changes the KL term, never the policy gradient.
      num_invalid: episodes left out because they are not valid.
      num_equal_groups: groups whose advantages are all zero, left out or not.
    """

    microbatches: tuple[TrainBatch, ...]
    origins: tuple[np.ndarray, ...]
    lengths: np.ndarray
    num_rows: int
    num_tokens: int
    num_invalid: int
    num_equal_groups: int


def make_batches(
    episodes: Sequence[Sequence[Episode]],
    advantages: np.ndarray,
    valid: np.ndarray,
    config: ConfigDict,
    *,
    merge_size: int,
    image_token_id: int,
    pad_id: int,
) -> StepBatch:
    """Lays a step's episodes out as microbatches.

    Args:
      episodes: [P][G], groups explicit.
      advantages: float32[P, G]; an all-zero row is a group without spread.
      valid: bool[P, G]; False leaves the episode out of loss and denominators.
      config: config.grpo (`drop_equal_groups`, `microbatch_rows`, `length_buckets` are read).
      merge_size: patches on a side of one picture token's cell.
      image_token_id: id of a picture token in `Episode.ids`.
      pad_id: id written behind a row's end; never read.
    Returns:
      StepBatch. `ref_per_token_logps` is zero until the update fills it.
    Raises:
      ValueError: shapes differ, a group mixes tasks, an episode is longer than the largest bucket,
        or its picture tokens are not as many as its pictures have cells.
    """
    advantages = np.asarray(advantages, np.float32)
    valid = np.asarray(valid, bool)
    _check_groups(episodes, advantages, valid)
    group_size = valid.shape[1]
    flat = [episode for group in episodes for episode in group]
    equal = (np.where(valid, advantages, 0.0) == 0.0).all(axis=1)
    kept = valid & ~equal[:, None] if config.drop_equal_groups else valid
    rows = np.flatnonzero(kept)
    # Stable, so that equal lengths keep their order and a batch can be made again exactly.
    rows = rows[np.argsort([-len(flat[i].ids) for i in rows], kind="stable")]
    pictures = _PictureKeys()
    microbatches, origins = [], []
    for start in range(0, len(rows), config.microbatch_rows):
        chosen = rows[start : start + config.microbatch_rows]
        origin = np.full(row_bucket(len(chosen), config.microbatch_rows), -1, np.int32)
        origin[: len(chosen)] = chosen
        length = length_bucket(len(flat[chosen[0]].ids), config.length_buckets)
        members = [flat[i] for i in chosen]
        weights = advantages.reshape(-1)[chosen]
        microbatches.append(
            _microbatch(
                members,
                weights,
                (len(origin), length),
                merge_size,
                image_token_id,
                pad_id,
                pictures,
            )
        )
        origins.append(origin)
    return StepBatch(
        microbatches=tuple(microbatches),
        origins=tuple(origins),
        lengths=np.array([len(e.ids) for e in flat], np.int32).reshape(-1, group_size),
        num_rows=int(valid.sum()),
        num_tokens=sum(int(flat[i].loss_mask.sum()) for i in np.flatnonzero(valid)),
        num_invalid=int((~valid).sum()),
        num_equal_groups=int(equal.sum()),
    )


def length_bucket(length: int, buckets: Sequence[int]) -> int:
    """Smallest bucket that holds `length` tokens; ValueError naming the remedy if none does."""
    fitting = [b for b in buckets if b >= length]
    if not fitting:
        raise ValueError(
            f"an episode of {length} tokens is longer than the largest of grpo.length_buckets "
            f"{tuple(buckets)}; the largest must be at least rollout.budget"
        )
    return min(fitting)


def row_bucket(rows: int, most: int) -> int:
    """Smallest power of two that holds `rows`, at least MIN_ROWS, at most `most`."""
    return min(most, max(MIN_ROWS, _power_of_two(rows)))


def trained_positions(batch: TrainBatch) -> int:
    """Static number of positions the head is applied to: half of the microbatch, or all of it.

    Policy tokens are seldom more than 40% of a row; two sizes keep the number of programs small.
    """
    size = batch.loss_mask.size
    return size // 2 if int((batch.loss_mask > 0).sum()) <= size // 2 else size


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _check_groups(episodes, advantages: np.ndarray, valid: np.ndarray) -> None:
    shape = (len(episodes), len(episodes[0]) if episodes else 0)
    if advantages.shape != valid.shape or advantages.shape != shape:
        raise ValueError(
            f"episodes [{shape[0]}][{shape[1]}], advantages {advantages.shape} and valid "
            f"{valid.shape} must agree"
        )
    for p, group in enumerate(episodes):
        tasks = sorted({episode.task_id for episode in group})
        if len(group) != shape[1] or len(tasks) != 1:
            raise ValueError(
                f"group {p}: {len(group)} episodes of tasks {tasks}, wants {shape[1]} of one task"
            )
    if not np.isfinite(advantages[valid]).all():
        raise ValueError("a valid episode's advantage is not finite")


class _PictureKeys:
    """Content keys of an episode's pictures; a group shares its arrays, so each is hashed once."""

    def __init__(self):
        self._known: dict[int, list[tuple[str, np.ndarray, tuple[int, int, int]]]] = {}

    def __call__(self, episode: Episode) -> list[tuple[str, np.ndarray, tuple[int, int, int]]]:
        """(key, patches float32[l, C], (t, h, w)) of each picture in reading order."""
        known = self._known.get(id(episode.pixel_values))
        if known is not None and len(known) == len(episode.image_grid_thw):
            return known
        pictures, start = [], 0
        for grid in episode.image_grid_thw:
            stop = start + int(np.prod(grid))
            patches = np.ascontiguousarray(episode.pixel_values[start:stop], np.float32)
            size = tuple(int(n) for n in grid)
            key = hashlib.sha256(repr(size).encode() + patches.tobytes()).hexdigest()
            pictures.append((key, patches, size))
            start = stop
        if start != len(episode.pixel_values):
            raise ValueError(
                f"{_name(episode)}: {len(episode.pixel_values)} patches, its grids say {start}"
            )
        self._known[id(episode.pixel_values)] = pictures
        return pictures


def _name(episode: Episode) -> str:
    return f"episode {episode.sample} of task {episode.task_id!r}"


def _microbatch(
    episodes: Sequence[Episode],
    advantages: np.ndarray,
    shape: tuple[int, int],
    merge_size: int,
    image_token_id: int,
    pad_id: int,
    picture_keys: _PictureKeys,
) -> TrainBatch:
    """One TrainBatch of `shape` (B, T); rows behind the last episode have weight zero."""
    ids = np.full(shape, pad_id, np.int32)
    positions = np.zeros((3, *shape), np.int32)
    group_id = np.full(shape, -1, np.int32)
    loss_mask = np.zeros(shape, np.float32)
    old_logps = np.zeros(shape, np.float32)
    image_index = np.full(shape, -1, np.int32)
    weights = np.zeros(shape[0], np.float32)
    weights[: len(episodes)] = advantages
    cells: dict[str, int] = {}  # first feature row of each distinct picture
    patches, grids, next_cell = [], [], 0
    for row, episode in enumerate(episodes):
        length = len(episode.ids)
        ids[row, :length] = episode.ids
        positions[:, row, :length] = episode.positions
        group_id[row, :length] = row
        loss_mask[row, :length] = episode.loss_mask
        old_logps[row, :length] = np.where(episode.loss_mask > 0, episode.sampler_logps, 0.0)
        features = []
        for key, values, grid in picture_keys(episode):
            count = int(np.prod(grid)) // merge_size**2
            if key not in cells:
                cells[key] = next_cell
                next_cell += count
                patches.append(values)
                grids.append(grid)
            features.append(np.arange(cells[key], cells[key] + count, dtype=np.int32))
        places = np.flatnonzero(episode.ids == image_token_id)
        if len(places) != sum(map(len, features)):
            raise ValueError(
                f"{_name(episode)}: {len(places)} picture tokens for "
                f"{sum(map(len, features))} picture cells"
            )
        if len(places):
            image_index[row, places] = np.concatenate(features)
    return TrainBatch(
        ids=ids,
        positions=positions,
        group_id=group_id,
        branch_id=np.zeros(shape, np.int32),
        loss_mask=loss_mask,
        advantages=weights,
        old_per_token_logps=old_logps,
        ref_per_token_logps=np.zeros(shape, np.float32),
        pixel_values=np.concatenate(patches) if patches else np.zeros((0, 0), np.float32),
        image_grid_thw=tuple(grids),
        image_index=image_index,
    )
