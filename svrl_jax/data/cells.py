"""Cells of published tables -> encoded pictures, answers and questions of a Task, decoded once.

The same thing comes in many forms: a picture as {bytes, path}, bytes, base64 text or a path;
answers as a list, a NumPy array, JSON text of a list or plain text. Whatever cannot be read raises
RowError with a reason; nothing is dropped in silence.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from svrl_jax.processing.images import MAX_ASPECT_RATIO, PictureError, load_picture

# Placeholder of a picture in the chat texts of other trainers; our prompt puts the picture itself.
_PICTURE_MARK = re.compile(r"\s*<image>\s*")
_MIN_BASE64_CHARS = 64  # shorter text is a path: no encoded picture is that small


class RowError(ValueError):
    """A published row that cannot become a task; the message is the reason."""


def picture_bytes(cell: Any, folders: Sequence[pathlib.Path]) -> bytes:
    """The encoded picture in a cell, byte for byte as published.

    Args:
      cell: {bytes, path}, bytes, a PIL picture (encoded as PNG), base64 text with or without a
        `data:` head, a path, or a list of one of these. None, "", NaN, [] and {bytes None, path
        None} mean no picture.
      folders: where relative paths start; the first that holds the file counts.
    Returns:
      Encoded bytes; b"" for no picture.
    Raises:
      RowError: several pictures, a missing file, a web address, or a form not known.
    """
    if isinstance(cell, np.ndarray):
        cell = cell.tolist()
    if cell is None or (isinstance(cell, float) and np.isnan(cell)):
        return b""
    if isinstance(cell, list | tuple):
        if len(cell) > 1:
            raise RowError(f"it has {len(cell)} pictures, a task has one")
        return picture_bytes(cell[0], folders) if cell else b""
    if isinstance(cell, Mapping):
        return picture_bytes(cell.get("bytes") or cell.get("path"), folders)
    if isinstance(cell, bytes | bytearray | memoryview):
        return bytes(cell)
    if isinstance(cell, Image.Image):
        buffer = io.BytesIO()
        cell.save(buffer, "PNG")
        return buffer.getvalue()
    if isinstance(cell, str | os.PathLike):
        return _picture_from_text(os.fspath(cell), folders)
    raise RowError(f"its picture is a {type(cell).__name__}, which is not known")


def picture_size(data: bytes) -> tuple[int, int]:
    """(width, height) in pixels of an encoded picture, upright, after decoding all of it.

    Raises:
      RowError: it cannot be decoded, or one side is too long for the model (see smart_resize).
    """
    try:
        picture = load_picture(data)
    except PictureError as error:
        raise RowError(str(error)) from error
    width, height = picture.size
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise RowError(f"its picture of {width} x {height} px is too narrow")
    return width, height


def answers(*cells: Any) -> tuple[str, ...]:
    """Accepted answers of several cells, the truth's cell first: each once, in order, none blank.

    A cell is text, a number, a list or NumPy array of these, or JSON text of such a list. Text that
    begins with "[" but is no JSON list is one literal answer. None means no answer.

    Raises:
      RowError: no answer is left (a row without a gold would reward by accident), or an entry that
        is neither text nor number.
    """
    found: dict[str, None] = {}
    for cell in cells:
        for text in map(str.strip, texts(cell)):
            if text:
                found.setdefault(text)
    if not found:
        raise RowError("it has no answer")
    return tuple(found)


def texts(cell: Any) -> list[str]:
    """A cell as a list of texts; see `answers` for its forms."""
    if isinstance(cell, np.ndarray | np.generic):
        cell = cell.tolist()
    if cell is None or (isinstance(cell, float) and np.isnan(cell)):
        return []
    if isinstance(cell, str):
        listed = _json_list(cell)
        return [cell] if listed is None else texts(listed)
    if isinstance(cell, bool):
        return ["yes" if cell else "no"]
    if isinstance(cell, int | float):
        return [str(cell)]
    if isinstance(cell, list | tuple):
        return [text for entry in cell for text in _entry_texts(entry)]
    raise RowError(f"an answer is a {type(cell).__name__}, neither text nor number")


def question(cell: Any) -> str:
    """The user's question: plain text, or the last user message of a chat.

    `<image>` marks of other trainers are taken out.

    Raises:
      RowError: no text is there.
    """
    if isinstance(cell, np.ndarray):
        cell = cell.tolist()
    if isinstance(cell, list | tuple):
        users = [m for m in cell if isinstance(m, Mapping) and m.get("role") == "user"]
        cell = users[-1].get("content") if users else None
        if isinstance(cell, list | tuple):  # parts of a message
            cell = " ".join(p["text"] for p in cell if p.get("type") == "text")
    if not isinstance(cell, str):
        raise RowError("it has no question")
    text = _PICTURE_MARK.sub(" ", cell).strip() if "<image>" in cell else cell.strip()
    if not text:
        raise RowError("it has no question")
    return text


def text_or_empty(cell: Any) -> str:
    """A cell's text; "" for None and NaN; a number as text."""
    if cell is None or (isinstance(cell, float) and np.isnan(cell)):
        return ""
    return str(cell).strip()


def _picture_from_text(text: str, folders: Sequence[pathlib.Path]) -> bytes:
    if not text.strip():
        return b""
    if text.startswith("data:"):
        return _from_base64(text.partition(",")[2])
    if re.match(r"https?://", text):
        raise RowError(f"its picture is the address {text[:80]}, download it first")
    for path in (os.path.join(folder, text) for folder in folders):
        if os.path.isfile(path):
            return pathlib.Path(path).read_bytes()
    if len(text) >= _MIN_BASE64_CHARS and re.fullmatch(r"[A-Za-z0-9+/=\s]+", text):
        return _from_base64(text)
    raise RowError(f"its picture file {text[:80]} is missing")


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise RowError(f"its picture is broken base64 ({error})") from error


def _json_list(text: str) -> list | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _entry_texts(entry: Any) -> list[str]:
    """One entry of a list: a text is literal here, it is not decoded again."""
    if isinstance(entry, str):
        return [entry]
    if entry is None or isinstance(entry, int | float | np.generic):
        return texts(entry)
    raise RowError(f"an answer is a {type(entry).__name__}, neither text nor number")
