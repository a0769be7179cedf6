"""Picture grids -> where each patch stands and which patches it attends to (host, NumPy).

Most layers of Qwen2.5-VL attend inside windows of `window_size` pixels, a few (in Qwen3-VL all)
over a whole picture. Both become the same dense attention over static arrays: the plan says which
patches form a segment, the tower gathers them to [segments, longest], attends under a mask, and
gathers back. So no attention over all pictures at once, and any `fullatt_block_indexes` works.
Source: transformers 5.24 vision_utils.py (`get_window_index`, `get_vision_position_ids`,
`get_vision_interpolation_indices_and_weights`).
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from svrl_jax.models.qwen_vl.config import Qwen3VisionConfig, VisionConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Patches cut into segments that attend among themselves.

    Attributes:
      patch: int32[W, longest], patch row of each place; 0 where the segment is shorter.
      valid: bool[W, longest], False on those places.
      place: int32[L], flat place (segment * longest + offset) of each patch row; 0 for padding
        rows, which are in no segment and read what the first patch attended to.
      is_plain: patch is 0, 1, 2, ... in order, so that gathering is reshaping. Static.
    """

    patch: jax.Array
    valid: jax.Array
    place: jax.Array
    is_plain: bool = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Taps:
    """Which learned positions each patch mixes (Qwen3-VL).

    Attributes:
      row: int32[L, 4], rows of the position table.
      weight: float32[L, 4], their shares; they sum to 1.
    """

    row: jax.Array
    weight: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VisionPlan:
    """Where each patch of a set of pictures stands; shapes depend on the grids only.

    Attributes:
      position_hw: int32[L, 2], row and column of each patch in its picture.
      windows: the windowed layers' segments; None in Qwen3-VL, which has none.
      frames: the full layers' segments, one a picture (a video: one a frame).
      taps: learned positions of Qwen3-VL; None in Qwen2.5-VL, which has none.
      same_segments: every window is a whole frame, so both kinds of layer are one. Static.
    """

    position_hw: jax.Array
    windows: Segments | None
    frames: Segments
    taps: Taps | None
    same_segments: bool = dataclasses.field(metadata={"static": True})

    @property
    def num_patches(self) -> int:
        """L, padding included."""
        return self.position_hw.shape[0]


def plan_vision(
    image_grid_thw: np.ndarray,
    vision_config: VisionConfig | Qwen3VisionConfig,
    pad_patches_to: int | None = None,
) -> VisionPlan:
    """Plans the attention of the given pictures.

    Args:
      image_grid_thw: int[I, 3], patches (t, h, w) of each picture, in the order of the rows.
      pad_patches_to: L to pad to, a multiple of the config's `pad_unit`. Then the number of
        segments and the longest frame are rounded up to few sizes as well (`few_sizes`), so that
        few shapes are compiled. None: exact shapes.
    Returns:
      A plan of NumPy arrays.
    Raises:
      ValueError: no picture, a grid that does not merge evenly, or too little room.
    """
    grids = np.asarray(image_grid_thw, np.int64).reshape(-1, 3)
    merge = vision_config.spatial_merge_size
    if not len(grids):
        raise ValueError("no picture to plan for; call the model with image_embeds=None")
    if (grids <= 0).any() or (grids[:, 1:] % merge).any():
        raise ValueError(f"grids {grids.tolist()}: h and w must be positive multiples of {merge}")
    first = np.cumsum(grids.prod(axis=1)) - grids.prod(axis=1)  # patch row of each picture
    real = int(grids.prod(axis=1).sum())
    total = real if pad_patches_to is None else _checked_total(pad_patches_to, real, vision_config)
    frames = [f for start, grid in zip(first, grids) for f in _frames(start, grid)]
    longest = max(map(len, frames))
    position_hw = np.concatenate([_positions(grid, merge) for grid in grids])
    bucket = pad_patches_to is not None
    whole = _segments(frames, few_sizes(longest) if bucket else longest, total, bucket)
    windows = taps = None
    same_segments = True
    if isinstance(vision_config, VisionConfig):
        cut = _window_rows(grids, first, vision_config)
        same_segments = len(cut) == len(frames)
        width = vision_config.pad_unit if bucket else max(map(len, cut))
        windows = whole if same_segments else _segments(cut, width, total, bucket)
    else:
        taps = _taps(grids, position_hw, total, vision_config.positions_per_side)
    return VisionPlan(
        position_hw=np.pad(position_hw, ((0, total - real), (0, 0))).astype(np.int32),
        windows=windows,
        frames=whole,
        taps=taps,
        same_segments=same_segments,
    )


def pad_pixel_values(pixel_values: np.ndarray, plan: VisionPlan) -> np.ndarray:
    """Adds zero rows to float32[L, C] until it has the plan's number of patches."""
    return np.pad(pixel_values, ((0, plan.num_patches - len(pixel_values)), (0, 0)))


def _checked_total(wanted: int, real: int, config: VisionConfig | Qwen3VisionConfig) -> int:
    if wanted < real or wanted % config.pad_unit:
        raise ValueError(
            f"pad_patches_to={wanted} must be at least the {real} patches and a multiple of "
            f"{config.pad_unit} (a window's patches, or a merged cell's)"
        )
    return wanted


def _frames(first: int, grid: np.ndarray) -> list[np.ndarray]:
    """Patch rows of each frame of one picture."""
    return np.split(first + np.arange(grid.prod()), grid[0])


def _window_rows(grids: np.ndarray, first: np.ndarray, config: VisionConfig) -> list[np.ndarray]:
    """Patch rows of each window of all pictures."""
    merge = config.spatial_merge_size
    side = config.window_size // merge // config.patch_size  # merged cells
    return [s + w for s, grid in zip(first, grids) for w in _windows(grid, merge, side)]


def _windows(grid: np.ndarray, merge: int, side: int) -> list[np.ndarray]:
    """Patch rows of each window of one picture, windows in raster order, cells too.

    The reference pads by a whole empty window when the grid divides evenly and drops it afterwards;
    here no empty window is made.
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


def _taps(grids: np.ndarray, position_hw: np.ndarray, total: int, side: int) -> Taps:
    """The square table of learned positions stretched over each picture, corner on corner.

    Patch i of n on an axis stands at i * (side - 1) / (n - 1) of the table and mixes the two rows
    around; so a patch mixes four. Padding patches take no row (weights 0).
    """
    sizes = np.repeat(grids[:, 1:], grids.prod(axis=1), axis=0)  # [L, 2]
    place = position_hw.astype(np.float32) * np.float32(side - 1) / (sizes - 1).astype(np.float32)
    low = np.floor(place)
    share = place - low
    low = low.astype(np.int64)
    high = np.minimum(low + 1, side - 1)
    rows = np.stack([low[:, 0], high[:, 0]], axis=1)[:, :, None] * side  # [L, 2, 1]
    columns = np.stack([low[:, 1], high[:, 1]], axis=1)[:, None, :]
    weights = np.stack([1 - share, share], axis=1)  # [L, 2 taps, hw]
    weights = weights[:, :, None, 0] * weights[:, None, :, 1]  # [L, 2, 2]
    pad = ((0, total - len(sizes)), (0, 0))
    return Taps(
        np.pad((rows + columns).reshape(-1, 4), pad).astype(np.int32),
        np.pad(weights.reshape(-1, 4), pad),
    )


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


def few_sizes(number: int) -> int:
    """Rounds up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: by a third at most, where powers of two would
    all but double a large picture, and its attention four times."""
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if power >= 4 and number <= power * 3 // 4 else power


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
