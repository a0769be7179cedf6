"""Episodes and advantages -> rows of static shapes for one update.

What stands in a row is `grpo.layout`'s choice (rows.py). Shapes come from a small set: rows of a
fixed length (or of `grpo.length_buckets`), numbers of rows and episodes from powers of two, places
of trained tokens in a few shares of a row. Nothing that the loss computes depends on these choices.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from svrl_jax.grpo import rows as rows_lib
from svrl_jax.types import Episode, TrainBatch

# Fewest rows of a microbatch of single episodes; smaller ones are filled with empty rows.
MIN_ROWS = 8
# Shares of a row that its trained tokens are given room for, and the least room: in short rows a
# program more costs more than the head on a few empty places.
TARGET_SHARES = (1 / 8, 1 / 4, 1 / 2, 1)
MIN_TARGETS = 128

# The picture grids are a host value that changes from batch to batch. The update empties them
# before a batch enters jit (the vision plan carries them as arrays), else every new set would
# compile anew.
jax.tree_util.register_dataclass(
    TrainBatch,
    data_fields=[f.name for f in dataclasses.fields(TrainBatch) if f.name != "image_grid_thw"],
    meta_fields=["image_grid_thw"],
)


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimiser step, host side.

    Attributes:
      microbatches: TrainBatch of NumPy arrays, longest rows first; () if nothing is left to train.
      origins: for each microbatch int32[E], flat episode number p * G + g, -1 where there is none.
      places: for each microbatch int32[B, M], place of each trained token in its own episode.
      num_episodes, num_tokens: trained episodes and their policy tokens, with those of groups left
        out for want of spread: leaving these out changes the KL term, never the policy gradient.
    """

    microbatches: tuple[TrainBatch, ...]
    origins: tuple[np.ndarray, ...]
    places: tuple[np.ndarray, ...]
    num_episodes: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """All rows of one step, host side.

    Attributes:
      minibatches: one an optimiser step of an inner epoch.
      lengths: int32[P, G], tokens of each episode.
      num_invalid: episodes left out because they are not valid.
      num_overlong: episodes that ran out of budget and are left out for it.
      num_equal_groups: groups whose advantages are all zero, left out or not.
      num_slots, num_real: places for tokens in all rows, and those that hold one.
      num_saved: tokens that a shared prompt made unnecessary.
    """

    minibatches: tuple[MiniBatch, ...]
    lengths: np.ndarray
    num_invalid: int
    num_overlong: int
    num_equal_groups: int
    num_slots: int
    num_real: int
    num_saved: int

    @property
    def microbatches(self) -> tuple[TrainBatch, ...]:
        """Of all minibatches."""
        return tuple(micro for mini in self.minibatches for micro in mini.microbatches)

    @property
    def num_episodes(self) -> int:
        """Of all minibatches."""
        return sum(mini.num_episodes for mini in self.minibatches)

    @property
    def num_tokens(self) -> int:
        """Of all minibatches."""
        return sum(mini.num_tokens for mini in self.minibatches)


