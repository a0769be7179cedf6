"""Queries, keys, values and a mask -> attended values: plain attention as matrix products.

One call serves training (masks from group and branch ids), cached decoding and both vision masks.
Scores and softmax are float32 whatever the inputs' dtype: 16-bit scores overflow.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Finite, so that a row without any key (padding) gives an average instead of NaN, and its gradient
# stays finite too.
MASKED_SCORE = -1e30


def attention_mask(
    q_group: jax.Array,
    q_branch: jax.Array,
    k_group: jax.Array,
    k_branch: jax.Array,
    *,
    causal: bool = True,
) -> jax.Array:
    """Which key a query may see, for rows in which several episodes share a prompt.

    A key is seen when it is not after the query, has the query's group, and is of the query's
    branch or of branch 0 (the group's shared prompt). Example, group 0 everywhere, branches
    0 0 1 1 2: token 4 sees tokens 0, 1 and 4. Without packing all branches are 0: the causal mask.

    Args:
      q_group, q_branch, k_group, k_branch: int32[B, T]; queries and keys are the same tokens in the
        same order. Group -1 is padding: it sees nothing and is not seen.
      causal: False lets a query see later keys too.
    Returns:
      bool[B, T, T], True where query (axis 1) sees key (axis 2).
    Raises:
      ValueError: queries and keys differ in shape, so that "not after" has no meaning.
    """
    if q_group.shape != k_group.shape:
        raise ValueError(
            f"queries {q_group.shape} and keys {k_group.shape} must be the same tokens"
        )
    same_group = (q_group[:, :, None] == k_group[:, None, :]) & (k_group[:, None, :] >= 0)
    branch = (q_branch[:, :, None] == k_branch[:, None, :]) | (k_branch[:, None, :] == 0)
    if not causal:
        return same_group & branch
    place = jnp.arange(q_group.shape[1])
    return (place[:, None] >= place[None, :]) & same_group & branch


def cache_mask(starts: jax.Array, num_queries: int, cache_length: int) -> jax.Array:
    """The mask of tokens appended to a cache: query i of a row sees keys up to starts + i.

    Args:
      starts: int32[B], cache index of each row's first new token.
    Returns:
      bool[B, num_queries, cache_length].
    """
    last = starts[:, None] + jnp.arange(num_queries)  # [B, T]
    return jnp.arange(cache_length) <= last[:, :, None]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention; several query heads may share a key head.

    Args:
      q: float[B, T, N, H].
      k, v: float[B, S, K, H], N a multiple of K; query head n reads key head n // (N / K).
      mask: bool[B, T, S], True where seen. A query that sees nothing gets a finite value.
    Returns:
      float[B, T, N, H] in q's dtype.
    """
    batch, length, num_heads, width = q.shape
    num_kv = k.shape[2]
    shared = num_heads // num_kv
    # Laid out as plain batched matrix products, and masked by adding: on CPU faster than an einsum
    # over [B, T, K, G, H] with a select.
    q = (q * width**-0.5).reshape(batch, length, num_kv, shared, width)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv, shared * length, width)
    scores = jnp.matmul(q, k.transpose(0, 2, 3, 1), preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, num_kv, shared, length, -1)  # [B, K, N/K, T, S]
    scores = scores + jnp.where(mask, 0.0, MASKED_SCORE)[:, None, None]
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    weights = weights.reshape(batch, num_kv, shared * length, -1)
    out = jnp.matmul(weights, v.transpose(0, 2, 1, 3), preferred_element_type=jnp.float32)
    out = out.reshape(batch, num_kv, shared, length, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, length, num_heads, width).astype(q.dtype)
