"""Picture patches -> features in the text tower's width: the vision tower, and its host-side plan.

Most layers attend inside windows of `window_size` pixels, a few over a whole picture. Both become
the same dense attention over static arrays: the plan (NumPy) says which patches form a segment, the
tower gathers them to [segments, longest], attends under a mask, and gathers back. So no attention
over all pictures at once, and any `fullatt_block_indexes` works.
Source: transformers 5.24 models/qwen2_5_vl/modeling_qwen2_5_vl.py and vision_utils.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from svrl_jax.models.qwen_vl.attention import attend
from svrl_jax.models.qwen_vl.config import VisionConfig
from svrl_jax.models.qwen_vl.layers import MLP, Linear, RMSNorm, scan_layers, stack_layers
from svrl_jax.models.qwen_vl.rope import rotate, vision_rope

NORM_EPS = 1e-6  # fixed in the reference, no config field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Patches cut into segments that attend among themselves.

    Attributes:
      patch: int32[W, longest], patch row of each place; 0 where the segment is shorter.
      valid: bool[W, longest], False on those places.
      place: int32[L], flat place (segment * longest + offset) of each patch row.
      is_plain: patch is 0, 1, 2, ... in order, so that gathering is reshaping. Static.
    """

    patch: jax.Array
    valid: jax.Array
    place: jax.Array
    is_plain: bool = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VisionPlan:
    """Where each patch of a set of pictures stands; shapes depend on the grids only.

    Attributes:
      position_hw: int32[L, 2], row and column of each patch in its picture.
      windows: the windowed layers' segments.
      frames: the full layers' segments, one a picture (a video: one a frame).
      same_segments: every window is a whole frame, so both kinds of layer are one. Static.
    """

    position_hw: jax.Array
    windows: Segments
    frames: Segments
    same_segments: bool = dataclasses.field(metadata={"static": True})

    @property
    def num_patches(self) -> int:
        """L, padding included."""
        return self.position_hw.shape[0]


def plan_vision(
    image_grid_thw: np.ndarray, vision_config: VisionConfig, pad_patches_to: int | None = None
) -> VisionPlan:
    """Plans the attention of the given pictures.

    Args:
      image_grid_thw: int[I, 3], patches (t, h, w) of each picture, in the order of the rows.
      pad_patches_to: L to pad to, a multiple of a window's patches. Then the number of segments and
        the longest frame are rounded up to powers of two as well, so that few shapes are compiled.
        Padding patches form segments of their own. None: exact shapes.
    Returns:
      A plan of NumPy arrays.
    Raises:
      ValueError: no picture, a grid that does not merge evenly, or too little room.
    """
    grids = np.asarray(image_grid_thw, np.int64).reshape(-1, 3)
    merge, unit = vision_config.spatial_merge_size, vision_config.merge_unit
    if not len(grids):
        raise ValueError("no picture to plan for; call the model with image_embeds=None")
    if (grids <= 0).any() or (grids[:, 1:] % merge).any():
        raise ValueError(f"grids {grids.tolist()}: h and w must be positive multiples of {merge}")
    side = vision_config.window_size // merge // vision_config.patch_size  # merged cells
    windows: list[np.ndarray] = []
    frames: list[np.ndarray] = []
    position_hw = []
    first = 0
    for grid in grids:
        windows += [first + w for w in _windows(grid, merge, side)]
        frames += np.split(first + np.arange(grid.prod()), grid[0])
        position_hw.append(_positions(grid, merge))
        first += int(grid.prod())
    window_patches = side * side * unit
    if pad_patches_to is not None:
        if pad_patches_to < first or pad_patches_to % window_patches:
            raise ValueError(
                f"pad_patches_to={pad_patches_to} must be at least the {first} patches and a "
                f"multiple of a window's {window_patches}"
            )
        padding = np.arange(first, pad_patches_to)
        # Pieces as long as the longest frame: shorter ones would each be padded to its length, and
        # full attention over a padded large picture would cost that many times too much.
        frames += _pieces(padding, max(map(len, frames)))
        windows += _pieces(padding, window_patches)
        position_hw.append(np.zeros((pad_patches_to - first, 2), np.int64))
    total = first if pad_patches_to is None else pad_patches_to
    bucket = pad_patches_to is not None
    same = not bucket and len(windows) == len(frames)
    width = window_patches if bucket else max(map(len, windows))
    longest = max(map(len, frames))
    return VisionPlan(
        position_hw=np.concatenate(position_hw).astype(np.int32),
        windows=_segments(windows, width, total, bucket),
        frames=_segments(frames, _power_of_two(longest) if bucket else longest, total, bucket),
        same_segments=same,
    )


def pad_pixel_values(pixel_values: np.ndarray, plan: VisionPlan) -> np.ndarray:
    """Adds zero rows to float32[L, C] until it has the plan's number of patches."""
    return np.pad(pixel_values, ((0, plan.num_patches - len(pixel_values)), (0, 0)))


