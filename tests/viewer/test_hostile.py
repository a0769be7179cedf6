"""Episodes made to break the page: everything is text, the policy holds, nothing runs."""

import json
import re

import pytest

from svrl_jax.viewer.build import script
from tests.viewer import samples
from tests.viewer.conftest import Opened, address

pytestmark = pytest.mark.case("viewer-content")


def open_question(page, number):
    page.locator(".row a").nth(number).click()
    page.wait_for_selector(".turn")
    for details in page.locator("details.raw").all():
        details.evaluate("d => d.open = true")


def test_nothing_runs_and_everything_is_shown_literally(opener, hostile_page):
    page = opener(address(hostile_page))
    open_question(page, 0)
    page.keyboard.press("t")
    page.wait_for_selector(".token-text")
    page.evaluate(
        """() => document.querySelectorAll('#question *').forEach(
          e => ['mouseover', 'click', 'error', 'load'].forEach(
            kind => e.closest('button, a, summary') || e.dispatchEvent(new Event(kind))))"""
    )
    assert page.evaluate("window.pwned") is None
    text = page.locator("#question").inner_text()
    for payload in samples.PAYLOADS[:5] + samples.PAYLOADS[7:]:
        assert payload in text
    assert (
        page.locator("#question :is(script, iframe, object, svg [onload], [onerror])").count() == 0
    )
    assert page.evaluate(
        "[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
        ".every(name => !name.startsWith('on'))"
    )


def test_only_addresses_of_the_web_are_links(opener, hostile_page):
    page = opener(address(hostile_page))
    open_question(page, 0)
    links = page.locator("#question a").evaluate_all(
        "all => all.map(a => [a.href, a.rel, a.target])"
    )
    assert links == []
    open_question(page, 1)
    links = page.locator("#question a").evaluate_all(
        "all => all.map(a => [a.href, a.rel, a.target])"
    )
    assert {tuple(x) for x in links} == {("http://x.example/", "noopener noreferrer", "_blank")}


def test_hidden_characters_are_visible_and_isolated(opener, hostile_page):
    page = opener(address(hostile_page))
    open_question(page, 0)
    marks = set(page.locator(".hidden-character").all_inner_texts())
    expected = "202E 202C 2066 2069 200F FEFF 2028 2029 D800 0000 0007 E0041"
    assert marks >= {f"U+{code}" for code in expected.split()}
    left = re.compile("[\u202a-\u202e\u2066-\u2069\u200f\u2028\u2029\x00\x07\U000e0041]")
    assert not left.search(page.locator("body").inner_text())
    styles = page.locator("#question .outside").evaluate_all(
        "all => [...new Set(all.map(e => getComputedStyle(e).unicodeBidi))]"
    )
    assert styles == ["isolate"]


def test_a_megabyte_is_cut_until_asked_for(opener, hostile_page):
    page = opener(address(hostile_page))
    open_question(page, 1)
    summary = page.locator(".summary").first
    assert len(summary.inner_text()) < 2000
    size = len(samples.MEGABYTE)
    button = summary.get_by_role("button", name=f"Show all {size:,} characters")
    button.click()
    assert len(summary.evaluate("e => e.textContent")) >= size
    assert page.evaluate("window.pwned") is None


def test_broken_pictures_are_stated_placeholders(opener, hostile_page):
    page = opener(address(hostile_page))
    open_question(page, 0)
    assert page.locator(".card .no-picture.broken").count() == 2 * 6  # of two models
    assert page.locator(".card img").count() == 2 * 2
    assert "cannot be shown" in page.locator(".question-head").inner_text()
    open_question(page, 2)
    text = page.locator("#question").inner_text()
    assert "The search did not answer (timeout)" in text and samples.PAYLOADS[1] in text


def test_the_policy_holds(browser, hostile_page):
    """What a page that was tricked would do is refused by the browser itself."""
    opened = Opened(browser)
    page = opened.open(address(hostile_page))
    assert (
        page.evaluate("try { document.body.innerHTML = '<b>x</b>'; 'set' } catch (e) { e.name }")
        == "TypeError"
    )
    page.evaluate(
        "(s => { s.async = true; document.head.append(s) })(document.createElement('script'))"
    )
    refused = page.evaluate(
        """async () => {
          const seen = [];
          document.addEventListener(
            'securitypolicyviolation', e => seen.push(e.effectiveDirective));
          const image = new Image(); image.src = 'https://x.example/a.png';
          try { await fetch('https://x.example/') } catch {}
          const frame = document.createElement('iframe'); frame.src = 'https://x.example/';
          document.body.append(frame);
          const style = document.createElement('style'); style.textContent = 'body{color:red}';
          document.head.append(style);
          const button = document.createElement('b');
          try { button.setAttribute('onclick', 'window.pwned=12'); button.click() } catch {}
          await new Promise(done => setTimeout(done, 300));
          return seen;
        }"""
    )
    assert {"img-src", "connect-src", "frame-src", "style-src-elem"} <= set(refused)
    assert page.evaluate("window.pwned") is None
    assert [a for a in opened.answers if not a.startswith("file:")] == []
    opened.context.close()


def test_data_scripts_hold_no_markup(hostile_page):
    for path in (hostile_page / "data").iterdir():
        text = path.read_text("ascii")
        assert not set("<>&") & set(text) and text.count("\n") == 1
    value = {"text": "".join(samples.PAYLOADS)}
    body = script("index", value).decode("ascii")
    start, end = 'svrlViewer.receive("index", ', ");\n"
    assert body.startswith(start) and body.endswith(end)
    assert json.loads(body[len(start) : -len(end)]) == value