def make_batches(
    episodes: Sequence[Sequence[Episode]],
    advantages: np.ndarray,
    valid: np.ndarray,
    config: ConfigDict,
    *,
    merge_size: int,
    image_token_id: int,
    pad_id: int,
    spans: Sequence[Sequence[np.ndarray]] | None = None,
    min_rows: int = 1,
) -> StepBatch:
    """Lays a step's episodes out as microbatches.

    Args:
      episodes: [P][G], groups explicit.
      advantages: float32[P, G]; an all-zero row is a group without spread.
      valid: bool[P, G]; False leaves the episode out of loss and denominators.
      config: config.grpo.
      merge_size: patches on a side of one picture token's cell.
      image_token_id: id of a picture token in `Episode.ids`.
      pad_id: id written behind a row's end; never read.
      spans: [P][G] int[T], number in `protocol.spans.SPANS` of each token; None: all `other`.
      min_rows: rows of every microbatch are a multiple of it (the devices that rows are split
        over).
    Returns:
      StepBatch. `ref_per_token_logps` is zero until the update fills it.
    Raises:
      ValueError: shapes differ, a group mixes tasks, an episode is longer than a row, or its
        picture tokens are not as many as its pictures have cells.
    """
    advantages = np.asarray(advantages, np.float32)
    valid = np.asarray(valid, bool)
    _check_groups(episodes, advantages, valid)
    flat = [episode for group in episodes for episode in group]
    overlong = np.array([e.end_reason == "budget" for e in flat]).reshape(valid.shape)
    overlong &= valid & bool(config.mask_overlong)
    trained = valid & ~overlong
    equal = (np.where(trained, advantages, 0.0) == 0.0).all(axis=1)
    writer = _Writer(
        flat,
        advantages.reshape(-1),
        None if spans is None else [s for group in spans for s in group],
        _PictureKeys(),
        config,
        merge_size,
        image_token_id,
        pad_id,
        min_rows,
    )
    minibatches, num_real, num_whole = [], 0, 0
    for members in _parts(equal, config.minibatches):
        counted = [_numbers(p, trained) for p in members]
        kept = [g for p, g in zip(members, counted) if not (config.drop_equal_groups and equal[p])]
        rows = rows_lib.plan_rows(kept, flat, config.layout, config.row_tokens)
        num_real += sum(rows_lib.row_length(row, flat) for row in rows)
        num_whole += sum(len(flat[n].ids) for row in rows for piece in row for n in piece)
        written = [writer.write(chunk) for chunk in _chunks(rows, config.microbatch_rows)]
        numbers = [n for group in counted for n in group]
        minibatches.append(
            MiniBatch(
                microbatches=tuple(w[0] for w in written),
                origins=tuple(w[1] for w in written),
                places=tuple(w[2] for w in written),
                num_episodes=len(numbers),
                num_tokens=sum(int(flat[n].loss_mask.sum()) for n in numbers),
            )
        )
    return StepBatch(
        minibatches=tuple(minibatches),
        lengths=np.array([len(e.ids) for e in flat], np.int32).reshape(valid.shape),
        num_invalid=int((~valid).sum()),
        num_overlong=int(overlong.sum()),
        num_equal_groups=int(equal.sum()),
        num_slots=sum(m.ids.size for mini in minibatches for m in mini.microbatches),
        num_real=num_real,
        num_saved=num_whole - num_real,
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


def row_bucket(rows: int, most: int, least: int = MIN_ROWS, multiple: int = 1) -> int:
    """Smallest power of two that holds `rows`, at least `least`, at most `most`; rounded up to a
    multiple, of which `most` is one."""
    number = max(least, power_of_two(rows))
    return min(most, -(-number // multiple) * multiple)


def target_bucket(count: int, length: int) -> int:
    """Room for the trained tokens of a row: the smallest of TARGET_SHARES that holds `count`, at
    least MIN_TARGETS, at most the row."""
    rooms = [min(length, max(MIN_TARGETS, int(length * share))) for share in TARGET_SHARES]
    return next(room for room in rooms if room >= count)


def power_of_two(number: int) -> int:
    """Smallest power of two that is at least `number`, and at least 1."""
    return 1 << max(0, number - 1).bit_length()


def _chunks(rows: list, size: int) -> list[list]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _numbers(p: int, trained: np.ndarray) -> list[int]:
    return [p * trained.shape[1] + int(g) for g in np.flatnonzero(trained[p])]


def _parts(equal: np.ndarray, count: int) -> list[list[int]]:
    """Groups dealt out to `count` minibatches, those with spread evenly."""
    order = sorted(range(len(equal)), key=lambda p: bool(equal[p]))  # stable
    return [sorted(order[i::count]) for i in range(count)]


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


@dataclasses.dataclass
class _Writer:
    """Writes rows into arrays; fields as `make_batches` names them, episodes and what goes with
    them by flat number."""

    episodes: Sequence[Episode]
    advantages: np.ndarray
    spans: Sequence[np.ndarray] | None
    picture_keys: _PictureKeys
    config: ConfigDict
    merge_size: int
    image_token_id: int
    pad_id: int
    min_rows: int

    def write(self, rows: Sequence[rows_lib.Row]) -> tuple[TrainBatch, np.ndarray, np.ndarray]:
        """(microbatch, origins int32[E], places int32[B, M]) of at most `microbatch_rows` rows."""
        members = [n for row in rows for piece in row for n in piece]
        most = max(
            sum(int(self.episodes[n].loss_mask.sum()) for piece in row for n in piece)
            for row in rows
        )
        batch = self._blank(rows, len(members), most)
        origins = np.full(len(batch.advantages), -1, np.int32)
        origins[: len(members)] = members
        batch.advantages[: len(members)] = self.advantages[members]
        places = np.zeros_like(batch.target_index)
        pictures = _Pictures(self.picture_keys, self.merge_size)
        number = 0
        for r, row in enumerate(rows):
            token = target = 0
            for group, piece in enumerate(row):
                token, target = self._piece(
                    batch, places, pictures, (r, group, number), piece, token, target
                )
                number += len(piece)
        pixels, grids = pictures.joined()
        batch = dataclasses.replace(batch, pixel_values=pixels, image_grid_thw=grids)
        return batch, origins, places

    def _blank(self, rows: Sequence[rows_lib.Row], count: int, most: int) -> TrainBatch:
        """Padding only, in the microbatch's shapes."""
        if self.config.layout == "single":
            longest = max(rows_lib.row_length(row, self.episodes) for row in rows)
            length, least = length_bucket(longest, self.config.length_buckets), MIN_ROWS
        else:
            # Full or half full: each number of rows is a program of its own.
            length, least = self.config.row_tokens, max(1, self.config.microbatch_rows // 2)
        height = row_bucket(len(rows), self.config.microbatch_rows, least, self.min_rows)
        shape, targets = (height, length), (height, target_bucket(most, length))
        return TrainBatch(
            ids=np.full(shape, self.pad_id, np.int32),
            positions=np.zeros((3, *shape), np.int32),
            group_id=np.full(shape, -1, np.int32),
            branch_id=np.zeros(shape, np.int32),
            target_index=np.zeros(targets, np.int32),
            predictor_index=np.zeros(targets, np.int32),
            episode_index=np.zeros(targets, np.int32),
            span_index=np.zeros(targets, np.int32),
            loss_mask=np.zeros(targets, np.float32),
            advantages=np.zeros(power_of_two(max(count, height)), np.float32),
            old_per_token_logps=np.zeros(targets, np.float32),
            ref_per_token_logps=np.zeros(targets, np.float32),
            pixel_values=np.zeros((0, 0), np.float32),
            image_grid_thw=(),
            image_index=np.full(shape, -1, np.int32),
        )

    def _piece(self, batch, places, pictures, where, piece, token, target) -> tuple[int, int]:
        """Writes a piece from token `token` and target `target` of its row on; returns the next
        free ones. `where`: row, group in the row, first episode in the microbatch."""
        row, group, number = where
        start, prompt = token, self.episodes[piece[0]].prompt_length
        for i, n in enumerate(piece):
            episode = self.episodes[n]
            skip = 0 if i == 0 else prompt  # the first one brings the prompt
            length = len(episode.ids) - skip
            span = slice(token, token + length)
            batch.ids[row, span] = episode.ids[skip:]
            batch.positions[:, row, span] = episode.positions[:, skip:]
            batch.group_id[row, span] = group
            if len(piece) > 1:
                batch.branch_id[row, token + prompt - skip : token + length] = i + 1
            batch.image_index[row, span] = self._cells(episode, pictures)[skip:]
            own = np.flatnonzero(episode.loss_mask)
            own = own[own > 0]  # the first token of all has no predictor
            to = slice(target, target + len(own))
            # In the row: behind the prompt shift by what was left out.
            at = np.where(own < prompt, start + own, token - skip + own)
            before = np.where(own - 1 < prompt, start + own - 1, token - skip + own - 1)
            batch.target_index[row, to] = at
            batch.predictor_index[row, to] = before
            batch.episode_index[row, to] = number + i
            batch.loss_mask[row, to] = 1.0
            batch.old_per_token_logps[row, to] = episode.sampler_logps[own]
            if self.spans is not None:
                batch.span_index[row, to] = self.spans[n][own]
            places[row, to] = own
            token, target = token + length, target + len(own)
        return token, target

    def _cells(self, episode: Episode, pictures: _Pictures) -> np.ndarray:
        """int32[T], feature row of each picture token, -1 elsewhere."""
        index = np.full(len(episode.ids), -1, np.int32)
        cells = pictures.cells_of(episode)
        places = np.flatnonzero(episode.ids == self.image_token_id)
        if len(places) != len(cells):
            raise ValueError(
                f"{_name(episode)}: {len(places)} picture tokens for {len(cells)} picture cells"
            )
        index[places] = cells
        return index


class _Pictures:
    """The distinct pictures of a microbatch."""

    def __init__(self, keys: _PictureKeys, merge_size: int):
        self._keys, self._unit = keys, merge_size**2
        self._first: dict[str, int] = {}  # first feature row of each
        self._patches: list[np.ndarray] = []
        self._grids: list[tuple[int, int, int]] = []
        self._next = 0

    def cells_of(self, episode: Episode) -> np.ndarray:
        """int32[cells], feature rows of an episode's pictures in reading order."""
        cells = [np.zeros(0, np.int32)]
        for key, patches, grid in self._keys(episode):
            count = int(np.prod(grid)) // self._unit
            if key not in self._first:
                self._first[key] = self._next
                self._next += count
                self._patches.append(patches)
                self._grids.append(grid)
            cells.append(np.arange(self._first[key], self._first[key] + count, dtype=np.int32))
        return np.concatenate(cells)

    def joined(self) -> tuple[np.ndarray, tuple[tuple[int, int, int], ...]]:
        """Patches float32[L, C] and grids of all of them."""
        if not self._patches:
            return np.zeros((0, 0), np.float32), ()
        return np.concatenate(self._patches), tuple(self._grids)
