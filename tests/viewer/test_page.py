"""The page in a browser: open, filter, step, switch, deep links, keys, narrow screens, and axe."""

import pathlib
import re
import threading
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe

from svrl_jax.viewer import serve
from tests.viewer.conftest import Opened, address

ROOT = pathlib.Path(__file__).resolve().parents[2]
NARROW = {"width": 390, "height": 844}


def titles(page):
    return page.locator(".row-question").all_inner_texts()


def hash_of(page):
    return page.evaluate("location.hash")


def first(page, key="j"):
    page.keyboard.press(key)
    page.wait_for_selector(".turn")


def test_opens_from_disk_with_every_question(opener, world_page, tasks):
    page = opener(address(world_page))
    assert titles(page) == [t.question for t in tasks]
    assert page.locator("#count").inner_text() == f"{len(tasks)} questions"
    rows = page.locator("#strip tbody tr")
    assert rows.count() == 4  # svrl's training and evaluation, initial, no_search
    assert "0.0%" in rows.nth(3).inner_text()  # SR of no_search
    assert page.locator(".row img").first.evaluate("i => i.complete && i.naturalWidth > 0")


def test_filters_leave_what_they_say(opener, world_page, tasks):
    page = opener(address(world_page))
    page.locator("#search").fill(tasks[3].question[:14])
    assert all(tasks[3].question[:14] in t for t in titles(page)) and titles(page)
    page.get_by_role("button", name="Clear").click()
    assert len(titles(page)) == len(tasks)
    page.locator("summary", has_text="Filters").click()
    right = page.get_by_label(re.compile(r"^1 svrl"))
    wrong = page.get_by_label(re.compile(r"^4 no_search"))
    right.select_option("right")
    wrong.select_option("wrong")
    kept = page.locator(".row").count()
    assert 0 < kept < len(tasks)
    assert page.locator(".row .chip.right", has_text="1").count() >= kept
    assert page.locator(".row .chip.wrong", has_text="4").count() >= kept
    assert f"{kept} of {len(tasks)} questions" in page.locator("#count").inner_text()
    page.reload()
    page.wait_for_selector(".row")
    assert page.locator(".row").count() == kept  # the address holds the filters


@pytest.mark.parametrize(
    "query, sign",
    [
        ("searched=no&model=MODEL", "no search"),
        ("searched=text&model=MODEL", "text search"),
        ("free=yes", ""),
        ("agree=some", ""),
        ("end=answered", ""),
        ("flips=1", ""),
    ],
)
def test_each_filter_is_the_records_own(opener, world_page, query, sign):
    page = opener(address(world_page))
    key = model_key(page, 0)
    page.goto(address(world_page, "#/?" + query.replace("MODEL", key)))
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert 0 < page.locator(".row").count() <= 12
    if sign:
        titles_ = page.locator(".chip[title^='model 1']").evaluate_all("c => c.map(x => x.title)")
        assert titles_ and all(sign in title for title in titles_)
    if query == "flips=1":
        for row in page.locator(".row").all():
            assert row.locator(".chip.right").count() and row.locator(".chip.wrong").count()


def model_key(page, number):
    """A model's word in addresses, from the filter's own options."""
    return (
        page.locator("label.field", has_text="of")
        .locator("select")
        .evaluate_all(
            "(all, n) => all.find(s => s.options[0].text === 'any model').options[n + 1].value",
            number,
        )
    )


def test_keys_do_everything(opener, world_page, tasks):
    page = opener(address(world_page))
    first(page)
    assert page.locator("h2").first.inner_text() == tasks[0].question
    first(page)
    assert quote(tasks[1].id, safe="") in hash_of(page)
    page.keyboard.press("k")
    page.wait_for_function(
        "q => document.querySelector('h2').innerText === q", arg=tasks[0].question
    )
    page.keyboard.press("3")
    page.wait_for_function("document.querySelectorAll('.cell-head').length === 1")
    assert "initial" in page.locator(".column-name").inner_text()
    page.keyboard.press("Shift+Digit4")
    page.wait_for_function("document.querySelectorAll('.cell-head').length === 2")
    page.keyboard.press("ArrowRight")
    assert "at=1" in hash_of(page) and page.locator(".cell.now").count() >= 1
    page.keyboard.press("s")
    assert "at=" not in hash_of(page)
    page.keyboard.press("t")
    page.wait_for_selector(".token-text")
    page.keyboard.press("/")
    page.keyboard.type("j")  # in the field a letter is a letter
    assert page.locator("#search").input_value() == "j"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert hash_of(page).startswith("#/?") and page.locator(".welcome").is_visible()
    page.keyboard.press("]")
    assert "step=0" in hash_of(page)


