"""Cached passes of the model: T tokens behind each row's context, and one token a row.

Neither copies the cache. Keys lie as [.., H, S] and values as [.., S, H], which is how the two
matrix products of attention read them. `append_pass` reads the slots' old entries block by block,
as many blocks as the longest context has, so that one program serves every length; `decode_step`
reads rows that `read_rows` gathered once for a whole chunk of steps, and the chunk's own entries go
to a small buffer beside them. What some rows' slots have in common (a group's prompt) is read once
for all of them. Both give what one full pass gives: tests hold them to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from svrl_jax.models.qwen_vl.attention import MASKED_SCORE
from svrl_jax.models.qwen_vl.layers import scan_layers
from svrl_jax.models.qwen_vl.model import QwenVL

WIDE = {"preferred_element_type": jnp.float32}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
    """Keys (already rotated) and values: k float[..., K, H, S], v float[..., K, S, H].

    The leading axes are [layers, rows]; or each of the two is a tuple over layers of arrays with
    the leading axis [rows].
    """

    k: Any
    v: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pods:
    """Neighbouring rows whose slots begin with the same entries, which are read once for them all.

    Attributes:
      first: int32[P], a pod's first row, ascending.
      slot: int32[P], one of its slots.
      length: int32[P], entries in common.
      count: int32[], pods in use; behind them nothing is read.
      rows: most rows of a pod.
      block: entries read at a time; the cache's length is a multiple of it.
    """

    first: jax.Array
    slot: jax.Array
    length: jax.Array
    count: jax.Array
    rows: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})


def append_pass(
    model: QwenVL,
    ids: jax.Array,
    positions: jax.Array,
    cache: Entries,
    slots: jax.Array,
    starts: jax.Array,
    image_embeds: jax.Array,
    image_index: jax.Array,
    *,
    block: int,
) -> tuple[jax.Array, Entries]:
    """Feeds T tokens a row behind what its slot holds; the cache is read and not written.

    Args:
      ids: int32[B, T].
      positions: int32[3, B, T].
      cache: of all slots, S a multiple of `block`.
      slots, starts: int32[B], each row's slot and the tokens that it holds.
      image_embeds, image_index: as in `QwenVL.extend`.
      block: old keys read at a time.
    Returns:
      (hidden float[B, T, D] after the final norm, entries of the new tokens [layers, B, ...]).
    """
    tower = model.language_model
    embeds, deepstack = model.embed(ids, image_embeds, image_index)
    cos, sin = tower.angles(positions)
    num_blocks = -(-starts.max() // block)
    numbers = jnp.arange(tower.config.num_hidden_layers)

    def step(layer, x, index):
        q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
        new = Entries(k.transpose(0, 2, 3, 1), v.swapaxes(1, 2))

        def old(i):
            return _read_block(cache, index, slots, i * block, block, x.dtype)

        x = x + layer.self_attn.output(_attend_blocks(q, new, old, num_blocks, starts, block))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x if deepstack is None else deepstack.add(x, index), new

    x, new = scan_layers(tower.layers, step, embeds, numbers)
    return tower.norm(x), new


def read_rows(
    cache: Entries,
    slots: jax.Array,
    starts: jax.Array,
    length: int,
    dtype: jax.typing.DTypeLike,
    *,
    unroll: bool,
) -> Entries:
    """`length` entries of some slots, from `starts` on; a slot out of range gives any other's.

    Args:
      slots, starts: int32[B], `length` entries or more stand behind each start.
      unroll: a tuple over layers, for `decode_step` with a tuple of layers; else one array.
    """

    def read(layer: int, count: int) -> Entries:
        def one(slot, start):
            def part(where, axis):
                begin, size = [layer, slot, 0, 0, 0], [count, 1, *where.shape[2:]]
                begin[axis], size[axis] = start, length
                return jax.lax.dynamic_slice(where, begin, size)[:, 0].astype(dtype)

            return Entries(part(cache.k, 4), part(cache.v, 3))

        return jax.vmap(one, out_axes=1)(slots, starts)

    if not unroll:
        return read(0, len(cache.k))
    single = [jax.tree.map(lambda e: e[0], read(i, 1)) for i in range(len(cache.k))]
    return Entries(tuple(e.k for e in single), tuple(e.v for e in single))


def empty_like(old: Entries, count: int) -> Entries:
    """Room for `count` tokens of the same rows."""
    return Entries(
        jax.tree.map(lambda k: jnp.zeros((*k.shape[:-1], count), k.dtype), old.k),
        jax.tree.map(lambda v: jnp.zeros((*v.shape[:-2], count, v.shape[-1]), v.dtype), old.v),
    )


def take_layers(layers: nnx.Module, count: int) -> tuple[nnx.Module, ...]:
    """A stack of layers as `count` single ones; taken apart before a loop, not in each round."""
    graphdef, params = nnx.split(layers)
    return tuple(
        nnx.merge(graphdef, jax.tree.map(lambda p, i=i: p[i], params)) for i in range(count)
    )


def decode_step(
    model: QwenVL,
    layers: nnx.Module | tuple[nnx.Module, ...],
    ids: jax.Array,
    positions: jax.Array,
    old: Entries,
    new: Entries,
    is_old: jax.Array,
    index: jax.Array,
    cache: Entries,
    pods: Pods,
) -> tuple[jax.Array, Entries]:
    """Feeds one token a row.

    Args:
      layers: the text tower's, as a stack or taken apart. Taken apart, nothing of the parameters
        and caches is copied in a step (on CPUs a scan copies each layer's slice).
      ids: int32[B].
      positions: int32[B], the same on all three M-RoPE axes, as behind the last picture.
      old: what the rows held before the chunk, but for what is read by pods; `read_rows` of the
        same kind.
      new: entries of the chunk's tokens so far.
      is_old: bool[B, S], entries of `old` that a row sees.
      index: int32[], the step's number in the chunk, from 0.
      cache, pods: of all slots, and what is read there; a row sees its pod's common entries.
    Returns:
      (hidden float[B, D] after the final norm, `new` with this token's entries).
    """
    tower = model.language_model
    cos, sin = tower.angles(jnp.broadcast_to(positions[:, None], (3, len(ids), 1)))
    is_new = jnp.arange(jax.tree.leaves(new.k)[0].shape[-1]) <= index
    is_new = jnp.broadcast_to(is_new, (len(ids), len(is_new)))
    mask = jnp.concatenate([is_old, is_new], axis=-1)  # [B, S + C]

    def step(layer, x, inputs):
        number, old, new = inputs
        q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
        write = jax.lax.dynamic_update_slice_in_dim
        new = Entries(
            write(new.k, k.transpose(0, 2, 3, 1), index, axis=-1),
            write(new.v, v.swapaxes(1, 2), index, axis=-2),
        )
        common = _attend_pods(q, cache, number, pods)
        x = x + layer.self_attn.output(_attend_one(q, old, new, mask, common))
        return x + layer.mlp(layer.post_attention_layernorm(x)), new

    x = tower.embed(ids[:, None])
    if isinstance(layers, tuple):
        found = []
        for i, layer in enumerate(layers):
            x, one = step(layer, x, (i, Entries(old.k[i], old.v[i]), Entries(new.k[i], new.v[i])))
            found.append(one)
        new = Entries(tuple(e.k for e in found), tuple(e.v for e in found))
    else:
        numbers = jnp.arange(tower.config.num_hidden_layers)
        x, new = scan_layers(layers, step, x, (numbers, old, new))
    return tower.norm(x)[:, 0], new


def write_rows(
    cache: Entries, new: Entries, slots: jax.Array, starts: jax.Array, num_rows: jax.Array
) -> Entries:
    """Writes entries [layers, B, ...] behind `starts` of the first `num_rows` rows' slots."""

    def write(i, cache):
        def put(where, values, axis):
            place = [0, slots[i], 0, 0, 0]
            place[axis] = starts[i]
            row = jax.lax.dynamic_slice_in_dim(values, i, 1, axis=1)
            return jax.lax.dynamic_update_slice(where, row.astype(where.dtype), place)

        return Entries(put(cache.k, new.k, 4), put(cache.v, new.v, 3))

    return jax.lax.fori_loop(0, num_rows, write, cache)


def stack_layers(entries: Entries) -> Entries:
    """[layers, B, ...] of entries of either kind."""
    if not isinstance(entries.k, tuple):
        return entries
    return Entries(jnp.stack(entries.k), jnp.stack(entries.v))


def _read_block(cache: Entries, layer, slots, start, size: int, dtype) -> Entries:
    """Entries [B, ...] of one layer: `size` of them from `start` on."""
    _, _, heads, width, _ = cache.k.shape

    def one(slot):
        k = jax.lax.dynamic_slice(cache.k, (layer, slot, 0, 0, start), (1, 1, heads, width, size))
        v = jax.lax.dynamic_slice(cache.v, (layer, slot, 0, start, 0), (1, 1, heads, size, width))
        return Entries(k[0, 0].astype(dtype), v[0, 0].astype(dtype))

    return jax.vmap(one)(slots)


def _attend_blocks(
    q: jax.Array,
    new: Entries,
    old: Callable[[jax.Array], Entries],
    num_blocks: jax.Array,
    starts: jax.Array,
    block: int,
) -> jax.Array:
    """Attention of new tokens over themselves (causal), then over old blocks, merged as they come.

    Args:
      q: float[B, T, N, H].
      old: number of a block -> its entries.
    Returns:
      float[B, T, N, H] in q's dtype.
    """
    batch, length, num_heads, width = q.shape
    num_kv, dtype = new.k.shape[1], q.dtype
    q = (q * width**-0.5).reshape(batch, length, num_kv, num_heads // num_kv, width)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv, -1, width)  # [B, K, (N/K) T, H]
    place = jnp.arange(length)
    causal = jnp.where(place[:, None] >= place, 0.0, MASKED_SCORE)
    scores = jnp.matmul(q, new.k, **WIDE)
    scores += jnp.tile(causal, (num_heads // num_kv, 1))  # a row's queries come head by head
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out = jnp.matmul(weights.astype(dtype), new.v, **WIDE)

    def merge(i, carry):
        is_held = i * block + jnp.arange(block) < starts[:, None]  # [B, block]
        return _merge(carry, q, old(i), is_held[:, None, None])

    _, total, out = jax.lax.fori_loop(0, num_blocks, merge, (top, total, out))
    out = (out / total).reshape(batch, num_kv, -1, length, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, length, num_heads, width).astype(dtype)


def _merge(carry, q: jax.Array, entries: Entries, is_seen: jax.Array):
    """Adds entries to a softmax average that is under way.

    Args:
      carry: (top score, sum of weights, weighted sum of values), float32[..., Q, 1 | 1 | H].
      q: float[..., Q, H], scaled.
      entries: k float[..., H, S], v float[..., S, H].
      is_seen: bool, to be broadcast to [..., Q, S].
    """
    top, total, out = carry
    scores = jnp.matmul(q, entries.k, **WIDE) + jnp.where(is_seen, 0.0, MASKED_SCORE)
    higher = jnp.maximum(top, scores.max(-1, keepdims=True))
    weights, shrink = jnp.exp(scores - higher), jnp.exp(top - higher)
    total = total * shrink + weights.sum(-1, keepdims=True)
    return higher, total, out * shrink + jnp.matmul(weights.astype(q.dtype), entries.v, **WIDE)


def _attend_pods(q: jax.Array, cache: Entries, layer: jax.Array | int, pods: Pods):
    """What each row sees of its pod's common entries, as the `carry` of `_merge`.

    Args:
      q: float[B, 1, N, H].
    Returns:
      (float32[B, K, N/K, 1], the same, float32[B, K, N/K, H]); a row of no pod sees nothing.
    """
    batch, _, num_heads, width = q.shape
    num_kv, rows = cache.k.shape[2], pods.rows
    shared = num_heads // num_kv
    # A pod is a window of rows. Those behind its last row are the next pod's, which writes them
    # later; or nobody's: the room behind the last row of all.
    q = jnp.pad((q * width**-0.5)[:, 0], ((0, rows), (0, 0), (0, 0)))
    empty = (
        jnp.full((batch + rows, num_kv, shared, 1), MASKED_SCORE, jnp.float32),
        jnp.zeros((batch + rows, num_kv, shared, 1), jnp.float32),
        jnp.zeros((batch + rows, num_kv, shared, width), jnp.float32),
    )

    def by_head(x):  # [rows, K, N/K, H] -> [K, rows N/K, H]
        return x.swapaxes(0, 1).reshape(num_kv, rows * shared, -1)

    def by_row(x):
        return x.reshape(num_kv, rows, shared, -1).swapaxes(0, 1)

    def attend(p, found):
        queries = jax.lax.dynamic_slice_in_dim(q, pods.first[p], rows)
        queries = by_head(queries.reshape(rows, num_kv, shared, width))

        def read(i, carry):
            start = i * pods.block
            entries = _read_block(cache, layer, pods.slot[p][None], start, pods.block, q.dtype)
            entries = jax.tree.map(lambda e: e[0], entries)
            is_common = start + jnp.arange(pods.block) < pods.length[p]
            return _merge(carry, queries, entries, is_common)

        carry = jax.tree.map(lambda e: by_head(e[:rows]), empty)
        carry = jax.lax.fori_loop(0, -(-pods.length[p] // pods.block), read, carry)
        return jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(
                whole, by_row(part), pods.first[p], axis=0
            ),
            found,
            carry,
        )

    found = jax.lax.fori_loop(0, pods.count, attend, empty)
    return jax.tree.map(lambda e: e[:batch], found)


def _attend_one(q: jax.Array, old: Entries, new: Entries, mask: jax.Array, common) -> jax.Array:
    """`attention.attend` for one query a row over both parts of the cache and its pod's.

    Args:
      q: float[B, 1, N, H].
      mask: bool[B, S + C], of old and new entries.
      common: of `_attend_pods`.
    """
    batch, _, num_heads, width = q.shape
    num_kv, length = old.k.shape[1], old.k.shape[-1]
    q = q.reshape(batch, num_kv, num_heads // num_kv, width) * width**-0.5
    scores = jnp.concatenate(
        [
            jnp.einsum("bkgh,bkhs->bkgs", q, old.k, **WIDE),
            jnp.einsum("bkgh,bkhc->bkgc", q, new.k, **WIDE),
        ],
        axis=-1,
    )
    scores = jnp.where(mask[:, None, None], scores, MASKED_SCORE)
    top, total, seen = common
    higher = jnp.maximum(scores.max(-1, keepdims=True), top)
    weights, shrink = jnp.exp(scores - higher), jnp.exp(top - higher)
    total = weights.sum(-1, keepdims=True) + total * shrink
    weights = weights.astype(q.dtype)
    out = jnp.einsum("bkgs,bksh->bkgh", weights[..., :length], old.v, **WIDE)
    out += jnp.einsum("bkgc,bkch->bkgh", weights[..., length:], new.v, **WIDE)
    out = (out + seen * shrink) / total
    return out.reshape(batch, 1, num_heads, width).astype(q.dtype)
