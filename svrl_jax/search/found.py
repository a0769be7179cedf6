"""A search result as a provider gave it, before its page is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Found:
    """One result. Its rank is its place in the list.

    Attributes:
      title: page title.
      link: the page's address, or "".
      snippet: the provider's own short text, or "".
      thumbnail_url: address of a small picture, or "".
    """

    title: str
    link: str = ""
    snippet: str = ""
    thumbnail_url: str = ""


def of_row(row: Any, **fields: str) -> Found | None:
    """A Found from a row of a reply; None for one without title and link.

    Args:
      row: a JSON object; anything else gives None.
      fields: Found's field -> the row's key. What is missing or no text is "".
    """
    if not isinstance(row, Mapping):
        return None
    texts = {
        field: value if isinstance(value := row.get(key), str) else ""
        for field, key in fields.items()
    }
    found = Found(**{"title": ""} | texts)
    return found if found.title or found.link else None
