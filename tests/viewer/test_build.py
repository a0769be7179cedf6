"""Records -> the folder: what stands in its data, and what happens to what cannot be read."""

import dataclasses
import io
import json
import pathlib
import shutil
import threading
import urllib.error
import urllib.request
import zlib

import numpy as np
import pytest
from PIL import Image

from svrl_jax.evals import cases
from svrl_jax.records import Record, read_records, write_records
from svrl_jax.rewards.audit import scripted_episode
from svrl_jax.rewards.judge import Verdict
from svrl_jax.types import OracleLabels, Score, SearchItem, Task, ToolCall
from svrl_jax.viewer import build, entries, pictures, runs, serve, tokens
from tests.data.published_files import PUBLISHED
from tests.viewer import samples
from tests.viewer.conftest import view

TASK = Task("t1", "Which river?", samples.encoded(), ("Nile",), "made/test", "river",
            evidence_ids=("b",))  # fmt: skip
ITEMS = tuple(SearchItem(i, i.upper(), f"https://{i}.example/", f"about {i}") for i in "abc")
LABELS = OracleLabels(items=((0, 1, 1), (0, 1, 1)), queries=(1,), proposals=((1, 0, 1, 1, 0),))
SCRIPT = (
    ("<reason>look</reason><search><img></search>",
     ToolCall("image_search", "", ITEMS, num_found=4, seconds=0.5)),
    ("<reason>ask</reason><verify>0,1,0</verify>"
     "<text_search>one, two, One!, three, four</text_search>",
     ToolCall("text_search", "two", ITEMS, num_found=3)),
    ("<reason>so</reason><verify>1,1</verify><answer>Nile</answer>", None),
)  # fmt: skip


def record(task=TASK, script=SCRIPT, score=None, **changes) -> Record:
    episode = scripted_episode(task, script, num_queries=5)
    return Record(dataclasses.replace(episode, **changes), task, score)


def entry(one=None, labels=None, scorer="em", **notes):
    notes = entries.Notes(labels, **notes)
    return entries.make_entry(one or record(), notes, scorer, pictures.InlinePictures())


def index_of(out: pathlib.Path) -> dict:
    return value_of(out / "data" / "index.js")


def value_of(path: pathlib.Path):
    text = path.read_text("ascii")
    return json.loads(text[text.index(", ") + 2 : -3])


def run_folder(folder, records, name="eval_test"):
    write_records(folder / "episodes", name, records)
    return folder


def test_a_mask_stands_at_the_items_that_it_is_about():
    turns = entry(labels=LABELS).view["turns"]
    assert [i["kept"] for i in turns[0]["call"]["items"]] == [0, 1, 0]
    assert [i["useful"] for i in turns[0]["call"]["items"]] == [0, 1, 1]
    assert [i["is_evidence"] for i in turns[0]["call"]["items"]] == [False, True, False]
    second = turns[1]["call"]  # the mask behind it has two values for three items
    assert [i["kept"] for i in second["items"]] == [None] * 3 and not second["has_mask"]
    line = entry(labels=LABELS).line
    assert (line["outputs"], line["agreement"]) == (2, pytest.approx(2 / 3, abs=1e-4))


def test_the_executed_query_is_marked_and_repeated_ones_too():
    proposals = entry(labels=LABELS).view["turns"][1]["proposals"]
    assert [p["executed"] for p in proposals] == [False, True, False, False, False]
    assert [p["duplicate"] for p in proposals] == [False, False, True, False, False]
    assert [p["good"] for p in proposals] == [1, 0, 1, 1, 0]
    other = dataclasses.replace(SCRIPT[1][1], query="another branch")
    one = record(script=(SCRIPT[0], (SCRIPT[1][0], other), SCRIPT[2]))
    last = entry(one, LABELS).view["turns"][1]["proposals"][-1]
    assert last == {
        "text": "another branch", "executed": True, "duplicate": False, "proposed": False,
        "good": 1, "judged": None,
    }  # fmt: skip


