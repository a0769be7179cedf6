"""The parts that towers are made of: linear map, embedding, norms, gated MLP, a stack of layers.

Parameters keep the checkpoint's names and shapes (`weight` is [out, in]), with a leading layer axis
inside a stack, so that loading is copying. Source: transformers 5.24 modeling_qwen2_5_vl.py and
modeling_qwen3_vl.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from svrl_jax.models.qwen_vl.sharding import constrain

# What attention over blocks gives its output and its log-sum-exp, which are dear to compute again.
ATTENDED = "attended"
# What `scan_layers` keeps for the backward pass; the rest is computed again.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(ATTENDED),
    ),
    "layer": jax.checkpoint_policies.nothing_saveable,
}


class Linear(nnx.Module):
    """y = x weight^T (+ bias); weight float[out, in], bias float[out].

    With an adapter (lora.py) lora_scale * (x lora_a^T) lora_b^T is added; lora_a float[r, in],
    lora_b float[out, r].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        std: float,
        rngs: nnx.Rngs,
        param_dtype: Any,
    ):
        shape = (out_features, in_features)
        self.weight = nnx.Param((std * jax.random.normal(rngs.params(), shape)).astype(param_dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), param_dtype)) if bias else None
        self.lora_a = self.lora_b = nnx.data(None)
        self.lora_scale = 0.0

    def add_lora(self, rank: int, scale: float, key: jax.Array) -> None:
        """Adds an adapter that changes nothing yet: A uniform as PEFT draws it, B zero. In a stack
        of layers both get its leading axis."""
        *stack, out_features, in_features = self.weight.shape
        dtype, bound = self.weight.dtype, in_features**-0.5
        a = jax.random.uniform(key, (*stack, rank, in_features), jnp.float32, -bound, bound)
        self.lora_a = nnx.Param(a.astype(dtype))
        self.lora_b = nnx.Param(jnp.zeros((*stack, out_features, rank), dtype))
        self.lora_scale = scale

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[..., in] to float[..., out] in x's dtype."""
        y = jnp.einsum("...i,oi->...o", x, self.weight[...].astype(x.dtype))
        if self.lora_a is not None:
            low = jnp.einsum("...i,ri->...r", x, self.lora_a[...].astype(x.dtype))
            y += self.lora_scale * jnp.einsum(
                "...r,or->...o", low, self.lora_b[...].astype(x.dtype)
            )
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class Embedding(nnx.Module):
    """Rows of float[V, D] by token id."""

    def __init__(self, count: int, size: int, *, std: float, rngs: nnx.Rngs, param_dtype: Any):
        weight = std * jax.random.normal(rngs.params(), (count, size))
        self.weight = nnx.Param(weight.astype(param_dtype))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Maps int32[...] to float[..., D]."""
        # On a mesh the width is gathered first, as of any weight; else XLA finds no way from rows
        # cut by their width to rows cut by the batch, and copies them to every device.
        weight = constrain(self.weight[...], "vocab", None)
        return jnp.take(weight, ids, axis=0, mode="clip")


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight; the statistics in float32."""

    def __init__(self, size: int, *, eps: float, param_dtype: Any):
        self.weight = nnx.Param(jnp.ones((size,), param_dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis; keeps x's dtype."""
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype) * self.weight[...].astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias; the statistics in float32."""

    def __init__(self, size: int, *, eps: float, param_dtype: Any):
        self.weight = nnx.Param(jnp.ones((size,), param_dtype))
        self.bias = nnx.Param(jnp.zeros((size,), param_dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis; keeps x's dtype."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight, bias = self.weight[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (wide * weight + bias).astype(x.dtype)


class MLP(nnx.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x))."""

    def __init__(
        self,
        size: int,
        inner: int,
        *,
        bias: bool,
        std: float,
        rngs: nnx.Rngs,
        param_dtype: Any,
    ):
        kind = {"bias": bias, "std": std, "rngs": rngs, "param_dtype": param_dtype}
        self.gate_proj = Linear(size, inner, **kind)
        self.up_proj = Linear(size, inner, **kind)
        self.down_proj = Linear(inner, size, **kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[..., D] to float[..., D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def stack_layers(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """Builds `count` layers as one module whose parameters have a leading layer axis."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def build(rngs: nnx.Rngs) -> nnx.Module:
        return make(rngs)

    return build(rngs)


def scan_layers(
    layers: nnx.Module,
    step: Callable[[nnx.Module, Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any = None,
    *,
    remat: str = "none",
) -> tuple[Any, Any]:
    """Runs a stack of layers one after another, compiled once.

    Args:
      layers: made by `stack_layers`.
      step: (one layer, carry, x) -> (carry, y).
      xs: pytree of per-layer values, leading layer axis; or None.
      remat: what a layer keeps for the backward pass, one of REMAT: `none` keeps everything, `dots`
        the results of its matrix products with parameters and of attention over blocks, `layer` its
        input alone.
    Returns:
      (carry, ys) as jax.lax.scan.
    """
    graphdef, params = nnx.split(layers)

    def body(carry, inputs):
        params, x = inputs
        return step(nnx.merge(graphdef, params), carry, x)

    if remat != "none":
        policy = REMAT[remat]
        body = jax.checkpoint(body, prevent_cse=False, policy=policy)  # scan needs no barrier
    return jax.lax.scan(body, carry, (params, xs))
