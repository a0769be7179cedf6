"""Batches of a prepared split: one order for any number of hosts, any stop, any reader."""

import numpy as np
import pytest

from svrl_jax.data import prepare
from svrl_jax.data.pipeline import TaskStream, fit_rows
from svrl_jax.data.prepared import Prepared
from svrl_jax.processing.images import ImageProcessor
from svrl_jax.protocol.prompts import PromptBuilder
from svrl_jax.types import Task
from tests.data import published_files as files

ROWS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of several sizes, a text-only row, a row of 400 words."""
    path = tmp_path_factory.mktemp("prepared")
    rows = []
    for number in range(ROWS):
        images = [{"bytes": files.picture(84 + 28 * number, 56), "path": None}]
        row = files.fvqa_row(number, images=[] if number == 3 else images)
        if number == 4:
            row["prompt"] = [{"role": "user", "content": "word " * 400}]
        rows.append(row)
    files.write_parquet(path / "in/fvqa_train.parquet", rows)
    prepare.prepare("fvqa", str(path / "in"), path, say=str)
    return path / "fvqa"


@pytest.fixture
def rows(folder):
    return Prepared(folder).split("train")


def stream(rows, *, batch_size=4, kept=None, build=lambda task: task.id, **options):
    kept = np.arange(ROWS) if kept is None else kept
    return TaskStream(rows, kept, build, seed=0, batch_size=batch_size, **options)


def ids(one, batches):
    found = [[t.id for t in next(one)[0]] for _ in range(batches)]
    one.close()
    return sum(found, [])


def test_each_row_comes_once_an_epoch_and_epochs_differ(rows):
    found = ids(stream(rows), 10)
    epochs = [found[i : i + ROWS] for i in range(0, 40, ROWS)]
    assert all(sorted(e) == sorted(rows.ids) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 4
    assert ids(TaskStream(rows, np.arange(ROWS), str, seed=1, batch_size=4), 3) != found[:12]


@pytest.mark.case("A-C3")
def test_a_stop_anywhere_goes_on_with_the_next_row(rows):
    whole = ids(stream(rows, batch_size=1), 25)
    one = stream(rows, batch_size=1)
    for stop in range(1, 25):
        assert next(one)[0][0].id == whole[stop - 1] and one.position == stop
        again = stream(rows, batch_size=1, position=one.position)
        assert next(again)[0][0].id == whole[stop]
    assert one.epoch == 2


def test_four_loaders_then_two_then_four_give_the_same_rows(rows):
    whole = ids(stream(rows), 15)
    position, found = 0, []
    for hosts, batches in ((4, 4), (2, 5), (4, 6)):
        ones = [
            stream(rows, position=position, host=h, num_hosts=hosts, read_threads=h % 2)
            for h in range(hosts)
        ]
        for _ in range(batches):
            shares = [next(one)[0] for one in ones]
            assert all(len(share) == 4 // hosts for share in shares)
            found += [task.id for share in shares for task in share]
        assert len({one.position for one in ones}) == 1
        position = ones[0].position
        for one in ones:
            one.close()
    assert found == whole
    assert all(sorted(found[i : i + ROWS]) == sorted(rows.ids) for i in range(0, 60, ROWS))


@pytest.mark.parametrize("threads, prefetch", [(0, 1), (1, 1), (3, 2), (3, 8)])
def test_reading_ahead_changes_nothing(rows, threads, prefetch):
    plain = ids(stream(rows), 6)
    assert ids(stream(rows, read_threads=threads, prefetch_batches=prefetch), 6) == plain


def test_worker_processes_change_nothing(rows):
    found = ids(stream(rows, build=_identity, workers=2, read_threads=1), 6)
    assert found == ids(stream(rows), 6)


def _identity(task: Task) -> str:
    return task.id


def test_a_batch_that_hosts_cannot_share_is_refused(rows):
    with pytest.raises(ValueError, match="prompts_per_step.*3 hosts"):
        stream(rows, num_hosts=3)


@pytest.fixture
def build(builder):
    """The tiny policy's prompts with pictures of up to 12 x 28 px cells."""

    def make(**limits):
        processor = ImageProcessor(max_pixels=12 * 28 * 28 * 2)
        return PromptBuilder(builder.tokenizer, processor, builder.config, builder.texts, **limits)

    return make