def test_a_recorded_score_counts_and_another_is_said_to_be_ours():
    score = Score(0.7, 0.0, 1.0, 0.8, 0.9, 1.0, 0.0, labels=LABELS, search_free=True)
    found = entry(record(score=score))
    assert found.line["right"] is False and found.line["reward"] == 0.7 and found.line["free"]
    assert found.view["score"]["r_count"] == 0.8 and found.view["is_labelled"]
    found = entry()
    assert found.line["right"] is True and found.view["score"] is None
    assert found.view["computed"] == {
        "r_acc": 1.0, "r_format": 0.0, "scorer": "em", "is_ours": True,
    }  # fmt: skip
    assert found.line["outputs"] == 0 and found.view["agreement"] is None


def test_what_is_not_known_is_no_verdict():
    assert entry(dataclasses.replace(record(), task=None)).line["right"] is None
    blank = dataclasses.replace(TASK, golds=(" ",))
    assert entry(record(blank)).line["right"] is None
    silent = dataclasses.replace(LABELS, answered=False)
    assert entry(labels=silent).line["outputs"] == 0
    with pytest.raises(ValueError, match="do not belong"):
        entry(labels=dataclasses.replace(LABELS, queries=()))


@pytest.mark.parametrize(
    "data, cause",
    [
        (b"\xff\xd8 torn", "no picture that can be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture that can be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture that can be read"),
        (samples.encoded()[:60], ""),
    ],
)
def test_pictures_that_cannot_be_read_say_so(data, cause):
    found = pictures.convert(data)
    assert found.problem and cause in found.problem and not found.files
    assert found.reference() == {"problem": found.problem}


def test_a_picture_of_too_many_pixels_is_refused(monkeypatch):
    monkeypatch.setattr(pictures, "MAX_ENCODED_BYTES", 10)
    assert "above the limit" in pictures.convert(samples.encoded()).problem
    monkeypatch.undo()
    small = samples.encoded(size=(8, 8))
    header = b"IHDR" + (12_000).to_bytes(4, "big") * 2 + small[24:29]
    bomb = small[:12] + header + zlib.crc32(header).to_bytes(4, "big") + small[33:]
    assert "above the limit" in pictures.convert(bomb).problem


def test_pictures_are_encoded_anew_without_their_metadata():
    image = Image.new("RGB", (300, 900), (1, 2, 3))
    exif = image.getexif()
    exif[0x0112], exif[0x010E] = 6, "secret place"  # turned a quarter, and a description
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    found = pictures.convert(buffer.getvalue())
    assert (found.width, found.height) == (900, 300)
    for size, data in found.files.items():
        assert b"secret place" not in data and data[:4] == b"RIFF"
        decoded = Image.open(io.BytesIO(data))
        assert max(decoded.size) == min(900, pictures.SIDES_PX[size]) and not decoded.getexif()


def test_equal_pictures_are_one_file(tmp_path):
    folder = pictures.PictureFolder(tmp_path)
    assert folder.add(samples.encoded()) == folder.add(samples.encoded()) is not None
    assert folder.add(b"") is folder.add(None) is None
    assert {p.name for p in tmp_path.iterdir()} == folder.used and len(folder.used) == 2


def test_tokens_of_a_view_are_the_episodes(builder, world, tasks):
    one = world.record(tasks[1], "initial", samples.HABITS["initial"])
    found = tokens.token_view(one, tokens.Vocabulary(builder.tokenizer))
    assert sum(found["counts"]) == len(one.episode.ids)
    mask = np.repeat(found["mask"], found["counts"])
    np.testing.assert_array_equal(mask, one.episode.loss_mask)
    assert max(found["counts"]) >= tokens.MIN_RUN  # the picture's
    assert all(c == 1 for c, m in zip(found["counts"], found["mask"]) if m)
    policy = one.episode.loss_mask == 1
    np.testing.assert_allclose(found["logps"], one.episode.sampler_logps[policy], atol=6e-5)
    gaps = (one.per_token_logps - one.episode.sampler_logps)[policy]
    np.testing.assert_allclose(found["gaps"], gaps, atol=6e-5)
    text = "".join(t for t, m in zip(found["texts"], found["mask"]) if m)
    assert text == "".join(t.text for t in one.episode.turns)


