"""5,000 questions of 3 models with pictures: how soon the page paints, and how fast it filters."""

import dataclasses
import os
import statistics

import pytest

from svrl_jax.records import write_records
from tests.viewer import samples
from tests.viewer.conftest import address, view
from tests.viewer.test_build import record

NUM_QUESTIONS, MODELS = 5000, ("first", "second", "third")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def large_page(tmp_path_factory):
    """Copies of a small episode under 5,000 questions, each with a picture of its own."""
    folder = tmp_path_factory.mktemp("large")
    small = record()
    encoded = [
        samples.encoded((i % 251, i // 251 * 12, 90), (240, 160)) for i in range(NUM_QUESTIONS)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # they need not outlive a power cut
        write_runs(folder, small, encoded)
    assert view(*(folder / m for m in MODELS), f"--out={folder / 'out'}") == 0
    return folder / "out"


def write_runs(folder, small, pictures):
    for number, model in enumerate(MODELS):
        for part in range(0, NUM_QUESTIONS, 500):
            records = []
            for i in range(part, part + 500):
                task = dataclasses.replace(
                    small.task, id=f"q{i}", question=f"Which river is number {i}?",
                    picture=pictures[i],
                    golds=("Nile",) if (i + number) % 3 else ("Rhine",),
                )  # fmt: skip
                episode = dataclasses.replace(small.episode, task_id=f"q{i}", policy=model)
                records.append(dataclasses.replace(small, episode=episode, task=task))
            write_records(folder / model / "episodes", f"eval_{part:05d}", records)


def test_paints_and_filters_in_time(opener, large_page, capsys):
    paints = []
    for _ in range(3):
        page = opener(address(large_page), ready=".row")
        assert page.locator("#count").inner_text() == "5,000 questions"
        assert page.locator(".row").count() < 40  # only what is in sight exists
        paints.append(
            page.evaluate(
                """() => new Promise(done => requestAnimationFrame(() => done(Math.max(
                  performance.now(), ...performance.getEntriesByType('paint')
                    .filter(p => p.name === 'first-contentful-paint').map(p => p.startTime)))))"""
            )
        )
    first = page.evaluate("performance.getEntriesByType('paint').map(p => [p.name, p.startTime])")
    times = page.evaluate(
        """async () => {
          const field = document.querySelector('#search'), times = [];
          for (const text of ['n', 'nu', 'number 4', 'number 49', 'river', '']) {
            const from = performance.now();
            field.value = text;
            field.dispatchEvent(new Event('input'));
            document.querySelector('#list').getBoundingClientRect();
            times.push(performance.now() - from);
            await new Promise(requestAnimationFrame);
          }
          for (const select of document.querySelectorAll('#filters select')) {
            for (const option of [...select.options].slice(0, 3)) {
              const from = performance.now();
              select.value = option.value;
              select.dispatchEvent(new Event('change'));
              document.querySelector('#list').getBoundingClientRect();
              times.push(performance.now() - from);
            }
          }
          return times;
        }"""
    )
    size = sum(p.stat().st_size for p in large_page.rglob("*") if p.is_file())
    index = (large_page / "data" / "index.js").stat().st_size
    files = sum(p.is_file() for p in large_page.rglob("*"))
    with capsys.disabled():
        print(
            f"\nrows on screen after {[round(p) for p in paints]} ms, paints {first}; filtering "
            f"median {statistics.median(times):.0f} ms, worst {max(times):.0f} ms of {len(times)}; "
            f"folder {size / 1e6:.1f} MB in {files} files, index {index / 1e6:.2f} MB"
        )
    assert statistics.median(paints) < 1500 and max(times) < 100
