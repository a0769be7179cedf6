"""Device programs of the sampler: append tokens to cache slots, decode a chunk of tokens in lanes.

A *slot* is a row of the key/value cache and holds one episode's context; a *lane* is a row of the
decode program. An episode that waits for a tool keeps its slot and costs no lane. The engine knows
tokens only: when a turn ends is the caller's business. Tokens decoded beyond that end are undone by
`truncate`, which moves a length and nothing else: what lies behind a slot's length is overwritten
before it can be seen.

Shapes are few: rows, tokens and cache lengths come in buckets, and `num_compiles` counts the
programs.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from svrl_jax.models.qwen_vl.model import QwenVL
from svrl_jax.models.qwen_vl.sharding import mesh_of_params, place
from svrl_jax.rollout import decode, sampling
from svrl_jax.rollout.decode import Entries, Pods
from svrl_jax.rollout.picture_features import PictureEncoder

PREFILL_TOKENS = 1024  # rows x tokens of the largest prefill program
PREFILL_CHUNKS = (32, 256)  # tokens a row of one prefill program; the longer for long contexts only
PREFILL_BLOCK = 256  # old keys that a prefill program reads at a time
SHORTEST_CACHE = 128  # smallest number of keys that a decode program looks at
POD_LANES = 8  # most lanes that read a common beginning together


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
      limit: tokens that the turn may still take, at least 1.
    """

    slot: int
    next_position: int
    key: np.ndarray
    temperature: float
    limit: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """What the device keeps of every slot.

    Attributes:
      cache: entries [layers, slots, ...].
      hidden: float[slots, D], final hidden state of the context's last token: the next is drawn
        from it.
    """

    cache: Entries
    hidden: jax.Array


