"""Each published schema -> a prepared folder; real rows as FORMATS has them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.__main__ import main
from svrl_jax.data import builders, prepare
from svrl_jax.data.prepare import PrepareError
from svrl_jax.data.prepared import Prepared, PreparedError
from svrl_jax.processing.images import ImageProcessor
from tests.data import published_files as files


def build(dataset, source, out, **options):
    """(prepared data set, lines said)."""
    lines = []
    prepare.prepare(dataset, str(source), out, say=lines.append, **options)
    return Prepared(out / (options.get("name") or dataset)), lines


def quarantined(data):
    lines = (data.folder / prepare.QUARANTINE).read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_published_mini_file_gives_the_rows_of_the_format_notes(tmp_path):
    data, lines = build("infoseek", files.PUBLISHED / "fvqa_mini.parquet", tmp_path)
    rows = data.split("test")
    assert [t.question for t in rows][3] == "What is this garden named after?"
    truths = [t.golds[0] for t in rows]
    assert truths == [
        "Spain", "Gautama Buddha", "Order of Hospitallers", "Tuileries Palace", "Portugal",
    ]  # fmt: skip
    assert "\U0001f1ea\U0001f1f8" in rows[0].golds and "ES" in rows[0].golds
    assert "Fo" in rows[1].golds and "PT" in rows[4].golds
    assert rows.sizes_px.tolist() == [[384, 512], [800, 531], [800, 600], [800, 600], [533, 800]]
    for processor, tokens in (
        (ImageProcessor(), (252, 551, 609, 609, 551)),
        (ImageProcessor(16, 2, 2, 65536, 16777216), (192, 425, 475, 475, 425)),
    ):
        grids = [processor.grid_thw(h, w) for w, h in rows.sizes_px.tolist()]
        assert tuple(h * w // 4 for _, h, w in grids) == tokens
    assert rows[0].id == "infoseek_test_0" and rows[0].source == "infoseek/test"
    assert rows[0].category == "" and rows[0].picture_url is None
    assert lines == [
        "warning: test has 5 tasks and 0 unreadable rows, published are 2000",
    ]


def test_real_rows_keep_their_picture_bytes_and_category(tmp_path):
    import pyarrow.parquet as pq

    source = files.PUBLISHED / "fvqa_sample.parquet"
    rows = build("fvqa", source, tmp_path, split="train")[0].split("train")
    published = pq.read_table(source).to_pylist()
    assert [t.picture for t in rows] == [r["images"][0]["bytes"] for r in published]
    assert rows.ids == [r["data_id"] for r in published] == [t.id for t in rows]
    assert rows.categories == [r["category"] for r in published] == [t.category for t in rows]
    assert rows[7].golds[0] == published[7]["reward_model"]["ground_truth"] == "2003 9 26"


def test_fvqas_two_files_have_two_schemas(tmp_path):
    files.write_parquet(tmp_path / "in/fvqa_train.parquet", [files.fvqa_row(i) for i in range(3)])
    test = [files.fvqa_row(0, split="test", candidates='["España"]')]
    files.write_parquet(tmp_path / "in/fvqa_test.parquet", test)
    data, lines = build("fvqa", tmp_path / "in", tmp_path)
    assert data.splits == ("train", "test")
    assert data.split("train").categories == ["search_free", "search_required", "search_free"]
    assert data.split("test")[0].golds == ("Spain", "España")
    assert data.split("test").categories == [""]
    assert [line.split(" has")[0] for line in lines] == [
        "warning: train", "warning: fvqa_train.parquet", "warning: test",
    ]  # fmt: skip
    assert "published is d23be97f4493" in lines[1]
    assert data.manifest["splits"]["train"]["files"][0]["path"] == "fvqa_train.parquet"
    assert len(data.manifest["splits"]["train"]["files"][0]["sha256"]) == 64


@pytest.mark.case("A-D1")
def test_no_row_vanishes_without_a_reason(tmp_path):
    rows = [
        files.fvqa_row(0),
        files.fvqa_row(1, images=[{"bytes": files.picture()[:40], "path": None}]),
        files.fvqa_row(2, truth="", candidates="[]"),
        files.fvqa_row(3, images=[]),
        files.fvqa_row(4, prompt=[]),
        files.fvqa_row(5, data_id="fvqa_train_0"),
        files.fvqa_row(6, images=[{"bytes": None, "path": "gone.jpg"}]),
        files.fvqa_row(7, reward_model=None),
    ]
    files.write_parquet(tmp_path / "in/fvqa_train.parquet", rows)
    data, lines = build("fvqa", tmp_path / "in", tmp_path)
    assert data.split("train").ids == ["fvqa_train_0", "fvqa_train_3"]
    assert data.split("train")[1].picture == b""
    made = data.manifest["splits"]["train"]
    assert (made["rows"], made["tasks"], made["text_only"], made["quarantined"]) == (8, 2, 1, 6)
    bad = quarantined(data)
    assert [row["row"] for row in bad] == [1, 2, 4, 5, 6, 7]
    assert [row["id"] for row in bad][0] == "fvqa_train_1"
    for row, reason in zip(
        bad, ["decoded", "no answer", "no question", "there before", "gone.jpg", "reward_model"],
        strict=True,
    ):  # fmt: skip
        assert reason in row["reason"]
    assert "6 rows of train cannot be read" in "".join(lines)


def test_infoseeks_own_files_bring_question_types_and_ranges(tmp_path):
    data, _ = build("infoseek_original", files.infoseek_original(tmp_path / "in"), tmp_path)
    rows = data.split("val")
    assert [t.golds for t in rows] == [
        ("Ann Lee", "A. Lee"), ("828.0", "[745.2, 910.8]"), ("1930", "1929", "1931"),
    ]  # fmt: skip
    assert rows.categories == ["val_unseen_entity", "val_unseen_question", "val_unseen_question"]
    assert "oven_09" in quarantined(data)[0]["reason"]
    assert data.manifest["scorer"] == "infoseek"


def test_mmsearch_has_rows_without_a_picture_and_a_split_without_them(tmp_path):
    data, lines = build("mmsearch", files.mmsearch(tmp_path / "in"), tmp_path)
    text, shown = data.split("end2end")
    assert text.picture == b"" and text.golds == ("Coco Gauff", "Gauff")
    assert shown.category == "knowledge/art" and data.split("pictures").ids == [shown.id]
    assert ["171" in line for line in lines] == [False, True]
    file = next((tmp_path / "in").rglob("*.parquet"))
    alone, _ = build("mmsearch", file, tmp_path, name="alone")
    assert alone.splits == data.splits


def test_livevqa_asks_twice_a_picture(tmp_path):
    data, _ = build("livevqa", files.livevqa(tmp_path / "in"), tmp_path)
    one, two = data.split("news")
    assert one.golds == ("New York", "NYC") and two.golds == ("The mayor",)
    assert one.category == "level1/location" and one.picture == two.picture != b""
    assert one.picture_url == "https://example.org/1.jpg" and one.id != two.id


def test_simplevqa_keeps_english_rows_and_reads_base64(tmp_path):
    data, _ = build("simplevqa", files.simplevqa(tmp_path / "in"), tmp_path)
    assert data.split("test").ids == ["simplevqa_1012"]
    made = data.manifest["splits"]["test"]
    assert (made["rows"], made["quarantined"]) == (3, 1)
    assert [f["path"] for f in made["files"]] == ["test.parquet"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_table_of_the_users_own(tmp_path, kind):
    (tmp_path / "1.png").write_bytes(files.picture())
    rows = [{"q": "What?", "gold": ["a", "b"], "img": "1.png"}, {"q": "Why?", "gold": "c"}]
    if kind == "jsonl":
        path = files.write_jsonl(tmp_path / "mine.jsonl", [*rows, {"gold": "d"}])
    else:
        rows = [rows[0], {"q": "Why?", "gold": ["c"], "img": None}, {"gold": ["d"]}]
        path = files.write_parquet(tmp_path / "mine.parquet", rows)
    options = {"split": "train", "name": "mine"}
    with pytest.raises(PrepareError, match=r"no column 'answer'.*\['q', 'gold', 'img'\]"):
        build("table", path, tmp_path, columns={"question": "q"}, **options)
    columns = {"question": "q", "answer": "gold", "picture": "img"}
    data, _ = build("table", path, tmp_path, columns=columns, **options)
    assert [(t.id, t.golds, bool(t.picture)) for t in data.split("train")] == [
        ("mine_train_0", ("a", "b"), True), ("mine_train_1", ("c",), False),
    ]  # fmt: skip
    assert data.manifest["splits"]["train"]["reasons"] == {"it has no question": 1}


def test_broken_lines_are_quarantined_and_a_broken_file_is_refused(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n{broken\n[1]\n', "utf-8")
    data, _ = build("table", path, tmp_path)
    assert [r["row"] for r in quarantined(data)] == [1, 2]
    (tmp_path / "test.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(prepare.tables.TableError, match="fetch it again"):
        build("table", tmp_path / "test.parquet", tmp_path, name="other")
    assert not (tmp_path / "other").exists()


def test_mistakes_are_sentences(tmp_path, capsys):
    source = files.PUBLISHED / "fvqa_sample.parquet"
    out = f"--out={tmp_path}"
    assert main(["svrl", "prepare", "--dataset=fvqa", f"--source={source}", out]) == 2
    assert "add --split" in capsys.readouterr().err
    command = ["svrl", "prepare", "--dataset=fvqa", f"--source={source}", out, "--split=dev"]
    assert main(command) == 2
    assert "no split 'dev'; one of: train, test" in capsys.readouterr().err
    assert main(["svrl", "prepare", out]) == 2
    assert main(["svrl", "prepare", "--dataset=simplevqa", f"--source={tmp_path}", out]) == 2
    assert "test.parquet" in capsys.readouterr().err
    assert main(["svrl", "prepare", "--dataset=fvqa", "--source=nowhere", out]) == 2
    assert "neither a file" in capsys.readouterr().err
    command = ["svrl", "prepare", "--dataset=fvqa", f"--source={source}", out, "--split=train"]
    assert main(command) == 0
    assert f"--config.data.source={tmp_path}/fvqa" in capsys.readouterr().out
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(PreparedError, match="prepare --dataset"):
        Prepared(tmp_path)
    with pytest.raises(PreparedError, match="it has train"):
        Prepared(tmp_path / "fvqa").split("test")


def test_a_killed_build_leaves_nothing_that_loads_and_starts_over(tmp_path):
    rows = [files.fvqa_row(i) for i in range(150)]
    files.write_parquet(tmp_path / "in/fvqa_train.parquet", rows)
    code = (
        "import time; from svrl_jax.data import prepare; "
        f"prepare.prepare('fvqa', {str(tmp_path / 'in')!r}, {str(tmp_path / 'out')!r}, "
        "progress=lambda split, done, total: time.sleep(600))"
    )
    command = [sys.executable, "-c", code]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    building = tmp_path / "out/.building-fvqa"
    while not list(building.rglob("*.shard*")):
        assert child.poll() is None
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert building.exists() and not (tmp_path / "out/fvqa").exists()
    for folder in (tmp_path / "out/fvqa", building, building / "fvqa"):
        with pytest.raises(PreparedError):
            Prepared(folder)
    data, _ = build("fvqa", tmp_path / "in", tmp_path / "out")
    assert len(data.split("train")) == 150 and not building.exists()


def test_an_interrupt_cleans_up(tmp_path):
    def interrupt(split, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build("infoseek", files.PUBLISHED / "fvqa_mini.parquet", tmp_path, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_second_build_of_the_same_folder_waits_its_turn(tmp_path):
    def again(split, done, total):
        with pytest.raises(PrepareError, match="another process"):
            build("infoseek", files.PUBLISHED / "fvqa_mini.parquet", tmp_path)

    build("infoseek", files.PUBLISHED / "fvqa_mini.parquet", tmp_path, progress=again)


def test_many_shards_keep_the_published_order(tmp_path, monkeypatch):
    monkeypatch.setattr(builders, "SHARD_BYTES", 60_000)
    data, _ = build("infoseek", files.PUBLISHED / "fvqa_mini.parquet", tmp_path)
    assert len(list((data.folder / "1.0.0").glob("*.array_record-*-of-*"))) > 2
    rows = data.split("test")
    assert [t.id for t in rows] == rows.ids == [f"infoseek_test_{i}" for i in range(5)]


def test_rows_lost_from_a_prepared_folder_are_noticed(tmp_path):
    data, _ = build("infoseek", files.PUBLISHED / "fvqa_mini.parquet", tmp_path)
    manifest = json.loads((data.folder / "prepared.json").read_text())
    manifest["splits"]["test"]["tasks"] = 6
    (data.folder / "prepared.json").write_text(json.dumps(manifest))
    with pytest.raises(PreparedError, match="5 of 6 rows"):
        Prepared(data.folder).split("test")


def test_a_folder_of_nothing_readable_is_refused(tmp_path):
    path = files.write_jsonl(tmp_path / "train.jsonl", [{"question": "q", "answer": ""}] * 3)
    with pytest.raises(PrepareError, match="3 x it has no answer"):
        build("table", path, tmp_path)
    assert not (tmp_path / "table").exists()


def test_no_tensorflow_is_imported_and_a_missing_package_is_a_sentence(tmp_path):
    code = (
        "import sys, svrl_jax.data; from svrl_jax.data import prepare, prepared\n"
        "heavy = {'tensorflow_datasets', 'pyarrow', 'grain', 'array_record'}\n"
        "assert not heavy & set(sys.modules), 'imported too early'\n"
        f"prepare.prepare('infoseek', {str(files.PUBLISHED / 'fvqa_mini.parquet')!r}, "
        f"{str(tmp_path)!r}, say=str)\n"
        f"print(prepared.Prepared({str(tmp_path / 'infoseek')!r}).split('test')[0].golds[0])\n"
        "roots = {m.split('.')[0] for m in sys.modules}\n"
        "assert not roots & {'tensorflow', 'torch'}, roots\n"
        "sys.modules['tensorflow_datasets'] = None\n"
        "del sys.modules['svrl_jax.data.builders'], svrl_jax.data.builders\n"
        "try: prepare._builders()\n"
        "except prepare.tables.TableError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Spain",
        "the package 'tensorflow_datasets' is missing; install what data sets need with: "
        "pip install -e '.[data]'",
    ]
