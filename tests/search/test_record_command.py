"""The mode `record`: stats, export, import."""

import pathlib

import pytest

from experiments.__main__ import main
from svrl_jax.search.record import SearchRecord
from tests.data.published_files import PUBLISHED

CONFIG = pathlib.Path(__file__).resolve().parents[2] / "configs" / "tiny.py"


@pytest.fixture
def record(capsys):
    """Runs a command; returns (exit status, stdout, stderr)."""

    def run(*arguments):
        capsys.readouterr()
        status = main(["experiments", "record", *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_traces_go_in_and_rows_travel(record, tmp_path):
    first, second, rows = (tmp_path / name for name in ("a.sqlite", "b.sqlite", "rows.jsonl"))
    traces = f"--traces={PUBLISHED / 'fvqa_sample_traces.jsonl'}"
    pictures = f"--pictures={PUBLISHED / 'fvqa_sample.parquet'}"
    status, said, _ = record("import", first, traces, pictures, f"--config={CONFIG}")
    assert status == 0 and "image_search 5, text_search 4" in said
    snapshot = said.split()[-1]
    status, said, _ = record("stats", first)
    assert status == 0 and f"snapshot {snapshot}" in said and "text_search   answered" in said
    assert record("export", first, f"--out={rows}")[0] == 0
    status, said, _ = record("import", second, f"--rows={rows}")
    assert status == 0 and said.split()[-1] == snapshot


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ([], "record stats|export|import FILE"),
        (["look", "r"], "record stats|export|import FILE"),
        (["stats", "none.sqlite"], "does not exist"),
        (["import", "r"], "--rows"),
        (["import", "r", "--rows=a", "--traces=b"], "--rows"),
        (["import", "r", "--traces=b"], "--pictures"),
        (["import", "r", "--traces=b", "--pictures=c"], "--config"),
    ],
)
def test_what_is_typed_wrong_is_one_sentence(record, tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    status, _, said = record(*arguments)
    assert status == 2 and reason in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_export_wants_a_file(record, tmp_path):
    SearchRecord(tmp_path / "r", "record").close()
    status, _, said = record("export", tmp_path / "r")
    assert status == 2 and "--out" in said
