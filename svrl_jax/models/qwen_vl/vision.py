"""Picture patches -> features in the text tower's width: Qwen2.5-VL's vision tower.

What both families' towers share is here too; Qwen3-VL's own is vision_qwen3.py.
Source: transformers 5.24 models/qwen2_5_vl/modeling_qwen2_5_vl.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from svrl_jax.models.qwen_vl.attention import attend
from svrl_jax.models.qwen_vl.attention_backends import attend_packed, choose_backend
from svrl_jax.models.qwen_vl.config import Qwen3VisionConfig, VisionConfig
from svrl_jax.models.qwen_vl.execution import Execution
from svrl_jax.models.qwen_vl.layers import MLP, Linear, RMSNorm, scan_layers, stack_layers
from svrl_jax.models.qwen_vl.rope import rotate, vision_rope
from svrl_jax.models.qwen_vl.sharding import constrain
from svrl_jax.models.qwen_vl.vision_plan import Segments, VisionPlan

NORM_EPS = 1e-6  # fixed in the reference, no config field
DENSE_SEGMENTS = 256  # patches; windows have 64, and kernels would pad them


class PatchEmbed(nnx.Module):
    """A patch row to float[D]: the checkpoint's Conv3d as one matrix, over both time slices."""

    def __init__(
        self,
        config: VisionConfig | Qwen3VisionConfig,
        *,
        bias: bool,
        rngs: nnx.Rngs,
        param_dtype: Any,
    ):
        self.proj = Linear(
            config.patch_dim,
            config.hidden_size,
            bias=bias,
            std=config.initializer_range,
            rngs=rngs,
            param_dtype=param_dtype,
        )

    def __call__(self, pixel_values: jax.Array, num_patches: int, dtype: Any = None) -> jax.Array:
        """Maps float[L', C], L' <= L, to float[L, D]; missing rows are 0.

        Args:
          dtype: of the result; None is the parameters'.

        Raises:
          ValueError: more rows than `num_patches` (L).
        """
        missing = num_patches - pixel_values.shape[0]
        if missing < 0:
            raise ValueError(f"{pixel_values.shape[0]} patch rows, plan for {num_patches}")
        x = jnp.asarray(pixel_values, self.proj.weight.dtype if dtype is None else dtype)
        return self.proj(jnp.pad(x, ((0, missing), (0, 0))))


