"""(group_id, branch_id) a token -> attended values, by the backend that suits platform and length.

    dense       scores in memory: short rows, any platform
    blockwise   XLA, block by block: any platform, any mask
    pallas      TPU kernels of ours, any mask
    cudnn       GPU, through jax.nn.dot_product_attention: bfloat16 rows that hold one group, one
                branch and padding at the end; its mask can say no more

`auto` is dense for short rows, then pallas on TPUs and blockwise elsewhere. All keep scores and
sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from svrl_jax.models.qwen_vl.attention import attend, attention_mask
from svrl_jax.models.qwen_vl.attention_blockwise import blockwise_attention
from svrl_jax.models.qwen_vl.sharding import spec_of

# q float[B, T, N, H], k and v float[B, T, K, H] -> float[B, T, N, H].
RowAttention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
BACKENDS = ("auto", "dense", "blockwise", "pallas", "cudnn")
# Up to here `auto` is dense: faster on a CPU, and the scores of a row are a few MiB a head.
DENSE_UP_TO = 1024


def attend_packed(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    group_id: jax.Array,
    branch_id: jax.Array,
    *,
    causal: bool = True,
    backend: str = "auto",
) -> jax.Array:
    """Softmax attention of rows under the rule of `attention.attention_mask`.

    Args:
      q: float[B, T, N, H].
      k, v: float[B, T, K, H], N a multiple of K.
      group_id, branch_id: int32[B, T]; group -1 is padding, whose values mean nothing but are
        finite.
      causal: False lets a query see later keys too (a picture's patches).
      backend: one of BACKENDS.
    Returns:
      float[B, T, N, H] in q's dtype.
    Raises:
      ValueError: an unknown backend, or cudnn without causal order.
    """
    backend = choose_backend(backend, q.shape[1], jax.default_backend())
    if backend == "dense":
        mask = attention_mask(group_id, branch_id, group_id, branch_id, causal=causal)
        return attend(q, k, v, mask)
    if backend == "blockwise":
        return blockwise_attention(q, k, v, group_id, branch_id, causal)
    if backend == "cudnn":
        if not causal:
            raise ValueError("the cudnn backend is causal; use auto for other attention")
        return plain_rows_attention(q, k, v, group_id, "cudnn")
    # Here, since only TPUs need what it imports.
    from svrl_jax.models.qwen_vl.attention_pallas import pallas_attention

    kernel = partial(pallas_attention, causal=causal)
    return _on_each_device(kernel, q, k, v, group_id, branch_id)


def row_attention(group_id: jax.Array, branch_id: jax.Array, backend: str) -> RowAttention:
    """`attend_packed` of given rows; a dense mask is made once for all layers."""
    if choose_backend(backend, group_id.shape[1], jax.default_backend()) == "dense":
        mask = attention_mask(group_id, branch_id, group_id, branch_id)
        return lambda q, k, v: attend(q, k, v, mask)
    return lambda q, k, v: attend_packed(q, k, v, group_id, branch_id, backend=backend)


def choose_backend(backend: str, length: int, platform: str) -> str:
    """What `backend` means for rows of `length` tokens; platform as jax.default_backend()."""
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} is none of {', '.join(BACKENDS)}")
    if backend != "auto":
        return backend
    if length <= DENSE_UP_TO:
        return "dense"
    return "pallas" if platform == "tpu" else "blockwise"


def plain_rows_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, group_id: jax.Array, implementation: str
) -> jax.Array:
    """Causal attention of rows for which `are_plain_rows` holds; padding is not attended.

    Args:
      implementation: of jax.nn.dot_product_attention, `cudnn` or `xla`.
    """
    lengths = (group_id >= 0).sum(axis=1).astype(jnp.int32)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation=implementation,
    )


def are_plain_rows(group_id: np.ndarray, branch_id: np.ndarray) -> bool:
    """Whether every row is one group in branch 0 with padding at its end only (on the host)."""
    group_id, branch_id = np.asarray(group_id), np.asarray(branch_id)
    is_real = group_id >= 0
    starts_again = (is_real[:, 1:] & ~is_real[:, :-1]).any()
    one_group = ((group_id == group_id[:, :1]) | ~is_real).all()
    return bool(one_group and not starts_again and not branch_id[is_real].any())


def _on_each_device(kernel, q, k, v, group_id, branch_id):
    """Runs a kernel on each device's rows and heads: XLA cannot split one by itself."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return kernel(q, k, v, group_id, branch_id)
    sizes = dict(mesh.shape)
    heads = "heads" if k.shape[2] % sizes.get("tensor", 1) == 0 else None
    q_spec, k_spec = (spec_of(("batch", None, heads, None), x.shape, sizes) for x in (q, k))
    ids_spec = spec_of(("batch", None), group_id.shape, sizes)
    return jax.shard_map(
        kernel,
        mesh=mesh,
        in_specs=(q_spec, k_spec, k_spec, ids_spec, ids_spec),
        out_specs=q_spec,
        check_vma=False,
    )(q, k, v, group_id, branch_id)
