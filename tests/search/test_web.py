"""Requests to servers that drip, bomb, lie and break off; addresses that are never connected to."""

import gzip
import socket
import struct
import threading
import time
import tracemalloc
import zlib

import pytest
from servers import closed_address, head, raw_server

from svrl_jax.search.errors import ToolError
from svrl_jax.search.web import Web, is_public


@pytest.fixture
def web():
    web = Web(allow_private=True)
    yield web
    web.close()


def get(web, url, *, seconds=5.0, max_bytes=100_000, **more):
    return web.send("GET", url, deadline=time.monotonic() + seconds, max_bytes=max_bytes, **more)


def failure(web, url, **more):
    with pytest.raises(ToolError) as error:
        get(web, url, **more)
    return error.value.kind


@pytest.mark.case("A-T3")
def test_a_body_without_end_is_cut_at_the_cap(web):
    def endless(connection):
        connection.sendall(head())
        while True:
            connection.sendall(b"x" * 1024)

    with raw_server(endless) as (url, _):
        reply = get(web, url, max_bytes=5000)
    assert reply.is_cut and reply.body == b"x" * 5000


@pytest.mark.case("A-T3")
@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nX-A: ", head()], ids=["", "h", "b"])
def test_a_server_that_drips_is_held_to_the_deadline(web, start):
    stop = threading.Event()

    def drip(connection):
        connection.sendall(start)
        while not stop.wait(0.05):
            connection.sendall(b"a" if start else b"")

    with raw_server(drip) as (url, _):
        began = time.monotonic()
        assert failure(web, url, seconds=0.5) == "timeout"
        assert 0.4 < time.monotonic() - began < 1.5
        stop.set()


@pytest.mark.case("A-T3")
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_is_opened_only_to_the_cap(web, encoding):
    plain = bytes(50 << 20)
    bomb = gzip.compress(plain) if encoding == "gzip" else zlib.compress(plain)
    assert len(bomb) < 60_000
    del plain

    def send(connection):
        connection.sendall(head(f"Content-Encoding: {encoding}") + bomb)

    with raw_server(send) as (url, _):
        tracemalloc.start()
        reply = get(web, url, max_bytes=1_000_000)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert reply.is_cut and len(reply.body) == 1_000_000
    assert peak < 8e6


def test_compressed_bodies_open_to_what_they_were(web):
    text = "naïve ".encode() * 50_000
    raw = zlib.compressobj(wbits=-15)
    forms = {
        "gzip": gzip.compress(text),
        "deflate": zlib.compress(text),
        "Deflate": raw.compress(text) + raw.flush(),
    }
    for encoding, body in forms.items():
        with raw_server(
            lambda c, e=encoding, b=body: c.sendall(head(f"Content-Encoding: {e}") + b)
        ) as (url, _):
            assert get(web, url, max_bytes=10**7).body == text
    with raw_server(lambda c: c.sendall(head("Content-Encoding: gzip") + b"no gzip")) as (url, _):
        assert failure(web, url) == "bad_response"
    with raw_server(lambda c: c.sendall(head("Content-Encoding: br") + b"x")) as (url, _):
        assert failure(web, url) == "bad_response"


@pytest.mark.case("A-T3")
def test_a_false_length_marks_the_text_as_cut(web):
    with raw_server(lambda c: c.sendall(head("Content-Length: 9000") + b"short")) as (url, _):
        reply = get(web, url)
    assert (reply.body, reply.is_cut) == (b"short", True)


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("answer", [lambda c: None, reset, lambda c: c.sendall(b"SSH-2.0\r\n\r\n")])
def test_a_broken_connection_is_unreachable(web, answer):
    with raw_server(answer) as (url, _):
        assert failure(web, url) == "unreachable"


def test_nobody_there_is_unreachable(web):
    assert failure(web, closed_address()) == "unreachable"
    assert failure(web, "http://no-such-host.invalid/") == "unreachable"


def test_the_host_alone_is_named(web):
    with pytest.raises(ToolError) as error:
        get(web, closed_address() + "/search?api_key=SECRET")
    assert "127.0.0.1" in str(error.value) and "SECRET" not in str(error.value)


@pytest.mark.case("A-T4")
@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://example.org/", "gopher://a", "x", ""])
def test_only_http_is_opened(web, url):
    assert failure(web, url) in ("blocked", "bad_response")


@pytest.mark.case("A-T4")
def test_private_addresses_are_refused_before_a_connection():
    strict = Web(allow_private=False)
    with raw_server(lambda c: c.sendall(head() + b"secret")) as (url, seen):
        port = url.rsplit(":", 1)[1]
        # Whatever way the address is written, the one connected to is what counts.
        for host in ("127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"):
            with pytest.raises(ToolError) as error:
                get(strict, f"http://{host}:{port}/")
            assert error.value.kind in ("blocked", "unreachable", "bad_response")
            assert "127.0.0.1" not in str(error.value)
        assert failure(strict, "http://[::1]:80/") in ("blocked", "unreachable")
        assert failure(strict, "http://169.254.169.254/latest/meta-data") == "blocked"
        assert failure(strict, f"http://127.0.0.1:{port}/") == "blocked"
        assert seen == []
        assert get(Web(allow_private=True), url).body == b"secret"


@pytest.mark.parametrize(
    "address, expected",
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("172.16.0.1", False), ("192.168.1.1", False), ("169.254.169.254", False),
        ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("::1", False),
        ("255.255.255.255", False), ("fe80::1%eth0", False), ("fd00::1", False), ("::", False),
        ("::ffff:127.0.0.1", False), ("::ffff:8.8.8.8", True), ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True), ("2002:7f00:1::", False), ("2002:808:808::", True),
    ],
)  # fmt: skip
def test_what_counts_as_public(address, expected):
    assert is_public(address) is expected
