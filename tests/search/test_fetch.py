"""Pages and pictures of hostile and merely sloppy servers."""

import io
import time

import pytest
from PIL import Image
from servers import head, raw_server

from svrl_jax.search import web as web_lib
from svrl_jax.search.errors import ToolError
from svrl_jax.search.fetch import Fetcher, decode, main_text, refuse_blocked
from svrl_jax.search.web import Reply, Web
from tests.data.published_files import picture

SENTENCE = "The Tower of London was founded towards the end of 1066 and guards the river. " * 6


def page(body: str, charset: str = "") -> str:
    meta = f"<meta charset='{charset}'>" if charset else ""
    return (
        f"<html><head>{meta}<title>T</title><script>var x = 1;</script></head><body>"
        f"<nav><a href='/'>Home</a></nav><article><p>{body}</p></article></body></html>"
    )


@pytest.fixture(scope="module")
def fetcher():
    return make_fetcher()


def make_fetcher(*, allow_private=True, **changes):
    sizes = {
        "max_bytes": 1_000_000, "max_redirects": 3, "max_pixels": 1_000_000, "thumbnail_px": 64,
    }  # fmt: skip
    return Fetcher(Web(allow_private=allow_private, keep_alive=False), **sizes | changes)


def soon(seconds=20.0):
    return time.monotonic() + seconds


def failure(call, *arguments):
    with pytest.raises(ToolError) as error:
        call(*arguments)
    return error.value.kind


def test_a_page_gives_its_main_text(fetcher, httpserver):
    httpserver.expect_request("/a").respond_with_data(page(SENTENCE), content_type="text/html")
    found = fetcher.page(httpserver.url_for("/a"), soon())
    assert "founded towards the end of 1066" in found.text and "var x" not in found.text
    assert not found.is_cut and not found.has_bad_bytes


@pytest.mark.case("A-T5")
@pytest.mark.parametrize(
    "body, kind, expected",
    [
        (page("日本語の文章", "Shift_JIS").encode("cp932"), "text/html", "日本語の文章"),
        ("汉字文本".encode("gbk"), "text/html; charset=GBK", "汉字文本"),
        ("naïve — 日本".encode(), "text/html", "naïve — 日本"),
        ("\ufeffnaïve".encode("utf-16"), "text/plain", "naïve"),
        ("“quoted”".encode("cp1252"), "text/plain; charset=iso-8859-1", "“quoted”"),
        (b"plain", "text/plain; charset=no-such-set", "plain"),
        (b"plain", "text/plain; charset=zip", "plain"),
    ],
)
def test_character_sets(body, kind, expected):
    text, has_bad_bytes = decode(Reply(200, {"content-type": kind}, body))
    assert expected in text and not has_bad_bytes


@pytest.mark.case("A-T5")
def test_bad_bytes_are_marked_and_flagged(fetcher, httpserver):
    httpserver.expect_request("/b").respond_with_data(b"one \xff two", content_type="text/plain")
    found = fetcher.page(httpserver.url_for("/b"), soon())
    assert found.text == "one \ufffd two" and found.has_bad_bytes
    # Half a character at a cut is no bad byte.
    assert decode(Reply(200, {}, "é".encode()[:1], is_cut=True)) == ("", False)
    assert decode(Reply(200, {}, "é".encode()[:1])) == ("\ufffd", True)


@pytest.mark.case("A-T4")
def test_every_redirect_is_checked(httpserver, monkeypatch):
    monkeypatch.setattr(web_lib, "is_public", lambda address: address == "127.0.0.1")
    strict = make_fetcher(allow_private=False)
    with raw_server(lambda c: c.sendall(head() + b"secret")) as (private, seen):
        port = private.rsplit(":", 1)[1]
        for name, target in (
            ("ok", httpserver.url_for("/end")),
            ("inside", f"http://127.0.0.2:{port}/"),
            ("file", "file:///etc/passwd"),
            ("loop", "loop"),
        ):
            httpserver.expect_request(f"/{name}").respond_with_data(
                status=302, headers={"Location": target}
            )
        httpserver.expect_request("/end").respond_with_data("the end", content_type="text/plain")
        assert strict.page(httpserver.url_for("/ok"), soon()).text == "the end"
        assert failure(strict.page, httpserver.url_for("/inside"), soon()) == "blocked"
        assert failure(strict.page, httpserver.url_for("/file"), soon()) == "blocked"
        assert failure(strict.page, httpserver.url_for("/loop"), soon()) == "bad_response"
        assert seen == []


@pytest.mark.parametrize(
    "status, kind, body, expected",
    [
        (403, "text/html", "no", "blocked"),
        (429, "text/html", "no", "blocked"),
        (404, "text/html", "no", "bad_response"),
        (503, "text/html", "no", "unreachable"),
        (200, "application/pdf", "%PDF", "bad_response"),
        (200, "text/html", "", "bad_response"),
        (200, "text/html", "<html><body>Please solve the CAPTCHA</body></html>", "blocked"),
        (200, "text/plain", "Warning: Target URL returned error 403: Forbidden", "blocked"),
    ],
)
def test_what_is_no_page_has_its_kind(fetcher, httpserver, status, kind, body, expected):
    httpserver.expect_request("/p").respond_with_data(body, status=status, content_type=kind)
    assert failure(fetcher.page, httpserver.url_for("/p"), soon()) == expected


def test_a_page_without_a_main_part_shows_its_visible_text(fetcher, httpserver):
    body = "<html><head><title>x</title></head><body><b>Open</b> from 9<script>a()</script></body>"
    httpserver.expect_request("/v").respond_with_data(body, content_type="text/html")
    assert fetcher.page(httpserver.url_for("/v"), soon()).text == "Open from 9"


def test_a_page_built_to_break_a_reader_takes_no_long_time():
    began = time.monotonic()
    for piece in ("<script ", "<div>", "<!--", "&#x", "<a href='"):
        main_text("<html><body>" + piece * 20_000)
    assert time.monotonic() - began < 60


def test_a_long_page_may_speak_of_captchas():
    refuse_blocked("A CAPTCHA is a challenge. " + SENTENCE * 5)


def test_a_page_over_the_cap_is_read_as_far_as_it_goes(httpserver):
    httpserver.expect_request("/l").respond_with_data("word " * 1000, content_type="text/plain")
    found = make_fetcher(max_bytes=100).page(httpserver.url_for("/l"), soon())
    assert found.is_cut and found.text == ("word " * 20)


def test_pictures_are_small_upright_rgb(fetcher, httpserver):
    cmyk = io.BytesIO()
    Image.new("CMYK", (200, 100), (0, 255, 255, 0)).save(cmyk, "JPEG")
    for name, data in (("cmyk", cmyk.getvalue()), ("gif", picture(200, 100, kind="GIF"))):
        httpserver.expect_request(f"/{name}").respond_with_data(data, content_type="image/x")
        made = Image.open(io.BytesIO(fetcher.picture(httpserver.url_for(f"/{name}"), soon())))
        assert made.size == (64, 32) and made.mode == "RGB" and made.getpixel((5, 5))[0] > 150


def test_what_is_no_picture_is_refused(fetcher, httpserver):
    bodies = {"huge": picture(1200, 900), "html": b"<html>gone</html>", "half": picture()[:60]}
    for name, data in bodies.items():
        httpserver.expect_request(f"/{name}").respond_with_data(data, content_type="image/png")
        assert failure(fetcher.picture, httpserver.url_for(f"/{name}"), soon()) == "bad_response"