def test_token_counts_are_known_before_a_picture_is_decoded(rows, build):
    maker = build()
    fit = fit_rows(rows, lambda q, s: maker.measure(q, s, "agent"))
    assert fit.num_tokens.tolist() == [len(maker.build(t, "agent").ids) for t in rows]
    assert fit.kept.tolist() == list(range(ROWS)) and fit.num_shrunk == 0


@pytest.mark.case("A-D4")
def test_long_rows_are_shrunk_or_left_out_by_their_true_size(rows, build):
    plain = build()
    lengths = np.array([len(plain.build(t, "agent").ids) for t in rows])
    limit = int(lengths[0]) + 3
    maker = build(max_tokens=limit)
    fit = fit_rows(rows, lambda q, s: maker.measure(q, s, "agent"))
    assert fit.left_out == ("fvqa_train_4",) and 4 not in fit.kept
    assert fit.num_shrunk == sum(lengths[fit.kept] > limit) > 2
    prompts = {t.id: maker.build(t, "agent") for t in rows}
    assert all(len(prompts[rows.ids[n]].ids) <= limit for n in fit.kept)
    assert fit.num_tokens.tolist() == [len(prompts[i].ids) for i in rows.ids]
    assert len(prompts["fvqa_train_4"].ids) > limit  # evaluation keeps it
    handed_out = ids(stream(rows, kept=fit.kept, batch_size=3), 6)
    assert sorted(handed_out) == sorted([i for i in rows.ids if i != "fvqa_train_4"] * 2)


@pytest.mark.case("A-D4")
def test_a_large_picture_under_a_limit_of_512_is_counted_by_its_cells(builder):
    maker = PromptBuilder(
        builder.tokenizer, ImageProcessor(), builder.config, builder.texts, max_tokens=512
    )
    picture = files.picture(1024, 1024)
    task = Task("t", "What is it?", picture, ("a",), "s", "c")
    size = maker.measure(task.question, (1024, 1024), "agent")
    assert size.is_shrunk and size.fits
    prompt = maker.build(task, "agent")
    assert len(prompt.ids) == size.num_tokens <= 512
    free = PromptBuilder(builder.tokenizer, ImageProcessor(), builder.config, builder.texts)
    assert len(free.build(task, "agent").ids) > 1300  # 37 x 37 cells, no placeholder's one


def test_question_pictures_have_a_bound_of_their_own(builder):
    maker = PromptBuilder(
        builder.tokenizer, ImageProcessor(), builder.config, builder.texts,
        max_picture_pixels=903_168,
    )  # fmt: skip
    grid = maker.build(Task("t", "q", files.picture(2000, 1500), ("a",), "s", "c"), "agent")
    assert int(grid.image_grid_thw.prod()) // 4 <= 1152 < 2000 * 1500 // 28**2


def test_no_row_that_fits_is_a_sentence(rows, build):
    maker = build(max_tokens=5)
    with pytest.raises(ValueError, match="max_prompt_tokens"):
        fit_rows(rows, lambda q, s: maker.measure(q, s, "agent"))


@pytest.mark.case("A-D3")
def test_text_only_rows_ride_with_picture_rows(rows, build):
    maker = build()

    def make(task):
        return maker.build(task, "agent")

    tasks, prompts = next(stream(rows, batch_size=ROWS, build=make))
    assert sum(not t.picture for t in tasks) == 1
    for task, prompt in zip(tasks, prompts, strict=True):
        alone = maker.build(task, "agent")
        np.testing.assert_array_equal(prompt.ids, alone.ids)
        np.testing.assert_array_equal(prompt.pixel_values, alone.pixel_values)
        assert len(prompt.image_grid_thw) == bool(task.picture)
    only = [n for n, task in enumerate(rows) if not task.picture]
    _, alone = next(stream(rows, batch_size=2, kept=np.array(only), build=make))
    assert all(p.pixel_values.shape == (0, 1176) for p in alone)
