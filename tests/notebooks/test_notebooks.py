"""Every notebook runs from its first cell to its last, on a small run made here."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from experiments.__main__ import main
from tests.conftest import compiler

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
CONFIG = f"--config={ROOT / 'configs' / 'tiny.py'}"


@pytest.fixture(scope="module")
def environment(tiny_folder, tmp_path_factory):
    """What the notebooks read from the environment instead of their defaults."""
    base = tmp_path_factory.mktemp("notebooks")
    run, sweep = base / "run", base / "sweep"
    model = f"--config.model.folder={tiny_folder}"
    few = ["--config.num_steps=1", "--config.eval.splits=('test',)"]
    with compiler(is_quick=True):
        assert main(["experiments", "train", CONFIG, model, f"--workdir={run}", *few]) == 0
    assert main(["experiments", "annotate", str(run)]) == 0
    record = {}
    for word in ("full", "outcome_only"):
        shutil.copytree(run, sweep / f"{word}-0", ignore=shutil.ignore_patterns("checkpoints"))
        about = {"word": word, "seed": 0, "seconds": 1.0, "is_done": True}
        record[f"{word}-0"] = about
    (sweep / "sweep.json").write_text(json.dumps({"runs": record}))
    flags = [model, *few[1:], "--config.eval.compare=False", "--config.eval.modes=('greedy',)"]
    return {
        "SVRL_RUN": str(run), "SVRL_SWEEP": str(sweep), "SVRL_OUT": str(base / "out"),
        "SVRL_POLICY": str(ROOT / "svrl_jax" / "data" / "quickstart"), "SVRL_STEPS": "1",
        "SVRL_CONFIG": str(ROOT / "configs" / "tiny.py"), "SVRL_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "IPYTHONDIR": str(base),
    }  # fmt: skip


def test_there_are_four():
    assert {p.stem for p in NOTEBOOKS.glob("*.ipynb")} == {
        "read_a_run", "ablations", "one_episode", "colab_quickstart",
    }  # fmt: skip


def test_they_are_kept_without_outputs():
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        assert not any(c.get("outputs") or c.get("execution_count") for c in cells), path.name


def test_every_notebook_runs(environment):
    command = [
        sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=300", "-q",
        "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={ROOT}", str(NOTEBOOKS),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "4 passed" in done.stdout
