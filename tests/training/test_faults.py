"""A run whose searches fail again and again goes on, loses no step, and says what failed."""

import dataclasses
import hashlib

import pytest
from test_loop import train

from configs import quickstart
from svrl_jax.search.errors import PASSING, SearchStopped, ToolError
from svrl_jax.training import assemble
from tests.conftest import compiler


@pytest.fixture(scope="module")
def quickstart_bench():
    """The quickstart as it ships: its policy searches, which the tiny one hardly does."""
    with compiler(is_quick=False):
        yield assemble.assemble(quickstart.get_config().lock())


class Flaky:
    """Tools of which a share of calls, drawn by their content, fails."""

    def __init__(self, tools, share):
        self._tools, self._share = tools, share

    def image_search(self, task):
        self._maybe_fail(task.id)
        return self._tools.image_search(task)

    def text_search(self, query, task):
        self._maybe_fail(task.id + query)
        return self._tools.text_search(query, task)

    def _maybe_fail(self, name):
        number = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
        if number < self._share * 2**32:
            raise ToolError("injected", PASSING[number % len(PASSING)])


@pytest.mark.slow
def test_twenty_steps_with_a_third_of_the_calls_failing(quickstart_bench, tmp_path):
    flaky = dataclasses.replace(quickstart_bench, tools=Flaky(quickstart_bench.tools, 0.3))
    done = train(flaky, tmp_path / "run", 20)
    assert [line["step"] for line in done.lines] == list(range(20))
    failed = {kind: sum(line[f"tool_failed_{kind}"] for line in done.lines) for kind in PASSING}
    assert min(failed.values()) > 0
    assert sum(line["invalid_tool_failed"] for line in done.lines) > 0
    assert all(line["tool_failed_auth"] == 0 for line in done.lines)


class Dead:
    """Tools whose key is not accepted."""

    def image_search(self, task):
        raise ToolError("serper: the key is not accepted", "auth")

    def text_search(self, query, task):
        raise ToolError("serper: the key is not accepted", "auth")


@pytest.mark.slow
def test_a_dead_key_stops_the_run_and_mending_it_goes_on(quickstart_bench, tmp_path):
    with pytest.raises(SearchStopped, match="the key is not accepted"):
        train(dataclasses.replace(quickstart_bench, tools=Dead()), tmp_path / "run", 2)
    done = train(quickstart_bench, tmp_path / "run", 2)
    assert [line["step"] for line in done.lines] == [0, 1]
