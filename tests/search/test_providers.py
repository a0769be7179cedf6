"""Every provider against a real HTTP server that answers in the documented form, and its faults."""

import email.utils
import gzip
import json
import re
import socket
import struct
import threading
import time
import tracemalloc

import pytest
from servers import closed_address, head, raw_server
from werkzeug import Response

from configs.base import get_config
from svrl_jax.search.errors import ToolError
from svrl_jax.search.limits import Budget
from svrl_jax.search.providers import chat, jina, serpapi, serper, tavily
from svrl_jax.search.providers.caller import Caller, retry_after_s
from svrl_jax.search.web import Web

KEY = "key-5f2c91"
MODULES = {"serper": serper, "serpapi": serpapi, "tavily": tavily, "jina": jina, "chat": chat}
GOOD = {
    "serper": {"organic": [{"title": "T", "link": "https://a.org/", "snippet": "S"}]},
    "serpapi": {"search_metadata": {"status": "Success"},
                "organic_results": [{"position": 1, "title": "T", "link": "https://a.org/"}]},
    "tavily": {"results": [{"title": "T", "url": "https://a.org/", "content": "S", "score": 0.9}]},
    "chat": {"choices": [{"message": {"content": "It says so."}, "finish_reason": "stop"}]},
}  # fmt: skip
JINA = "Title: T\n\nURL Source: https://a.org/\n\nMarkdown Content:\nThe text of the page."
EMPTY = {
    "serper": {"organic": []},
    "serpapi": {"search_metadata": {"status": "Success"},
                "search_information": {"organic_results_state": "Fully empty"},
                "error": "Google hasn't returned any results for this query."},
    "tavily": {"results": []},
}  # fmt: skip


def caller(name, endpoint, *, max_retries=3, max_wait_s=20.0, budget=None, **changes):
    config = get_config().search[name]
    config.update({"endpoint": endpoint, "per_minute": 1e6} | changes)
    return Caller(
        name, Web(allow_private=True), budget or Budget(0, 0), config, KEY,
        MODULES[name].fault_of, max_retries=max_retries, max_wait_s=max_wait_s,
    )  # fmt: skip


def call(name, endpoint, *, seconds=10.0, **more):
    """The provider's own call, whatever it is."""
    one, deadline = caller(name, endpoint, **more), time.monotonic() + seconds
    if name == "jina":
        return jina.read_page(one, KEY, "https://a.org/p?q=1", deadline).text
    if name == "chat":
        return chat.summarise(one, KEY, "m", "page", "question", 20, deadline)
    return MODULES[name].search_text(one, KEY, "a query", 5, deadline)


def failure(name, endpoint, **more):
    with pytest.raises(ToolError) as error:
        call(name, endpoint, **more)
    assert KEY not in str(error.value)
    return error.value.kind


def reply(name, body=None, status=200, **headers):
    if body is None:
        body = JINA if name == "jina" else GOOD[name]
    if not isinstance(body, str | bytes):
        body = json.dumps(body)
    kind = "text/plain" if name == "jina" else "application/json"
    headers = {k.replace("_", "-"): v for k, v in headers.items()}
    return Response(body, status, headers, content_type=kind)


@pytest.fixture
def serve(httpserver):
    """serve(*responses): answers them in turn, the last one for ever; gives the endpoint."""

    def start(*responses):
        queue = list(responses)
        httpserver.clear()
        handler = httpserver.expect_request(re.compile(".*"))
        handler.respond_with_handler(lambda _: queue.pop(0) if len(queue) > 1 else queue[0])
        return httpserver.url_for("").rstrip("/")

    return start


def requests_of(httpserver):
    return [request for request, _ in httpserver.log]


def test_serper_asks_and_reads(serve, httpserver):
    endpoint = serve(reply("serper"))
    (found,) = call("serper", endpoint)
    assert (found.title, found.link, found.snippet) == ("T", "https://a.org/", "S")
    (request,) = requests_of(httpserver)
    assert (request.path, request.headers["X-API-KEY"]) == ("/search", KEY)
    assert request.json == {"q": "a query", "num": 5}


def test_serper_lens_reads_thumbnails(serve, httpserver):
    rows = [
        {"title": "A", "link": "https://a.org", "thumbnailUrl": "https://t/1"},
        {"imageUrl": ""},
        None,
    ]
    endpoint = serve(reply("serper", {"organic": rows}))
    one = caller("serper", endpoint)
    (found,) = serper.search_image(one, KEY, "https://p.org/x.jpg", time.monotonic() + 5)
    assert found.thumbnail_url == "https://t/1"
    assert requests_of(httpserver)[0].json == {"url": "https://p.org/x.jpg"}


def test_serpapi_asks_and_reads(serve, httpserver):
    endpoint = serve(reply("serpapi"))
    (found,) = call("serpapi", endpoint)
    assert (found.title, found.snippet) == ("T", "")
    arguments = requests_of(httpserver)[0].args
    assert (arguments["engine"], arguments["q"], arguments["api_key"]) == ("google", "a query", KEY)


