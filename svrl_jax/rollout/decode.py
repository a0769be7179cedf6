"""One decode step of many rows, against caches that a chunk of steps only reads.

`model.extend` writes each new key into the cache and reads all of it back, which copies the cache
once a step. Within a chunk the old entries do not change, so here they are laid out once for the
two matrix products of attention, and the chunk's own entries go to a small buffer beside them. The
result is that of `model.extend` one token at a time: tests hold both to one full pass.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from svrl_jax.models.qwen_vl.attention import MASKED_SCORE
from svrl_jax.models.qwen_vl.layers import scan_layers
from svrl_jax.models.qwen_vl.model import QwenVL


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OldEntries:
    """What rows held before the chunk: k float[layers, B, K, H, S], v float[layers, B, K, S, H]."""

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewEntries:
    """Keys and values of the chunk's tokens so far, float[layers, B, C, K, H] each."""

    k: jax.Array
    v: jax.Array


def begin_chunk(
    k: jax.Array, v: jax.Array, count: int, dtype: jax.typing.DTypeLike
) -> tuple[OldEntries, NewEntries]:
    """Lays out the rows' caches float[layers, B, S, K, H] and an empty buffer for `count`
    tokens.
    """
    layers, batch, _, heads, width = k.shape
    empty = jnp.zeros((layers, batch, count, heads, width), dtype)
    old = OldEntries(k.transpose(0, 1, 3, 4, 2).astype(dtype), v.swapaxes(2, 3).astype(dtype))
    return old, NewEntries(empty, empty)


def decode_step(
    model: QwenVL,
    ids: jax.Array,
    positions: jax.Array,
    old: OldEntries,
    new: NewEntries,
    lengths: jax.Array,
    index: jax.Array,
) -> tuple[jax.Array, NewEntries]:
    """Feeds one token a row.

    Args:
      ids: int32[B].
      positions: int32[B], the same on all three M-RoPE axes, as behind the last picture.
      lengths: int32[B], entries of `old` that are a row's own.
      index: int32[], the step's number in the chunk, from 0.
    Returns:
      (hidden float[B, D] after the final norm, `new` with this token's entries).
    """
    tower = model.language_model
    cos, sin = tower.angles(jnp.broadcast_to(positions[:, None], (3, len(ids), 1)))
    is_old = jnp.arange(old.k.shape[-1]) < lengths[:, None]  # [B, S]
    is_new = jnp.broadcast_to(jnp.arange(new.k.shape[2]) <= index, (len(ids), new.k.shape[2]))
    mask = jnp.concatenate([is_old, is_new], axis=-1)  # [B, S + C]

    def step(layer, x, entries):
        old, new = entries
        q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
        new = NewEntries(
            jax.lax.dynamic_update_slice_in_dim(new.k, k, index, axis=1),
            jax.lax.dynamic_update_slice_in_dim(new.v, v, index, axis=1),
        )
        x = x + layer.self_attn.output(_attend(q, old, new, mask))
        return x + layer.mlp(layer.post_attention_layernorm(x)), new

    x, new = scan_layers(tower.layers, step, tower.embed(ids[:, None]), (old, new))
    return tower.norm(x)[:, 0], new


def _attend(q: jax.Array, old: OldEntries, new: NewEntries, mask: jax.Array) -> jax.Array:
    """`attention.attend` for one query a row, q float[B, 1, N, H], over both parts of the cache."""
    batch, _, num_heads, width = q.shape
    num_kv, length = old.k.shape[1], old.k.shape[-1]
    wide = {"preferred_element_type": jnp.float32}
    q = q.reshape(batch, num_kv, num_heads // num_kv, width) * width**-0.5
    scores = jnp.concatenate(
        [
            jnp.einsum("bkgh,bkhs->bkgs", q, old.k, **wide),
            jnp.einsum("bkgh,bckh->bkgc", q, new.k, **wide),
        ],
        axis=-1,
    )
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED_SCORE), axis=-1)
    weights = weights.astype(q.dtype)
    out = jnp.einsum("bkgs,bksh->bkgh", weights[..., :length], old.v, **wide)
    out += jnp.einsum("bkgc,bckh->bkgh", weights[..., length:], new.v, **wide)
    return out.reshape(batch, 1, num_heads, width).astype(q.dtype)
