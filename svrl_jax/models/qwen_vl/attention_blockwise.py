"""Packed attention in blocks, in plain XLA: no array of T x T, on any platform.

The row is cut into blocks; a query block meets the key blocks up to its own one after another under
a running softmax, and the backward pass computes the scores again from the saved log-sum-exp
(FlashAttention, arXiv 2205.14135 and 2307.08691). Blocks that share no group are left out.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from svrl_jax.models.qwen_vl.attention import MASKED_SCORE
from svrl_jax.models.qwen_vl.layers import ATTENDED

# Tokens of a block: on a CPU its scores are to stay in the cache.
BLOCK = {"cpu": 128, "other": 256}


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def blockwise_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    group_id: jax.Array,
    branch_id: jax.Array,
    causal: bool = True,
    block: int | None = None,
) -> jax.Array:
    """Softmax attention under the rule of `attention.attention_mask`.

    Args:
      q: float[B, T, N, H].
      k, v: float[B, T, K, H], N a multiple of K.
      group_id, branch_id: int32[B, T].
      causal: False lets a query see later keys too.
      block: tokens of a block; None chooses by BLOCK. T need not be a multiple.
    Returns:
      float[B, T, N, H] in q's dtype; scores and sums in float32. 0 at padding.
    """
    return _forward(q, k, v, group_id, branch_id, causal, block)[0]


def _forward(q, k, v, group_id, branch_id, causal, block):
    blocks = _Blocks(q, k, group_id, branch_id, causal, block)
    q_blocks, k_blocks, v_blocks = blocks.of_queries(q), blocks.of_keys(k), blocks.of_keys(v)

    def row(i):
        q_i = q_blocks[i]  # [B, K, G, Q, H]

        def meet(j, carry):
            def seen(carry):
                top, total, acc = carry  # [B, K, G, Q], the last with H
                scores, mask = blocks.scores(i, j, q_i, k_blocks[j])
                new_top = jnp.maximum(top, scores.max(axis=-2))
                weights = jnp.where(mask, jnp.exp(scores - new_top[..., None, :]), 0.0)
                shrink = jnp.exp(top - new_top)
                found = jnp.einsum(
                    "bkgsq,bksh->bkgqh",
                    weights.astype(v.dtype),
                    v_blocks[j],
                    preferred_element_type=jnp.float32,
                )
                total = shrink * total + weights.sum(axis=-2)
                return new_top, total, shrink[..., None] * acc + found

            return jax.lax.cond(blocks.meet[i, j], seen, lambda c: c, carry)

        top = jnp.full(q_i.shape[:-1], MASKED_SCORE, jnp.float32)
        zeros = jnp.zeros(q_i.shape, jnp.float32)
        top, total, acc = jax.lax.fori_loop(
            0, i + 1 if causal else blocks.count, meet, (top, zeros[..., 0], zeros)
        )
        is_blank = total == 0  # padding: it sees nothing
        out = acc / jnp.where(is_blank, 1.0, total)[..., None]
        lse = jnp.where(is_blank, 0.0, top + jnp.log(jnp.where(is_blank, 1.0, total)))
        return out.astype(q.dtype), lse

    out, lse = jax.lax.map(row, jnp.arange(blocks.count))
    out = checkpoint_name(blocks.joined_queries(out), ATTENDED)
    lse = checkpoint_name(lse, ATTENDED)
    return out, (q, k, v, group_id, branch_id, out, lse)


def _backward(causal, block, saved, d_out):
    q, k, v, group_id, branch_id, out, lse = saved
    blocks = _Blocks(q, k, group_id, branch_id, causal, block)
    q_blocks, k_blocks, v_blocks = blocks.of_queries(q), blocks.of_keys(k), blocks.of_keys(v)
    d_out_blocks = blocks.of_queries(d_out)
    wide = {"preferred_element_type": jnp.float32}
    # Of each query: sum over the head of output times its gradient.
    inner = (blocks.of_queries(out).astype(jnp.float32) * d_out_blocks).sum(-1)

    def column(dq_blocks, j):
        k_j, v_j = k_blocks[j], v_blocks[j]

        def meet(i, carry):
            def seen(carry):
                dq_blocks, dk, dv = carry
                scores, mask = blocks.scores(i, j, q_blocks[i], k_j)
                weights = jnp.where(mask, jnp.exp(scores - lse[i][..., None, :]), 0.0)
                d_o = d_out_blocks[i]
                dv += jnp.einsum("bkgsq,bkgqh->bksh", weights.astype(d_o.dtype), d_o, **wide)
                d_weights = jnp.einsum("bksh,bkgqh->bkgsq", v_j, d_o, **wide)
                d_scores = weights * (d_weights - inner[i][..., None, :]) * blocks.scale
                d_scores = d_scores.astype(q.dtype)
                dk += jnp.einsum("bkgsq,bkgqh->bksh", d_scores, q_blocks[i], **wide)
                dq = jnp.einsum("bkgsq,bksh->bkgqh", d_scores, k_j, **wide)
                return dq_blocks.at[i].add(dq), dk, dv

            return jax.lax.cond(blocks.meet[i, j], seen, lambda c: c, carry)

        zeros = jnp.zeros(k_j.shape, jnp.float32)
        carry = (dq_blocks, zeros, zeros)
        dq_blocks, dk, dv = jax.lax.fori_loop(j if causal else 0, blocks.count, meet, carry)
        return dq_blocks, (dk, dv)

    dq = jnp.zeros(q_blocks.shape, jnp.float32)
    dq, (dk, dv) = jax.lax.scan(column, dq, jnp.arange(blocks.count))
    return (
        blocks.joined_queries(dq).astype(q.dtype),
        blocks.joined_keys(dk).astype(k.dtype),
        blocks.joined_keys(dv).astype(v.dtype),
        None,
        None,
    )


blockwise_attention.defvjp(_forward, _backward)


class _Blocks:
    """Cuts rows into blocks, axis 0 the block's number; puts them together again."""

    def __init__(self, q, k, group_id, branch_id, causal: bool, block: int | None):
        self.causal = causal
        self.length, self.num_kv = q.shape[1], k.shape[2]
        block = block or BLOCK.get(jax.default_backend(), BLOCK["other"])
        self.block = min(block, self.length)
        self.count = -(-self.length // self.block)
        self.scale = q.shape[-1] ** -0.5
        # [count, B, Q]; the last block is filled up with padding tokens.
        self.group = self._cut(group_id, -1)
        self.branch = self._cut(branch_id, 0)
        self.meet = blocks_meet(self.group, self.branch).any(-1)

    def _cut(self, x, fill=0):
        missing = self.count * self.block - self.length
        x = jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)), constant_values=fill)
        return x.reshape(x.shape[0], self.count, self.block, *x.shape[2:]).swapaxes(0, 1)

    def of_queries(self, x):
        """float[B, T, N, H] -> [count, B, K, N / K, Q, H]."""
        x = self._cut(x)
        x = x.reshape(*x.shape[:3], self.num_kv, -1, x.shape[-1])
        return x.transpose(0, 1, 3, 4, 2, 5)

    def of_keys(self, x):
        """float[B, T, K, H] -> [count, B, K, S, H]."""
        return self._cut(x).swapaxes(2, 3)

    def joined_queries(self, x):
        """The way back from `of_queries`."""
        x = x.transpose(1, 0, 4, 2, 3, 5)
        return x.reshape(x.shape[0], self.count * self.block, -1, x.shape[-1])[:, : self.length]

    def joined_keys(self, x):
        """The way back from `of_keys`."""
        x = x.transpose(1, 0, 3, 2, 4)
        return x.reshape(x.shape[0], self.count * self.block, -1, x.shape[-1])[:, : self.length]

    def scores(self, i, j, q_i, k_j):
        """Masked float32[B, K, G, S, Q] and its mask bool[B, 1, 1, S, Q].

        Keys come before queries, so that a query's maximum and sum run along the outer axis: on a
        CPU that is many times as fast.
        """
        scores = jnp.einsum("bksh,bkgqh->bkgsq", k_j, q_i, preferred_element_type=jnp.float32)
        q_group, k_group = self.group[i][:, None, :], self.group[j][:, :, None]
        q_branch, k_branch = self.branch[i][:, None, :], self.branch[j][:, :, None]
        mask = (q_group == k_group) & (k_group >= 0)
        mask &= (q_branch == k_branch) | (k_branch == 0)
        if self.causal:
            place = jnp.arange(self.block)
            mask &= (j * self.block + place)[:, None] <= (i * self.block + place)[None, :]
        mask = mask[:, None, None]
        return jnp.where(mask, scores * self.scale, MASKED_SCORE), mask


def blocks_meet(group: jax.Array, branch: jax.Array) -> jax.Array:
    """Whether a query block may see a key of a key block, by the ranges of their ids.

    Keys of a block are seen when its groups overlap the query block's and, of those, either some
    are a shared prompt's (branch 0) or the branches overlap. Never wrongly False; sharp where
    groups and branches stand in order, as packed rows have them.

    Args:
      group, branch: int32[count, B, tokens], cut into blocks; group -1 is padding.
    Returns:
      bool[count, count, B], True where a row's query block (axis 0) meets its key block (axis 1).
    """
    real, far = group >= 0, jnp.int32(2**30)
    # (group, branch) as one number that keeps their order; branches are fewer than tokens.
    width = group.shape[0] * group.shape[2] + 1
    own = group * width + branch
    prompt = real & (branch == 0)

    def ranges(values, chosen):
        return jnp.where(chosen, values, far).min(-1), jnp.where(chosen, values, -1).max(-1)

    def overlap(a, b):
        return (a[0][:, None] <= b[1][None]) & (b[0][None] <= a[1][:, None])

    same_branch = overlap(ranges(own, real), ranges(own, real))
    prompt_of = overlap(ranges(group, real), ranges(group, prompt))
    return same_branch | prompt_of
