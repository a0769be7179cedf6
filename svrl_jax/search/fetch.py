"""An address from the open web -> a page's text or a picture, under rules for hostile servers.

http and https only; the address really connected to is checked at every redirect (web.py); opened
bytes, time, redirects and pixels are capped; character sets follow the header, then the page's own
word, then UTF-8.
"""

from __future__ import annotations

import codecs
import dataclasses
import importlib
import io
import re

import httpx2
from PIL import Image

from svrl_jax.processing.images import PictureError, load_picture
from svrl_jax.search.errors import SearchSetupError, ToolError
from svrl_jax.search.web import Reply, Web

_HTML = ("text/html", "application/xhtml+xml")
_TEXT = ("text/plain", "text/markdown", "text/csv", "application/json")
# What pages call these is read by browsers as the wider set.
_WIDER = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "gb2312": "gb18030", "gbk": "gb18030",
    "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs",
}  # fmt: skip
_META = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{2,40})", re.IGNORECASE)
_REFUSALS = re.compile(
    r"captcha|are you (?:a )?(?:human|robot)|verify (?:that )?you are (?:a )?human"
    r"|unusual traffic|enable javascript and cookies|access denied"
    r"|target url returned error (?:401|403|429)",
    re.IGNORECASE,
)
_HIDDEN = ("script", "style", "head", "noscript", "template")
_REFUSAL_CHARS = 1500  # a longer page that speaks of captchas is about them


@dataclasses.dataclass(frozen=True)
class Page:
    """A page's main text.

    Attributes:
      text: readable text, white space folded to lines.
      is_cut: the page went on past a cap.
      has_bad_bytes: some bytes were no characters and became replacement marks.
    """

    text: str
    is_cut: bool = False
    has_bad_bytes: bool = False


