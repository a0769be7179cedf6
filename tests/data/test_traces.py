"""Real traces of MMSearch-R1-7B."""

import json

import pytest

from svrl_jax.data.traces import TraceError, read_traces
from tests.data.published_files import PUBLISHED

PATH = PUBLISHED / "fvqa_sample_traces.jsonl"


@pytest.fixture(scope="module")
def traces():
    return {t.task.id: t for t in read_traces(PATH)}


def test_every_line_is_a_trace(traces):
    lines = [json.loads(line) for line in PATH.read_text("utf-8").splitlines()]
    assert list(traces) == [line["data_id"] for line in lines]
    for trace, line in zip(traces.values(), lines, strict=True):
        assert [text for text, _ in trace.turns] == [r["response"] for r in line["rounds"]]
        assert trace.answer == line["final_answer"]
        assert trace.exact_match == line["exact_match"]
        assert trace.task.golds[0] == line["ground_truth"]
        for (_, call), one in zip(trace.turns, line["rounds"], strict=True):
            assert (call is None) == (one["action"] == "answer")


def test_an_image_search_has_titles_and_thumbnails(traces):
    image = traces["fvqa_train_1007"].turns[0][1]
    assert image.call.tool == "image_search" and image.call.status == "ok"
    assert len(image.call.items) == image.call.num_found == len(image.found) == 5
    assert all(item.title and not item.text for item in image.found)
    assert all(address.startswith("https://") for address in image.thumbnails)


def test_a_text_search_joins_results_with_summaries(traces):
    text = traces["fvqa_train_3112"].turns[1][1]
    assert text.call.query == "When was the Auditorio de Tenerife officially opened?"
    assert all(i.text and i.link == i.id for i in text.call.items) and len(text.call.items) == 5
    assert len(text.snippets) == 5 and all(text.snippets)


def test_a_run_that_broke_off_keeps_what_was_found(traces):
    trace = traces["fvqa_train_4724"]
    assert trace.answer is None and trace.status == "text_search_hard_failure"
    image, text = (call for _, call in trace.turns)
    assert image.failures[0]["error"] == "HTTPError" and image.call.status == "ok"
    assert text.call.status == "failed" and text.call.items == ()
    assert "HTTP 403" in text.call.error
    assert len(text.found) == text.call.num_found == 5
    assert [bool(item.text) for item in text.found] == [False, True, True, False, True]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"rounds": [{"response": "x", "action": "video_search"}]}, "video_search"),
        ({"terminal_status": None}, "line 1"),
        ({"ground_truth": ""}, "no answer"),
    ],
)
def test_a_strange_line_is_named(tmp_path, change, reason):
    line = json.loads(PATH.read_text("utf-8").splitlines()[0]) | change
    (tmp_path / "t.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(TraceError, match=reason):
        list(read_traces(tmp_path / "t.jsonl"))
    (tmp_path / "t.jsonl").write_text('{"data_id": "a"}\n')
    with pytest.raises(TraceError, match="line 1: it has no terminal_status"):
        list(read_traces(tmp_path / "t.jsonl"))
