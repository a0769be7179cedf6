"""A provider's call: its turn, its deadline, its retries, and what its failures mean."""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from svrl_jax.search.errors import PASSING, ToolError
from svrl_jax.search.fetch import decode
from svrl_jax.search.limits import Budget, Pace
from svrl_jax.search.web import Reply, Web

_MAX_BYTES = 8_000_000  # of a reply in JSON; a page of results has some 50 kB
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.5, 8.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """Why a reply is none.

    Attributes:
      kind: one of `errors.FAILURES`.
      message: short; keys in it are struck out by the caller.
      wait_s: seconds that the provider asks to wait, or None.
    """

    kind: str
    message: str
    wait_s: float | None = None


class Caller:
    """Calls one provider; shared by threads."""

    def __init__(
        self,
        name: str,
        web: Web,
        budget: Budget,
        config: ConfigDict,
        key: str | None,
        fault_of: Callable[[Reply, Any], Fault | None],
        *,
        max_retries: int,
        max_wait_s: float,
    ):
        """Args:
        name: for messages and counts.
        config: the provider's own: endpoint, per_minute, concurrency, usd_per_call.
        key: struck out of every message; None where there is none.
        fault_of: (reply, its JSON or None) -> why it is no answer, or None.
        max_retries: of passing faults.
        max_wait_s: longest wait before a retry, whatever the provider asks.
        """
        self.name = name
        self._web, self._budget, self._key = web, budget, key
        self._endpoint = config.endpoint.rstrip("/")
        self._usd = config.usd_per_call
        self._pace = Pace(name, config.per_minute, config.concurrency)
        self._fault_of = fault_of
        self._max_retries, self._max_wait_s = max_retries, max_wait_s

    def json(self, method: str, path: str, deadline: float, **request) -> dict[str, Any]:
        """The JSON object that a call answers.

        Args:
          path: behind the endpoint.
          deadline: a `time.monotonic` value for every try and wait together.
          request: headers, params, json.
        Raises:
          ToolError: of any kind but not_recorded and no_address.
          SearchStopped: the budget is spent.
        """
        return self._call(method, path, deadline, request)[1]

    def text(self, method: str, path: str, deadline: float, **request) -> tuple[str, bool]:
        """(the text that a call answers, whether it is cut); raises as `json`."""
        reply, _ = self._call(method, path, deadline, request, is_json=False)
        return decode(reply)[0], reply.is_cut

    def _call(self, method, path, deadline, request, is_json=True):
        for attempt in range(self._max_retries + 1):
            fault, reply, body = self._try(method, path, deadline, request, is_json)
            if fault is None:
                return reply, body
            wait = self._wait_s(fault, attempt)
            is_last = attempt == self._max_retries or fault.kind not in PASSING
            if is_last or time.monotonic() + wait >= deadline:
                if fault.wait_s is not None:
                    self._pace.hold(wait)  # for the calls of others
                message = fault.message
                if self._key:
                    message = message.replace(self._key, "***")
                raise ToolError(f"{self.name}: {message}", fault.kind)
            if fault.wait_s is not None:
                self._pace.hold(wait)
            else:
                time.sleep(wait)
        raise AssertionError("unreachable: the last try returns or raises")

    def _try(self, method, path, deadline, request, is_json):
        with self._pace.turn(deadline):
            self._budget.spend(self.name, self._usd)
            try:
                reply = self._web.send(
                    method, self._endpoint + path, deadline=deadline, max_bytes=_MAX_BYTES,
                    **request,
                )  # fmt: skip
            except ToolError as error:
                return Fault(error.kind, str(error)), None, None
        body = _json_of(reply)
        fault = self._fault_of(reply, body)
        if fault is None and is_json and not isinstance(body, dict):
            fault = _no_json(reply)
        return fault, reply, body

    def _wait_s(self, fault: Fault, attempt: int) -> float:
        if fault.wait_s is not None:
            return min(fault.wait_s, self._max_wait_s)
        backoff = min(_FIRST_BACKOFF_S * 2**attempt, _LAST_BACKOFF_S)
        return min(backoff * random.uniform(0.5, 1.0), self._max_wait_s)


def fault_of_status(reply: Reply, body: Any) -> Fault | None:
    """What HTTP itself says; providers look at their own signs first."""
    status, text = reply.status, message_of(body)
    about = f"HTTP {status}" + (f", {text}" if text else "")
    if status in (401, 403):
        return Fault("auth", f"the key is not accepted ({about})")
    if status == 402:
        return Fault("quota", f"the account is used up ({about})")
    if status == 429:
        return Fault("rate_limited", f"too many calls ({about})", retry_after_s(reply.headers))
    if status == 408 or status >= 500:
        return Fault("unreachable", f"it failed ({about})", retry_after_s(reply.headers))
    if status != 200:
        return Fault("bad_response", about)
    return None


def message_of(body: Any) -> str:
    """The words of an error body, whichever of the usual places they stand in."""
    for name in ("error", "detail", "message", "readableMessage"):
        if isinstance(body, Mapping) and body.get(name):
            body = body[name]
    return " ".join(body.split())[:200] if isinstance(body, str) else ""


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header, as a number or a date; None where it says nothing usable."""
    value = headers.get("retry-after", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(value)
        except (ValueError, TypeError):
            return None
        if date.tzinfo is None:
            date = date.replace(tzinfo=datetime.UTC)
        seconds = date.timestamp() - time.time()
    return seconds if 0 <= seconds < float("inf") else None


def _json_of(reply: Reply) -> Any:
    if reply.is_cut:
        return None
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError):
        return None


def _no_json(reply: Reply) -> Fault:
    start = reply.body[:20_000].lower()
    if b"captcha" in start or b"unusual traffic" in start:
        return Fault("blocked", "it shows a captcha")
    return Fault("bad_response", "no JSON object where one is due, or a body cut short")
