"""OpenMoji SVG -> a picture of fixed size, with small random changes (scale, turn, colour, noise,
crop).
"""

from __future__ import annotations

import functools
import io

import numpy as np
from PIL import Image

from svrl_jax.data import sources

# OpenMoji draws a flag inside this part of its 72 x 72 field: left, top, right, bottom.
_FLAG_BOX = (5.0, 17.0, 67.0, 55.0)
_RASTER_PX = 288


@functools.cache
def _raster(code: str) -> Image.Image:
    try:
        import resvg_py  # kept late: only the embedded default draws
    except ImportError as error:
        raise sources.missing("resvg_py") from error

    data = bytes(resvg_py.svg_to_bytes(svg_path=str(sources.svg_path(code)), width=_RASTER_PX))
    drawn = Image.open(io.BytesIO(data)).convert("RGBA")
    white = Image.new("RGBA", drawn.size, "white")
    return Image.alpha_composite(white, drawn).convert("RGB")


@functools.lru_cache(maxsize=2048)
def clean_picture(code: str, width_px: int, height_px: int, *, is_flag: bool) -> np.ndarray:
    """The emoji without random changes: uint8[height_px, width_px, 3], shared: do not write to it.

    A flag fills the canvas; an object stands centred on white at full height.
    """
    raster = _raster(code)
    if is_flag:
        box = tuple(v * _RASTER_PX / 72.0 for v in _FLAG_BOX)
        picture = raster.resize((width_px, height_px), Image.Resampling.LANCZOS, box=box)
        return np.asarray(picture)
    side = min(width_px, height_px)
    canvas = Image.new("RGB", (width_px, height_px), "white")
    small = raster.resize((side, side), Image.Resampling.LANCZOS)
    canvas.paste(small, ((width_px - side) // 2, (height_px - side) // 2))
    return np.asarray(canvas)


def draw(
    code: str, rng: np.random.Generator, width_px: int, height_px: int, *, is_flag: bool
) -> np.ndarray:
    """The emoji with small random changes: uint8[height_px, width_px, 3].

    Scale 0.92 to 1.12, turn up to 4 degrees, shift up to 3% of a side (what leaves the canvas is
    cropped), brightness and each colour channel up to 8%, Gaussian noise of 5 grey levels.
    """
    picture = Image.fromarray(clean_picture(code, width_px, height_px, is_flag=is_flag))
    scale, degrees = rng.uniform(0.92, 1.12), rng.uniform(-4.0, 4.0)
    shift_x, shift_y = rng.uniform(-0.03, 0.03, 2) * (width_px, height_px)
    cos, sin = np.cos(np.radians(degrees)) / scale, np.sin(np.radians(degrees)) / scale
    cx, cy = width_px / 2, height_px / 2
    matrix = (
        cos, sin, cx - cos * (cx + shift_x) - sin * (cy + shift_y),
        -sin, cos, cy + sin * (cx + shift_x) - cos * (cy + shift_y),
    )  # fmt: skip
    turned = picture.transform(
        picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor="white"
    )
    values = np.asarray(turned, np.float32)
    values = values * rng.uniform(0.92, 1.08) * rng.uniform(0.95, 1.05, 3).astype(np.float32)
    values = values + rng.normal(0.0, 5.0, values.shape).astype(np.float32)
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def to_png(picture: np.ndarray) -> bytes:
    """uint8[H, W, 3] -> PNG bytes."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
