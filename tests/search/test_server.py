"""A search server on loopback and its clients."""

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time

import pytest
import uvicorn

from configs import tiny
from experiments.__main__ import main
from svrl_jax.data import world
from svrl_jax.search import build, server, wire
from svrl_jax.search.errors import FAILURES, SearchSetupError, SearchStopped, ToolError
from svrl_jax.types import SearchItem, Task
from tests.conftest import changed
from tests.search import servers

TOKEN = "sk-test-SERVER-0123456789"
TASK = Task(
    "t-1", "What is \u201cthis\u201d?", b"\x89PNG\x00\xff", ("a gold answer",), "s", "c",
    picture_url="https://p.org/x.jpg",
)  # fmt: skip
ITEMS = [
    SearchItem("1", "One <b>", "https://p.org", "text\u202e", 0.5, b"\x00\x01picture", "serper"),
    SearchItem("2", "Two"),
]


class Searches:
    """Answers with ITEMS, or raises; keeps what it was asked."""

    def __init__(self, error=None):
        self.error, self.asked = error, []

    def text_search(self, query, task):
        return self._answer(query, task)

    def image_search(self, task):
        return self._answer(None, task)

    def _answer(self, *asked):
        self.asked.append(asked)
        if self.error is not None:
            raise self.error
        return ITEMS


@contextlib.contextmanager
def serving(tools, about=lambda: "live, text serper"):
    listener = socket.create_server(("127.0.0.1", 0))
    app = server.make_app(tools, about, TOKEN)
    running = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(10)
        listener.close()


def client(url, **changes):
    keys = {"search.kind": "server", "search.server.endpoint": url, "search.max_retries": 0}
    return build.build_tools(changed(tiny.get_config(), **keys | changes))


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(wire.TOKEN, TOKEN)


def test_items_come_back_exactly():
    tools = Searches()
    with serving(tools) as url:
        remote = client(url)
        assert remote.text_search("two words, one query", TASK) == ITEMS
        assert remote.image_search(TASK) == ITEMS
    (query, text_task), (_, image_task) = tools.asked
    assert query == "two words, one query" and text_task.picture == b""
    assert (image_task.picture, image_task.picture_url) == (TASK.picture, TASK.picture_url)
    assert image_task.question == TASK.question and image_task.id == TASK.id
    assert text_task.golds == image_task.golds == ()  # a search must not know them


@pytest.mark.parametrize("kind", FAILURES)
def test_every_kind_of_failure_comes_through(kind):
    with serving(Searches(ToolError("why", kind))) as url:
        with pytest.raises(ToolError, match="why") as caught:
            client(url).text_search("q", TASK)
    assert caught.value.kind == kind


def test_a_spent_budget_stops_the_run_of_every_client():
    with serving(Searches(SearchStopped("max_calls are made"))) as url:
        for _ in range(2):
            with pytest.raises(SearchStopped, match="max_calls are made"):
                client(url).image_search(TASK)


def test_a_fault_of_ours_is_no_empty_result():
    with serving(Searches(KeyError("bug"))) as url:
        with pytest.raises(ToolError) as caught:
            client(url).text_search("q", TASK)
    assert caught.value.kind == "unreachable"


def test_another_token_is_refused_and_not_said(monkeypatch):
    tools = Searches()
    with serving(tools) as url:
        monkeypatch.setenv(wire.TOKEN, "another-secret")
        with pytest.raises(ToolError, match="not accepted") as caught:
            client(url).text_search("q", TASK)
    assert caught.value.kind == "auth" and not tools.asked
    assert "another-secret" not in str(caught.value) and TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    "body, status",
    [
        (b"", 400),
        (b"[1]", 400),
        (b'{"query": "q"}', 400),
        (b'{"query": 3, "task": {"id": "a", "question": "b"}}', 400),
        (b'{"query": "q", "task": {"id": "a", "question": "b", "picture": "?"}}', 400),
        (b'{"query": "q", "task": {"id": "a", "question": "b"}}', 200),
        (b" " * 33_000_000, 413),
    ],
)
def test_a_wrong_call_is_refused_and_the_server_goes_on(body, status):
    with serving(Searches()) as url:
        for expected, sent in ((status, body), (200, b'{"task": {"id": "a", "question": "b"}}')):
            call = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
            path = "/text_search" if sent is body else "/image_search"
            call.request("POST", path, sent, {"Authorization": f"Bearer {TOKEN}"})
            assert call.getresponse().status == expected
            call.close()


def test_many_clients_search_at_once():
    gate = threading.Barrier(50, timeout=10)

    class Slow(Searches):
        def text_search(self, query, task):
            gate.wait()  # passes only if fifty searches are under way
            return ITEMS

    with serving(Slow()) as url:
        remote = client(url)
        threads = [
            threading.Thread(target=remote.text_search, args=(str(i), TASK)) for i in range(50)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
    assert not gate.broken and not any(thread.is_alive() for thread in threads)


def test_a_table_names_what_the_server_searches():
    with serving(Searches(), lambda: "live, record 1234") as url:
        config = changed(tiny.get_config(), **{"search.kind": "server"}).search
        assert build.describe(config, client(url)) == "live, record 1234"


def test_no_server_is_a_failure_in_time():
    start = time.monotonic()
    with pytest.raises(ToolError) as caught:
        client(servers.closed_address()).text_search("q", TASK)
    assert caught.value.kind == "unreachable" and time.monotonic() - start < 5


def test_an_answer_of_another_form_is_no_empty_result(httpserver):
    for body in ({}, {"items": [{"id": 1}]}, {"items": {}}, {"failure": {"kind": "odd"}}):
        httpserver.clear()
        httpserver.expect_request("/text_search").respond_with_json(body)
        with pytest.raises(ToolError) as caught:
            client(httpserver.url_for("").rstrip("/")).text_search("q", TASK)
        assert caught.value.kind == "bad_response"


def test_the_mode_serves_the_configs_searches(monkeypatch):
    """The command as users start it, and its client, over the embedded world."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "experiments", "search-server", "--config=configs/tiny.py",
        f"--port={port}",
    ]  # fmt: skip
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout.readline() == f"serving local at http://127.0.0.1:{port}\n"
        url = f"http://127.0.0.1:{port}"
        remote = client(url, **{"search.max_retries": 8})
        (task,) = world.eval_tasks("test", 1, 84, 56)[:1]
        expected = build.build_tools(tiny.get_config())
        assert remote.about() == "local"
        assert remote.image_search(task) == expected.image_search(task) != []
        query = f"capital of {task.entity[0]}"
        assert remote.text_search(query, task) == expected.text_search(query, task) != []
    finally:
        running.terminate()
        running.wait(10)


@pytest.mark.parametrize(
    "flag, word", [("--config.search.kind=server", "of its own"), ("--port=8101", wire.TOKEN)]
)
def test_the_mode_refuses_what_it_cannot_serve(monkeypatch, capsys, flag, word):
    monkeypatch.delenv(wire.TOKEN)
    argv = ["experiments", "search-server", "--config=configs/tiny.py", flag]
    assert main(argv) == 2 and word in capsys.readouterr().err


def test_without_a_token_nothing_begins(monkeypatch):
    monkeypatch.delenv(wire.TOKEN)
    with pytest.raises(SearchSetupError, match=wire.TOKEN):
        client("http://127.0.0.1:1")
