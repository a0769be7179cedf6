"""FVQA's published image-search cache, a pickle -> plain results, once; nothing else reads pickles.

Form: {data_id: {tool_returned_web_title_list: [title], tool_returned_images_urls: [address, or a
pickled Pillow picture]}}, lists of equal length (lmms-lab/FVQA). A pickle may name any function to
call, so this unpickler resolves no name at all but those of Pillow's picture classes, and to them
gives a stub that keeps the state it is handed. Pixels are opened from that state under limits.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import pickle
from collections.abc import Iterator
from typing import Any

from PIL import Image

MAX_BYTES = 256_000_000  # of a cache file; the published ones have 4 and 11 MB
_TITLES, _PICTURES = "tool_returned_web_title_list", "tool_returned_images_urls"
_PICTURE_CLASSES = {
    ("PIL.Image", "Image"),
    ("PIL.JpegImagePlugin", "JpegImageFile"),
    ("PIL.PngImagePlugin", "PngImageFile"),
}
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")


class CacheError(RuntimeError):
    """A cache that cannot be read; the message names the entry and the remedy."""


@dataclasses.dataclass(frozen=True)
class CachedResult:
    """One result.

    Attributes:
      title: page title.
      picture: address of the thumbnail, its PNG bytes, or "" where it cannot be opened.
    """

    title: str
    picture: str | bytes


def read_cache(
    path: str | os.PathLike, *, max_pixels: int, thumbnail_px: int
) -> Iterator[tuple[str, list[CachedResult]]]:
    """(data_id, results, best first) of every entry.

    Args:
      max_pixels: width * height of a picture; a larger one is "".
      thumbnail_px: longer side of a picture as it is given.
    Raises:
      CacheError: no such file, a pickle that names anything but pictures, or another form.
    """
    entries = _load(pathlib.Path(path))
    for data_id, entry in entries.items():
        titles, pictures = _lists(path, data_id, entry)
        yield data_id, [
            CachedResult(title, picture if isinstance(picture, str) else
                         _png(picture, max_pixels, thumbnail_px))
            for title, picture in zip(titles, pictures, strict=True)
        ]  # fmt: skip


class _Picture:
    """Stands for a pickled Pillow picture."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) in _PICTURE_CLASSES:
            return _Picture
        raise CacheError(f"it names {module[:60]}.{name[:60]}, which is no picture")


def _load(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        raise CacheError(f"{path} does not exist")
    if path.stat().st_size > MAX_BYTES:
        raise CacheError(f"{path} is larger than {MAX_BYTES} bytes: it is no FVQA cache")
    try:
        with path.open("rb") as file:
            entries = _Unpickler(file).load()
    except CacheError as error:
        raise CacheError(f"{path} is refused: {error}") from None
    except Exception as error:  # a damaged or hostile pickle raises what it likes
        raise CacheError(f"{path} is no pickle of plain values ({type(error).__name__})") from error
    if type(entries) is not dict:
        raise CacheError(f"{path} holds no dict: name FVQA's image-search cache")
    return entries


def _lists(path, data_id: Any, entry: Any) -> tuple[list[str], list[str | _Picture]]:
    titles = entry.get(_TITLES) if type(entry) is dict else None
    pictures = entry.get(_PICTURES) if type(entry) is dict else None
    is_whole = type(data_id) is str and type(titles) is list and type(pictures) is list
    if (
        not is_whole
        or len(titles) != len(pictures)
        or any(type(title) is not str for title in titles)
        or any(type(picture) not in (str, _Picture) for picture in pictures)
    ):
        name = data_id if type(data_id) is str else type(data_id).__name__
        raise CacheError(f"{path}, entry {name[:60]!r}: not two lists of equal length")
    return titles, pictures


def _png(picture: _Picture, max_pixels: int, thumbnail_px: int) -> bytes | str:
    """The pixels of a pickled picture: its state is [info, mode, size, palette, pixels, ...]."""
    try:
        _, mode, (width, height), palette, pixels = picture.state[:5]
        is_sound = (
            mode in _MODES
            and type(width) is type(height) is int
            and width > 0 < height
            and width * height <= max_pixels
            and type(pixels) is bytes
        )
        if not is_sound:
            return ""
        image = Image.frombytes(mode, (width, height), pixels)
        if mode == "P":
            image.putpalette(bytes(palette))
    except (AttributeError, TypeError, ValueError, OverflowError, KeyError):
        return ""
    image = image.convert("RGB")
    image.thumbnail((thumbnail_px, thumbnail_px), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