def test_characters_cut_over_tokens_are_whole(builder):
    ids = builder.tokenizer.encode_plain("a東京é😀").tolist()
    spelt = tokens.Vocabulary(builder.tokenizer).spell_all(ids)
    assert "".join(spelt) == "a東京é😀" and len(spelt) == len(ids)
    assert tokens.Vocabulary(None).spell_all([7, 10**9]) == ["[7]", "[1000000000]"]
    assert tokens.Vocabulary(builder.tokenizer).spell(10**9) == "[1000000000]"


def test_log_probs_that_were_not_recorded_are_absent():
    found = tokens.token_view(record(), tokens.Vocabulary(None))
    assert found["logps"] is None and found["gaps"] is None and not found["spelt"]


def test_runs_meet_by_the_questions_id(tmp_path):
    a = run_folder(tmp_path / "a", [record(), record(dataclasses.replace(TASK, id="t2"))])
    b = run_folder(tmp_path / "b", [record(dataclasses.replace(TASK, question="Other?"))])
    assert view(a, f"mine={b}", f"--out={tmp_path / 'out'}") == 0
    index = index_of(tmp_path / "out")
    assert [t["id"] for t in index["tasks"]] == ["t1", "t2"]
    assert [m["run"] for m in index["models"]] == ["a", "mine"]
    assert index["episodes"]["task"] == [0, 1, 0] and index["episodes"]["model"] == [0, 0, 1]
    assert ["reads differently" in p for p in index["problems"]] == [True]
    [name] = index["chunks"]
    chunk = value_of(tmp_path / "out" / "data" / f"episodes_{name}.js")
    assert [e["turns"][2]["answer"] for e in chunk["episodes"]] == ["Nile"] * 3


def test_models_are_policies_under_a_regime_and_a_temperature(tmp_path):
    records = [record(), record(temperature=0.0), record(regime="direct"), record(policy="p")]
    run_folder(tmp_path / "run", records)
    run_folder(tmp_path / "run", [record(step=3, sample=1)], "step_000003")
    assert view(tmp_path / "run", f"--out={tmp_path / 'out'}") == 0
    index = index_of(tmp_path / "out")
    assert [m["how"] for m in index["models"]] == ["T=1", "greedy", "T=1", "T=1", "training"]
    assert index["episodes"]["step"] == [-1] * 4 + [3]
    assert len({m["key"] for m in index["models"]}) == 5


