"""What passes between a search server and its clients: tasks one way, items or failures the other.

Bytes are base64. Gold answers stay where they are: a server is told only what a search needs.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from svrl_jax.search.errors import FAILURES, SearchStopped, ToolError
from svrl_jax.types import SearchItem, Task

TOKEN = "SEARCH_SERVER_TOKEN"  # environment variable, on both sides
_ITEM_TEXTS = ("id", "title", "link", "text", "provider")


class WireError(ValueError):
    """A message of another form."""


def task_to_json(task: Task, *, has_picture: bool) -> dict[str, Any]:
    """What a search is told of a task. Args: has_picture: send the picture's bytes too."""
    return {
        "id": task.id,
        "question": task.question,
        "picture": _encode(task.picture) if has_picture and task.picture else None,
        "picture_url": task.picture_url,
    }


def task_of_json(value: Any) -> Task:
    """The task that a server searches for; without golds.

    Raises:
      WireError: another form.
    """
    _want(isinstance(value, Mapping), "task")
    for name in ("id", "question"):
        _want(isinstance(value.get(name), str), name)
    url = value.get("picture_url")
    _want(url is None or isinstance(url, str), "picture_url")
    picture = _decode(value.get("picture")) or b""
    return Task(value["id"], value["question"], picture, (), "", "", picture_url=url)


def items_to_json(items: Sequence[SearchItem]) -> dict[str, Any]:
    """The answer that a search found."""
    rows = [dataclasses.asdict(item) for item in items]
    for row in rows:
        row["picture"] = None if row["picture"] is None else _encode(row["picture"])
    return {"items": rows}


def failure_to_json(error: ToolError | SearchStopped) -> dict[str, Any]:
    """The answer that a search has none."""
    if isinstance(error, SearchStopped):
        return {"stopped": str(error)}
    return {"failure": {"kind": error.kind, "message": str(error)}}


def items_of_json(value: Mapping[str, Any]) -> list[SearchItem]:
    """The items of an answer.

    Raises:
      ToolError: the server's search failed, or (bad_response) the answer has another form.
      SearchStopped: the server can search no more.
    """
    if isinstance(value.get("stopped"), str):
        raise SearchStopped(f"the search server has stopped: {value['stopped']}")
    failure = value.get("failure")
    if isinstance(failure, Mapping) and failure.get("kind") in FAILURES:
        raise ToolError(str(failure.get("message", "")), failure["kind"])
    try:
        rows = value.get("items")
        _want(isinstance(rows, list), "items")
        return [_item(row) for row in rows]
    except WireError as error:
        raise ToolError(f"the search server's answer: {error}", "bad_response") from error


def _item(row: Any) -> SearchItem:
    _want(isinstance(row, Mapping), "items")
    for name in _ITEM_TEXTS:
        _want(isinstance(row.get(name), str), name)
    _want(isinstance(row.get("score"), int | float), "score")
    texts = {name: row[name] for name in _ITEM_TEXTS}
    return SearchItem(**texts, score=float(row["score"]), picture=_decode(row.get("picture")))


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: Any) -> bytes | None:
    if text is None:
        return None
    _want(isinstance(text, str), "picture")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise WireError("picture is no base64") from None


def _want(is_right: bool, name: str) -> None:
    if not is_right:
        raise WireError(f"{name} is missing or of another kind")
