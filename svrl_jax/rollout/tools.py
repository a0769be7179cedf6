"""Tool calls on worker threads: (tool, query, task) -> items, or why there are none.

The device goes on decoding other episodes while a tool works. A call that raises `ToolError` or
is not back within its time is a failed call, recorded as such with its kind; a permanent failure
(a dead key, a spent quota) raises `SearchStopped`, which ends the run, and any other exception is a
bug and is raised.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from typing import Protocol

from svrl_jax.search.errors import PERMANENT, SearchStopped, ToolError
from svrl_jax.types import SearchItem, Task

MAX_WORKERS = 256  # enough to hide a web search's seconds; each worker mostly waits


class Tools(Protocol):
    """The two searches. Each raises `ToolError` if it does not answer; [] is an empty result."""

    def image_search(self, task: Task) -> list[SearchItem]:
        """Pages about pictures like the question's."""
        ...

    def text_search(self, query: str, task: Task) -> list[SearchItem]:
        """Pages about the query; the task is known so that a summary can have it in view."""
        ...


@dataclasses.dataclass(frozen=True)
class ToolAnswer:
    """What came back: items and an empty error, or no items, the cause and its kind."""

    items: tuple[SearchItem, ...]
    error: str
    seconds: float
    failure: str = ""

    @property
    def status(self) -> str:
        """`ok`, `empty` or `failed`."""
        return "failed" if self.error else ("ok" if self.items else "empty")


@dataclasses.dataclass
class PendingCall:
    """A call under way, as one episode sees it; `deadline` is a `time.monotonic` value."""

    future: concurrent.futures.Future
    started: float
    deadline: float

    def is_over(self) -> bool:
        """True if it answered or its time is up."""
        return self.future.done() or time.monotonic() >= self.deadline

    def answer(self) -> ToolAnswer:
        """The answer of a call that is over."""
        if self.future.done():
            return self.future.result()
        seconds = time.monotonic() - self.started
        return ToolAnswer((), f"no answer within {seconds:.0f} s", seconds, "timeout")


class ToolRunner:
    """Runs calls on threads; the same call of one task is made once. Use as a context manager."""

    def __init__(self, tools: Tools | None, *, timeout_s: float, workers: int):
        self._tools = tools
        self._timeout_s = timeout_s
        self._pool = concurrent.futures.ThreadPoolExecutor(min(workers, MAX_WORKERS), "tool")
        self._calls: dict[tuple[str, str, str], concurrent.futures.Future] = {}

    def __enter__(self) -> ToolRunner:
        return self

    def __exit__(self, *exc_info) -> None:
        # A tool that hangs must not hold up the run: its thread is left behind.
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start(self, tool: str, query: str, task: Task, left_s: float = float("inf")) -> PendingCall:
        """Starts a call, or joins the one that another sample of the task made already.

        Args:
          left_s: what is left of the episode's time for tools; with nothing left no call is made,
            and the answer is a failed one.
        """
        now = time.monotonic()
        if left_s <= 0:
            over: concurrent.futures.Future = concurrent.futures.Future()
            error = "the episode's time for searches is used up"
            over.set_result(ToolAnswer((), error, 0.0, "timeout"))
            return PendingCall(over, now, now)
        name = (tool, query, task.id)
        if name not in self._calls:
            self._calls[name] = self._pool.submit(self._run, tool, query, task)
        return PendingCall(self._calls[name], now, now + min(self._timeout_s, left_s))

    def _run(self, tool: str, query: str, task: Task) -> ToolAnswer:
        start = time.monotonic()
        try:
            if tool == "image_search":
                items = self._tools.image_search(task)
            else:
                items = self._tools.text_search(query, task)
        except ToolError as e:
            if e.kind in PERMANENT:
                raise SearchStopped(
                    f"the {tool.replace('_', ' ')} can never answer ({e.kind}: {e}): mend that and "
                    "start the same command again, which goes on from the last checkpoint"
                ) from e
            return ToolAnswer((), str(e), time.monotonic() - start, e.kind)
        return ToolAnswer(tuple(items), "", time.monotonic() - start)


def wait_for_any(calls: list[PendingCall]) -> None:
    """Blocks until one of the calls is over."""
    left = min(call.deadline for call in calls) - time.monotonic()
    concurrent.futures.wait(
        [call.future for call in calls],
        timeout=max(0.0, left),
        return_when=concurrent.futures.FIRST_COMPLETED,
    )
