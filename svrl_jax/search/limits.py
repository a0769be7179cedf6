"""A provider's pace and the run's budget: who may call, when, and for how much."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from svrl_jax.search.errors import SearchStopped, ToolError


class Pace:
    """Spaces the starts of calls evenly and bounds how many run at once; shared by threads."""

    def __init__(self, name: str, per_minute: float, concurrency: int):
        """Args: per_minute: starts a minute, above 0; concurrency: calls at once, at least 1."""
        self._name = name
        self._gap_s = 60.0 / per_minute
        self._slots = threading.BoundedSemaphore(concurrency)
        self._lock = threading.Lock()
        self._next = 0.0  # earliest start of the next call, by time.monotonic

    @contextlib.contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """Waits for this call's turn and holds it.

        Args:
          deadline: a `time.monotonic` value.
        Raises:
          ToolError: (rate_limited) the turn would not come before the deadline; nothing was used.
        """
        late = ToolError(f"{self._name}: our own limits leave no turn in time", "rate_limited")
        if not self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise late
        try:
            with self._lock:
                start = max(time.monotonic(), self._next)
                if start >= deadline:
                    raise late
                self._next = start + self._gap_s
            time.sleep(max(0.0, start - time.monotonic()))
            yield
        finally:
            self._slots.release()

    def hold(self, seconds: float) -> None:
        """No call starts for so long: the provider asked one of them to wait."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)


class Budget:
    """Calls and money of this process; ends the run before either is passed."""

    def __init__(self, max_calls: int, max_usd: float):
        """Args: max_calls: 0 means no limit; max_usd: US dollars, 0 means no limit."""
        self._max_calls, self._max_usd = max_calls, max_usd
        self._lock = threading.Lock()
        self.calls: dict[str, int] = {}
        self.usd = 0.0

    def spend(self, name: str, usd: float) -> None:
        """Counts a call before it is made; retries count too.

        Args:
          usd: its price, in US dollars.
        Raises:
          SearchStopped: the call would pass a limit; it is not counted.
        """
        with self._lock:
            if self._max_calls and sum(self.calls.values()) >= self._max_calls:
                raise SearchStopped(
                    f"config.search.max_calls ({self._max_calls}) calls are made: raise it and "
                    "start the same command again, which goes on from the last checkpoint"
                )
            if self._max_usd and self.usd + usd > self._max_usd + 1e-9:
                raise SearchStopped(
                    f"config.search.max_usd ({self._max_usd:g}) is spent: raise it and start the "
                    "same command again, which goes on from the last checkpoint"
                )
            self.calls[name] = self.calls.get(name, 0) + 1
            self.usd += usd