class Engine:
    """Cache slots and the programs that advance them.

    Where the parameters are spread over a mesh, so are the caches: their heads along `tensor`, if
    they divide; XLA cuts the programs up.

    Args:
      model: gives the structure and the first parameters; later ones come by `set_params`.
      banned: bool[V], ids that are never drawn.
      pausing: bool[V], ids after which a turn may be over: a decode call ends early once every
        lane has drawn one of them or has reached its limit. Changes no token.
      slots: contexts held at once.
      lanes: rows of the largest decode program.
      capacity: tokens that a context may reach.
      decode_chunk: most tokens decoded by one call.
      cache_dtype: of keys and values.
      top_k, top_p: as of `sampling.draw_tokens`.
      unroll: take the layers of decode programs apart; None: on CPUs, where a scan copies each
        layer's slice of parameters and caches in every step. It costs compile time.

    Attributes:
      lengths: int32[slots], tokens that each slot holds.
      num_compiles: programs compiled so far.
      counts: tokens appended (`prefilled`) and the places that the programs had for them
        (`prefill_places`), tokens copied from another slot instead (`copied`), tokens decoded
        (`decoded`, overshoot included) and places of the programs (`decode_places`) and of all
        lanes (`lane_places`), `patches` and `patch_places`, `compiles`, and seconds of both kinds
        of calls (`prefill_s`, `decode_s`).
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
        pausing: np.ndarray | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        unroll: bool | None = None,
    ):
        self.config = model.config
        self.slots = slots
        self.lanes = min(lanes, slots)
        self.capacity = capacity
        self.decode_chunk = decode_chunk
        self.num_compiles = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.lengths = np.zeros(slots, np.int32)
        # Slots of equal number begin with the same entries, so many of them; 0: with nothing known.
        self._beginnings, self._common = np.zeros((2, slots), np.int64)
        self._num_beginnings = 0
        self._graphdef, self._params = nnx.split(model)
        self._banned = jnp.asarray(banned)
        self._pausing = jnp.asarray(np.zeros_like(banned) if pausing is None else pausing)
        self._truncation = {"top_k": top_k, "top_p": top_p}
        self._unroll = jax.default_backend() == "cpu" if unroll is None else unroll
        self._chunks = [c for c in PREFILL_CHUNKS if c == PREFILL_CHUNKS[0] or 4 * c <= capacity]
        # Every write is a whole chunk, the last one of a full context too; blocks are whole.
        longest = capacity + max(decode_chunk, *self._chunks)
        self._block = PREFILL_BLOCK if longest >= 2 * PREFILL_BLOCK else SHORTEST_CACHE
        length = -(-longest // self._block) * self._block
        self._cache_lengths = _cache_buckets(length, SHORTEST_CACHE)
        text = self.config.text_config
        lead = (text.num_hidden_layers, slots, text.num_key_value_heads)
        dtype = jax.tree.leaves(self._params)[0].dtype
        self._state = SlotState(
            Entries(
                jnp.zeros((*lead, text.head_dim, length), cache_dtype),
                jnp.zeros((*lead, length, text.head_dim), cache_dtype),
            ),
            jnp.zeros((slots, text.hidden_size), dtype),
        )
        self._mesh: Mesh | None = None
        self._place_state()
        self._prefill = jax.jit(self._prefill_program, donate_argnums=1)
        self._copy = jax.jit(self._copy_program, donate_argnums=0)
        self._decode = jax.jit(self._decode_program, donate_argnums=1, static_argnames="length")
        self._encode = jax.jit(self._encode_program)
        self._pictures = PictureEncoder(
            self.config, lambda pixels, plan: self._encode(self._params, pixels, plan), self.counts
        )

    @property
    def params(self) -> nnx.State:
        """What is sampled from."""
        return self._params

    def set_params(self, params: nnx.State) -> None:
        """Samples from these parameters (`nnx.split(model)[1]`) from now on; caches are emptied."""
        self._params = params
        self._place_state()
        for slot in range(self.slots):
            self.clear(slot)

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self.lengths[slot] = self._common[slot] = 0

    def truncate(self, slot: int, length: int) -> None:
        """Forgets what lies behind the first `length` tokens; an append must come before a decode.

        Raises:
          ValueError: the slot holds fewer tokens.
        """
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"slot {slot} holds {self.lengths[slot]} tokens, not {length}")
        self.lengths[slot] = length
        self._common[slot] = min(length, self._common[slot])

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
        start = time.perf_counter()
        features, image_index = self._pictures.features(
            [(one.slot, one.ids, one.pixel_values, one.image_grid_thw) for one in appends],
            self._state.hidden.dtype,
        )
        left = [(one, index, 0) for one, index in zip(appends, image_index, strict=True)]
        while left:
            # A program reads as many old blocks as its longest context has.
            left.sort(key=lambda row: int(self.lengths[row[0].slot]))
            longest = max(len(one.ids) - done for one, _, done in left)
            chunk = next((c for c in self._chunks[::-1] if longest > c // 2), self._chunks[0])
            rows = PREFILL_TOKENS // chunk
            for i in range(0, len(left), rows):
                self._append_chunk(left[i : i + rows], chunk, features)
            left = [(o, x, done + chunk) for o, x, done in left if done + chunk < len(o.ids)]
        jax.block_until_ready(self._state.hidden)
        self.counts["prefill_s"] += time.perf_counter() - start

    def copy(self, source: int, targets: Sequence[int], length: int | None = None) -> None:
        """Makes the contexts of `targets` equal to that of `source` (a group's shared prompt).

        Args:
          length: only so many of its first tokens; an append must then come before a decode.
        """
        length = int(self.lengths[source]) if length is None else length
        padded = np.zeros(self.slots, np.int32)
        padded[: len(targets)] = targets
        num_blocks = -(-length // self._block)
        self._state = self._copy(
            self._state, np.int32(source), padded, np.int32(len(targets)), np.int32(num_blocks)
        )
        self.lengths[list(targets)] = length
        if not self._common[source]:
            self._num_beginnings += 1
            self._beginnings[source], self._common[source] = self._num_beginnings, length
        self._beginnings[list(targets)] = self._beginnings[source]
        self._common[list(targets)] = min(length, self._common[source])
        self.counts["copied"] += length * len(targets)

    def decode(self, lanes: Sequence[Lane]) -> tuple[np.ndarray, np.ndarray]:
        """Draws up to `decode_chunk` tokens in each lane and appends them to its slot.

        Args:
          lanes: at most `self.lanes`, of different slots that an append or a decode made current.
        Returns:
          (ids int32[B, C], logps float32[B, C]), rows as given, 1 <= C <= decode_chunk; see
          `sampling.draw_tokens`.
        """
        start = time.perf_counter()
        size = _bucket(_row_buckets(self.lanes), len(lanes))
        order, starts, pods = self._pods([lane.slot for lane in lanes], size)
        slots = np.full(size, self.slots, np.int32)
        next_position, lengths, limits = np.zeros((3, size), np.int32)
        keys = np.zeros((size, 2), np.uint32)
        temperature = np.ones(size, np.float32)
        for i, lane in enumerate(lanes[number] for number in order):
            slots[i], next_position[i], limits[i] = lane.slot, lane.next_position, lane.limit
            keys[i], temperature[i] = lane.key, lane.temperature
            lengths[i] = self.lengths[lane.slot]
        length = _bucket(self._cache_lengths, int((lengths - starts).max()))
        self._state, count, ids, logps = self._decode(
            self._params, self._state, slots, lengths, starts, pods, next_position, keys,
            temperature, limits, np.int32(len(lanes)), length=length,
        )  # fmt: skip
        count = int(count)
        self.lengths[slots[: len(lanes)]] += count
        self.counts["decoded"] += count * len(lanes)
        self.counts["decode_places"] += count * size
        self.counts["lane_places"] += count * self.lanes
        self.counts["decode_s"] += time.perf_counter() - start
        rows = np.argsort(order)  # of each lane as given
        return np.asarray(ids)[:count].T[rows], np.asarray(logps)[:count].T[rows]

    def _place_state(self) -> None:
        """Puts the caches where the parameters are."""
        mesh = mesh_of_params(self._params)
        if mesh == self._mesh:
            return
        self._mesh = mesh
        if mesh is None:
            self._state = jax.device_put(self._state, jax.tree.leaves(self._params)[0].sharding)
            return
        heads = (None, None, "heads", None, None)
        cache = jax.tree.map(lambda x: place(x, heads, mesh), self._state.cache)
        self._state = SlotState(cache, place(self._state.hidden, (None, None), mesh))

    def _pods(self, slots: Sequence[int], size: int) -> tuple[list[int], np.ndarray, Pods]:
        """Which lanes read their beginnings together.

        Returns:
          (the order in which the lanes lie in the program, int32[size] entries that each of them
          reads with its pod, the pods).
        """
        by_beginning = collections.defaultdict(list)
        for number, slot in enumerate(slots):
            if self._common[slot]:
                by_beginning[self._beginnings[slot]].append(number)
        pods = [
            members[i : i + POD_LANES]
            for members in by_beginning.values()
            for i in range(0, len(members), POD_LANES)
        ]
        if 2 * len(pods) > sum(map(len, pods)):  # next to nobody to share with
            pods = []
        inside = {number for pod in pods for number in pod}
        order = [number for number in range(len(slots)) if number not in inside]
        starts = np.zeros(size, np.int32)
        first, slot, length = np.zeros((3, size), np.int32)
        for p, pod in enumerate(pods):
            first[p], slot[p] = len(order), slots[pod[0]]
            length[p] = self._common[[slots[number] for number in pod]].min()
            starts[len(order) : len(order) + len(pod)] = length[p]
            order += pod
        rows = min(POD_LANES, size)
        return order, starts, Pods(first, slot, length, np.int32(len(pods)), rows, self._block)

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
            self.counts["prefilled"] += count
        self.counts["prefill_places"] += rows * chunk
        # Only the features that these tokens need, one place a token: the shape does not depend on
        # the pictures, and the same program serves text.
        is_image = image_index.reshape(-1) >= 0
        embeds = np.zeros((rows * chunk, features.shape[1]), features.dtype)
        embeds[is_image] = features[image_index.reshape(-1)[is_image]]
        places = np.where(is_image, np.arange(rows * chunk), -1).reshape(rows, chunk)
        self._state = self._prefill(
            self._params, self._state, ids, positions, slots, starts, last, final, embeds,
            places.astype(np.int32), np.int32(len(batch)),
        )  # fmt: skip

    def _count_compile(self) -> None:
        self.num_compiles += 1
        self.counts["compiles"] += 1

    # The programs. Their Python bodies run once a compiled shape: that is what the counter counts.

    def _encode_program(self, params, pixel_values, plan):
        self._count_compile()
        return nnx.merge(self._graphdef, params).encode_images(pixel_values, plan)

    def _prefill_program(
        self, params, state, ids, positions, slots, starts, last, final, embeds, image_index,
        num_rows,
    ):  # fmt: skip
        self._count_compile()
        model = nnx.merge(self._graphdef, params)
        readable = jnp.minimum(slots, self.slots - 1)
        hidden, new = decode.append_pass(
            model, ids, positions, state.cache, readable, starts, embeds, image_index,
            block=self._block,
        )  # fmt: skip
        last_hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        return SlotState(
            decode.write_rows(state.cache, new, slots, starts, num_rows),
            state.hidden.at[final].set(last_hidden, mode="drop"),
        )

    def _copy_program(self, state, source, targets, num_targets, num_blocks):
        self._count_compile()

        def block(i, state):
            j, b = i // num_blocks, i % num_blocks

            def move(where, axis):
                start, size = [0, source, 0, 0, 0], list(where.shape)
                start[axis], size[axis], size[1] = b * self._block, self._block, 1
                part = jax.lax.dynamic_slice(where, start, size)
                start[1] = targets[j]
                return jax.lax.dynamic_update_slice(where, part, start)

            return Entries(move(state.k, 4), move(state.v, 3))

        def last(i, hidden):
            return hidden.at[targets[i]].set(hidden[source])

        return SlotState(
            jax.lax.fori_loop(0, num_targets * num_blocks, block, state.cache),
            jax.lax.fori_loop(0, num_targets, last, state.hidden),
        )

    def _decode_program(
        self, params, state, slots, lengths, starts, pods, next_position, keys, temperature, limits,
        num_rows, *, length: int,
    ):  # fmt: skip
        self._count_compile()
        model = nnx.merge(self._graphdef, params)
        layers = model.language_model.layers
        if self._unroll:
            layers = decode.take_layers(layers, self.config.text_config.num_hidden_layers)
        begins = jnp.minimum(starts, state.cache.v.shape[3] - length)
        places = begins[:, None] + jnp.arange(length)
        is_old = (places >= starts[:, None]) & (places < lengths[:, None])
        old = decode.read_rows(
            state.cache, slots, begins, length, state.hidden.dtype, unroll=self._unroll
        )
        chunk, rows = self.decode_chunk, len(slots)

        def goes_on(carry):
            i, is_done, *_ = carry
            return (i < chunk) & ~is_done.all()

        def step(carry):
            i, is_done, hidden, new, ids, logps = carry
            drawn, logp = sampling.draw_tokens(
                model.logits(hidden), keys, lengths + i, temperature, self._banned,
                **self._truncation,
            )  # fmt: skip
            hidden, new = decode.decode_step(
                model, layers, drawn, next_position + i, old, new, is_old, i, state.cache, pods
            )
            is_done |= (i + 1 >= limits) | self._pausing[drawn]
            return i + 1, is_done, hidden, new, ids.at[i].set(drawn), logps.at[i].set(logp)

        count, _, hidden, new, ids, logps = jax.lax.while_loop(
            goes_on,
            step,
            (
                jnp.int32(0),
                jnp.arange(rows) >= num_rows,
                state.hidden.at[slots].get(mode="clip"),
                decode.empty_like(old, chunk),
                jnp.zeros((chunk, rows), jnp.int32),
                jnp.zeros((chunk, rows), jnp.float32),
            ),
        )
        cache = decode.write_rows(state.cache, decode.stack_layers(new), slots, lengths, num_rows)
        hidden = state.hidden.at[slots].set(hidden, mode="drop")
        return SlotState(cache, hidden), count, ids, logps


def _cache_buckets(length: int, shortest: int) -> tuple[int, ...]:
    """Old keys a decode program may look at: doubling up to 512, then in steps of a half to a
    third up to 1024 and of a quarter to a seventh from there on, so that little is looked at in
    vain; and all of them."""
    buckets = []
    while shortest < length:
        steps = 1 if shortest < 512 else 2 if shortest < 1024 else 4
        buckets += [shortest * (steps + i) // steps for i in range(steps)]
        shortest *= 2
    return (*(b for b in buckets if b < length), length)


def _row_buckets(rows: int) -> tuple[int, ...]:
    """Rows of a program: all, or a quarter when few are left."""
    return tuple(sorted({max(1, rows // 4), rows}))


def _bucket(buckets: Sequence[int], wanted: int) -> int:
    """The smallest bucket that holds `wanted`."""
    return next(b for b in buckets if b >= wanted)
