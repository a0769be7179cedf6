"""`show` in a notebook: the same drawing, in a frame that can do nothing."""

import html
import re

import pytest

import svrl_jax
from svrl_jax.viewer.notebook import Shown
from tests.viewer import samples


@pytest.fixture(scope="module")
def record(world, tasks):
    return world.record(tasks[2], "initial", samples.HABITS["initial"])


def host(tmp_path, shown):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><title>n</title>{shown._repr_html_()}", "utf-8")
    return f"file://{path}"


def inside(page):
    frame = page.frames[1]
    frame.wait_for_selector("body[data-ready]")
    return frame


def test_an_episode_is_drawn_inline(opener, tmp_path, record, world):
    shown = svrl_jax.viewer.show(record, tokenizer=world.builder.tokenizer)
    frame = inside(opener(host(tmp_path, shown), ready="iframe"))
    text = frame.locator("body").inner_text()
    assert record.task.question in text and f"{record.score.total:.3f}" in text
    assert frame.locator(".turn").count() == len(record.episode.turns)
    assert frame.locator("img").first.evaluate("i => i.naturalWidth > 0")
    frame.locator("summary", has_text=re.compile("^Tokens$")).click()
    assert "<|im_start|>" in frame.locator(".token-text").inner_text()


def test_hostile_episodes_stay_text_and_sandboxed(opener, tmp_path):
    record = samples.hostile_records()[0]
    shown = svrl_jax.viewer.show(record)
    page = opener(host(tmp_path, shown), ready="iframe")
    frame = inside(page)
    assert frame.evaluate("window.pwned") is None and page.evaluate("window.pwned") is None
    assert samples.PAYLOADS[0] in frame.locator("body").inner_text()
    assert frame.evaluate("window.origin") == "null"  # no way to the notebook
    tag = re.match(r"<iframe ([^>]*)srcdoc=", shown._repr_html_())[1]
    assert "allow-scripts" in tag and "allow-same-origin" not in tag


def test_the_string_is_escaped_once_and_whole():
    shown = svrl_jax.viewer.show(samples.hostile_records()[0])
    inner = re.search(r'srcdoc="([^"]*)"', shown._repr_html_())[1]
    assert html.unescape(inner) == shown.document
    data = re.search(r'id="data">([^<]*)</script>', shown.document)[1]
    assert "onerror" in data and "<" not in data
    assert "hostile" in repr(shown) and isinstance(shown, Shown)


def test_an_episode_alone_and_wrong_arguments(record):
    shown = svrl_jax.viewer.show(record.episode)
    assert "question not recorded" in shown.document and record.episode.policy in repr(shown)
    assert record.task.question in svrl_jax.viewer.show(record.episode, task=record.task).document
    with pytest.raises(TypeError, match="brings its own task"):
        svrl_jax.viewer.show(record, task=record.task)
    with pytest.raises(TypeError, match="takes an Episode"):
        svrl_jax.viewer.show("episode")
