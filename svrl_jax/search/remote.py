"""Both searches by way of a search server, which holds the keys, the limits and the record."""

from __future__ import annotations

import time
from typing import Any

from svrl_jax.search import wire
from svrl_jax.search.errors import ToolError
from svrl_jax.search.providers.caller import Caller
from svrl_jax.types import SearchItem, Task

_ABOUT_TIMEOUT_S = 20.0


class RemoteTools:
    """Both searches of a server; shared by threads.

    Args:
      caller: of the server.
      token: that the server wants.
      timeout_s: of one call.
    """

    def __init__(self, caller: Caller, token: str, *, timeout_s: float):
        self._caller, self._timeout_s = caller, timeout_s
        self._headers = {"Authorization": f"Bearer {token}"}

    def text_search(self, query: str, task: Task) -> list[SearchItem]:
        """Items for a query, best first.

        Raises:
          ToolError: the server's search failed, or the server itself does not answer.
          SearchStopped: the server's budget is spent.
        """
        told = wire.task_to_json(task, has_picture=False)
        return self._ask("/text_search", {"query": query, "task": told})

    def image_search(self, task: Task) -> list[SearchItem]:
        """Pages about pictures like the question's; raises as text_search."""
        return self._ask("/image_search", {"task": wire.task_to_json(task, has_picture=True)})

    def about(self) -> str:
        """Where the server's results come from; raises ToolError."""
        deadline = time.monotonic() + _ABOUT_TIMEOUT_S
        found = self._caller.json("GET", "/about", deadline, headers=self._headers).get("search")
        if not isinstance(found, str):
            raise ToolError("the search server does not say what it searches", "bad_response")
        return found

    def _ask(self, path: str, body: dict[str, Any]) -> list[SearchItem]:
        deadline = time.monotonic() + self._timeout_s
        return wire.items_of_json(
            self._caller.json("POST", path, deadline, headers=self._headers, json=body)
        )
