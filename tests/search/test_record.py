"""The record: what it keeps, what it gives back, and that nothing is lost between processes."""

import json
import multiprocessing
import os
import signal
import sqlite3
import threading
import time

import pytest

from svrl_jax.search.errors import ToolError
from svrl_jax.search.exchange import export_rows, import_rows
from svrl_jax.search.record import SearchRecord, SearchRecordError, content_of_picture, fold_query

SETTINGS = {"provider": "serper", "num_results": 5}


def asked(record, query, answer=None, settings=SETTINGS):
    """(answer, whether the outside was asked)."""
    calls = []

    def live():
        calls.append(1)
        if isinstance(answer, Exception):
            raise answer
        return answer

    found = record.ask("text_search", {"query": fold_query(query)}, settings, live)
    return found, bool(calls)


def failure(record, query, error=None):
    with pytest.raises(ToolError) as raised:
        asked(record, query, error)
    return raised.value.kind


def test_the_modes(tmp_path):
    path = tmp_path / "r.sqlite"
    recording = SearchRecord(path, "record")
    assert asked(recording, "Capital of Chad", [1]) == ([1], True)
    assert asked(recording, "Capital of Chad", [2]) == ([2], True)  # asks again, keeps the newest
    replaying = SearchRecord(path, "replay")
    assert asked(replaying, " capital  of CHAD") == ([2], False)
    assert failure(replaying, "something else") == "not_recorded"
    both = SearchRecord(path, "replay_or_live")
    assert asked(both, "Capital of Chad", [3]) == ([2], False)
    assert asked(both, "something else", [4]) == ([4], True)
    assert asked(replaying, "something else") == ([4], False)


def test_other_settings_are_another_call(tmp_path):
    record = SearchRecord(tmp_path / "r", "replay_or_live")
    asked(record, "q", [1])
    assert asked(record, "q", [2], SETTINGS | {"num_results": 3}) == ([2], True)
    assert content_of_picture(b"a") != content_of_picture(b"b")


def test_failures_replay_and_those_that_pass_are_asked_again(tmp_path):
    path = tmp_path / "r"
    record = SearchRecord(path, "replay_or_live")
    assert failure(record, "slow", ToolError("late", "timeout")) == "timeout"
    assert failure(record, "odd", ToolError("html", "bad_response")) == "bad_response"
    assert failure(record, "dead", ToolError("key", "auth")) == "auth"
    replaying = SearchRecord(path, "replay")
    kinds = [failure(replaying, q) for q in ("slow", "odd", "dead")]
    assert kinds == ["timeout", "bad_response", "not_recorded"]
    assert asked(record, "slow", [1]) == ([1], True)
    with pytest.raises(ToolError, match="html"):
        asked(record, "odd", [1])
    # An answer is never lost to a later failure.
    again = SearchRecord(path, "record")
    assert failure(again, "slow", ToolError("late", "timeout")) == "timeout"
    assert asked(replaying, "slow") == ([1], False)


def test_bytes_come_back(tmp_path):
    record = SearchRecord(tmp_path / "r", "replay_or_live")
    for _ in range(2):
        assert record.ask("thumbnail", {"link": "a"}, {}, lambda: b"\x00\xff") == b"\x00\xff"
    assert record.counts() == {("thumbnail", ""): 1}


def test_one_thread_asks_and_the_others_wait_for_it(tmp_path):
    record, calls = SearchRecord(tmp_path / "r", "replay_or_live"), []

    def live():
        calls.append(1)
        time.sleep(0.1)
        return [7]

    found = []
    threads = [
        threading.Thread(target=lambda: found.append(record.ask("page", {"link": "a"}, {}, live)))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[7]] * 5 and calls == [1]


def test_a_snapshot_names_what_is_recorded(tmp_path):
    one, two = (SearchRecord(tmp_path / n, "record") for n in "ab")
    for record, order in ((one, "xy"), (two, "yx")):
        for query in order:
            asked(record, query, [query])
    assert one.snapshot() == two.snapshot()
    asked(two, "y", ["other"])
    assert one.snapshot() != two.snapshot()


def test_rows_travel_as_json_lines(tmp_path):
    record = SearchRecord(tmp_path / "a", "record")
    asked(record, "q", [{"title": "Ünï"}])
    record.put("thumbnail", {"link": "a"}, {}, b"\x00")
    record.put_failure("page", {"link": "b"}, {}, ToolError("no", "blocked"))
    assert export_rows(record, tmp_path / "rows.jsonl") == 3
    other = SearchRecord(tmp_path / "b", "record")
    assert import_rows(other, tmp_path / "rows.jsonl") == 3
    assert other.snapshot() == record.snapshot()
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    (tmp_path / "bad.jsonl").write_text(json.dumps(row | {"asked": "[]"}) + "\n")
    for text in (json.dumps(row | {"asked": "[]"}), "no json", "[]", "{}"):
        (tmp_path / "bad.jsonl").write_text(text + "\n")
        with pytest.raises(SearchRecordError, match="line 1"):
            import_rows(other, tmp_path / "bad.jsonl")


def test_what_is_no_record_is_named(tmp_path):
    with pytest.raises(SearchRecordError, match="does not exist"):
        SearchRecord(tmp_path / "none", "replay")
    (tmp_path / "text").write_text("hello, this is a text and no database" * 50)
    with pytest.raises(SearchRecordError, match="no search record"):
        SearchRecord(tmp_path / "text", "replay")
    sqlite3.connect(tmp_path / "other").execute("CREATE TABLE a (b)").connection.close()
    with pytest.raises(SearchRecordError, match="other file|another file"):
        SearchRecord(tmp_path / "other", "replay")


def _write(path, name, sent):
    record = SearchRecord(path, "record")
    number = 0
    while True:
        record.put("page", {"link": f"{name}/{number}"}, {}, "x" * 200)
        sent.send(number)  # acknowledged
        number += 1


def _two_processes(path, seconds):
    context = multiprocessing.get_context("spawn")
    writers = []
    for name in ("a", "b"):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_write, args=(path, name, theirs), daemon=True)
        process.start()
        theirs.close()
        writers.append((name, process, mine))
    acknowledged = {"a": -1, "b": -1}
    for _, _, pipe in writers:
        assert pipe.poll(60)
    end = time.monotonic() + seconds
    killed = False
    while time.monotonic() < end:
        for name, process, pipe in writers:
            while pipe.poll(0) and not (killed and name == "a"):
                acknowledged[name] = pipe.recv()
            if name == "a" and not killed and time.monotonic() > end - seconds / 2:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                killed = True
    for name, process, pipe in writers:
        process.kill()
        process.join()
        try:
            while True:
                acknowledged[name] = pipe.recv()
        except EOFError:
            pass
    record = SearchRecord(path, "replay")
    assert record._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    there = {json.loads(row["asked"])[0]["link"] for row in record.rows()}
    for name, last in acknowledged.items():
        assert last >= 5
        assert {f"{name}/{i}" for i in range(last + 1)} <= there


def test_no_acknowledged_row_is_lost_when_a_process_is_killed(tmp_path):
    _two_processes(str(tmp_path / "r"), 1.5)


@pytest.mark.slow
def test_nor_in_a_minute(tmp_path):
    _two_processes(str(tmp_path / "r"), 60)