@pytest.mark.parametrize("field", ["visual_matches", "exact_matches"])
def test_serpapi_lens(serve, field):
    rows = [{"position": 1, "title": "A", "link": "https://a.org", "thumbnail": "https://t/1"}]
    endpoint = serve(reply("serpapi", {field: rows}))
    one = caller("serpapi", endpoint)
    (found,) = serpapi.search_image(one, KEY, "https://p.org/x.jpg", time.monotonic() + 5)
    assert (found.title, found.thumbnail_url) == ("A", "https://t/1")


def test_tavily_asks_and_reads(serve, httpserver):
    (found,) = call("tavily", serve(reply("tavily")))
    assert (found.link, found.snippet) == ("https://a.org/", "S")
    request = requests_of(httpserver)[0]
    assert request.headers["Authorization"] == f"Bearer {KEY}" and request.json["max_results"] == 5


def test_jina_reads_the_text_behind_its_head(serve, httpserver):
    assert call("jina", serve(reply("jina"))) == "The text of the page."
    request = requests_of(httpserver)[0]
    assert request.full_path.endswith("https://a.org/p?q=1")
    assert request.headers["Authorization"] == f"Bearer {KEY}"


def test_a_model_summarises_and_its_thoughts_are_left_out(serve, httpserver):
    body = {"choices": [{"message": {"content": "<think>hm</think>\nIt says so."}}]}
    assert call("chat", serve(reply("chat", body))) == "It says so."
    messages = requests_of(httpserver)[0].json["messages"]
    assert "question" in messages[1]["content"] and "page" in messages[1]["content"]


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_found_is_no_failure(serve, name):
    assert call(name, serve(reply(name, EMPTY[name]))) == []


FAULTS = [
    ("serper", 401, {"message": "Unauthorized.", "statusCode": 403}, "auth"),
    ("serper", 403, {"message": "Unauthorized."}, "auth"),
    ("serper", 400, {"message": "Not enough credits", "statusCode": 400}, "quota"),
    ("serper", 400, {"message": "Bad query"}, "bad_response"),
    ("serpapi", 401, {"error": f"Invalid API key {KEY}."}, "auth"),
    ("serpapi", 429, {"error": "Your account has run out of searches."}, "quota"),
    ("serpapi", 200, {"search_metadata": {"status": "Error"}, "error": "x"}, "bad_response"),
    ("serper", 200, {"organic": 7}, "bad_response"),
    ("serpapi", 200, {"search_metadata": "odd", "organic_results": {"a": 1}}, "bad_response"),
    ("tavily", 200, {"results": "none"}, "bad_response"),
    ("tavily", 401, {"detail": {"error": "Unauthorized: missing or invalid API key."}}, "auth"),
    ("tavily", 432, {"detail": {"error": "This request exceeds your plan's limit."}}, "quota"),
    ("tavily", 433, {"detail": {"error": "pay-as-you-go limit"}}, "quota"),
    ("tavily", 400, {"detail": {"error": "Query is too long."}}, "bad_response"),
    ("jina", 401, {"data": None, "code": 401, "message": "Invalid key"}, "auth"),
    ("jina", 402, {"code": 402, "readableMessage": "InsufficientBalanceError"}, "quota"),
    ("jina", 403, "forbidden", "blocked"),
    ("jina", 451, {"code": 451, "status": 45102, "message": "SecurityCompromiseError"}, "blocked"),
    ("jina", 422, {"code": 422, "message": "bad page"}, "bad_response"),
    ("jina", 200, "Title: x\n\nWarning: Target URL returned error 403: Forbidden\n\n"
     "Markdown Content:\nno", "blocked"),
    ("jina", 200, "Title: x\n\nWarning: Target URL returned error 404: Not Found\n\n"
     "Markdown Content:\nno", "bad_response"),
    ("jina", 200, "Title: x\n\nMarkdown Content:\nVerify you are human", "blocked"),
    ("chat", 401, {"error": {"message": "Incorrect API key provided", "code": "x"}}, "auth"),
    ("chat", 429, {"error": {"message": "m", "code": "insufficient_quota"}}, "quota"),
    ("chat", 400, {"object": "error", "message": "too long", "code": 400}, "bad_response"),
    ("chat", 200, {"choices": [{"message": {"content": None}}]}, "bad_response"),
    ("chat", 200, {"choices": []}, "bad_response"),
]  # fmt: skip


@pytest.mark.parametrize("name, status, body, expected", FAULTS)
def test_a_fault_has_its_kind_and_is_asked_once(serve, httpserver, name, status, body, expected):
    assert failure(name, serve(reply(name, body, status))) == expected
    assert len(httpserver.log) == 1


@pytest.mark.parametrize("name", MODULES)
def test_the_same_faults_of_every_provider(serve, name, httpserver):
    assert failure(name, closed_address(), max_retries=0) == "unreachable"
    with raw_server(lambda c: None) as (url, seen):
        assert failure(name, url, max_retries=1) == "unreachable"
        assert len(seen) == 2
    stop = threading.Event()
    with raw_server(lambda c: stop.wait(5)) as (url, _):
        began = time.monotonic()
        assert failure(name, url, seconds=0.4) == "timeout"
        assert time.monotonic() - began < 2
    stop.set()
    if name == "jina":
        return
    html = "<html><body>Our systems have detected unusual traffic; captcha</body></html>"
    with raw_server(lambda c: c.sendall(head() + html.encode())) as (url, _):
        assert failure(name, url) == "blocked"
    with raw_server(lambda c: c.sendall(head() + b"<html>hello</html>")) as (url, _):
        assert failure(name, url) == "bad_response"
    with raw_server(lambda c: c.sendall(head("Content-Length: 99") + b'{"a": 1}')) as (url, _):
        assert failure(name, url) == "bad_response"


