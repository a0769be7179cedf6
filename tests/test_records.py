import dataclasses
import json

import numpy as np
import pytest

from svrl_jax.records import (
    Record,
    RecordError,
    read_records,
    record_files,
    write_records,
)
from svrl_jax.types import (
    Episode,
    OracleLabels,
    ParsedTurn,
    Score,
    SearchItem,
    Task,
    ToolCall,
    Turn,
)

PNG, JPEG = b"\x89PNG\r\n\x1a\n one", b"\xff\xd8 two"
# Line separators, a lone surrogate, markup and quotes: text that breaks careless line formats.
TEXT = 'a\u2028b\r\n</script>"\\ \ud800 Straße 東京'


def assert_equal(a, b):
    """Equal field by field: values, types, dtypes and shapes."""
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_equal(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_equal(x, y)
    else:
        assert a == b


def make_turns():
    items = (
        SearchItem("d1", "Title", "http://x", TEXT, 0.1 + 0.2, PNG),
        SearchItem("d2", "", picture=None),
    )
    search = ParsedTurn("text_search", TEXT, (), ("q1", "q2"), 5, None, ("query_count",))
    answer = ParsedTurn("answer", "r", (1, 0), answer="x")
    call = ToolCall("text_search", "q1", items, "ok", "", 7, 0.25)
    failed = ToolCall("image_search", "", (), "failed", "timeout")
    broken = ParsedTurn(None, mask=None, violations=("no_action",))
    return (
        Turn("t0", 3, 5, 8, search, call, None),
        Turn("t1", 8, 9, 9, answer, failed, 2, 0.125),
        Turn("", 9, 9, 9, broken),
    )


def make_record(seed, pixel_values=None, **changes):
    rng = np.random.default_rng(seed)
    length = 5 + seed
    grid = np.array([[1, 2, 2]], np.int32)
    if pixel_values is None:
        pixel_values = rng.normal(size=(4, 6)).astype(np.float32)
    if not len(pixel_values):
        grid = grid[:0]
    episode = Episode(
        task_id=f"task{seed}",
        step=3,
        sample=seed,
        seed=1,
        policy="p",
        regime="agent",
        ids=rng.integers(0, 99, length).astype(np.int32),
        loss_mask=rng.integers(0, 2, length).astype(np.int32),
        positions=rng.integers(0, 99, (3, length)).astype(np.int32),
        sampler_logps=rng.normal(size=length).astype(np.float32),
        pixel_values=pixel_values,
        image_grid_thw=grid,
        prompt_length=3,
        turns=make_turns(),
        end_reason="answered",
        answer=TEXT,
        temperature=0.7,
    )
    task = Task(
        "task", TEXT, JPEG, ("g1", "g2"), "world/test", "capital", ("e",), ("d1",), None, "i"
    )
    labels = OracleLabels(((1, 0), ()), (1,), ((1, 0),), True)
    score = Score(1 / 3, 1.0, 0.1, 0.6, 0.5, 0.75, 1.0, labels=labels, search_free=False)
    values = {"task": task, "score": score, "advantage": -0.1, "per_token_logps": None} | changes
    return Record(episode, **values)


@pytest.fixture
def records():
    shared = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
    logps = np.array([0.0, -1.5, -0.1, 0.0, -3.0, -4.0, -5.0], np.float32)
    return [
        make_record(0, shared),
        make_record(1, shared),
        make_record(2, per_token_logps=logps),
        make_record(3, np.zeros((0, 6), np.float32), task=None, score=None, advantage=None),
        make_record(4, score=Score(0, 0, 1, 1, 1, 1, 0, False, "tool", None, None)),
    ]


def test_records_come_back_exactly(tmp_path, records):
    path = write_records(tmp_path, "step_000003", records)
    again = read_records(path)
    assert len(again) == len(records)
    for a, b in zip(records, again):
        assert_equal(a, b)
    assert list(record_files(tmp_path)) == [path]


def test_turns_of_older_records_have_no_seconds(tmp_path, records):
    path = write_records(tmp_path, "a", records)
    header, *lines = map(json.loads, path.read_text().splitlines())
    for line in lines:
        for turn in line["episode"]["turns"]:
            del turn["seconds"]
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))
    for old, new in zip(read_records(path), records):
        assert {turn.seconds for turn in old.episode.turns} == {None}
        assert old.episode.turns == new.episode.turns  # equality leaves times out


def test_no_records_come_back_as_none(tmp_path):
    assert read_records(write_records(tmp_path, "empty", [])) == []


def test_pictures_are_stored_once_by_content(tmp_path, records):
    write_records(tmp_path, "a", records)
    write_records(tmp_path, "b", records)
    stored = sorted(p.suffix for p in (tmp_path / "pictures").iterdir())
    assert stored == [".jpg", ".png"]
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        # Five episodes with four distinct pixel arrays, one of them shared by two.
        assert len({name.split("_")[1] for name in arrays.files if name.startswith("pixels")}) == 4


def test_many_distinct_pixel_values_come_back_exactly(tmp_path):
    wide = np.random.default_rng(0).normal(size=(4, 20_000)).astype(np.float32)
    wide[0, :3] = [np.nan, -0.0, np.inf]
    path = write_records(tmp_path, "a", [make_record(0, wide)])
    back = read_records(path)[0].episode.pixel_values
    np.testing.assert_array_equal(back.view(np.uint32), wide.view(np.uint32))


def test_lines_are_strict_json_with_a_schema(tmp_path, records):
    path = write_records(tmp_path, "a", records)

    def refuse(name):
        raise AssertionError(name)

    lines = [json.loads(x, parse_constant=refuse) for x in path.read_text().splitlines()]
    assert lines[0]["schema_version"] == 1 and lines[0]["num_records"] == len(records)
    assert "ids" not in lines[1]["episode"]  # arrays stay out of the text


def test_half_replaced_set_is_noticed(tmp_path, records):
    path = write_records(tmp_path, "a", records)
    other = write_records(tmp_path / "other", "a", records[:2])
    path.with_suffix(".npz").write_bytes(other.with_suffix(".npz").read_bytes())
    with pytest.raises(RecordError, match="does not belong"):
        read_records(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_text(p.read_text()[:-40]), "not JSON lines"),
        (lambda p: p.write_text("\n".join(p.read_text().split("\n")[:3])), "2 of 5 records"),
        (lambda p: p.write_text(""), "no header"),
        (
            lambda p: p.write_text(p.read_text().replace('version": 1', 'version": 9', 1)),
            "schema 9",
        ),
        (lambda p: p.with_suffix(".npz").unlink(), "is missing"),
        (lambda p: next((p.parent / "pictures").glob("*.jpg")).unlink(), "is missing"),
        (lambda p: next((p.parent / "pictures").glob("*.jpg")).write_bytes(b"x"), "is damaged"),
    ],
)
def test_damage_gives_one_sentence(tmp_path, records, damage, message):
    path = write_records(tmp_path, "a", records)
    damage(path)
    with pytest.raises(RecordError, match=message) as caught:
        read_records(path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_unexpected_dtype_is_refused(tmp_path):
    record = make_record(0)
    wrong = dataclasses.replace(record.episode, ids=record.episode.ids.astype(np.int64))
    with pytest.raises(TypeError, match="Episode.ids is int64"):
        write_records(tmp_path, "a", [dataclasses.replace(record, episode=wrong)])
    assert not list(tmp_path.glob("*.jsonl"))