def test_step_through_moves_all_columns(opener, world_page):
    page = opener(address(world_page, "#/?flips=1&sort=calls"))
    first(page)
    page.keyboard.press("1")
    page.keyboard.press("Shift+Digit3")
    page.wait_for_function("document.querySelectorAll('.cell-head').length === 2")
    steps = int(re.search(r"(\d+) steps", page.locator(".step-at").inner_text())[1])
    assert steps >= 3
    rows = page.locator(".cell-head ~ .cell")
    same = page.evaluate(  # cells of a row start at one height
        """() => {
          const cells = [...document.querySelectorAll('.cell')];
          const top = cell => cell.getBoundingClientRect().top;
          return cells.every(a => cells.every(
            b => a.style.gridRow !== b.style.gridRow || Math.abs(top(a) - top(b)) < 1));
        }"""
    )
    assert same and rows.count() >= 2 * steps - 1
    for step in range(1, steps + 1):
        page.get_by_role("button", name="Next step").click()
        assert page.locator(".step-at").inner_text() == f"step {step} of {steps}"
        now = page.locator(".cell.now")
        assert now.count() == 2 and now.first.is_visible()
        hidden = page.locator(".cell.later")
        assert hidden.count() == 2 * (steps - step)
        assert not any(cell.is_visible() for cell in hidden.all())
    assert page.get_by_role("button", name="Next step").is_disabled()
    assert page.locator(".cell.now .outcome").count() == 2


def test_an_address_brings_the_same_view_back(opener, world_page, tasks):
    page = opener(address(world_page))
    first(page)
    for key in ("3", "Shift+Digit2", "t", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    page.wait_for_selector(".token-text")
    route, text = hash_of(page), page.locator("#question").inner_text()
    again = opener(address(world_page, route))
    again.wait_for_selector(".token-text")
    assert again.locator("#question").inner_text() == text
    again.keyboard.press("j")
    again.wait_for_function(
        "q => document.querySelector('h2').innerText === q", arg=tasks[1].question
    )
    again.go_back()
    again.wait_for_function(
        "q => document.querySelector('h2').innerText === q", arg=tasks[0].question
    )
    unknown = opener(address(world_page, "#/q/nobody%20asked%E0%A4%A"))
    assert "holds no question called" in unknown.locator("#question").inner_text()


def test_an_episode_is_shown_whole(opener, world_page, world_runs, world, tasks):
    from svrl_jax.records import read_records

    records = read_records(pathlib.Path(world_runs[1]) / "episodes" / "eval_test.jsonl")
    record = next(r for r in records if len(r.episode.calls) == 2)
    page = opener(address(world_page, f"#/q/{quote(record.task.id, safe='')}?flips="))
    page.keyboard.press("3")
    page.wait_for_function("document.querySelectorAll('.cell-head').length === 1")
    text = page.locator("#question").inner_text()
    episode, score = record.episode, record.score
    for turn in episode.turns:
        assert turn.parsed.reason in text
        for item in turn.call.items if turn.call else ():
            assert item.title in text and item.text in text
    search = next(t for t in episode.turns if t.parsed.action == "text_search")
    executed = page.locator(".proposals li.executed")
    assert executed.count() == 1 and search.call.query in executed.inner_text()
    assert page.locator(".proposals s").count() == 5 - len(set(search.parsed.proposals))
    cards = page.locator(".card")
    expected = [
        (bool(m), bool(o))
        for turn, labels in zip(episode.turns[1:], score.labels.items)
        for m, o in zip(turn.parsed.mask, labels)
    ]
    shown = [
        ("agent kept" in c.inner_text(), "oracle: useful" in c.inner_text()) for c in cards.all()
    ]
    assert shown == expected
    agreeing = sum(m == o for m, o in expected)
    assert page.locator(".mark.agree .icon-agree").count() == agreeing  # a shape beside the colour
    assert page.locator(".mark.disagree .icon-disagree").count() == len(expected) - agreeing
    for name in ("r_acc", "r_aware", "r_count", "r_qalign", "r_salign", "r_format"):
        row = page.locator(
            ".factors tr", has=page.locator("code", has_text=re.compile(f"^{name}$"))
        )
        assert f"{getattr(score, name):.3f}" in row.inner_text()
    assert f"{score.total:.3f}" in page.locator(".factors .total").inner_text()
    assert all(gold in text for gold in record.task.golds[:6])


def test_tokens_under_every_measure(opener, world_page, world_runs):
    page = opener(address(world_page))
    first(page)
    page.keyboard.press("2")
    page.keyboard.press("t")
    page.wait_for_selector(".token-text")
    text = page.locator(".token-text").inner_text()
    assert "<|im_start|>" in text and "<reason>" in text
    trained = page.locator(".token-text .tok.trained")
    assert trained.count() > 5
    for name, style in (
        ("log-prob", "level-"),
        ("sampler–trainer gap", "level-"),
        ("advantage", ""),
    ):
        page.get_by_role("button", name=name).click()
        page.wait_for_selector(f".choice[aria-pressed=true]:has-text('{name}')")
        if style:
            assert page.locator(f".token-text .tok[class*='{style}']").count() > 5
    page.locator(".token-text").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".readout").inner_text() == "token 0: not the policy's, loss mask 0"
    page.locator(".token-text .tok:not(.outside-policy)").first.hover()
    readout = page.locator(".readout").inner_text()
    for word in ("loss mask 1", "log-prob -", "trainer − sampler", "advantage"):
        assert word in readout


