"""The whole live path on loopback: search, pages, summaries, thumbnails, record, stop."""

import dataclasses
import io
import json
import threading
import time

import pytest
from PIL import Image
from servers import raw_server

from configs.base import get_config
from svrl_jax.data.traces import read_traces
from svrl_jax.rollout.tools import ToolRunner
from svrl_jax.search import imported
from svrl_jax.search.build import chat_model, live_tools, record_settings
from svrl_jax.search.errors import SearchSetupError, SearchStopped, ToolError
from svrl_jax.search.record import SearchRecord, content_of_picture
from svrl_jax.types import Task
from tests.data.published_files import PUBLISHED, picture

KEY = "key-5f2c91"
TASK = Task("t", "Who built it?", picture(), ("x",), "s", "c", picture_url="https://p.org/x.png")
PAGE = "The bridge was built in 1894 by Horace Jones. It crosses the river. " * 3


@pytest.fixture
def search(httpserver, monkeypatch):
    """search(**keys): config.search whose providers are the local server."""
    monkeypatch.setenv("SERPER_API_KEY", KEY)

    def make(**changes):
        config = get_config().search
        endpoint = httpserver.url_for("").rstrip("/")
        config.update({"kind": "live", "allow_private": True, "summary_words": 12} | changes)
        config.serper.update({"endpoint": endpoint, "per_minute": 1e6, "usd_per_call": 0.01})
        return config

    return make


def serve_results(httpserver, links, path="/search", **more):
    rows = [{"title": f"T{i}", "link": link, "snippet": f"S{i}"} for i, link in enumerate(links)]
    for i, row in enumerate(rows):
        row |= {k: v[i] for k, v in more.items()}
    httpserver.expect_request(path).respond_with_json({"organic": rows})


def serve_pages(httpserver):
    httpserver.expect_request("/good").respond_with_data(PAGE, content_type="text/plain")
    httpserver.expect_request("/gone").respond_with_data("no", status=404)


def test_items_are_summaries_of_pages_and_snippets_stand_in(search, httpserver):
    serve_pages(httpserver)
    links = [httpserver.url_for("/good"), httpserver.url_for("/gone")]
    serve_results(httpserver, links)
    tools = live_tools(search(), timeout_s=20)
    first, second = tools.text_search("Who built the bridge?", TASK)
    assert first.text.startswith("The bridge was built in 1894") and second.text == "S1"
    assert (first.id, first.title, first.provider) == (links[0], "T0", "serper")
    assert tools.unread == {("page", "bad_response"): 1}
    dropping = live_tools(search(unread_pages="drop"), timeout_s=20)
    assert [i.title for i in dropping.text_search("Who built the bridge?", TASK)] == ["T0"]


def test_no_readable_page_is_a_failure_and_no_result_is_none(search, httpserver):
    serve_pages(httpserver)
    serve_results(httpserver, [httpserver.url_for("/gone")])
    tools = live_tools(search(unread_pages="drop"), timeout_s=20)
    with pytest.raises(ToolError) as error:
        tools.text_search("q", TASK)
    assert error.value.kind == "bad_response"
    httpserver.clear()
    serve_results(httpserver, [])
    assert tools.text_search("other", TASK) == []


@pytest.mark.case("A-T7")
def test_one_slow_thumbnail_does_not_hold_up_the_others(search, httpserver):
    httpserver.expect_request("/a.png").respond_with_data(picture(90, 60), content_type="image/png")
    stop = threading.Event()
    with raw_server(lambda c: stop.wait(10)) as (slow, _):
        good = httpserver.url_for("/a.png")
        serve_results(httpserver, ["", "", ""], "/lens", thumbnailUrl=[good, slow, good])
        tools = live_tools(search(thumbnails=True, page_reader="none"), timeout_s=1.5)
        began = time.monotonic()
        items = tools.image_search(TASK)
        assert time.monotonic() - began < 1.5
        stop.set()
    assert [i.title for i in items] == ["T0", "T1", "T2"]
    assert [i.picture is not None for i in items] == [True, False, True]
    assert Image.open(io.BytesIO(items[0].picture)).size == (90, 60)
    assert tools.unread == {("thumbnail", "timeout"): 1}


def test_titles_alone_read_no_page(search, httpserver):
    serve_results(httpserver, [httpserver.url_for("/good")], "/lens")
    (item,) = live_tools(search(image_items="titles"), timeout_s=20).image_search(TASK)
    assert item.title == "T0" and item.text == ""
    assert [request.path for request, _ in httpserver.log] == ["/lens"]


def hosted(data: bytes) -> str:
    return f"https://pictures.example/{len(data)}"


def test_a_picture_needs_an_address(search, httpserver):
    serve_results(httpserver, [], "/lens")
    private = dataclasses.replace(TASK, picture_url=None)
    with pytest.raises(ToolError, match="uploader") as error:
        live_tools(search(), timeout_s=20).image_search(private)
    assert error.value.kind == "no_address"
    live_tools(search(uploader="test_live:hosted"), timeout_s=20).image_search(private)
    assert httpserver.log[-1][0].json["url"] == hosted(private.picture)
    with pytest.raises(SearchSetupError, match="uploader"):
        live_tools(search(uploader="test_live:nothing"), timeout_s=20)