def test_labels_of_annotate_are_used(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", [record()])
    line = {"task_id": "t1", "sample": 0, "oracle": "rule", "items": LABELS.items,
            "queries": LABELS.queries, "proposals": LABELS.proposals, "answered": True}  # fmt: skip
    path = folder / "episodes" / "eval_test.labels.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert view(folder, f"--out={tmp_path / 'out'}") == 0
    assert index_of(tmp_path / "out")["episodes"]["outputs"] == [2]
    path.write_text(json.dumps({"task_id": "t1", "sample": 0, "query_judge": [1]}) + "\n")
    assert view(folder, f"--out={tmp_path / 'out'}") == 0
    assert index_of(tmp_path / "out")["episodes"]["outputs"] == [0]
    path.write_text(json.dumps(line | {"task_id": "other"}) + "\n")
    assert view(folder, f"--out={tmp_path / 'out'}") == 0  # the episodes are shown without them
    assert index_of(tmp_path / "out")["episodes"]["outputs"] == [0]
    assert "annotate the run again" in capsys.readouterr().out
    path.write_text(json.dumps(line | {"queries": []}) + "\n")
    assert view(folder, f"--out={tmp_path / 'out'}") == 0
    assert "annotate the run again" in capsys.readouterr().out


def test_verdicts_and_query_labels_are_told_beside_what_they_are_about(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", [record(), record(sample=1)])
    path = folder / "episodes" / "eval_test.jsonl"
    records = read_records(path)
    verdicts = [
        (Verdict("judge", 0.0, "incorrect"), Verdict("em", 1.0)),
        (Verdict("judge", None, cause="timeout"), Verdict("em", 1.0)),
    ]
    cases.write_verdicts(path, records, verdicts)
    lines = [
        {"task_id": "t1", "sample": i, "query_judge": [v], "query_judge_name": "model (12)"}
        for i, v in enumerate((0, None))
    ]
    path.with_suffix(".labels.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert view(folder, f"--out={tmp_path / 'out'}") == 0
    index = index_of(tmp_path / "out")
    assert index["episodes"]["right"] == [0, -1] and index["problems"] == []  # the first counts
    [name] = index["chunks"]
    first, second = value_of(tmp_path / "out" / "data" / f"episodes_{name}.js")["episodes"]
    assert first["verdicts"] == [
        {"scorer": "judge", "value": 0.0, "grade": "incorrect", "cause": ""},
        {"scorer": "em", "value": 1.0, "grade": "", "cause": ""},
    ]
    assert first["computed"]["scorer"] == "judge" and not first["computed"]["is_ours"]
    assert second["verdicts"][0] == {
        "scorer": "judge", "value": None, "grade": "", "cause": "timeout",
    }  # fmt: skip
    judged = [[p["judged"] for p in e["turns"][1]["proposals"]] for e in (first, second)]
    assert judged == [[None, "poor", *[None] * 3], [None, "no verdict", *[None] * 3]]
    assert first["query_judge"] == "model (12)" and first["oracle"] == ""
    cases.write_verdicts(path, [record(sample=9)], verdicts[:1])
    assert view(folder, f"--out={tmp_path / 'out'}") == 0
    assert "rescore the run again" in capsys.readouterr().out


def test_seconds_of_turns_are_there_or_absent():
    assert [t["seconds"] for t in entry().view["turns"]] == [None] * 3
    assert entry().view["turn_seconds"] is None
    one = record()
    turns = tuple(
        dataclasses.replace(t, seconds=s)
        for t, s in zip(one.episode.turns, (0.25, None, 1.5), strict=True)
    )
    found = entry(dataclasses.replace(one, episode=dataclasses.replace(one.episode, turns=turns)))
    assert [t["seconds"] for t in found.view["turns"]] == [0.25, None, 1.5]
    assert found.view["turn_seconds"] == 1.75


def test_a_set_that_cannot_be_read_is_told_and_left_out(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", [record()])
    run_folder(folder, [record()], "step_000001")
    (folder / "episodes" / "step_000001.npz").write_bytes(b"torn")
    assert view(folder, f"--out={tmp_path / 'out'}") == 0
    assert "note: run/step_000001" in capsys.readouterr().out
    index = index_of(tmp_path / "out")
    assert len(index["problems"]) == 1 and len(index["episodes"]["task"]) == 1


def test_made_anew_it_holds_what_there_is_now(tmp_path):
    folder, out = run_folder(tmp_path / "run", [record()]), tmp_path / "out"
    assert view(folder, f"--out={out}") == 0
    before = {p.name: p.read_bytes() for p in (out / "data").iterdir() if p.name != "index.js"}
    assert view(folder, f"--out={out}") == 0  # a page of the same records keeps its chunks
    assert before == {
        p.name: p.read_bytes() for p in (out / "data").iterdir() if "index" not in p.name
    }
    red = dataclasses.replace(TASK, picture=samples.encoded((0, 0, 200)))
    run_folder(folder, [record(red)])  # a run that goes on
    (out / "data" / "notes.txt").write_text("of the user")
    assert view(folder, f"--out={out}") == 0
    names = {p.name for p in (out / "data").iterdir()}
    assert not names & set(before) and "notes.txt" in names and len(names) == 4
    assert len(list((out / "pictures").iterdir())) == 2


def test_large_runs_are_cut_into_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "EPISODES_CHUNK_CHARS", 4000)
    records = [record(dataclasses.replace(TASK, id=f"t{i}")) for i in range(9)]
    assert view(run_folder(tmp_path / "run", records), f"--out={tmp_path / 'out'}") == 0
    index = index_of(tmp_path / "out")
    assert len(index["chunks"]) > 2
    for e, task in enumerate(index["episodes"]["task"]):
        name = index["chunks"][index["episodes"]["chunk"][e]]
        chunk = value_of(tmp_path / "out" / "data" / f"episodes_{name}.js")
        view_ = chunk["episodes"][index["episodes"]["place"][e]]
        assert chunk["tasks"][view_["task"]]["id"] == index["tasks"][task]["id"] == f"t{e}"


def test_traces_of_another_agent_with_their_pictures(tmp_path):
    out = tmp_path / "out"
    traces = PUBLISHED / "fvqa_sample_traces.jsonl"
    assert view(traces, f"--pictures={PUBLISHED / 'fvqa_sample.parquet'}", f"--out={out}") == 0
    index = index_of(out)
    [model] = index["models"]
    assert model["is_trace"] and model["policy"] == "MMSearch-R1"
    assert sum(t["picture"] is not None for t in index["tasks"]) >= 5
    assert len(index["tasks"]) == len(traces.read_text("utf-8").strip().split("\n"))
    chunk = value_of(out / "data" / f"episodes_{index['chunks'][0]}.js")
    assert any(i["link"].startswith("https://") for e in chunk["episodes"] for t in e["turns"]
               if t["call"] for i in t["call"]["items"])  # fmt: skip


def test_mistakes_are_one_sentence(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", [record()])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    (tmp_path / "odd.jsonl").write_text("{}\n")
    for arguments, words in (
        ((folder,), "name runs and a folder"),
        ((f"--out={tmp_path / 'o'}",), "name runs and a folder"),
        ((tmp_path / "nowhere", f"--out={tmp_path / 'o'}"), "does not exist"),
        ((tmp_path / "full", f"--out={tmp_path / 'o'}"), "no recorded episodes"),
        ((tmp_path / "odd.jsonl", f"--out={tmp_path / 'o'}"), "neither records nor traces"),
        ((folder, f"--out={tmp_path / 'full'}"), "holds something else"),
    ):
        assert view(*arguments) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert (tmp_path / "full" / "thesis.tex").read_text() == "x"


def test_names_of_runs_are_made_unique(tmp_path):
    for part in ("x", "y"):
        run_folder(tmp_path / part / "run", [record()])
    found = runs.parse_runs([str(tmp_path / "x" / "run"), str(tmp_path / "y" / "run" / "episodes")])
    assert [r.name for r in found] == ["run", "run (2)"]


def test_the_server_answers_to_this_machine_alone(tmp_path):
    out = tmp_path / "out"
    assert view(run_folder(tmp_path / "run", [record()]), f"--out={out}") == 0
    shutil.copy(out / "icon.svg", tmp_path / "outside.svg")
    server = serve.make_server(out, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with urllib.request.urlopen(f"{base}/index.html") as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        for path, host, status in (
            ("/", "evil.example", 403),
            ("/data/", "127.0.0.1", 404),
            ("/../outside.svg", "127.0.0.1", 404),
        ):
            request = urllib.request.Request(base + path, headers={"Host": host})
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request)
            assert error.value.code == status
            error.value.close()
    finally:
        server.shutdown()
        server.server_close()
    assert server.server_address[0] == "127.0.0.1"
