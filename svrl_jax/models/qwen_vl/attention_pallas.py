"""Packed attention as TPU kernels (Pallas): forward, and backward in two passes.

The same arithmetic as `attention_blockwise`, with a block's scores in on-chip memory only. Splash
attention cannot say "own branch or the group's shared prompt": its segment ids know equality alone,
and its log-sum-exp has no gradient, so that two calls cannot be joined. Ids of queries come spread
over the lanes and ids of keys over the sublanes, as the TPU lays vectors out (the scheme of
jax.experimental.pallas.ops.tpu.flash_attention).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from svrl_jax.models.qwen_vl.attention import MASKED_SCORE
from svrl_jax.models.qwen_vl.attention_blockwise import blocks_meet

BLOCK = 512
LANES, SUBLANES = 128, 8
_PARALLEL = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def pallas_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    group_id: jax.Array,
    branch_id: jax.Array,
    causal: bool = True,
    block: int = BLOCK,
    interpret: bool = False,
) -> jax.Array:
    """Softmax attention under the rule of `attention.attention_mask`.

    Args:
      q: float[B, T, N, H].
      k, v: float[B, T, K, H], N a multiple of K.
      group_id, branch_id: int32[B, T].
      causal: False lets a query see later keys too.
      block: tokens of a block, on a TPU a multiple of 128. T need not be one of it.
      interpret: run the kernels in Python on any device, for tests.
    Returns:
      float[B, T, N, H] in q's dtype; scores and sums in float32. 0 at padding.
    """
    return _forward(q, k, v, group_id, branch_id, causal, block, interpret)[0]


def _forward(q, k, v, group_id, branch_id, causal, block, interpret):
    layout = _Layout(q, k, group_id, branch_id, causal, block)
    out, lse = _call_forward(layout, layout.heads(q), layout.heads(k), layout.heads(v), interpret)
    return layout.tokens(out), (q, k, v, group_id, branch_id, out, lse[..., 0])


def _backward(causal, block, interpret, saved, d_out):
    q, k, v, group_id, branch_id, out, lse = saved
    layout = _Layout(q, k, group_id, branch_id, causal, block)
    q_heads, k_heads, v_heads = layout.heads(q), layout.heads(k), layout.heads(v)
    d_out = layout.heads(d_out)
    inner = (out.astype(jnp.float32) * d_out).sum(-1)  # [B, N, T]
    lse, inner = _over_lanes(lse), _over_lanes(inner)
    given = (q_heads, k_heads, v_heads, d_out, lse, inner)
    dq = _call_dq(layout, *given, interpret)
    dk, dv = _call_dkv(layout, *given, interpret)
    return layout.tokens(dq), layout.tokens(dk), layout.tokens(dv), None, None


pallas_attention.defvjp(_forward, _backward)


class _Layout:
    """Shapes, the ids' layout, and block specs by (batch, query head, query block, key block)."""

    def __init__(self, q, k, group_id, branch_id, causal: bool, block: int):
        self.causal = causal
        self.batch, self.length, self.num_heads, self.width = q.shape
        self.num_kv = k.shape[2]
        self.shared = self.num_heads // self.num_kv
        self.block = min(block, -(-self.length // LANES) * LANES)
        self.count = -(-self.length // self.block)
        self.total = self.count * self.block
        self.scale = self.width**-0.5
        missing = ((0, 0), (0, self.total - self.length))
        group = jnp.pad(group_id, missing, constant_values=-1)
        branch = jnp.pad(branch_id, missing)
        self.ids = (
            self._meetings(group, branch),
            *(_over_lanes(x) for x in (group, branch)),
            *(_over_sublanes(x) for x in (group, branch)),
        )

    def _meetings(self, group, branch):
        """int32[B * count * count], 1 where a query block sees something of a key block."""
        cut = [
            x.reshape(self.batch, self.count, self.block).swapaxes(0, 1) for x in (group, branch)
        ]
        return blocks_meet(*cut).transpose(2, 0, 1).reshape(-1).astype(jnp.int32)

    def heads(self, x):
        """float[B, T, heads, H] -> [B, heads, T', H]."""
        x = jnp.pad(x, ((0, 0), (0, self.total - self.length), (0, 0), (0, 0)))
        return x.swapaxes(1, 2)

    def tokens(self, x):
        """The way back from `heads`."""
        return x.swapaxes(1, 2)[:, : self.length]

    def by_query(self, b, n, i, j):
        """Places of the passes that keep a query block and run through the key blocks.

        A skipped key block is named by the last one needed: an equal index moves no memory.
        """
        return b, n, i, jnp.minimum(i, j) if self.causal else j

    def by_key(self, b, kv, j, step):
        """Places of the pass that keeps a key block and runs through the query blocks of every
        query head that reads it."""
        head, i = jax.lax.div(step, self.count), jax.lax.rem(step, self.count)
        return b, kv * self.shared + head, jnp.maximum(i, j) if self.causal else i, j

    def specs(self, place):
        """Block specs of ids, queries, keys and per-query vectors.

        Args:
          place: grid indices -> (batch, query head, query block, key block).
        """

        def spec(shape, index):
            return pl.BlockSpec(shape, lambda *grid: index(*place(*grid)))

        block, shared = self.block, self.shared
        q_ids = spec((1, block, LANES), lambda b, n, i, j: (b, i, 0))
        k_ids = spec((1, SUBLANES, block), lambda b, n, i, j: (b, 0, j))
        queries = spec((1, 1, block, self.width), lambda b, n, i, j: (b, n, i, 0))
        keys = spec((1, 1, block, self.width), lambda b, n, i, j: (b, jax.lax.div(n, shared), j, 0))
        vectors = spec((1, 1, block, LANES), lambda b, n, i, j: (b, n, i, 0))
        meetings = pl.BlockSpec(memory_space=pltpu.SMEM)
        return [meetings, q_ids, q_ids, k_ids, k_ids], queries, keys, vectors


def _call_forward(layout: _Layout, q, k, v, interpret):
    ids, queries, keys, vectors = layout.specs(layout.by_query)
    shape = (layout.block, LANES)
    return pl.pallas_call(
        partial(_forward_kernel, causal=layout.causal, scale=layout.scale, count=layout.count),
        grid=(layout.batch, layout.num_heads, layout.count, layout.count),
        in_specs=[*ids, queries, keys, keys],
        out_specs=[queries, vectors],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((*q.shape[:3], LANES), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM(shape, jnp.float32),
            pltpu.VMEM(shape, jnp.float32),
            pltpu.VMEM((layout.block, layout.width), jnp.float32),
        ],
        compiler_params=_PARALLEL,
        interpret=interpret,
    )(*layout.ids, q, k, v)


def _forward_kernel(
    meetings, q_group, q_branch, k_group, k_branch, q, k, v, out, lse, top, total, acc, *,
    causal, scale, count,
):  # fmt: skip
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full(top.shape, MASKED_SCORE, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(_meets(meetings, i, j, count, causal))
    def _():
        scores, mask = _scores(i, j, (q_group, q_branch, k_group, k_branch), q, k, causal, scale)
        old_top = top[...][:, :1]  # [Q, 1]
        new_top = jnp.maximum(old_top, scores.max(axis=-1, keepdims=True))
        weights = jnp.where(mask, jnp.exp(scores - new_top), 0.0)
        shrink = jnp.exp(old_top - new_top)
        found = _dot(weights.astype(v.dtype), v[0, 0], (1, 0))
        acc[...] = shrink * acc[...] + found
        total[...] = shrink * total[...] + weights.sum(axis=-1, keepdims=True)
        top[...] = jnp.broadcast_to(new_top, top.shape)

    @pl.when(j == count - 1)
    def _():
        is_blank = total[...] == 0.0  # padding: it sees nothing
        safe = jnp.where(is_blank, 1.0, total[...])
        out[0, 0] = (acc[...] / safe[:, :1]).astype(out.dtype)
        lse[0, 0] = jnp.where(is_blank, 0.0, top[...] + jnp.log(safe))


def _call_dq(layout: _Layout, q, k, v, d_out, lse, inner, interpret):
    ids, queries, keys, vectors = layout.specs(layout.by_query)
    return pl.pallas_call(
        partial(_dq_kernel, causal=layout.causal, scale=layout.scale, count=layout.count),
        grid=(layout.batch, layout.num_heads, layout.count, layout.count),
        in_specs=[*ids, queries, keys, keys, queries, vectors, vectors],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[pltpu.VMEM((layout.block, layout.width), jnp.float32)],
        compiler_params=_PARALLEL,
        interpret=interpret,
    )(*layout.ids, q, k, v, d_out, lse, inner)


def _dq_kernel(
    meetings, q_group, q_branch, k_group, k_branch, q, k, v, d_out, lse, inner, dq, acc, *,
    causal, scale, count,
):  # fmt: skip
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(_meets(meetings, i, j, count, causal))
    def _():
        ids = (q_group, q_branch, k_group, k_branch)
        _, d_scores = _weights(i, j, ids, q, k, v, d_out, lse, inner, causal, scale)
        acc[...] += _dot(d_scores, k[0, 0], (1, 0))

    @pl.when(j == count - 1)
    def _():
        dq[0, 0] = acc[...].astype(dq.dtype)


def _call_dkv(layout: _Layout, q, k, v, d_out, lse, inner, interpret):
    count, steps = layout.count, layout.shared * layout.count
    ids, queries, keys, vectors = layout.specs(layout.by_key)
    return pl.pallas_call(
        partial(_dkv_kernel, causal=layout.causal, scale=layout.scale, count=count, steps=steps),
        grid=(layout.batch, layout.num_kv, count, steps),
        in_specs=[*ids, queries, keys, keys, queries, vectors, vectors],
        out_specs=[keys, keys],
        out_shape=[
            jax.ShapeDtypeStruct(k.shape, k.dtype),
            jax.ShapeDtypeStruct(v.shape, v.dtype),
        ],
        scratch_shapes=[pltpu.VMEM((layout.block, layout.width), jnp.float32)] * 2,
        compiler_params=_PARALLEL,
        interpret=interpret,
    )(*layout.ids, q, k, v, d_out, lse, inner)


def _dkv_kernel(
    meetings, q_group, q_branch, k_group, k_branch, q, k, v, d_out, lse, inner,
    dk, dv, dk_acc, dv_acc, *, causal, scale, count, steps,
):  # fmt: skip
    j, step = pl.program_id(2), pl.program_id(3)
    i = jax.lax.rem(step, count)

    @pl.when(step == 0)
    def _():
        dk_acc[...] = jnp.zeros(dk_acc.shape, jnp.float32)
        dv_acc[...] = jnp.zeros(dv_acc.shape, jnp.float32)

    @pl.when(_meets(meetings, i, j, count, causal))
    def _():
        ids = (q_group, q_branch, k_group, k_branch)
        weights, d_scores = _weights(i, j, ids, q, k, v, d_out, lse, inner, causal, scale)
        dv_acc[...] += _dot(weights.astype(d_out.dtype), d_out[0, 0], (0, 0))
        dk_acc[...] += _dot(d_scores, q[0, 0], (0, 0))

    @pl.when(step == steps - 1)
    def _():
        dk[0, 0] = dk_acc[...].astype(dk.dtype)
        dv[0, 0] = dv_acc[...].astype(dv.dtype)


def _meets(meetings, i, j, count, causal):
    """bool[]: the pair of blocks is not skipped."""
    seen = meetings[(pl.program_id(0) * count + i) * count + j] != 0
    return seen & (j <= i) if causal else seen


def _weights(i, j, ids, q, k, v, d_out, lse, inner, causal, scale):
    """Weights float32[Q, S] of a pair of blocks, and the scores' gradient in q's dtype."""
    scores, mask = _scores(i, j, ids, q, k, causal, scale)
    weights = jnp.where(mask, jnp.exp(scores - lse[0, 0][:, :1]), 0.0)
    d_weights = _dot(d_out[0, 0], v[0, 0], (1, 1))
    d_scores = weights * (d_weights - inner[0, 0][:, :1]) * scale
    return weights, d_scores.astype(q.dtype)


def _scores(i, j, ids, q, k, causal, scale):
    """Masked scores float32[Q, S] and the mask, `attention.attention_mask` of a pair of blocks."""
    scores = _dot(q[0, 0], k[0, 0], (1, 1)) * scale
    q_group, q_branch = (x[0][:, :1] for x in ids[:2])  # [Q, 1]
    k_group, k_branch = (x[0][:1] for x in ids[2:])  # [1, S]
    mask = (q_group == k_group) & (k_group >= 0)
    mask &= (q_branch == k_branch) | (k_branch == 0)
    if causal:
        block = scores.shape[0]
        rows = i * block + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        columns = j * block + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        mask &= rows >= columns
    return jnp.where(mask, scores, MASKED_SCORE), mask


def _dot(a, b, over: tuple[int, int]):
    """float32 product of two matrices, contracted over the named axis of each."""
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _over_lanes(x):
    return jnp.broadcast_to(x[..., None], (*x.shape, LANES))


def _over_sublanes(x):
    return jnp.broadcast_to(x[:, None], (x.shape[0], SUBLANES, x.shape[1]))