def test_a_missing_key_is_named_before_the_run_unless_the_record_answers(
    search, monkeypatch, tmp_path
):
    monkeypatch.delenv("SERPER_API_KEY")
    with pytest.raises(SearchSetupError, match="SERPER_API_KEY"):
        live_tools(search(), timeout_s=20)
    SearchRecord(tmp_path / "r", "record")
    live_tools(search(record_mode="replay", record_file=str(tmp_path / "r")), timeout_s=20)


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_is_refused_by_name_unless_the_record_answers(search, tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "http://user:hidden@proxy.example:3128")
    with pytest.raises(SearchSetupError, match=name) as error:
        live_tools(search(), timeout_s=5)
    assert "hidden" not in str(error.value) and "proxy.example" not in str(error.value)
    with pytest.raises(SearchSetupError, match=name):
        chat_model(get_config().reward.oracle_chat, "oracle", "ORACLE_API_KEY")
    path = tmp_path / "r.sqlite"
    SearchRecord(path, "record").close()
    live_tools(search(record_mode="replay", record_file=str(path)), timeout_s=5)


def test_a_run_is_recorded_and_replays_without_network_and_without_keys(
    search, httpserver, tmp_path, monkeypatch
):
    serve_pages(httpserver)
    links = [httpserver.url_for("/good"), httpserver.url_for("/gone")]
    serve_results(httpserver, links)
    serve_results(httpserver, links, "/lens")
    path = tmp_path / "r.sqlite"
    recording = live_tools(search(record_mode="record", record_file=str(path)), timeout_s=20)
    first = recording.text_search("Who built it?", TASK), recording.image_search(TASK)
    httpserver.clear()
    monkeypatch.delenv("SERPER_API_KEY")
    replaying = live_tools(search(record_mode="replay", record_file=str(path)), timeout_s=20)
    assert (replaying.text_search("who built IT?", TASK), replaying.image_search(TASK)) == first
    assert replaying.unread == recording.unread
    assert httpserver.log == []
    with pytest.raises(ToolError) as error:
        replaying.text_search("never asked", TASK)
    assert error.value.kind == "not_recorded"
    for file in tmp_path.iterdir():
        assert KEY.encode() not in file.read_bytes()


def run(tools, query="q"):
    with ToolRunner(tools, timeout_s=20, workers=2) as runner:
        call = runner.start("text_search", query, TASK)
        return call.future.result(30)


def test_a_dead_key_or_a_spent_budget_ends_the_run_with_a_sentence(search, httpserver):
    httpserver.expect_request("/search").respond_with_json({"message": "Unauthorized"}, status=403)
    with pytest.raises(SearchStopped, match="serper: the key is not accepted") as error:
        run(live_tools(search(), timeout_s=20))
    assert KEY not in str(error.value)
    httpserver.clear()
    serve_results(httpserver, [])
    tools = live_tools(search(max_usd=0.02), timeout_s=20)
    assert [run(tools, q).status for q in ("a", "b")] == ["empty", "empty"]
    with pytest.raises(SearchStopped, match="config.search.max_usd"):
        run(tools, "c")


def test_a_failure_reaches_the_episode_with_its_kind(search, httpserver):
    httpserver.expect_request("/search").respond_with_data("<p>hello</p>")
    answer = run(live_tools(search(), timeout_s=20))
    assert (answer.status, answer.failure, answer.items) == ("failed", "bad_response", ())


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """(tools that replay the real traces, the traces with their pictures)."""
    path = tmp_path_factory.mktemp("record") / "r"
    config = get_config().search
    config.update({"record_mode": "replay", "record_file": str(path), "image_items": "titles"})
    config.unread_pages = "drop"
    pictures = imported.pictures_by_id(PUBLISHED / "fvqa_sample.parquet")
    keys = imported.picture_keys_by_id(PUBLISHED / "fvqa_sample.parquet")
    traces = [t for t in read_traces(PUBLISHED / "fvqa_sample_traces.jsonl")]
    counts = imported.import_traces(
        SearchRecord(path, "record"), traces, keys, record_settings(config)
    )
    assert counts["text_search"] and counts["summary"] == 5 * counts["text_search"]
    return live_tools(config, timeout_s=20), traces, pictures, counts


def test_real_traces_replay_with_what_the_agent_saw(replay):
    tools, traces, pictures, counts = replay
    seen = dict.fromkeys(("text_search", "image_search"), 0)
    for trace in traces:
        task = dataclasses.replace(trace.task, picture=pictures.get(trace.task.id, b""))
        for _, searched in trace.turns:
            if searched is None or (searched.call.tool == "image_search" and not task.picture):
                continue
            shown = [i for i in searched.found if i.text or searched.call.tool == "image_search"]
            if searched.call.tool == "image_search":
                found = tools.image_search(task)
            else:
                found = tools.text_search(searched.call.query, task)
            assert [(i.title, i.link, i.text) for i in found] == [
                (i.title, i.link, i.text) for i in shown
            ]
            seen[searched.call.tool] += 1
    assert seen == {k: counts[k] for k in seen} and seen["image_search"]


def test_an_import_twice_is_one_import(replay, tmp_path):
    _, traces, pictures, counts = replay
    keys = {data_id: content_of_picture(picture) for data_id, picture in pictures.items()}
    settings = record_settings(get_config().search)
    record = SearchRecord(tmp_path / "r", "record")
    assert imported.import_traces(record, traces, keys, settings) == counts
    before = record.snapshot()
    imported.import_traces(record, traces, keys, settings)
    assert record.snapshot() == before
    assert imported.import_traces(record, traces, {}, settings)["no_picture"] > 0
    assert json.loads(next(record.rows())["asked"])