class VisionAttention(nnx.Module):
    """Attention inside segments, with fused q, k, v."""

    def __init__(
        self, config: VisionConfig | Qwen3VisionConfig, *, rngs: nnx.Rngs, param_dtype: Any
    ):
        size = config.hidden_size
        kind = {"std": config.initializer_range, "rngs": rngs, "param_dtype": param_dtype}
        self.num_heads = config.num_heads
        self.qkv = Linear(size, 3 * size, bias=True, **kind)
        self.proj = Linear(size, size, bias=True, **kind)

    def project(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Maps float[L, D] to q, k (rotated) and v in one array, float[L, 3, N, H]."""
        qkv = self.qkv(x).reshape(x.shape[0], 3, self.num_heads, -1)
        turned = rotate(qkv[:, :2], cos[:, None], sin[:, None])
        return jnp.concatenate([turned, qkv[:, 2:]], axis=1)


def attend_segments(qkv: jax.Array, segments: Segments, backend: str = "auto") -> jax.Array:
    """Maps float[L, 3, N, H] to float[L, N * H]; `auto` is dense but for large pictures."""
    shape = segments.patch.shape
    if segments.is_plain:
        gathered = qkv.reshape(*shape, *qkv.shape[1:])
    else:
        gathered = qkv[segments.patch]  # [W, longest, 3, N, H]
    q, k, v = gathered[:, :, 0], gathered[:, :, 1], gathered[:, :, 2]
    valid = jnp.asarray(segments.valid)
    if shape[1] <= DENSE_SEGMENTS:
        backend = "dense"
    elif backend == "cudnn":  # which is causal alone
        backend = "auto"
    if choose_backend(backend, shape[1], jax.default_backend()) == "dense":
        mask = jnp.broadcast_to(valid[:, None, :], (shape[0], shape[1], shape[1]))
        out = attend(q, k, v, mask)
    else:
        group = jnp.where(valid, 0, -1)
        branch = jnp.zeros_like(group)
        out = attend_packed(q, k, v, group, branch, causal=False, backend=backend)
    out = out.reshape(shape[0] * shape[1], -1)
    return out if segments.is_plain else out[segments.place]


class VisionBlock(nnx.Module):
    """Pre-norm attention and MLP, each added to its input."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        size = config.hidden_size
        self.norm1 = RMSNorm(size, eps=NORM_EPS, param_dtype=param_dtype)
        self.attn = VisionAttention(config, rngs=rngs, param_dtype=param_dtype)
        self.norm2 = RMSNorm(size, eps=NORM_EPS, param_dtype=param_dtype)
        self.mlp = MLP(
            size,
            config.intermediate_size,
            bias=True,
            std=config.initializer_range,
            rngs=rngs,
            param_dtype=param_dtype,
        )

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        plan: VisionPlan,
        is_full: jax.Array,
        backend: str = "auto",
    ) -> jax.Array:
        """Maps float[L, D] to float[L, D]; `is_full` (bool[]) chooses the plan's frames."""
        qkv = self.attn.project(self.norm1(x), cos, sin)  # [L, 3, N, H]
        if plan.same_segments:
            attended = attend_segments(qkv, plan.windows, backend)
        else:
            attended = jax.lax.cond(
                is_full,
                lambda qkv: attend_segments(qkv, plan.frames, backend),
                lambda qkv: attend_segments(qkv, plan.windows, backend),
                qkv,
            )
        x = x + self.attn.proj(attended)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nnx.Module):
    """Joins each merge block of patches to one feature of the text tower's width."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        kind = {
            "bias": True,
            "std": config.initializer_range,
            "rngs": rngs,
            "param_dtype": param_dtype,
        }
        self.joined = config.hidden_size * config.merge_unit
        self.ln_q = RMSNorm(config.hidden_size, eps=NORM_EPS, param_dtype=param_dtype)
        # The checkpoint's names: a sequence of linear 0, activation 1, linear 2.
        self.mlp = nnx.Dict(
            {
                "0": Linear(self.joined, self.joined, **kind),
                "2": Linear(self.joined, config.out_hidden_size, **kind),
            }
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps float[L, D] to float[M, out], M = L / merge_unit (rows come in merge blocks)."""
        x = self.ln_q(x).reshape(-1, self.joined)
        return self.mlp["2"](jax.nn.gelu(self.mlp["0"](x), approximate=False))


class VisionTower(nnx.Module):
    """patch_embed, blocks (stacked), merger."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        self.config = config
        self.execution = Execution()
        self.patch_embed = PatchEmbed(config, bias=False, rngs=rngs, param_dtype=param_dtype)
        self.blocks = stack_layers(
            lambda rngs: VisionBlock(config, rngs=rngs, param_dtype=param_dtype), config.depth, rngs
        )
        self.merger = PatchMerger(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(
        self, pixel_values: jax.Array, plan: VisionPlan, *, remat: str = "none"
    ) -> jax.Array:
        """Maps patch rows to features.

        Args:
          pixel_values: float[L, C], L as planned. Rows may be missing at the end: they are zeros.
          remat: what blocks keep for the backward pass, see `layers.scan_layers`.
        Returns:
          float[M, out], one feature a merged cell in reading order; padding cells at the end.
        Raises:
          ValueError: more rows than planned.
        """
        dtype = self.execution.dtype_of(self.patch_embed.proj.weight.dtype)
        x = self.patch_embed(pixel_values, plan.num_patches, dtype)
        cos, sin = vision_rope(plan.position_hw, self.config.head_dim, self.config.rope_theta)

        def step(block, x, is_full):
            x = constrain(x, "patches", None)
            return block(x, cos, sin, plan, is_full, self.execution.attention), None

        is_full = np.isin(np.arange(self.config.depth), self.config.fullatt_block_indexes)
        x, _ = scan_layers(self.blocks, step, x, jnp.asarray(is_full), remat=remat)
        return self.merger(x)
