"""Row by row: a kill loses no finished question and repeats none."""

import json

import numpy as np
import pytest

from svrl_jax.evals.store import GroupStore, group_name
from svrl_jax.records import Journal, Record, read_records
from svrl_jax.training.run_folder import RunFolderError
from tests.evals.twelve import about, twelve

CASES = twelve()
ABOUT = about(digest="d", query_choice="first", filter="")
TASKS = [c.task for c in CASES]


def same(one, other):
    assert one.episode.turns == other.episode.turns and one.task == other.task
    for name in ("ids", "loss_mask", "positions", "sampler_logps", "pixel_values"):
        np.testing.assert_array_equal(getattr(one.episode, name), getattr(other.episode, name))


def test_a_journal_gives_back_every_whole_record(tmp_path):
    journal = Journal(tmp_path, "a")
    assert journal.read() == []
    records = [Record(c.episode, c.task) for c in CASES]
    for record in records:
        journal.add(record)
    path = tmp_path / "a.journal"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])  # killed while it wrote the last one
    found = Journal(tmp_path, "a").read()
    assert len(found) == 11
    for one, other in zip(found, records, strict=False):
        same(one, other)
    Journal(tmp_path, "a").add(records[11])  # goes on behind the last whole line
    assert [r.task.id for r in Journal(tmp_path, "a").read()] == [t.id for t in TASKS]
    journal.remove()
    journal.remove()
    assert journal.read() == []


def test_a_stopped_chunk_runs_what_is_missing_and_nothing_else(tmp_path):
    store = GroupStore(tmp_path, "eval_toy", ABOUT)
    chunk = store.chunk(0)
    assert chunk.missing(TASKS, 1) == [(0, TASKS)]
    for case in (CASES[3], CASES[0], CASES[7]):  # in whatever order they end
        chunk.add(case.episode)
    # Killed. The next start:
    chunk = GroupStore(tmp_path, "eval_toy", ABOUT).chunk(0)
    ((sample, left),) = chunk.missing(TASKS, 1)
    assert sample == 0 and [t.id for t in left] == [
        t.id for i, t in enumerate(TASKS) if i not in (0, 3, 7)
    ]
    for case in CASES:
        if case.task in left:
            chunk.add(case.episode)
    records = chunk.close(TASKS, 1)
    assert [r.task.id for r in records] == [t.id for t in TASKS]
    assert not list((tmp_path / "episodes").glob("*.journal"))
    assert [r.task.id for r in read_records(chunk.path)] == [t.id for t in TASKS]
    again = GroupStore(tmp_path, "eval_toy", ABOUT).chunk(0)
    assert again.missing(TASKS, 1) == []
    before = chunk.path.stat().st_mtime_ns
    assert [r.task.id for r in again.close(TASKS, 1)] == [t.id for t in TASKS]
    assert chunk.path.stat().st_mtime_ns == before  # a whole set is left alone


def test_more_questions_and_more_samples_are_added(tmp_path):
    store = GroupStore(tmp_path, "eval_toy", ABOUT)
    chunk = store.chunk(0)
    chunk.missing(TASKS[:2], 1)
    for case in CASES[:2]:
        chunk.add(case.episode)
    chunk.close(TASKS[:2], 1)
    chunk = store.chunk(0)
    assert chunk.missing(TASKS[:3], 2) == [(0, [TASKS[2]]), (1, TASKS[:3])]
    assert [r.task.id for r in store.chunk(0).close(TASKS[:1], 1)] == ["t1"]
    assert len(read_records(chunk.path)) == 2  # fewer were asked for: none is lost


def test_another_evaluation_under_the_name_is_refused_or_replaced(tmp_path):
    store = GroupStore(tmp_path, "eval_toy", ABOUT)
    chunk = store.chunk(0)
    chunk.missing(TASKS[:1], 1)
    chunk.add(CASES[0].episode)
    chunk.close(TASKS[:1], 1)
    store.note(seconds=3.5)
    other = ABOUT | {"digest": "e"}
    with pytest.raises(RunFolderError, match="digest was 'd', is now 'e'"):
        GroupStore(tmp_path, "eval_toy", other)
    assert GroupStore(tmp_path, "eval_toy", ABOUT).about["seconds"] == 3.5
    store = GroupStore(tmp_path, "eval_toy", other, replace=True)
    assert store.about["seconds"] == 6.0 and store.chunk(0).done == {}
    assert json.loads((tmp_path / "evals" / "eval_toy.json").read_text())["digest"] == "e"


def test_group_names_are_file_names():
    assert group_name("a/b c", "agent", "set/test", "greedy") == "eval_a-b-c_agent_set-test_greedy"
