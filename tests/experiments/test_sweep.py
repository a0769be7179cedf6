"""A sweep: one process a run, stopped and gone on with, tables from what is finished."""

import json
import shutil

import pytest

from svrl_jax.analysis.ablations import read
from tests.experiments.conftest import ROOT

CONFIG = f"--config={ROOT / 'configs' / 'ablations.py'}"
MARKS = "<!-- ablations: begin -->\nold\n<!-- ablations: end -->\n"


def test_finished_runs_are_tabulated_without_a_run(cli, trained, tmp_path):
    sweep = tmp_path / "sweep"
    record = {}
    for name in ("full-0", "no_aware-0"):
        shutil.copytree(trained, sweep / name, ignore=shutil.ignore_patterns("checkpoints"))
        word, seed = name.split("-")
        record[name] = {
            "word": word, "seed": int(seed), "seconds": 60.0, "is_done": True, "set": [],
            "commit": "0123456789abcdef",
        }  # fmt: skip
    record["full-1"] = record["full-0"] | {"seed": 1, "is_done": False}
    (sweep / "sweep.json").write_text(json.dumps({"runs": record}))
    readme = tmp_path / "README.md"
    readme.write_text(f"# x\n\n{MARKS}\nend\n")
    command = ("sweep", CONFIG, f"--workdir={sweep}", "--norun", "--seeds=0,1")
    code, out, _ = cli(*command, "--words=full,no_aware", f"--readme={readme}")
    assert code == 0 and "of 2 runs" in out
    text = readme.read_text()
    assert "2 of 4 runs of 2 steps, 2 minutes in all" in text and "0123456" in text
    assert "| no_aware |" in text and "old" not in text and text.endswith("\nend\n")
    assert (sweep / "ablations.md").is_file() and (sweep / "ablations.png").is_file()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--workdir=x"], "--config"),
        ([CONFIG], "--workdir"),
        ([CONFIG, "--workdir=x", "--seeds=a"], "--seeds"),
        (["--config=configs/nothing.py", "--workdir=x"], "does not exist"),
        ([f"--config={ROOT / 'configs' / 'tiny.py'}", "--workdir=x"], "no WORDS"),
    ],
)
def test_mistakes_are_a_sentence(cli, arguments, said):
    code, _, err = cli("sweep", *arguments)
    assert code == 2 and said in err and err.count("\n") == 1


@pytest.mark.slow
def test_a_stopped_sweep_goes_on(cli, tmp_path):
    sweep = tmp_path / "sweep"
    few = [
        "num_steps=1", "data.prompts_per_step=2", "rollout.group_size=2", "eval.num_items=2",
        "eval.modes=('greedy',)",
    ]  # fmt: skip
    command = [
        "sweep", CONFIG, f"--workdir={sweep}", "--seeds=0", *(f"--set={change}" for change in few),
    ]  # fmt: skip
    assert cli(*command, "--words=full")[0] == 0
    done = (sweep / "full-0" / "environment.json").read_text()
    code, out, _ = cli(*command, "--words=full,outcome_only")
    assert code == 0 and "outcome_only-0: finished" in out and "full-0: training" not in out
    assert (sweep / "full-0" / "environment.json").read_text() == done
    assert read(sweep / "outcome_only-0", "outcome_only", 0, {}).rows["greedy"]
    code, _, err = cli(*command[:-1], "--words=full")
    assert code == 2 and "choose another --workdir" in err
    code, out, err = cli(*command, "--words=nonsense")
    assert code == 1 and "nonsense-0 failed" in err
