"""The check of a released checkpoint, on a random tiny folder and real rows."""

import json
import pathlib

import jax
import pytest

from experiments.__main__ import main
from tests.conftest import compiler
from tests.test_api import make_folder

PUBLISHED = pathlib.Path(__file__).parents[1] / "data" / "published"


@pytest.fixture(scope="module")
def folder(untrained_folder, tmp_path_factory):
    return make_folder("qwen2_5_vl", untrained_folder, tmp_path_factory.mktemp("release"))


def check(*arguments):
    with compiler(is_quick=True), jax.default_matmul_precision("highest"):
        return main(["python -m experiments", "check_release", *map(str, arguments)])


def test_the_gap_to_transformers_is_measured(folder, tmp_path, capsys):
    out = tmp_path / "figures.json"
    status = check(
        folder, f"--rows={PUBLISHED / 'fvqa_sample.parquet'}", "--num_rows=2",
        "--dtype=float32", "--peak_tflops=0.1", f"--out={out}",
    )  # fmt: skip
    assert status == 0
    figures = json.loads(out.read_text())
    assert figures["model"] == "qwen2_5_vl" and figures["rows"] == 2
    assert 0 < figures["logp_gap_mean"] <= figures["logp_gap_p99"] <= figures["logp_gap_max"] < 1e-3
    assert figures["logp_mean"] < -1 and figures["tokens"] > figures["pictures' tokens"] > 0
    assert figures["tokens_per_s"] > 0
    assert figures["mfu"] == pytest.approx(figures["tflops_per_s"] / 0.1)
    assert "logp_gap_max" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name one model folder"),
        (["nowhere", "--rows=x.parquet"], "nowhere holds no config.json"),
        (["{folder}", "--rows=nowhere.parquet"], "nowhere.parquet"),
    ],
)
def test_mistakes_are_one_sentence(folder, arguments, said, capsys):
    assert check(*[a.format(folder=folder) for a in arguments]) == 2
    assert said in capsys.readouterr().err