def test_the_slider_picks_a_step_of_training(opener, world_page):
    page = opener(address(world_page))
    everything = page.locator("#strip tbody tr").nth(1).inner_text()
    slider = page.locator("#step")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".slider output").inner_text() == "0" and "step=0" in hash_of(page)
    assert page.locator(".row").count() == 4 and page.locator("#count").inner_text().startswith(
        "4 of"
    )
    one = page.locator("#strip tbody tr").nth(1).inner_text()
    assert one != everything and "\t8\t" in one
    slider.focus()
    page.keyboard.press("End")
    assert page.locator(".row").count() == 6  # the last step has most questions
    first(page)
    page.keyboard.press("2")
    options = page.locator("#pick1 option").all_inner_texts()
    assert [o.split(" · ")[:2] for o in options] == [["step 2", "sample 1"], ["step 2", "sample 2"]]
    page.locator("#pick1").select_option(index=1)
    assert "pick." in hash_of(page)


@pytest.mark.parametrize(
    "scheme, size, moments",
    [
        ("light", {"width": 1280, "height": 800}, (("j", "ArrowRight", "t"), ("?",))),
        ("dark", {"width": 1280, "height": 800}, (("j", "t"),)),
        ("light", NARROW, ((), ("j",))),
        ("dark", NARROW, ((), ("j",))),
    ],
)
def test_axe_finds_nothing_serious(browser, world_page, scheme, size, moments):
    opened = Opened(browser, viewport=size, color_scheme=scheme, bypass_csp=True)
    page = opened.open(address(world_page, "#/?flips=1&sort=calls"))
    for keys in moments:
        for key in keys:
            page.keyboard.press(key)
            page.wait_for_timeout(150)
        options = {
            "runOnly": ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"],
            "resultTypes": ["violations"],
            "preload": False,
        }
        result = Axe().run(page, options=options).response
        found = [
            (v["id"], v["nodes"][0]["html"][:200])
            for v in result["violations"]
            if v["impact"] in ("serious", "critical")
        ]
        assert found == [] and result["passes"]
    opened.context.close()


def test_a_narrow_screen_shows_one_thing_at_a_time(opener, world_page):
    page = opener(address(world_page), viewport=NARROW)
    assert page.locator("#list").is_visible() and not page.locator("#question").is_visible()
    page.locator(".row a").first.click()
    page.wait_for_selector(".turn")
    assert page.locator("#question").is_visible() and not page.locator("#list").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = page.evaluate(
        """() => [...document.querySelectorAll('#question *')].filter(e =>
          !e.closest('.columns, .visually-hidden')
            && e.getBoundingClientRect().right > 391).length"""
    )
    assert wide == 0
    page.get_by_role("button", name="All questions").click()
    assert page.locator("#list").is_visible()


def test_the_theme_is_kept(opener, world_page):
    page = opener(address(world_page), color_scheme="light")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    page.locator("#theme").click()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert page.locator("#theme").inner_text() == "Theme: dark" and dark != light
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_the_server_gives_the_same_page(opener, world_page):
    server = serve.make_server(world_page, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        page = opener(f"http://127.0.0.1:{server.server_address[1]}/")
        first(page)
        assert page.locator(".outcome").count() >= 1
    finally:
        server.shutdown()
        server.server_close()


def test_the_picture_of_the_readme(browser, world_page, tmp_path):
    """docs/viewer.png is this picture; VIEWER_PICTURE=1 writes it anew."""
    import os

    from PIL import Image

    opened = Opened(browser, viewport={"width": 1280, "height": 860}, color_scheme="light")
    page = opened.open(address(world_page, "#/?flips=1&sort=calls"))
    first(page)
    for key in ("1", "Shift+Digit3"):
        page.keyboard.press(key)
    page.wait_for_function("document.querySelectorAll('.cell-head').length === 2")
    page.wait_for_function("[...document.images].every(i => i.complete)")
    path = ROOT / "docs" / "viewer.png" if os.environ.get("VIEWER_PICTURE") else tmp_path / "x.png"
    page.screenshot(path=path)
    opened.context.close()
    if os.environ.get("VIEWER_PICTURE"):
        Image.open(path).quantize(128).save(path, optimize=True)
    assert Image.open(path).size == Image.open(ROOT / "docs" / "viewer.png").size == (1280, 860)
    assert "](docs/viewer.png)" in (ROOT / "README.md").read_text("utf-8")
