"""Cached passes of the model: T tokens behind each row's context, and one token a row.

Neither copies the cache. Keys lie as [.., H, S] and values as [.., S, H], which is how the two
matrix products of attention read them. `append_pass` reads the slots' old entries block by block,
as many blocks as the longest context has, so that one program serves every length; `decode_step`
reads rows that `read_rows` gathered once for a whole chunk of steps, and the chunk's own entries go
to a small buffer beside them. Both give what one full pass gives: tests hold them to it.
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
    cache: Entries, slots: jax.Array, length: int, dtype: jax.typing.DTypeLike, *, unroll: bool
) -> Entries:
    """The first `length` entries of some slots; a slot out of range gives any other's.

    Args:
      unroll: a tuple over layers, for `decode_step` with a tuple of layers; else one array.
    """
    take = {"mode": "clip"}
    if not unroll:
        return Entries(
            cache.k.at[:, slots, :, :, :length].get(**take).astype(dtype),
            cache.v.at[:, slots, :, :length].get(**take).astype(dtype),
        )
    layers = range(cache.k.shape[0])
    return Entries(
        tuple(cache.k.at[i, slots, :, :, :length].get(**take).astype(dtype) for i in layers),
        tuple(cache.v.at[i, slots, :, :length].get(**take).astype(dtype) for i in layers),
    )


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
    lengths: jax.Array,
    index: jax.Array,
) -> tuple[jax.Array, Entries]:
    """Feeds one token a row.

    Args:
      layers: the text tower's, as a stack or taken apart. Taken apart, nothing of the parameters
        and caches is copied in a step (on CPUs a scan copies each layer's slice).
      ids: int32[B].
      positions: int32[B], the same on all three M-RoPE axes, as behind the last picture.
      old: what the rows held before the chunk; `read_rows` of the same kind.
      new: entries of the chunk's tokens so far.
      lengths: int32[B], entries of `old` that are a row's own.
      index: int32[], the step's number in the chunk, from 0.
    Returns:
      (hidden float[B, D] after the final norm, `new` with this token's entries).
    """
    tower = model.language_model
    cos, sin = tower.angles(jnp.broadcast_to(positions[:, None], (3, len(ids), 1)))
    one = jax.tree.leaves(old.k)[0], jax.tree.leaves(new.k)[0]
    is_old = jnp.arange(one[0].shape[-1]) < lengths[:, None]  # [B, S]
    is_new = jnp.broadcast_to(jnp.arange(one[1].shape[-1]) <= index, (len(ids), one[1].shape[-1]))
    mask = jnp.concatenate([is_old, is_new], axis=-1)  # [B, S + C]

    def step(layer, x, entries):
        old, new = entries
        q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
        write = jax.lax.dynamic_update_slice_in_dim
        new = Entries(
            write(new.k, k.transpose(0, 2, 3, 1), index, axis=-1),
            write(new.v, v.swapaxes(1, 2), index, axis=-2),
        )
        x = x + layer.self_attn.output(_attend_one(q, old, new, mask))
        return x + layer.mlp(layer.post_attention_layernorm(x)), new

    x = tower.embed(ids[:, None])
    if isinstance(layers, tuple):
        found = []
        for i, layer in enumerate(layers):
            entries = Entries(old.k[i], old.v[i]), Entries(new.k[i], new.v[i])
            x, one = step(layer, x, entries)
            found.append(one)
        new = Entries(tuple(e.k for e in found), tuple(e.v for e in found))
    else:
        x, new = scan_layers(layers, step, x, (old, new))
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
        top, total, out = carry
        entries = old(i)
        is_held = i * block + jnp.arange(block) < starts[:, None]  # [B, block]
        scores = jnp.matmul(q, entries.k, **WIDE)
        scores += jnp.where(is_held, 0.0, MASKED_SCORE)[:, None, None]
        higher = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights, shrink = jnp.exp(scores - higher), jnp.exp(top - higher)
        total = total * shrink + weights.sum(-1, keepdims=True)
        return higher, total, out * shrink + jnp.matmul(weights.astype(dtype), entries.v, **WIDE)

    _, total, out = jax.lax.fori_loop(0, num_blocks, merge, (top, total, out))
    out = (out / total).reshape(batch, num_kv, -1, length, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, length, num_heads, width).astype(dtype)


def _attend_one(q: jax.Array, old: Entries, new: Entries, mask: jax.Array) -> jax.Array:
    """`attention.attend` for one query a row, q float[B, 1, N, H], over both parts of the cache."""
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
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED_SCORE), axis=-1)
    weights = weights.astype(q.dtype)
    out = jnp.einsum("bkgs,bksh->bkgh", weights[..., :length], old.v, **WIDE)
    out += jnp.einsum("bkgc,bkch->bkgh", weights[..., length:], new.v, **WIDE)
    return out.reshape(batch, 1, num_heads, width).astype(q.dtype)