class Fetcher:
    """Opens pages and pictures of any host; shared by threads."""

    def __init__(
        self, web: Web, *, max_bytes: int, max_redirects: int, max_pixels: int, thumbnail_px: int
    ):
        """Args:
        max_bytes: opened bytes of one body.
        max_pixels: width * height of a picture as it comes.
        thumbnail_px: longer side of a picture as it is kept.
        """
        self._web = web
        self._max_bytes, self._max_redirects = max_bytes, max_redirects
        self._max_pixels, self._thumbnail_px = max_pixels, thumbnail_px

    def page(self, url: str, deadline: float) -> Page:
        """The main text of a page.

        Raises:
          ToolError: blocked, timeout, unreachable or bad_response.
        """
        reply = self._get(url, deadline, "text/html,text/plain;q=0.9")
        kind = _content_type(reply)
        if kind not in (*_HTML, *_TEXT, ""):
            raise ToolError(f"a page of the type {kind[:40]!r}", "bad_response")
        text, has_bad_bytes = decode(reply)
        if kind in _HTML or (not kind and "<html" in text[:1000].lower()):
            text = main_text(text)
        refuse_blocked(text)
        return Page(text, reply.is_cut, has_bad_bytes)

    def picture(self, url: str, deadline: float) -> bytes:
        """A picture as a small PNG: upright RGB, first frame, longer side at most `thumbnail_px`.

        Raises:
          ToolError: as `page`; bad_response where it is no picture, cut, or has too many pixels.
        """
        reply = self._get(url, deadline, "image/*")
        if reply.is_cut:
            raise ToolError("a picture larger than the limit, or cut short", "bad_response")
        try:
            image = load_picture(reply.body, max_pixels=self._max_pixels)
        except PictureError as error:
            raise ToolError(str(error), "bad_response") from None
        image.thumbnail((self._thumbnail_px, self._thumbnail_px), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()

    def _get(self, url: str, deadline: float, accept: str) -> Reply:
        for _ in range(self._max_redirects + 1):
            reply = self._web.send(
                "GET", url, deadline=deadline, max_bytes=self._max_bytes,
                headers={"Accept": accept},
            )  # fmt: skip
            if reply.status not in (301, 302, 303, 307, 308) or "location" not in reply.headers:
                break
            try:
                url = str(httpx2.URL(url).join(reply.headers["location"]))
            except (httpx2.InvalidURL, UnicodeError, ValueError):
                raise ToolError("a redirect that cannot be read", "bad_response") from None
        else:
            raise ToolError(f"more than {self._max_redirects} redirects", "bad_response")
        if reply.status in (401, 403, 429, 451):
            raise ToolError(f"the page refuses (HTTP {reply.status})", "blocked")
        if reply.status >= 500:
            raise ToolError(f"the page's server failed (HTTP {reply.status})", "unreachable")
        if reply.status != 200:
            raise ToolError(f"no page there (HTTP {reply.status})", "bad_response")
        return reply


def decode(reply: Reply) -> tuple[str, bool]:
    """(text, whether some bytes were no characters): by the header, else a byte-order mark, else
    the page's own word, else UTF-8.
    """
    body = reply.body
    named = re.search(r"charset\s*=\s*\"?([\w.:-]+)", reply.headers.get("content-type", ""), re.I)
    inside = _META.search(body[:4096])
    candidates = [named and named.group(1), _by_mark(body), inside and inside.group(1).decode()]
    for name in candidates:
        if name and (codec := _codec(name)):
            break
    else:
        codec = "utf-8"
    decoder = codecs.getincrementaldecoder(codec)("strict")
    try:
        # Where the body was cut, its last character may be half there.
        return decoder.decode(body, final=not reply.is_cut).lstrip("\ufeff"), False
    except UnicodeDecodeError:
        return body.decode(codec, "replace").lstrip("\ufeff"), True


def main_text(page: str) -> str:
    """HTML -> its main text; the whole visible text where no main part is found.

    Raises:
      SearchSetupError: trafilatura is not installed.
    """
    try:
        found = trafilatura().extract(page, include_comments=False, favor_recall=True)
    except SearchSetupError:
        raise
    except Exception:  # a page may be built to break a reader; it must not end a run
        found = None
    if not found:
        found = _visible_text(page)
    return "\n".join(line for raw in found.splitlines() if (line := " ".join(raw.split())))


def trafilatura():
    """The package that finds a page's main text; imported late, since it takes long."""
    try:
        return importlib.import_module("trafilatura")
    except ImportError as error:
        raise SearchSetupError(
            f"config.search.page_reader=fetch needs trafilatura ({error}): "
            "pip install -e '.[search]'"
        ) from error


def refuse_blocked(text: str) -> None:
    """Raises ToolError (blocked) for a captcha or refusal in a page's place, (bad_response) for
    none.
    """
    if not text.strip():
        raise ToolError("a page without text", "bad_response")
    if len(text) < _REFUSAL_CHARS and _REFUSALS.search(text):
        raise ToolError("the page shows a captcha or a refusal", "blocked")


def _visible_text(page: str) -> str:
    """What a reader would see. By libxml2, since the standard library's parser takes time in the
    square of the page where tags are left open.
    """
    etree = importlib.import_module("lxml.etree")  # trafilatura stands on it
    try:
        root = etree.fromstring(page.encode("utf-8", "replace"), etree.HTMLParser(encoding="utf-8"))
    except etree.LxmlError:
        return ""
    if root is None:
        return ""
    etree.strip_elements(root, etree.Comment, *_HIDDEN, with_tail=False)
    return " ".join(root.itertext())


def _content_type(reply: Reply) -> str:
    return reply.headers.get("content-type", "").split(";")[0].strip().lower()


def _by_mark(body: bytes) -> str | None:
    marks = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
    return next((name for mark, name in marks if body.startswith(mark)), None)


def _codec(name: str) -> str | None:
    try:
        found = codecs.lookup(name)
    except (LookupError, ValueError):
        return None
    # Python also lists codecs that are no character sets, such as `zip`.
    return _WIDER.get(found.name, found.name) if found._is_text_encoding else None