class PatchEmbed(nnx.Module):
    """A patch row to float[D]: the checkpoint's Conv3d as one matrix, over both time slices."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        self.proj = Linear(
            config.patch_dim,
            config.hidden_size,
            bias=False,
            std=config.initializer_range,
            rngs=rngs,
            param_dtype=param_dtype,
        )

    def __call__(self, pixel_values: jax.Array) -> jax.Array:
        """Maps float[L, C] to float[L, D]."""
        return self.proj(pixel_values)


class VisionAttention(nnx.Module):
    """Attention inside segments, with fused q, k, v."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: Any):
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
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, plan: VisionPlan, is_full: jax.Array
    ) -> jax.Array:
        """Maps float[L, D] to float[L, D]; `is_full` (bool[]) chooses the plan's frames."""
        qkv = self.attn.project(self.norm1(x), cos, sin)  # [L, 3, N, H]
        if plan.same_segments:
            attended = _attend_segments(qkv, plan.windows)
        else:
            attended = jax.lax.cond(
                is_full,
                lambda qkv: _attend_segments(qkv, plan.frames),
                lambda qkv: _attend_segments(qkv, plan.windows),
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
        self.patch_embed = PatchEmbed(config, rngs=rngs, param_dtype=param_dtype)
        self.blocks = stack_layers(
            lambda rngs: VisionBlock(config, rngs=rngs, param_dtype=param_dtype), config.depth, rngs
        )
        self.merger = PatchMerger(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(
        self, pixel_values: jax.Array, plan: VisionPlan, *, remat: bool = False
    ) -> jax.Array:
        """Maps patch rows to features.

        Args:
          pixel_values: float[L, C], L as planned. Rows may be missing at the end: they are zeros.
          remat: recompute each block in the backward pass.
        Returns:
          float[M, out], one feature a merged cell in reading order; padding cells at the end.
        Raises:
          ValueError: more rows than planned.
        """
        missing = plan.num_patches - pixel_values.shape[0]
        if missing < 0:
            raise ValueError(f"{pixel_values.shape[0]} patch rows, plan for {plan.num_patches}")
        dtype = self.patch_embed.proj.weight.dtype
        x = jnp.pad(jnp.asarray(pixel_values, dtype), ((0, missing), (0, 0)))
        x = self.patch_embed(x)
        cos, sin = vision_rope(plan.position_hw, self.config.head_dim, self.config.rope_theta)

        def step(block, x, is_full):
            return block(x, cos, sin, plan, is_full), None

        is_full = np.isin(np.arange(self.config.depth), self.config.fullatt_block_indexes)
        x, _ = scan_layers(self.blocks, step, x, jnp.asarray(is_full), remat=remat)
        return self.merger(x)


def _attend_segments(qkv: jax.Array, segments: Segments) -> jax.Array:
    """Maps float[L, 3, N, H] to float[L, N * H]."""
    shape = segments.patch.shape
    if segments.is_plain:
        gathered = qkv.reshape(*shape, *qkv.shape[1:])
    else:
        gathered = qkv[segments.patch]  # [W, longest, 3, N, H]
    q, k, v = gathered[:, :, 0], gathered[:, :, 1], gathered[:, :, 2]
    mask = jnp.broadcast_to(jnp.asarray(segments.valid)[:, None, :], (shape[0], shape[1], shape[1]))
    out = attend(q, k, v, mask).reshape(shape[0] * shape[1], -1)
    return out if segments.is_plain else out[segments.place]


def _pieces(rows: np.ndarray, length: int) -> list[np.ndarray]:
    """`rows` cut into pieces of `length`, the last one shorter."""
    return [rows[i : i + length] for i in range(0, len(rows), length)]


def _windows(grid: np.ndarray, merge: int, side: int) -> list[np.ndarray]:
    """Patch rows of each window of one picture, windows in raster order, cells too.

     The reference pads by a whole empty window when the grid divides evenly and drops it afterwards
    ; here no empty window is made.
    """
    grid_t, cells_h, cells_w = int(grid[0]), int(grid[1]) // merge, int(grid[2]) // merge
    cells = np.arange(grid_t * cells_h * cells_w).reshape(grid_t, cells_h, cells_w)
    inside = np.arange(merge * merge)
    return [
        (cells[t, h : h + side, w : w + side].reshape(-1, 1) * merge**2 + inside).reshape(-1)
        for t in range(grid_t)
        for h in range(0, cells_h, side)
        for w in range(0, cells_w, side)
    ]


def _positions(grid: np.ndarray, merge: int) -> np.ndarray:
    """int[L, 2], (row, column) of each patch in merge-block order: (0,0)(0,1)(1,0)(1,1)(0,2)..."""
    grid_t, grid_h, grid_w = (int(n) for n in grid)
    hw = np.indices((grid_h, grid_w)).reshape(2, grid_h // merge, merge, grid_w // merge, merge)
    hw = hw.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    return np.tile(hw, (grid_t, 1))


def _segments(rows: list[np.ndarray], width: int, total: int, bucket: bool) -> Segments:
    count = _power_of_two(len(rows)) if bucket else len(rows)
    patch = np.zeros((count, width), np.int32)
    valid = np.zeros((count, width), bool)
    place = np.zeros((total,), np.int32)
    for i, row in enumerate(rows):
        patch[i, : len(row)] = row
        valid[i, : len(row)] = True
        place[row] = i * width + np.arange(len(row))
    is_plain = count * width == total and bool((patch.reshape(-1) == np.arange(total)).all())
    return Segments(patch, valid, place, is_plain)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
