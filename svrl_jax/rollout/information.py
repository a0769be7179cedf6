"""A tool's items -> the tokens and pictures of the turn that carries them.

An item is one piece: its thumbnail, if it has one, then its text. Pieces are shown whole or not at
all, so a cut to the budget never falls into a picture.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.processing.images import ImageProcessor, PictureError, load_picture
from svrl_jax.protocol import render
from svrl_jax.types import SearchItem

NO_PIXELS = np.zeros((0, 0), np.float32)
NO_GRIDS = np.zeros((0, 3), np.int32)
UNREADABLE = "(its picture cannot be read)"


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of a context.

    Attributes:
      ids: int32[n].
      pixel_values: float32[L, C], pictures whose placeholders stand in `ids`; L = 0 for none.
      image_grid_thw: int32[I, 3] of those pictures.
    """

    ids: np.ndarray
    pixel_values: np.ndarray = dataclasses.field(default_factory=lambda: NO_PIXELS)
    image_grid_thw: np.ndarray = dataclasses.field(default_factory=lambda: NO_GRIDS)

    def __len__(self) -> int:
        return len(self.ids)


class ToolPictures:
    """Thumbnails -> patches, the way that prompt pictures take.

    Args:
      processor: of the policy's folder.
      max_pixels: area that a thumbnail is brought down to.
    """

    def __init__(self, processor: ImageProcessor, max_pixels: int):
        tile = (processor.patch_size * processor.merge_size) ** 2
        most = max(tile, min(processor.max_pixels, max_pixels))
        self._processor = dataclasses.replace(
            processor, min_pixels=min(processor.min_pixels, most), max_pixels=most
        )
        # The samples of a group see the same items.
        self.patches = functools.lru_cache(maxsize=256)(self._patches)

    def _patches(self, picture: bytes) -> tuple[np.ndarray, np.ndarray] | None:
        """(pixel_values, image_grid_thw) of encoded bytes; None where they cannot be read."""
        try:
            return self._processor([load_picture(picture)])
        except PictureError:
            return None


def information_pieces(
    tokenizer,
    item_texts: list[str],
    status: str,
    items: Sequence[SearchItem] = (),
    pictures: ToolPictures | None = None,
    config: QwenVLConfig | None = None,
) -> tuple[np.ndarray, list[Piece], np.ndarray]:
    """The turn that carries a tool's result: (prefix ids, one piece an item, suffix ids).

    Prefix and suffix are our template, so special-token spellings in them become special tokens.
    Items come from outside: `encode_plain` turns such spellings into ordinary characters.

    Args:
      item_texts: `render.render_items`' result, or fewer of them.
      status: the call's status; `failed` and `empty` show a note, which counts as an item here.
      items: those of the texts; their pictures are shown if `pictures` is given.
      pictures: cuts thumbnails; None shows none. One that cannot be read becomes a note.
      config: gives the ids around a picture; needed with `pictures`.
    """
    prefix, texts, suffix = render.wrap_information(item_texts, status)
    pieces = []
    for i, text in enumerate(texts):
        thumbnail = items[i].picture if pictures is not None and i < len(items) else None
        found = None if thumbnail is None else pictures.patches(thumbnail)
        if thumbnail is not None and found is None:
            text = f"{text.rstrip()} {UNREADABLE}\n"
        ids = tokenizer.encode_plain(text)
        if found is None:
            pieces.append(Piece(ids))
            continue
        pixel_values, grids = found
        cells = int(grids.prod()) // config.vision_config.merge_unit
        shown = [config.vision_start_token_id, *[config.image_token_id] * cells]
        shown = np.asarray([*shown, config.vision_end_token_id], np.int32)
        pieces.append(Piece(np.concatenate([shown, ids]), pixel_values, grids))
    return tokenizer.encode(prefix), pieces, tokenizer.encode(suffix)