def _endless(connection):
    connection.sendall(head())
    while True:
        connection.sendall(b"x" * 65_536)


def _drips(connection):
    connection.sendall(head())
    while True:
        connection.sendall(b"x" * 1024)
        time.sleep(0.05)


def _resets(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


BOMB = gzip.compress(bytes(50 << 20))  # made once: its 50 MiB count for no test


def _bomb(connection):
    connection.sendall(head("Content-Encoding: gzip") + BOMB)


def _bad_bytes(connection):
    connection.sendall(
        head("Content-Type: application/json; charset=nonsense") + b'{"a": "\xff\xfe'
    )


def _redirects(connection):
    answer = b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n"
    connection.sendall(answer)


@pytest.mark.case("A-T3")
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "answer, expected",
    [(_endless, "bad_response"), (_bomb, "bad_response"), (_drips, "timeout"),
     (_resets, "unreachable"), (_redirects, "bad_response"), (_bad_bytes, "bad_response")],
)  # fmt: skip
def test_hostile_servers_cost_little_time_and_memory(name, answer, expected):
    if name == "jina" and answer in (_endless, _bomb, _bad_bytes):
        expected = None  # text is shown as far as it goes, bad bytes as marks
    with raw_server(answer) as (url, seen):
        tracemalloc.start()
        began = time.monotonic()
        if expected is None:
            assert len(call(name, url, seconds=3.0)) <= 8_000_000
        else:
            assert failure(name, url, seconds=3.0, max_retries=0) == expected
        seconds, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert seconds < 5 and len(seen) == 1  # no redirect of a provider is followed
    assert peak < 48e6  # a few copies of the cap of 8 MB, not the 50 MiB of the bomb


@pytest.mark.case("A-T1")
@pytest.mark.parametrize("name", MODULES)
def test_too_many_calls_wait_and_are_tried_again(serve, httpserver, name):
    busy = reply(name, "busy", 429, Retry_After="1")
    endpoint = serve(busy, reply(name, "broken", 503), reply(name))
    began = time.monotonic()
    assert call(name, endpoint)
    assert 1.0 <= time.monotonic() - began < 6.0


@pytest.mark.case("A-T1")
def test_limit_captcha_empty_and_html_are_four_outcomes(serve):
    found = [
        failure("serper", serve(reply("serper", "x", 429, Retry_After="60")), seconds=3),
        failure("serper", serve(reply("serper", "<p>captcha</p>"))),
        failure("serper", serve(reply("serper", "<p>hello</p>"))),
    ]
    assert found == ["rate_limited", "blocked", "bad_response"]


@pytest.mark.case("A-T2")
def test_what_retry_after_says():
    def of(value):
        return retry_after_s({"retry-after": value})

    assert of("7") == 7 and of("99999") == 99999 and of("0") == 0
    assert of(email.utils.formatdate(time.time() + 30, usegmt=True)) == pytest.approx(30, abs=1.5)
    for bad in ("-1", "soon", "", "nan", "inf", email.utils.formatdate(0, usegmt=True)):
        assert of(bad) is None
    assert retry_after_s({}) is None


@pytest.mark.case("A-T2")
def test_the_wait_has_a_cap_and_the_deadline_holds(serve, httpserver):
    long = reply("serper", "x", 429, Retry_After="99999")
    endpoint = serve(long, reply("serper"))
    began = time.monotonic()
    assert call("serper", endpoint, max_wait_s=0.3)
    assert 0.3 <= time.monotonic() - began < 3
    endpoint, began = serve(long), time.monotonic()
    assert failure("serper", endpoint, seconds=4, max_wait_s=20) == "rate_limited"
    assert time.monotonic() - began < 2  # no wait that cannot help


def test_serpapi_looks_into_the_account_before_it_calls_a_429_final(httpserver):
    httpserver.expect_request("/search.json").respond_with_json({"error": "x"}, status=429)
    left = httpserver.expect_oneshot_request("/account.json")
    left.respond_with_json({"total_searches_left": 0})
    endpoint = httpserver.url_for("").rstrip("/")
    assert failure("serpapi", endpoint, max_retries=0) == "quota"
    httpserver.expect_request("/account.json").respond_with_json({"total_searches_left": 9})
    assert failure("serpapi", endpoint, max_retries=0) == "rate_limited"


def test_every_try_counts_and_costs(serve):
    budget = Budget(0, 0)
    endpoint = serve(reply("tavily", "x", 503), reply("tavily"))
    call("tavily", endpoint, budget=budget, usd_per_call=0.25)
    assert budget.calls == {"tavily": 2} and budget.usd == 0.5
