"""Picture patches -> features in the text tower's width: Qwen3-VL's vision tower.

Beside Qwen2.5-VL's: learned positions interpolated to each picture, layer norms, a plain MLP with
tanh-GELU, full attention in every layer, and *deepstack*: features taken behind a few middle layers
too, which the text tower adds to its first layers' outputs at the picture's tokens (arXiv
2406.04334).
Source: transformers 5.24 models/qwen3_vl/modeling_qwen3_vl.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from svrl_jax.models.qwen_vl.config import Qwen3VisionConfig
from svrl_jax.models.qwen_vl.execution import Execution
from svrl_jax.models.qwen_vl.layers import (
    Embedding,
    LayerNorm,
    Linear,
    scan_layers,
    stack_layers,
)
from svrl_jax.models.qwen_vl.rope import vision_rope
from svrl_jax.models.qwen_vl.sharding import constrain
from svrl_jax.models.qwen_vl.vision import (
    NORM_EPS,
    PatchEmbed,
    VisionAttention,
    attend_segments,
)
from svrl_jax.models.qwen_vl.vision_plan import Taps, VisionPlan


class Qwen3VisionMLP(nnx.Module):
    """linear_fc2(gelu(linear_fc1(x))), GELU by its tanh approximation."""

    def __init__(self, config: Qwen3VisionConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        size, inner = config.hidden_size, config.intermediate_size
        kind = _biased(config, rngs, param_dtype)
        self.linear_fc1 = Linear(size, inner, **kind)
        self.linear_fc2 = Linear(inner, size, **kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[..., D] to float[..., D]."""
        return self.linear_fc2(jax.nn.gelu(self.linear_fc1(x), approximate=True))


class Qwen3VisionBlock(nnx.Module):
    """Pre-norm attention and MLP, each added to its input."""

    def __init__(self, config: Qwen3VisionConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        size = config.hidden_size
        self.norm1 = LayerNorm(size, eps=NORM_EPS, param_dtype=param_dtype)
        self.attn = VisionAttention(config, rngs=rngs, param_dtype=param_dtype)
        self.norm2 = LayerNorm(size, eps=NORM_EPS, param_dtype=param_dtype)
        self.mlp = Qwen3VisionMLP(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        plan: VisionPlan,
        backend: str = "auto",
    ) -> jax.Array:
        """Maps float[L, D] to float[L, D]."""
        qkv = self.attn.project(self.norm1(x), cos, sin)  # [L, 3, N, H]
        x = x + self.attn.proj(attend_segments(qkv, plan.frames, backend))
        return x + self.mlp(self.norm2(x))


class Qwen3PatchMerger(nnx.Module):
    """Joins each merge block of patches to one feature of the text tower's width.

    The last merger normalises each patch, a deepstack merger the joined block.
    """

    def __init__(
        self, config: Qwen3VisionConfig, *, norm_joined: bool, rngs: nnx.Rngs, param_dtype: Any
    ):
        kind = _biased(config, rngs, param_dtype)
        self.joined = config.hidden_size * config.merge_unit
        self.norm_joined = norm_joined
        size = self.joined if norm_joined else config.hidden_size
        self.norm = LayerNorm(size, eps=NORM_EPS, param_dtype=param_dtype)
        self.linear_fc1 = Linear(self.joined, self.joined, **kind)
        self.linear_fc2 = Linear(self.joined, config.out_hidden_size, **kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[L, D] to float[M, out], M = L / merge_unit (rows come in merge blocks)."""
        if self.norm_joined:
            x = self.norm(x.reshape(-1, self.joined))
        else:
            x = self.norm(x).reshape(-1, self.joined)
        return self.linear_fc2(jax.nn.gelu(self.linear_fc1(x), approximate=False))


class Qwen3VisionTower(nnx.Module):
    """patch_embed, pos_embed, blocks (stacked), merger, deepstack_merger_list (stacked)."""

    def __init__(self, config: Qwen3VisionConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        kind = {"rngs": rngs, "param_dtype": param_dtype}
        self.config = config
        self.execution = Execution()
        self.patch_embed = PatchEmbed(config, bias=True, **kind)
        self.pos_embed = Embedding(
            config.num_position_embeddings,
            config.hidden_size,
            std=config.initializer_range,
            **kind,
        )
        self.blocks = stack_layers(
            lambda rngs: Qwen3VisionBlock(config, rngs=rngs, param_dtype=param_dtype),
            config.depth,
            rngs,
        )
        self.merger = Qwen3PatchMerger(config, norm_joined=False, **kind)
        self.deepstack_merger_list = stack_layers(
            lambda rngs: Qwen3PatchMerger(
                config, norm_joined=True, rngs=rngs, param_dtype=param_dtype
            ),
            len(config.deepstack_visual_indexes),
            rngs,
        )

    def __call__(
        self, pixel_values: jax.Array, plan: VisionPlan, *, remat: str = "none"
    ) -> jax.Array:
        """Maps patch rows to features.

        Args:
          pixel_values: float[L, C], L as planned. Rows may be missing at the end: they are zeros.
          remat: what blocks keep for the backward pass, see `layers.scan_layers`.
        Returns:
          float[M, (1 + levels) * out], one row a merged cell in reading order; padding cells at
          the end. A row is the last merger's feature, then each deepstack level's, in order.
        Raises:
          ValueError: more rows than planned.
        """
        dtype = self.execution.dtype_of(self.patch_embed.proj.weight.dtype)
        x = self.patch_embed(pixel_values, plan.num_patches, dtype)
        x = x + learned_positions(self.pos_embed, plan.taps).astype(x.dtype)
        cos, sin = vision_rope(plan.position_hw, self.config.head_dim, self.config.rope_theta)
        levels = len(self.config.deepstack_visual_indexes)
        # Every layer writes its output somewhere: a tapped one to its level, the others to a spare
        # place behind them. A condition in the loop would cost more than the write.
        place = np.full(self.config.depth, levels)
        place[list(self.config.deepstack_visual_indexes)] = np.arange(levels)

        def step(block, carry, place):
            x, taken = carry
            x = block(constrain(x, "patches", None), cos, sin, plan, self.execution.attention)
            return (x, jax.lax.dynamic_update_index_in_dim(taken, x, place, 0)), None

        taken = jnp.zeros((levels + 1, *x.shape), x.dtype)
        (x, taken), _ = scan_layers(self.blocks, step, (x, taken), jnp.asarray(place), remat=remat)

        def merge(merger, _, hidden):
            return None, merger(hidden)

        _, deep = scan_layers(self.deepstack_merger_list, merge, None, taken[:levels])
        return (
            jnp.concatenate([self.merger(x)[None], deep])
            .swapaxes(0, 1)
            .reshape(-1, (1 + levels) * self.config.out_hidden_size)
        )


def learned_positions(table: Embedding, taps: Taps) -> jax.Array:
    """float32[L, D]: each patch's mix of four rows of the table."""
    rows = table(taps.row).astype(jnp.float32)  # [L, 4, D]
    return jnp.einsum("ltd,lt->ld", rows, taps.weight, precision=jax.lax.Precision.HIGHEST)


def _biased(config: Qwen3VisionConfig, rngs: nnx.Rngs, param_dtype: Any) -> dict[str, Any]:
    return {
        "bias": True,
        "std": config.initializer_range,
        "rngs": rngs,
        "param_dtype": param_dtype,
    }
