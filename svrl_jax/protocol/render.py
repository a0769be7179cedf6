"""A tool's items -> the text of the next non-policy turn.

Retrieved text is hostile: protocol tags inside it are made harmless here, and the caller encodes
items with the tokenizer's `encode_plain`, so that no special token can come from them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ml_collections import ConfigDict

from svrl_jax.types import SearchItem

PREFIX = "<|im_start|>user\n<information>"
SUFFIX = "</information><|im_end|>\n<|im_start|>assistant\n"
UNAVAILABLE = "The search is unavailable."
NOTHING = "Nothing found."
_TAGS = "reason|verify|search|text_search|answer|information|img"


def neutralise(text: str) -> str:
    """Protocol tags in untrusted text lose their angle bracket (`‹` instead); white space folds."""
    text = re.sub(rf"<(?=\s*/?\s*(?:{_TAGS})\b)", "‹", text, flags=re.IGNORECASE)
    return re.sub(r"\s+", " ", text).strip()


def render_items(tool: str, items: Sequence[SearchItem], config: ConfigDict) -> list[str]:
    """One text an item, numbered `#1`, `#2`, ... as the reason may cite them.

    Args:
      tool: `image_search` or `text_search`.
      items: as retrieved; [] gives [].
      config: the search config (`image_items`, `show_links`).
    """
    titles_only = tool == "image_search" and config.image_items == "titles"
    texts = []
    for number, item in enumerate(items, start=1):
        text = f"#{number} {neutralise(item.title)}"
        if not titles_only:
            link = f" ({neutralise(item.link)})" if config.show_links and item.link else ""
            text += f"{link}: {neutralise(item.text)}"
        texts.append(text + "\n")
    return texts


def wrap_information(item_texts: list[str], status: str) -> tuple[str, list[str], str]:
    """(prefix, item texts, suffix) of the information turn.

    Args:
      item_texts: `render_items`' result, or fewer.
      status: a ToolCall's status; `failed` and `empty` show a short note instead of items.
    """
    if status == "failed":
        return PREFIX, [UNAVAILABLE], SUFFIX
    return PREFIX, item_texts or [NOTHING], SUFFIX
