"""Token embeddings and positions -> final hidden states: the text tower, with and without a cache.

Source: transformers 5.24 models/qwen2_5_vl/modeling_qwen2_5_vl.py (`Qwen2_5_VLTextModel`) and
models/qwen3_vl/modeling_qwen3_vl.py (`Qwen3VLTextModel`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from svrl_jax.models.qwen_vl.attention import attend, cache_mask
from svrl_jax.models.qwen_vl.attention_backends import RowAttention, row_attention
from svrl_jax.models.qwen_vl.config import QwenVLConfig, TextConfig
from svrl_jax.models.qwen_vl.execution import Execution
from svrl_jax.models.qwen_vl.layers import (
    MLP,
    Embedding,
    Linear,
    RMSNorm,
    scan_layers,
    stack_layers,
)
from svrl_jax.models.qwen_vl.rope import rotate, text_rope
from svrl_jax.models.qwen_vl.sharding import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (already rotated) and values of every layer; float[layers, slots, S, K, H] each."""

    k: jax.Array
    v: jax.Array


def init_cache(config: QwenVLConfig, slots: int, length: int, dtype: Any = jnp.float32) -> KVCache:
    """Returns an empty cache of `slots` rows with room for `length` tokens each."""
    text = config.text_config
    shape = (text.num_hidden_layers, slots, length, text.num_key_value_heads, text.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Deepstack:
    """What Qwen3-VL's first layers add to their outputs at picture tokens.

    Attributes:
      features: float[M, levels, D], one row a merged cell; level i is added behind layer i.
      index: int32[B, T], row of `features` at picture tokens, -1 elsewhere.
    """

    features: jax.Array
    index: jax.Array

    def add(self, x: jax.Array, layer: jax.Array) -> jax.Array:
        """Maps the output float[B, T, D] of layer `layer` (int32[]) to what the next one reads."""

        def deepen(x):
            level = jax.lax.dynamic_index_in_dim(self.features, layer, 1, keepdims=False)
            rows = jnp.take(level, jnp.maximum(self.index, 0), axis=0, mode="clip")
            return x + jnp.where((self.index >= 0)[..., None], rows.astype(x.dtype), 0)

        # Gathered where needed: [layers, B, T, D] of mostly zeros would be larger than the rest.
        return jax.lax.cond(layer < self.features.shape[1], deepen, lambda x: x, x)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions.

    Queries, keys and values have a bias in Qwen2.5-VL; each head's queries and keys are normalised
    before they turn in Qwen3-VL.
    """

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        size, width, bias = config.hidden_size, config.head_dim, config.has_qkv_bias
        kind = {"std": config.initializer_range, "rngs": rngs, "param_dtype": param_dtype}
        self.head_dim = width
        self.q_proj = Linear(size, config.num_attention_heads * width, bias=bias, **kind)
        self.k_proj = Linear(size, config.num_key_value_heads * width, bias=bias, **kind)
        self.v_proj = Linear(size, config.num_key_value_heads * width, bias=bias, **kind)
        norm = {"eps": config.rms_norm_eps, "param_dtype": param_dtype}
        self.q_norm = RMSNorm(width, **norm) if config.has_qk_norm else None
        self.k_norm = RMSNorm(width, **norm) if config.has_qk_norm else None
        self.o_proj = Linear(config.num_attention_heads * width, size, bias=False, **kind)

    def project(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Maps float[B, T, D] to rotated q [B, T, N, H], rotated k and v [B, T, K, H]."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k = self.q_proj(x).reshape(heads), self.k_proj(x).reshape(heads)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), self.v_proj(x).reshape(heads)

    def output(self, attended: jax.Array) -> jax.Array:
        """Maps float[B, T, N, H] to float[B, T, D]."""
        return self.o_proj(attended.reshape(*attended.shape[:-2], -1))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each added to its input."""

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps, param_dtype=param_dtype)
        self.self_attn = Attention(config, rngs=rngs, param_dtype=param_dtype)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, param_dtype=param_dtype)
        self.mlp = MLP(
            size,
            config.intermediate_size,
            bias=False,
            std=config.initializer_range,
            rngs=rngs,
            param_dtype=param_dtype,
        )

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, attention: RowAttention
    ) -> jax.Array:
        """Maps float[B, T, D] to float[B, T, D]; `attention` maps q, k, v to attended values."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        x = x + self.self_attn.output(attention(q, k, v))
        return x + self.mlp(self.post_attention_layernorm(x))

    def extend(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        mask: jax.Array,
        cache: KVCache,
        layer: jax.Array,
        starts: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """As a call, but writes the new keys and values into layer `layer` of the cache first.

        Args:
          x: float[B, T, D].
          mask: bool[B, T, S].
          cache: the whole cache, float[layers, B, S, K, H].
        """
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        cache = KVCache(_write(cache.k, k, layer, starts), _write(cache.v, v, layer, starts))
        keys = cache.k[layer].astype(x.dtype)  # [B, S, K, H]
        values = cache.v[layer].astype(x.dtype)
        x = x + self.self_attn.output(attend(q, keys, values, mask))
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class TextTower(nnx.Module):
    """embed_tokens, layers (stacked), norm."""

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        self.config = config
        self.execution = Execution()
        self.embed_tokens = Embedding(
            config.vocab_size,
            config.hidden_size,
            std=config.initializer_range,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.layers = stack_layers(
            lambda rngs: DecoderLayer(config, rngs=rngs, param_dtype=param_dtype),
            config.num_hidden_layers,
            rngs,
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, param_dtype=param_dtype)

    def embed(self, ids: jax.Array) -> jax.Array:
        """Maps int32[...] to float[..., D] in the dtype of `execution`."""
        embeds = self.embed_tokens(ids)
        embeds = embeds.astype(self.execution.dtype_of(embeds.dtype))
        return constrain(embeds, "batch", *(None,) * (embeds.ndim - 1))

    def __call__(
        self,
        embeds: jax.Array,
        positions: jax.Array,
        group_id: jax.Array,
        branch_id: jax.Array,
        deepstack: Deepstack | None = None,
        *,
        remat: str = "none",
    ) -> jax.Array:
        """Maps float[B, T, D] to float[B, T, D], after the final norm.

        Args:
          positions: int32[3, B, T].
          group_id, branch_id: int32[B, T], see `attention.attention_mask`.
          deepstack: of the rows' pictures; None without pictures, and in Qwen2.5-VL.
          remat: what layers keep for the backward pass, see `layers.scan_layers`.
        """
        attention = row_attention(group_id, branch_id, self.execution.attention)
        cos, sin = self.angles(positions)

        def step(layer, x, index):
            x = layer(constrain(x, "batch", None, None), cos, sin, attention)
            return x if deepstack is None else deepstack.add(x, index), None

        numbers = None if deepstack is None else jnp.arange(self.config.num_hidden_layers)
        hidden, _ = scan_layers(self.layers, step, embeds, numbers, remat=remat)
        return self.norm(hidden)

    def extend(
        self,
        embeds: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        starts: jax.Array,
        deepstack: Deepstack | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Appends T tokens a row to the cache.

        Args:
          embeds: float[B, T, D].
          positions: int32[3, B, T].
          cache: B slots; starts: int32[B], each row's first free index.
          deepstack: as in a call.
        Returns:
          (hidden float[B, T, D] after the final norm, the cache with the new entries).
        """
        mask = cache_mask(starts, embeds.shape[1], cache.k.shape[2])
        cos, sin = self.angles(positions)

        # The cache is carried, not scanned over: scanning would copy each layer in and out again.
        def step(layer, carry, index):
            x, cache = carry
            x, cache = layer.extend(x, cos, sin, mask, cache, index, starts)
            return (x if deepstack is None else deepstack.add(x, index), cache), None

        numbers = jnp.arange(self.config.num_hidden_layers)
        (hidden, cache), _ = scan_layers(self.layers, step, (embeds, cache), numbers)
        return self.norm(hidden), cache

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines float32[B, T, H/2] of positions int32[3, B, T]."""
        return text_rope(positions, self.config)


def _write(cache: jax.Array, new: jax.Array, layer: jax.Array, starts: jax.Array) -> jax.Array:
    """Writes new [B, T, K, H] at cache[layer, b, starts[b]:starts[b] + T], in place under jit."""
    rows = jnp.arange(new.shape[0])
    where = jnp.stack([jnp.full_like(rows, layer), rows, starts], axis=-1)  # [B, 3]
    return jax.lax.scatter(
        cache,
        where,
        new.astype(cache.dtype),
        jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2, 3),
            inserted_window_dims=(0, 1),
            scatter_dims_to_operand_dims=(0, 1, 2),
        ),
        indices_are_sorted=True,
        unique_indices=True,
        mode=jax.lax.GatherScatterMode.CLIP,
    )
