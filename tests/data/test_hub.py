"""A data set named by its hub id, fetched from a small server that speaks the hub's protocol."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse

import pytest

from tests.data.published_files import PUBLISHED

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILE = PUBLISHED / "fvqa_mini.parquet"


class Hub(http.server.BaseHTTPRequestHandler):
    """One data set, `someone/infoseek`, of one file at one commit."""

    def do_GET(self):
        self._answer(has_body=True)

    def do_HEAD(self):
        self._answer(has_body=False)

    def log_message(self, *_):
        pass

    def _answer(self, *, has_body: bool):
        path = urllib.parse.urlparse(self.path).path
        name = "mmsearch_r1_infoseek_sub_2k.parquet"
        data, headers = FILE.read_bytes(), {}
        if path == f"/datasets/someone/infoseek/resolve/{COMMIT}/{name}":
            digest = hashlib.sha256(data).hexdigest()
            headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}
        elif path.startswith("/api/datasets/someone/infoseek/tree/"):
            files = [
                {"type": "file", "path": p, "size": len(data), "oid": "1" * 40}
                for p in (name, "unrelated.bin")
            ]
            data = json.dumps(files).encode()
        elif path.startswith("/api/datasets/someone/infoseek"):
            siblings = [{"rfilename": name}, {"rfilename": "unrelated.bin"}]
            data = json.dumps(
                {"id": "someone/infoseek", "sha": COMMIT, "siblings": siblings, "tags": []}
            ).encode()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if has_body:
            self.wfile.write(data)


@pytest.fixture
def endpoint():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def prepare(endpoint, tmp_path, source):
    code = (
        "from svrl_jax.data import prepare\n"
        f"try: print(prepare.prepare('infoseek', {source!r}, {str(tmp_path)!r})['revision'])\n"
        "except prepare.PrepareError as error: print('refused:', error)\n"
    )
    changes = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | changes
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_hub_id_is_fetched_at_its_revision(endpoint, tmp_path):
    out = prepare(endpoint, tmp_path, f"someone/infoseek@{COMMIT}")
    assert out.splitlines()[-1] == COMMIT
    manifest = json.loads((tmp_path / "infoseek" / "prepared.json").read_text())
    assert manifest["source"].startswith("someone/infoseek@")
    assert manifest["splits"]["test"]["tasks"] == 5
    assert not list((tmp_path / "hf").rglob("unrelated.bin"))  # only what is read is fetched
    assert "published is 8d5a0f9e8e6c" in out


def test_a_hub_that_does_not_have_it_is_a_sentence(endpoint, tmp_path):
    out = prepare(endpoint, tmp_path, "someone/nothing")
    assert out.startswith("refused: someone/nothing cannot be fetched") and "--source" in out
    assert not (tmp_path / "infoseek").exists()
