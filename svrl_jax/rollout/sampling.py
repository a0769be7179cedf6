"""Logits -> drawn token ids and their log-probs.

One uniform number a row is turned into a token in two levels: the probability mass is summed over
blocks of about sqrt(V) tokens, the block that the number falls into is found, then the token inside
it. A Gumbel draw needs V random numbers a row, and a cumulative sum over V is slow on every
backend; this needs neither.

The log-prob that comes with a token is always that of the *sampler's convention*: raw logits over
the temperature, banned ids masked, before any truncation by top_k or top_p. The trainer computes
the same.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def draw_tokens(
    logits: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    temperature: jax.Array,
    banned: jax.Array,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Draws one token a row with the key `fold_in(keys[b], positions[b])`.

    Args:
      logits: float32[B, V], raw.
      keys: uint32[B, 2], key data of each row's turn (`rng.turn_keys`).
      positions: int32[B], index of the drawn token in its episode.
      temperature: float32[B]; 0 takes the likeliest token, whose log-prob is then that of the raw
        distribution (temperature 1), so that it stays finite and comparable.
      banned: bool[V], ids that are never drawn and carry no probability.
      top_k: only the k likeliest tokens can be drawn; 0 turns it off (the default: never greedy by
        accident).
      top_p: only tokens with less than this mass before them (likeliest first) can be drawn; 1
        turns it off.
    Returns:
      ids int32[B] and log-probs float32[B] (natural log, under softmax(logits / temperature)
      without the banned ids; top_k and top_p do not change them).
    Raises:
      ValueError: top_k < 0, or top_p outside (0, 1].
    """
    if top_k < 0 or not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_k must be >= 0 and top_p in (0, 1]; got {top_k} and {top_p}")
    is_greedy = temperature <= 0.0
    uniform = jax.vmap(_uniform)(keys, positions)
    inverse = 1.0 / jnp.where(is_greedy, 1.0, temperature)[:, None]  # a product is cheap to repeat
    if top_k or top_p < 1.0:
        scaled = masked_logits(logits, inverse, banned)  # [B, V]
        top = scaled.max(-1)
        mass = jnp.exp(scaled - top[:, None])  # 1 at the likeliest token, exactly 0 at banned ids
        total = mass.sum(-1)
        drawn = draw_from_mass(truncate(mass, top_k=top_k, top_p=top_p), uniform)
        # The first of the likeliest; argmax is several times slower on a CPU.
        places = jnp.where(scaled == top[:, None], jnp.arange(scaled.shape[-1]), scaled.shape[-1])
        ids = jnp.where(is_greedy, places.min(-1), drawn).astype(jnp.int32)
        chosen = jnp.take_along_axis(scaled, ids[:, None], axis=-1)[:, 0]
        return ids, chosen - top - jnp.log(total)
    blocks, banned_blocks = _in_blocks(logits), _in_blocks(banned[None], fill=True)
    # Two reductions read the logits and nothing of size V is written.
    scaled = masked_logits(blocks, inverse[..., None], banned_blocks)  # [B, blocks, width]
    tops = scaled.max(-1)  # [B, blocks]
    top = tops.max(-1)
    ends = jnp.cumsum(jnp.exp(scaled - top[:, None, None]).sum(-1), axis=-1)  # [B, blocks]
    block, before = _block_of(ends, uniform * ends[:, -1])
    block = jnp.where(is_greedy, _first(tops == top[:, None]), block)
    # Scaled again from the gathered logits: a second reader of `scaled` would have it written out.
    inside = masked_logits(
        jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], inverse,
        jnp.take(banned_blocks[0], block, axis=0),
    )  # [B, width]  # fmt: skip
    mass = jnp.exp(inside - top[:, None])
    drawn = _first_above(jnp.cumsum(mass, axis=-1), uniform * ends[:, -1] - before)
    place = jnp.where(is_greedy, _first(inside == top[:, None]), drawn)
    chosen = jnp.take_along_axis(inside, place[:, None], axis=-1)[:, 0]
    ids = (block * inside.shape[-1] + place).astype(jnp.int32)
    return ids, chosen - top - jnp.log(ends[:, -1])


def draw_from_shards(
    logits: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    temperature: jax.Array,
    banned: jax.Array,
    axis_name: str,
) -> tuple[jax.Array, jax.Array]:
    """`draw_tokens` inside `shard_map`, each device holding a slice of the vocabulary.

    The levels are the shard, the block and the token. Devices exchange two numbers a row (the
    likeliest logit, the mass) and the owner's answer; no logits travel.

    Args:
      logits: float32[B, V / shards], the device's slice, in the order of the mesh axis.
      keys, positions, temperature: as of `draw_tokens`, the same on every device.
      banned: bool[V / shards], the device's slice; not everything may be banned.
      axis_name: mesh axis of the vocabulary.
    Returns:
      (ids int32[B] in the whole vocabulary, log-probs float32[B]), equal on every device.
    """
    index, size = jax.lax.axis_index(axis_name), logits.shape[-1]
    is_greedy = temperature <= 0.0
    inverse = 1.0 / jnp.where(is_greedy, 1.0, temperature)[:, None]
    scaled = masked_logits(logits, inverse, banned)
    own_top = scaled.max(-1)  # -inf where the whole slice is banned
    top = jax.lax.pmax(own_top, axis_name)
    mass = jnp.exp(scaled - top[:, None])
    masses = jax.lax.all_gather(mass.sum(-1), axis_name, axis=1)  # [B, shards]
    ends = jnp.cumsum(masses, axis=-1)
    target = jax.vmap(_uniform)(keys, positions) * ends[:, -1]
    shard, before = _block_of(ends, target)
    tops = jax.lax.all_gather(own_top, axis_name, axis=1)
    shard = jnp.where(is_greedy, _first(tops == top[:, None]), shard)
    # Every device draws from its slice; only the owner's draw counts.
    has_mass = masses[:, index] > 0.0
    safe = jnp.where(has_mass[:, None], mass, 1.0)
    drawn = _draw_at(safe, jnp.maximum(target - before, 0.0))
    likeliest = _first((scaled == top[:, None]) | (own_top != top)[:, None])
    place = jnp.where(is_greedy, likeliest, drawn)
    chosen = jnp.take_along_axis(scaled, place[:, None], axis=-1)[:, 0]
    is_owner = shard == index
    ids = jax.lax.psum(jnp.where(is_owner, index * size + place, 0), axis_name)
    chosen = jax.lax.psum(jnp.where(is_owner, chosen, 0.0), axis_name)
    return ids.astype(jnp.int32), chosen - top - jnp.log(ends[:, -1])


