"""Paces and budgets."""

import concurrent.futures
import threading
import time

import pytest

from svrl_jax.search.errors import SearchStopped, ToolError
from svrl_jax.search.limits import Budget, Pace


def test_starts_are_spaced_evenly_over_threads():
    pace, starts = Pace("p", per_minute=1200, concurrency=8), []

    def call(_):
        with pace.turn(time.monotonic() + 30):
            starts.append(time.monotonic())

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(call, range(6)))
    assert max(starts) - min(starts) >= 5 * 0.05 - 0.005


def test_no_more_than_allowed_run_at_once():
    pace, lock, running, most = Pace("p", 1e6, 2), threading.Lock(), [], []

    def call(_):
        with pace.turn(time.monotonic() + 30):
            with lock:
                running.append(1)
                most.append(len(running))
            time.sleep(0.02)
            with lock:
                running.pop()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(call, range(6)))
    assert max(most) == 2


def test_a_turn_that_would_come_too_late_is_refused_at_once():
    pace = Pace("p", per_minute=1, concurrency=1)
    with pace.turn(time.monotonic() + 1):
        pass
    began = time.monotonic()
    with pytest.raises(ToolError) as error, pace.turn(began + 5):
        raise AssertionError("no turn")
    assert error.value.kind == "rate_limited" and time.monotonic() - began < 1
    held = Pace("p", 1e6, 1)
    held.hold(60)
    with pytest.raises(ToolError), held.turn(time.monotonic() + 5):
        raise AssertionError("no turn")


def test_a_budget_stops_before_it_is_passed():
    budget = Budget(max_calls=2, max_usd=0)
    budget.spend("a", 9.0)
    budget.spend("b", 9.0)
    with pytest.raises(SearchStopped, match="max_calls"):
        budget.spend("a", 0)
    assert budget.calls == {"a": 1, "b": 1}
    budget = Budget(max_calls=0, max_usd=0.03)
    for _ in range(3):
        budget.spend("a", 0.01)
    with pytest.raises(SearchStopped, match="max_usd"):
        budget.spend("a", 0.01)
    assert budget.usd == pytest.approx(0.03)
