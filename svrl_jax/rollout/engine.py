"""Device programs of the sampler: append tokens to cache slots, decode a chunk of tokens in lanes.

A *slot* is a row of the key/value cache and holds one episode's context; a *lane* is a row of the
decode program. Every program gathers the rows it works on, so that an episode that waits for a tool
keeps its slot and costs no lane. The engine knows tokens only: when a turn ends is the caller's
business. Tokens decoded beyond that end are undone by `truncate`, which moves a length and nothing
else: what lies behind a slot's length is overwritten before it can be seen.

Shapes are few: rows, tokens and cache lengths come in buckets, and `num_compiles` counts the
programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from svrl_jax.models.qwen_vl.model import QwenVL
from svrl_jax.models.qwen_vl.text import init_cache
from svrl_jax.models.qwen_vl.vision_plan import plan_vision
from svrl_jax.rollout import sampling
from svrl_jax.rollout.decode import begin_chunk, decode_step

PREFILL_TOKENS = 1024  # rows x tokens of the largest prefill program
PREFILL_CHUNKS = (32, 256)  # tokens a row of one prefill program; the longer for long contexts only
SHORTEST_CACHE = 128  # smallest number of keys that a program looks at
PICTURES_PER_CALL = 16  # vision batch of small pictures, ...
PATCHES_PER_CALL = 1024  # ... which together have at most so many patches


@dataclasses.dataclass(frozen=True)
class Append:
    """Tokens to put behind a slot's context.

    Attributes:
      slot: cache row.
      ids: int32[n], n >= 1.
      positions: int32[3, n].
      pixel_values: float32[L, C], pictures whose placeholders stand in `ids`; L = 0 for none.
      image_grid_thw: int32[I, 3] of those pictures.
    """

    slot: int
    ids: np.ndarray
    positions: np.ndarray
    pixel_values: np.ndarray
    image_grid_thw: np.ndarray


@dataclasses.dataclass(frozen=True)
class Lane:
    """A slot to decode.

    Attributes:
      slot: cache row.
      next_position: M-RoPE position (all axes) of the next token.
      key: uint32[2], key data of the turn.
      temperature: 0 is greedy.
    """

    slot: int
    next_position: int
    key: np.ndarray
    temperature: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """What the device keeps of every slot.

    Attributes:
      k, v: float[layers, slots, S, K, H].
      hidden: float[slots, D], final hidden state of the context's last token: the next is drawn
        from it.
    """

    k: jax.Array
    v: jax.Array
    hidden: jax.Array


class Engine:
    """Cache slots and the programs that advance them.

    Args:
      model: gives the structure and the first parameters; later ones come by `set_params`.
      banned: bool[V], ids that are never drawn.
      slots: contexts held at once.
      lanes: rows of the largest decode program.
      capacity: tokens that a context may reach.
      decode_chunk: tokens decoded by one call.
      cache_dtype: of keys and values.
    """

    def __init__(
        self,
        model: QwenVL,
        *,
        banned: np.ndarray,
        slots: int,
        lanes: int,
        capacity: int,
        decode_chunk: int,
        cache_dtype: str,
    ):
        self.config = model.config
        self.slots = slots
        self.lanes = min(lanes, slots)
        self.capacity = capacity
        self.decode_chunk = decode_chunk
        self.num_compiles = 0
        self.lengths = np.zeros(slots, np.int32)
        self._graphdef, self._params = nnx.split(model)
        self._banned = jnp.asarray(banned)
        self._chunks = [c for c in PREFILL_CHUNKS if c == PREFILL_CHUNKS[0] or 4 * c <= capacity]
        # Every write is a whole chunk, the last one of a full context too.
        length = -(-(capacity + max(decode_chunk, *self._chunks)) // 32) * 32
        self._cache_lengths = _cache_buckets(length, SHORTEST_CACHE)
        self._prefill_lengths = _cache_buckets(length, 4 * SHORTEST_CACHE)
        cache = init_cache(self.config, slots, length, cache_dtype)
        width = self.config.text_config.hidden_size
        dtype = jax.tree.leaves(self._params)[0].dtype
        self._state = SlotState(cache.k, cache.v, jnp.zeros((slots, width), dtype))
        self._prefill = jax.jit(self._prefill_program, donate_argnums=1, static_argnames="length")
        self._copy = jax.jit(self._copy_program, donate_argnums=0, static_argnames="length")
        self._decode = jax.jit(self._decode_program, donate_argnums=1, static_argnames="length")
        self._encode = jax.jit(self._encode_program)

    def set_params(self, params: nnx.State) -> None:
        """Samples from these parameters (`nnx.split(model)[1]`) from now on; caches are emptied."""
        self._params = params
        self.lengths[:] = 0

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self.lengths[slot] = 0

    def truncate(self, slot: int, length: int) -> None:
        """Forgets what lies behind the first `length` tokens; an append must come before a decode.

        Raises:
          ValueError: the slot holds fewer tokens.
        """
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"slot {slot} holds {self.lengths[slot]} tokens, not {length}")
        self.lengths[slot] = length

    def append(self, appends: Sequence[Append]) -> None:
        """Puts tokens behind the contexts of some slots, each slot at most once.

        Raises:
          ValueError: a context would outgrow the capacity, or picture tokens and picture features
            differ in number.
        """
        for one in appends:
            if self.lengths[one.slot] + len(one.ids) > self.capacity:
                raise ValueError(
                    f"slot {one.slot}: {self.lengths[one.slot]} + {len(one.ids)} tokens are more "
                    f"than the capacity of {self.capacity}"
                )
        features, image_index = self._encode_pictures(appends)
        left = [(one, index, 0) for one, index in zip(appends, image_index, strict=True)]
        while left:
            longest = max(len(one.ids) - done for one, _, done in left)
            chunk = next((c for c in self._chunks[::-1] if longest > c // 2), self._chunks[0])
            rows = PREFILL_TOKENS // chunk
            for i in range(0, len(left), rows):
                self._append_chunk(left[i : i + rows], chunk, features)
            left = [(o, x, done + chunk) for o, x, done in left if done + chunk < len(o.ids)]

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Makes the contexts of `targets` equal to that of `source` (a group's shared prompt)."""
        rows = PREFILL_TOKENS // PREFILL_CHUNKS[0]
        length = _bucket(self._cache_lengths, int(self.lengths[source]))
        for i in range(0, len(targets), rows):
            part = targets[i : i + rows]
            padded = np.full(rows, self.slots, np.int32)  # out of range: dropped
            padded[: len(part)] = part
            self._state = self._copy(self._state, np.int32(source), padded, length=length)
        self.lengths[list(targets)] = self.lengths[source]

    def decode(self, lanes: Sequence[Lane]) -> tuple[np.ndarray, np.ndarray]:
        """Draws `decode_chunk` tokens in each lane and appends them to its slot.

        Args:
          lanes: at most `self.lanes`, of different slots that an append or a decode made current.
        Returns:
          (ids int32[B, C], logps float32[B, C]), rows as given; see `sampling.draw_tokens`.
        """
        size = _bucket(_row_buckets(self.lanes), len(lanes))
        slots = np.full(size, self.slots, np.int32)
        next_position, lengths = np.zeros((2, size), np.int32)
        keys = np.zeros((size, 2), np.uint32)
        temperature = np.ones(size, np.float32)
        for i, lane in enumerate(lanes):
            slots[i], next_position[i] = lane.slot, lane.next_position
            keys[i], temperature[i] = lane.key, lane.temperature
            lengths[i] = self.lengths[lane.slot]
        length = _bucket(self._cache_lengths, int(lengths.max()) + self.decode_chunk)
        self._state, ids, logps = self._decode(
            self._params, self._state, slots, lengths, next_position, keys, temperature,
            length=length,
        )  # fmt: skip
        self.lengths[slots[: len(lanes)]] += self.decode_chunk
        return np.asarray(ids).T[: len(lanes)], np.asarray(logps).T[: len(lanes)]

    def _append_chunk(self, batch, chunk: int, features: np.ndarray) -> None:
        """Runs one prefill program over (append, image index, tokens done) triples."""
        rows = _bucket(_row_buckets(PREFILL_TOKENS // chunk), len(batch))
        ids, image_index = np.zeros((rows, chunk), np.int32), np.full((rows, chunk), -1, np.int32)
        positions = np.zeros((3, rows, chunk), np.int32)
        slots, final = np.full((2, rows), self.slots, np.int32)  # out of range: dropped
        starts, last = np.zeros((2, rows), np.int32)
        for i, (one, index, done) in enumerate(batch):
            part = slice(done, done + chunk)
            count = len(one.ids[part])
            ids[i, :count], positions[:, i, :count] = one.ids[part], one.positions[:, part]
            image_index[i, :count] = index[part]
            slots[i], starts[i], last[i] = one.slot, self.lengths[one.slot], count - 1
            if done + chunk >= len(one.ids):
                final[i] = one.slot  # this token's hidden state is the context's last
            self.lengths[one.slot] += count
        # Only the features that these tokens need, one place a token: the shape does not depend on
        # the pictures, and the same program serves text.
        is_image = image_index.reshape(-1) >= 0
        embeds = np.zeros((rows * chunk, features.shape[1]), features.dtype)
        embeds[is_image] = features[image_index.reshape(-1)[is_image]]
        places = np.where(is_image, np.arange(rows * chunk), -1).reshape(rows, chunk)
        length = _bucket(self._prefill_lengths, int(starts.max()) + chunk)
        self._state = self._prefill(
            self._params, self._state, ids, positions, slots, starts, last, final, embeds,
            places.astype(np.int32), length=length,
        )  # fmt: skip

    def _encode_pictures(self, appends: Sequence[Append]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Features of all pictures, float[M, F], and each append's row of them per token or -1."""
        parts = [np.zeros((0, self.config.image_feature_size), self._state.hidden.dtype)]
        merge = self.config.vision_config.merge_unit
        indices, total = [], 0
        pictures: list[tuple[np.ndarray, np.ndarray]] = []  # (patches, grid) of each
        for one in appends:
            is_image = one.ids == self.config.image_token_id
            sizes = one.image_grid_thw.prod(axis=-1, dtype=np.int64)
            if is_image.sum() * merge != sizes.sum() or sizes.sum() != len(one.pixel_values):
                raise ValueError(
                    f"slot {one.slot}: {is_image.sum()} picture tokens and "
                    f"{len(one.pixel_values)} patches for grids {one.image_grid_thw.tolist()}"
                )
            indices.append(np.where(is_image, total + np.cumsum(is_image) - 1, -1))
            total += int(is_image.sum())
            patches = np.split(one.pixel_values, np.cumsum(sizes)[:-1]) if len(sizes) else []
            pictures += zip(patches, one.image_grid_thw, strict=True)
        while pictures:
            batch, pictures = _take_pictures(pictures)
            parts.append(self._encode_batch(batch))
        return np.concatenate(parts), indices

    def _encode_batch(self, batch) -> np.ndarray:
        """Features of some pictures, without padding. Small ones always fill a whole batch."""
        wanted = sum(len(patches) for patches, _ in batch)
        padded = list(batch)
        while len(padded) < PICTURES_PER_CALL and (
            sum(len(patches) for patches, _ in padded) + len(batch[0][0]) <= PATCHES_PER_CALL
        ):
            padded.append(batch[0])  # so that the plan's shape is that of a full batch
        num_patches = sum(len(patches) for patches, _ in padded)
        rows = max(PATCHES_PER_CALL, 1 << (num_patches - 1).bit_length())
        plan = plan_vision(
            np.stack([grid for _, grid in padded]), self.config.vision_config, pad_patches_to=rows
        )
        pixels = np.zeros((rows, batch[0][0].shape[1]), np.float32)
        pixels[:num_patches] = np.concatenate([patches for patches, _ in padded])
        features = np.asarray(self._encode(self._params, pixels, plan))
        return features[: wanted // self.config.vision_config.merge_unit]

    # The programs. Their Python bodies run once a compiled shape: that is what the counter counts.

    def _encode_program(self, params, pixel_values, plan):
        self.num_compiles += 1
        return nnx.merge(self._graphdef, params).encode_images(pixel_values, plan)

    def _prefill_program(
        self, params, state, ids, positions, slots, starts, last, final, embeds, image_index, *,
        length: int,
    ):  # fmt: skip
        self.num_compiles += 1
        model = nnx.merge(self._graphdef, params)
        k, v = _rows(state, slots, length)
        hidden, k, v = model.extend(ids, positions, k, v, starts, embeds, image_index)
        last_hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        columns = starts[:, None] + jnp.arange(ids.shape[1])  # [B, T]
        rows = jnp.arange(len(ids))[:, None]
        state = _write(state, k[:, rows, columns], v[:, rows, columns], slots, starts)
        hidden = state.hidden.at[final].set(last_hidden, mode="drop")
        return dataclasses.replace(state, hidden=hidden)

    def _copy_program(self, state, source, targets, *, length: int):
        self.num_compiles += 1
        return SlotState(
            k=state.k.at[:, targets, :length].set(state.k[:, source, None, :length], mode="drop"),
            v=state.v.at[:, targets, :length].set(state.v[:, source, None, :length], mode="drop"),
            hidden=state.hidden.at[targets].set(state.hidden[source], mode="drop"),
        )

    def _decode_program(
        self, params, state, slots, starts, next_position, keys, temperature, *, length: int
    ):
        self.num_compiles += 1
        model = nnx.merge(self._graphdef, params)

        def step(carry, i):
            hidden, new = carry
            ids, logps = sampling.draw_tokens(
                model.logits(hidden), keys, starts + i, temperature, self._banned
            )
            hidden, new = decode_step(model, ids, next_position + i, old, new, starts, i)
            return (hidden, new), (ids, logps)

        k, v = _rows(state, slots, length)
        old, new = begin_chunk(k, v, self.decode_chunk, state.hidden.dtype)
        hidden = state.hidden.at[slots].get(mode="clip")
        (hidden, new), (ids, logps) = jax.lax.scan(
            step, (hidden, new), jnp.arange(self.decode_chunk)
        )
        state = _write(state, new.k, new.v, slots, starts)
        hidden = state.hidden.at[slots].set(hidden, mode="drop")
        return dataclasses.replace(state, hidden=hidden), ids, logps


def _rows(state: SlotState, slots: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """The working copy of some slots' first `length` entries; a padding row copies any slot."""
    take = {"mode": "clip"}
    return (
        state.k.at[:, slots, :length].get(**take),
        state.v.at[:, slots, :length].get(**take),
    )


def _write(
    state: SlotState, k: jax.Array, v: jax.Array, slots: jax.Array, starts: jax.Array
) -> SlotState:
    """Writes new entries float[layers, B, T, K, H] behind `starts` int32[B] of the rows' slots."""
    where = (slice(None), slots[:, None], starts[:, None] + jnp.arange(k.shape[2]))
    return dataclasses.replace(
        state,
        k=state.k.at[where].set(k.astype(state.k.dtype), mode="drop"),
        v=state.v.at[where].set(v.astype(state.v.dtype), mode="drop"),
    )


def _take_pictures(pictures: list) -> tuple[list, list]:
    """Splits off the pictures of the next vision call: at least one, few enough patches."""
    count, patches = 1, len(pictures[0][0])
    while (
        count < min(len(pictures), PICTURES_PER_CALL)
        and patches + len(pictures[count][0]) <= PATCHES_PER_CALL
    ):
        patches += len(pictures[count][0])
        count += 1
    return pictures[:count], pictures[count:]


def _cache_buckets(length: int, shortest: int) -> tuple[int, ...]:
    """Cache lengths a program may look at: `shortest`, four times that, ..., and all of it."""
    buckets = []
    while 2 * shortest <= length:
        buckets.append(shortest)
        shortest *= 4
    return (*buckets, length)


def _row_buckets(rows: int) -> tuple[int, ...]:
    """Rows of a program: all, or a quarter when few are left."""
    return tuple(sorted({max(1, rows // 4), rows}))


def _bucket(buckets: Sequence[int], wanted: int) -> int:
    """The smallest bucket that holds `wanted`."""
    return next(b for b in buckets if b >= wanted)