def masked_logits(logits: jax.Array, inverse: jax.Array, banned: jax.Array) -> jax.Array:
    """float32[B, V]: logits times the inverse temperature float32[B, 1], -inf at banned ids."""
    return jnp.where(banned, -jnp.inf, logits.astype(jnp.float32) * inverse)


def draw_from_mass(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    """Turns one uniform number a row into an index, with probability proportional to `mass`.

    Args:
      mass: float32[B, V], >= 0, not all zero in any row; need not sum to 1.
      uniform: float32[B], in [0, 1).
    Returns:
      int32[B]; an entry of zero mass is never returned.
    """
    return _draw_at(mass, uniform * _block_ends(mass)[:, -1])


def truncate(mass: jax.Array, *, top_k: int, top_p: float) -> jax.Array:
    """float32[B, V]: `mass`, 0 outside the top_k likeliest (0: off) or the top_p nucleus (1: off).

    A token is kept while the mass *before* it, likeliest first, is less than top_p of the total, so
    the one that crosses the border is kept and the likeliest always is. Equal masses keep the lower
    id.
    """
    order = jnp.argsort(-mass, axis=-1, stable=True)
    ranked = jnp.take_along_axis(mass, order, axis=-1)
    share = ranked / ranked.sum(-1, keepdims=True)
    kept = jnp.cumsum(share, axis=-1) - share < top_p if top_p < 1.0 else jnp.ones_like(share, bool)
    if top_k:
        kept &= jnp.arange(mass.shape[-1]) < top_k
    kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
    return jnp.where(kept, mass, 0.0)


def block_width(size: int) -> int:
    """Tokens of a block: the divisor of the vocabulary's size that is nearest to its square root.

    Where none is within a factor of 8, the root itself; the last block is then padded. Example:
    151936 = 1187 blocks of 128.
    """
    root = math.isqrt(max(1, size - 1)) + 1
    near = [w for w in range(-(-root // 8), 8 * root + 1) if size % w == 0]
    return min(near, key=lambda w: max(w / root, root / w)) if near else root


def _in_blocks(values: jax.Array, fill: float = 0) -> jax.Array:
    """Cuts [B, V] into [B, blocks, width]; `fill` stands behind the last value."""
    rows, size = values.shape
    width = block_width(size)
    count = -(-size // width)
    if count * width > size:
        values = jnp.pad(values, ((0, 0), (0, count * width - size)), constant_values=fill)
    return values.reshape(rows, count, width)


def _block_ends(mass: jax.Array) -> jax.Array:
    """float32[B, blocks]: running sums of the blocks' masses."""
    return jnp.cumsum(_in_blocks(mass).sum(-1), axis=-1)


def _draw_at(mass: jax.Array, target: jax.Array) -> jax.Array:
    """int32[B]: the entry that the target float32[B] falls into, as masses are summed up.

    A target is scaled by the total as it was summed, not by 1: rounding leaves no gap at the end.
    """
    blocks, ends = _in_blocks(mass), _block_ends(mass)
    block, before = _block_of(ends, target)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [B, width]
    index = _first_above(jnp.cumsum(inside, axis=-1), target - before)
    return block * inside.shape[-1] + index


def _block_of(ends: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(block that the target falls into, mass before it), int32[B] and float32[B]."""
    block = _first_above(ends, target)
    before = jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], -1)[:, 0]
    return block, jnp.where(block > 0, before, 0.0)


def _first(is_there: jax.Array) -> jax.Array:
    """int32[B]: index of the first True of bool[B, N]; there is one."""
    size = is_there.shape[-1]
    return jnp.where(is_there, jnp.arange(size), size).min(-1)


def _uniform(key_data: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(key_data), position)
    return jax.random.uniform(key, dtype=jnp.float32)


def _first_above(ends: jax.Array, target: jax.Array) -> jax.Array:
    """int32[B]: first index whose running sum is above the target, never one that added no mass.

    Example: ends [0, .2, .2, 1.], target .2 -> 3; target 0 -> 1; target 1 (rounding) -> 3.
    """
    target = jnp.maximum(target, 0.0)  # `target - before` may come out as a tiny negative number
    index = (ends <= target[:, None]).sum(-1)
    last = (ends < ends[:, -1:]).sum(-1)  # the first place that reaches the total: it added mass
    return jnp.minimum(index, last).astype(jnp.int32)
