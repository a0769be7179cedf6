"""Encoded pictures of others -> pictures of ours under their content's hash, or a stated reason.

Nothing that came from outside reaches a browser as it is: every picture is decoded under a limit of
pixels and encoded anew, upright and without its metadata.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pathlib
import tempfile
import warnings

from PIL import Image

from svrl_jax.processing.images import PictureError, load_picture

SIDES_PX = {"large": 1024, "small": 160}  # longest side of each stored size
MAX_ENCODED_BYTES = 64_000_000
# Others that Pillow knows start programs or are rare: a page of the web has no use for them.
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "ICO", "AVIF", "PPM")
_NAME_DIGITS = 32


@dataclasses.dataclass(frozen=True)
class Picture:
    """One picture as the page knows it.

    Attributes:
      name: start of the sha256 of the encoded bytes as they came.
      width, height: pixels of the original; 0 where it cannot be shown.
      problem: why it cannot be shown; "" where it can.
      files: size's name -> encoded WebP; empty where it cannot be shown.
    """

    name: str
    width: int
    height: int
    problem: str
    files: dict[str, bytes]

    def reference(self) -> dict:
        """What stands in the page's data."""
        if self.problem:
            return {"problem": self.problem}
        return {"name": self.name, "width": self.width, "height": self.height}


def convert(data: bytes, sizes: tuple[str, ...] = ("large", "small")) -> Picture:
    """Decodes, turns upright, makes smaller and encodes.

    Args:
      data: encoded bytes of any origin, not empty.
      sizes: keys of SIDES_PX.
    Returns:
      A Picture; one that cannot be decoded, or is above the limits, says so in `problem`.
    """
    name = hashlib.sha256(data).hexdigest()[:_NAME_DIGITS]
    if len(data) > MAX_ENCODED_BYTES:
        return Picture(name, 0, 0, f"{len(data):,} bytes are above the limit", {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # we have a limit
            image = load_picture(Image.open(io.BytesIO(data), formats=FORMATS))
    except (PictureError, Image.DecompressionBombError, OSError, ValueError) as error:
        cause = "no picture that can be read" if "identify" in str(error) else str(error)
        return Picture(name, 0, 0, cause.removeprefix("picture: ")[:200], {})
    files = {}
    for size in sizes:
        smaller = image.copy()
        smaller.thumbnail((SIDES_PX[size], SIDES_PX[size]), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        smaller.save(buffer, "WEBP", quality=86, method=2)
        files[size] = buffer.getvalue()
    return Picture(name, image.width, image.height, "", files)


class PictureFolder:
    """Pictures of a page's folder: NAME_SIZE.webp, each content once.

    Attributes:
      used: names of the files that this build's data may ask for.
    """

    def __init__(self, folder: pathlib.Path):
        """Args: folder: made if missing; what is there already is not encoded again."""
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[bytes, dict] = {}
        self.used: set[str] = set()

    def add(self, data: bytes | None) -> dict | None:
        """Stores a picture; returns its reference, or None where there is none."""
        if not data:
            return None
        key = hashlib.sha256(data).digest()
        if key not in self._known:
            picture = convert(data)
            self._known[key] = picture.reference()
            for size, encoded in picture.files.items():
                name = f"{picture.name}_{size}.webp"
                self.used.add(name)
                if not (self._folder / name).exists():
                    write_whole(self._folder / name, encoded)
        return self._known[key]


class InlinePictures:
    """Pictures kept in memory, for a page that is one string.

    Attributes:
      files: NAME_SIZE.webp -> encoded bytes.
    """

    def __init__(self):
        self.files: dict[str, bytes] = {}

    def add(self, data: bytes | None) -> dict | None:
        """Keeps a picture; returns its reference, or None where there is none."""
        if not data:
            return None
        picture = convert(data)
        for size, encoded in picture.files.items():
            self.files[f"{picture.name}_{size}.webp"] = encoded
        return picture.reference()


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Writes a file that appears only when it is whole. What can be made again need not be
    forced to the disk: `records.write_atomic` is for what cannot.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
