"""Encoded pictures -> upright RGB -> patch rows, equal to transformers' Qwen2VLImageProcessorPil.

Source: transformers 5.24 models/qwen2_vl/image_processing_pil_qwen2_vl.py. Prompt pictures and tool
pictures take this same path.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps

MAX_PICTURE_PIXELS = 64_000_000  # decoded; about 200 MB as RGB
MAX_ASPECT_RATIO = 200  # longer side over shorter, the reference's limit
BACKGROUND = (255, 255, 255)  # what shows through clear areas
PROCESSOR_CLASSES = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}


class PictureError(ValueError):
    """A picture that cannot be used: broken, no picture at all, too large, too narrow."""


def load_picture(
    source: bytes | str | os.PathLike | Image.Image,
    *,
    name: str = "",
    max_pixels: int = MAX_PICTURE_PIXELS,
) -> Image.Image:
    """Decodes a picture to upright RGB.

    The camera's rotation tag is obeyed (one that cannot be read turns nothing), clear areas show
    white, grey becomes three equal channels, of an animation the first frame counts. The size is
    checked before pixels are decoded.

    Args:
      source: encoded bytes, a path, or a PIL picture, which gets the same treatment; of an opened
        animation the frame it stands at.
      name: row id or address, for the message.
      max_pixels: width * height above which the picture is refused.
    Returns:
      A PIL picture of mode RGB.
    Raises:
      PictureError: with `name` and the cause.
    """
    if not name and isinstance(source, str | os.PathLike):
        name = os.fspath(source)
    label = f"picture {name}: " if name else "picture: "
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own check follows
            image = _open(source)
        if image.width * image.height > max_pixels:
            raise PictureError(
                f"{label}{image.width} x {image.height} px is above the limit of {max_pixels} px"
            )
        image.load()
        return _to_rgb(_upright(image))
    except PictureError:
        raise
    except Exception as error:  # decoders raise all kinds: OSError, SyntaxError, struct.error, ...
        raise PictureError(f"{label}cannot be decoded: {error}") from error


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The size a picture is brought to before it is cut into patches.

    Each side becomes a multiple of `factor`; the area is brought between the bounds, keeping the
    shape as far as that allows. Two choices, both the reference's: a side that is x.5 tiles goes to
    the even number; and no side falls below one tile, so a very narrow picture may stay above
    `max_pixels` (28 x 5600 under a budget of 20 tiles gives 28 x 1764).

    Args:
      height, width: pixels.
      factor: pixels of a merged cell's side.
      min_pixels, max_pixels: bounds of the area.
    Returns:
      (height, width).
    Raises:
      PictureError: one side is more than 200 times the other.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise PictureError(
            f"picture: {width} x {height} px has sides in the ratio {ratio:.1f}; "
            f"the limit is {MAX_ASPECT_RATIO}"
        )
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        tall = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif tall * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        tall = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    return tall, wide


@dataclasses.dataclass(frozen=True)
class ImageProcessor:
    """Resizes, normalises and cuts pictures. Defaults are the values of the Qwen2.5-VL release;
    `QWEN3_VL` holds the other release's.

    Attributes:
      patch_size, temporal_patch_size, merge_size: pixels, frames, patches.
      min_pixels, max_pixels: bounds of the resized area.
      mean, std: per channel, of values in [0, 1].
    """

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 3136
    max_pixels: int = 12_845_056
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> ImageProcessor:
        """Reads preprocessor_config.json, or processor_config.json as transformers 5 writes it.

        Raises:
          FileNotFoundError: neither is there.
          ValueError: a setting that this processor does not have.
        """
        for file_name in ("preprocessor_config.json", "processor_config.json"):
            path = os.path.join(folder, file_name)
            if os.path.isfile(path):
                with open(path, encoding="utf-8") as file:
                    found = json.load(file)
                return cls.from_hf(found.get("image_processor", found))
        raise FileNotFoundError(f"{folder} holds no preprocessor_config.json")

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ImageProcessor:
        """Reads a parsed preprocessor_config.json.

        The bounds stand in `size` or in `min_pixels` and `max_pixels`, which count first. Without
        either they have transformers' class default, which is not the release's.

        Raises:
          ValueError: a setting that this processor does not have, or a bound missing.
        """
        for switch in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if not config.get(switch, True):
                raise ValueError(f"preprocessor_config.json: {switch} false is not supported")
        for name, expected in (("resample", 3), ("rescale_factor", 1 / 255)):
            if abs(config.get(name, expected) - expected) > 1e-6:
                raise ValueError(
                    f"preprocessor_config.json: {name} is {config[name]}, not {expected}"
                )
        size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        if config.get("size") is not None:
            size = config["size"]
        shortest = _first_set(config.get("min_pixels"), size.get("shortest_edge"))
        longest = _first_set(config.get("max_pixels"), size.get("longest_edge"))
        if shortest is None or longest is None:
            raise ValueError(
                "preprocessor_config.json: size must name shortest_edge and longest_edge, pixels "
                f"of a picture, or min_pixels and max_pixels stand beside it; it is {size}"
            )
        names = {"patch_size", "merge_size", "temporal_patch_size"} & set(config)
        channels = {
            own: tuple(config[theirs])
            for own, theirs in (("mean", "image_mean"), ("std", "image_std"))
            if theirs in config
        }
        return cls(
            min_pixels=int(shortest),
            max_pixels=int(longest),
            **{name: int(config[name]) for name in names},
            **channels,
        )

    def to_hf(self, family: str = "qwen2_5_vl") -> dict[str, Any]:
        """Returns the contents of a preprocessor_config.json that transformers reads.

        Args:
          family: `model_type` of the model that it stands beside.
        """
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": PROCESSOR_CLASSES[family],
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "patch_size": self.patch_size,
            "temporal_patch_size": self.temporal_patch_size,
            "merge_size": self.merge_size,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }

    def save(self, folder: str | os.PathLike, family: str = "qwen2_5_vl") -> None:
        """Writes preprocessor_config.json."""
        with open(os.path.join(folder, "preprocessor_config.json"), "w", encoding="utf-8") as file:
            json.dump(self.to_hf(family), file, indent=2)
            file.write("\n")

    @property
    def patch_dim(self) -> int:
        """C, the numbers of one patch row."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def grid_thw(self, height: int, width: int) -> tuple[int, int, int]:
        """The patch grid of a picture of the given pixels, without decoding it."""
        factor = self.patch_size * self.merge_size
        tall, wide = smart_resize(height, width, factor, self.min_pixels, self.max_pixels)
        return 1, tall // self.patch_size, wide // self.patch_size

    def __call__(self, pictures: Sequence[Image.Image]) -> tuple[np.ndarray, np.ndarray]:
        """Cuts pictures into patch rows.

        Args:
          pictures: as `load_picture` gives them (other modes are brought to RGB the same way).
        Returns:
          (pixel_values float32[L, C], image_grid_thw int32[I, 3]); rows in merge blocks, each row
          flattened channel, frame, row, column. No picture gives L = I = 0.
        Raises:
          PictureError: a picture too narrow to resize.
        """
        rows, grids = [np.zeros((0, self.patch_dim), np.float32)], []
        for picture in pictures:
            picture = picture if picture.mode == "RGB" else load_picture(picture)
            grid = self.grid_thw(picture.height, picture.width)
            size = (grid[2] * self.patch_size, grid[1] * self.patch_size)
            resized = picture.resize(size, Image.Resampling.BICUBIC)
            rows.append(self._patches(np.asarray(resized), grid))
            grids.append(grid)
        return np.concatenate(rows), np.asarray(grids, np.int32).reshape(-1, 3)

    def _patches(self, image: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
        """Maps uint8[height, width, 3] to float32[patches, C]."""
        merge, patch = self.merge_size, self.patch_size
        # The reference's arithmetic to the bit: scaled in float64, then float32 throughout.
        values = (image.transpose(2, 0, 1).astype(np.float64) * (1 / 255)).astype(np.float32)
        mean = np.asarray(self.mean, np.float32)[:, None, None]
        std = np.asarray(self.std, np.float32)[:, None, None]
        values = (values - mean) / std
        cells_h, cells_w = grid[1] // merge, grid[2] // merge
        values = values.reshape(3, cells_h, merge, patch, cells_w, merge, patch)
        values = values.transpose(1, 4, 2, 5, 0, 3, 6)  # [cell row, cell col, m, m, C, ph, pw]
        # A still picture is one frame shown `temporal_patch_size` times.
        values = np.repeat(values[:, :, :, :, :, None], self.temporal_patch_size, axis=5)
        return values.reshape(grid[1] * grid[2], -1)


# The values of the Qwen3-VL release.
QWEN3_VL = ImageProcessor(
    patch_size=16,
    min_pixels=65_536,
    max_pixels=16_777_216,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)


def _first_set(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _open(source: bytes | str | os.PathLike | Image.Image) -> Image.Image:
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return Image.open(io.BytesIO(bytes(source)))
    with open(source, "rb") as file:
        return Image.open(io.BytesIO(file.read()))


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # many pictures on the web carry broken EXIF blocks around sound pixels
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if image.mode.startswith("I"):  # 16-bit grey; PIL's own conversion clips at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        clear = image.convert("RGBA")
        solid = Image.new("RGBA", image.size, (*BACKGROUND, 255))
        return Image.alpha_composite(solid, clear).convert("RGB")
    return image.convert("RGB")
