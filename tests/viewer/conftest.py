"""A browser, and pages to open in it, made once."""

import os
import shutil

import pytest

from experiments.__main__ import main as experiments_main
from svrl_jax.data import world as world_lib
from svrl_jax.records import write_records
from tests.viewer import samples

# Needed where tests run as root and without a screen; nothing may reach the network.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="session")
def browser():
    """Chromium. Under CI it has to be there; elsewhere its tests are skipped without it."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("CI has no chromium: .ci/run installs it")
        pytest.skip("needs chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(OPTIONS))
        yield chromium
        chromium.close()


class Opened:
    """A page of the browser with all that it complained of."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.answers: list[str] = []
        self.page = self.context.new_page()
        self.page.on("console", lambda m: self.complaints.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.complaints.append(f"error: {e}"))
        self.page.on(
            "dialog", lambda d: (self.complaints.append(f"dialog {d.message}"), d.dismiss())
        )
        self.page.on("response", lambda r: self.answers.append(r.url))
        self.page.on("request", lambda r: self.requests.append(r.url))

    def open(self, address, ready="body[data-ready]"):
        self.page.goto(address)
        self.page.wait_for_selector(ready, timeout=20_000)
        return self.page


@pytest.fixture
def opener(browser):
    """Opens addresses; at the end nothing may have been complained of."""
    opened = []

    def open_(address, ready="body[data-ready]", **options):
        opened.append(Opened(browser, **options))
        return opened[-1].open(address, ready)

    yield open_
    complaints = [c for one in opened for c in one.complaints]
    foreign = [
        r
        for one in opened
        for r in one.requests
        if not r.startswith(("file:", "data:", "http://127.0.0.1"))
    ]
    for one in opened:
        one.context.close()
    assert complaints == [] and foreign == []


@pytest.fixture(scope="session")
def tasks():
    """Twelve questions of many kinds, some with two draws."""
    everything = world_lib.eval_tasks("test", 1, 240, 160)
    return everything[:: len(everything) // 12][:12]


@pytest.fixture(scope="session")
def world(world_tools, builder, tiny_config):
    return samples.World(world_tools, builder, tiny_config)


@pytest.fixture(scope="session")
def world_runs(tmp_path_factory, world, tasks, untrained_folder):
    """Run folders of three models on the same questions."""
    folder = tmp_path_factory.mktemp("runs")
    return samples.write_world_runs(folder, world, tasks, untrained_folder)


def view(*arguments) -> int:
    return experiments_main(["python -m experiments", "view", *map(str, arguments)])


@pytest.fixture(scope="session")
def world_page(tmp_path_factory, world_runs):
    """The folder that `view` makes of them."""
    out = tmp_path_factory.mktemp("page") / "out"
    assert view(*world_runs, f"--out={out}") == 0
    return out


@pytest.fixture(scope="session")
def hostile_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    for run in ("hostile<b>", "other"):
        write_records(folder / run / "episodes", "eval", samples.hostile_records(f"<i>{run}"))
    out = folder / "out"
    assert view(folder / "hostile<b>", folder / "other", f"--out={out}") == 0
    return out


def address(folder, route="#/"):
    return f"file://{folder}/index.html{route}"
