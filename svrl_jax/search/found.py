"""A search result as a provider gave it, before its page is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from svrl_jax.search.errors import ToolError


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


def of_rows(rows: Any, **fields: str) -> list[Found]:
    """Results from the rows of a reply, in order; rows without title and link are left out.

    Args:
      rows: a JSON list of objects; None, where the reply has no such part, gives [].
      fields: Found's field -> a row's key. What is missing or no text is "".
    Raises:
      ToolError: (bad_response) `rows` is something else.
    """
    if not isinstance(rows, list | None):
        raise ToolError("results that are no list", "bad_response")
    found = (_of_row(row, fields) for row in rows or [])
    return [f for f in found if f is not None]


def _of_row(row: Any, fields: Mapping[str, str]) -> Found | None:
    if not isinstance(row, Mapping):
        return None
    texts = {
        field: value if isinstance(value := row.get(key), str) else ""
        for field, key in fields.items()
    }
    found = Found(**{"title": ""} | texts)
    return found if found.title or found.link else None
