"""A whole run over live searches, models included: its keys stand in nothing that it leaves."""

import base64
import itertools
import json
import re
import sqlite3

import pytest
from werkzeug.wrappers import Response

from svrl_jax.records import read_records, record_files
from tests.experiments.conftest import ROOT

KEYS = {
    name: f"sk-test-{name.split('_')[0]}-7f3a91c2"
    for name in ("SERPER_API_KEY", "JINA_API_KEY", "SUMMARY_API_KEY", "ORACLE_API_KEY")
}


def upload(picture: bytes) -> str:
    """Stands for a picture host of the user's own."""
    return "https://pictures.example.org/1.png"


@pytest.fixture
def web(httpserver, monkeypatch):
    """Providers that answer, and every third time fail with the caller's own key in the body."""
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    shown, count = set(), itertools.count()

    def answer(request):
        key = request.headers.get("X-API-KEY") or request.headers["Authorization"].split()[-1]
        shown.add(key)
        if next(count) % 3 == 2:
            return Response(json.dumps({"message": f"fault for {key}"}), 500, {"X-Key": key})
        if request.path == "/chat/completions":
            reply = [{"message": {"content": "It says so."}, "finish_reason": "stop"}]
            return Response(json.dumps({"choices": reply}))
        if request.path in ("/search", "/lens"):
            rows = [
                {"title": f"Page {i}", "link": f"https://p{i}.example.org/x", "snippet": "about"}
                for i in range(3)
            ]
            return Response(json.dumps({"organic": rows}))
        return Response("Title: Page\n\nMarkdown Content:\nWhat the page says.")

    httpserver.expect_request(re.compile(".*")).respond_with_handler(answer)
    return httpserver.url_for("").rstrip("/"), shown


def test_the_keys_stand_in_nothing_that_a_run_leaves(cli, web, tmp_path):
    url, shown = web
    run, record = tmp_path / "run", tmp_path / "searches.sqlite"
    changes = {
        "num_steps": 1,
        "data.prompts_per_step": 2,
        "data.draws_per_item": 1,
        "rollout.group_size": 4,
        "rollout.lanes": 8,
        "rollout.slots": 8,
        "eval.num_items": 1,
        "eval.splits": ("test",),
        "eval.modes": ("greedy",),
        "reward.search_free_source": "greedy",
        "reward.search_free_samples": 0,
        "reward.oracle": "model",
        "search.kind": "live",
        "search.record_mode": "record",
        "search.record_file": record,
        "search.uploader": "tests.experiments.test_secrets:upload",
        "search.page_reader": "jina",
        "search.summariser": "model",
        "search.image_items": "full",
        "search.max_retries": 0,
        "reward.oracle_chat.max_retries": 0,
        "search.jina.per_minute": 6000.0,
        "search.serper.per_minute": 6000.0,
    } | {f"{name}.endpoint": url for name in
         ("search.serper", "search.jina", "search.chat", "reward.oracle_chat")}  # fmt: skip
    code, out, err = cli(
        "train", f"--config={ROOT / 'configs' / 'quickstart.py'}", f"--workdir={run}",
        *(f"--config.{name}={value}" for name, value in changes.items()),
    )  # fmt: skip
    assert code == 0, err
    # What makes the test worth something: every key was shown, searches answered and failed.
    assert shown == set(KEYS.values())
    calls = [
        call
        for path in record_files(run / "episodes")
        for r in read_records(path)
        for call in r.episode.calls
    ]
    assert {call.status for call in calls} >= {"ok", "failed"}
    (rows,) = sqlite3.connect(record).execute("SELECT COUNT(*) FROM answers").fetchone()
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert rows > 5 and len(files) > 10
    everything = b"".join(p.read_bytes() for p in files) + (out + err).encode()
    for key in KEYS.values():
        assert key.encode() not in everything
        assert base64.b64encode(key.encode()) not in everything
