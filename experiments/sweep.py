"""sweep: one run for each word of a config and each seed, then tables over them.

Every run is a `train` of its own process in WORKDIR/WORD-SEED; finished ones are left alone and
stopped ones go on, so the same command resumes the sweep. A run that fails is named at the end and
does not stop the others.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments import command_line
from svrl_jax.analysis import ablations
from svrl_jax.training.run_folder import environment

_RECORD = "sweep.json"


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--config, --words, --seeds, --set, --workdir, --references, --readme, --run."""
    flags.DEFINE_string(
        "config", None, "config file that takes a word, such as configs/ablations.py",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_list("words", [], "its words; default: the file's own WORDS", flag_values=values)
    flags.DEFINE_list("seeds", ["0", "1", "2"], "of config.seed", flag_values=values)
    flags.DEFINE_multi_string(
        "set", [], "KEY=VALUE of the config, for all runs alike", flag_values=values
    )
    flags.DEFINE_string("workdir", None, "folder of the runs and tables", flag_values=values)
    flags.DEFINE_list(
        "references", ["full", "outcome_only"], "rewards that the others are compared with",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "readme", None, "Markdown file whose marked section is filled with the tables",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_bool("run", True, "False: only tabulate what is finished", flag_values=values)


def main(call: command_line.Call) -> int:
    """Runs what is not finished; writes the tables of what is."""
    values = call.values
    if not values.config or not values.workdir:
        raise command_line.UsageError("name both: --config=FILE and --workdir=DIR")
    words = values.words or _words_of(values.config)
    try:
        seeds = [int(s) for s in values.seeds]
    except ValueError:
        raise command_line.UsageError(f"--seeds has {values.seeds}; whole numbers") from None
    workdir = pathlib.Path(values.workdir)
    record = _read(workdir / _RECORD)
    failed = []
    for seed in seeds:  # seed by seed, so that a stopped sweep has whole comparisons
        for word in words:
            if values.run and not _is_finished(record, word, seed, values):
                if not _run(record, word, seed, values, workdir):
                    failed.append(f"{word}-{seed}")
    finished = [(w, s) for w in words for s in seeds if f"{w}-{s}" in record["runs"]]
    finished = [(w, s) for w, s in finished if record["runs"][f"{w}-{s}"]["is_done"]]
    if finished:
        _tabulate(record, finished, values, workdir, len(words) * len(seeds))
    for name in failed:
        print(f"{name} failed: see {workdir / name}.log", file=sys.stderr)
    return 1 if failed else 0


def _run(record: dict, word: str, seed: int, values, workdir: pathlib.Path) -> bool:
    """Trains and labels one run; True if it is finished."""
    name = f"{word}-{seed}"
    folder = workdir / name
    train = [
        "train", f"--config={values.config}:{word}", f"--workdir={folder}",
        f"--config.seed={seed}", *(f"--config.{change}" for change in values.set),
    ]  # fmt: skip
    about = record["runs"].setdefault(name, {"seconds": 0.0, "is_done": False})
    about |= {"word": word, "seed": seed, "set": list(values.set), "is_done": False}
    about["commit"] = environment()["commit"]
    print(f"{name}: training", flush=True)
    workdir.mkdir(parents=True, exist_ok=True)
    # The runs compile the same programs.
    programs = {"JAX_COMPILATION_CACHE_DIR": str((workdir / "programs").absolute())}
    start = time.perf_counter()
    with (workdir / f"{name}.log").open("a") as log:
        for arguments in (train, ["annotate", str(folder)]):
            command = [sys.executable, "-m", "experiments", *arguments]
            done = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **programs}
            )
            if done.returncode:
                break
    about["seconds"] += time.perf_counter() - start
    about["is_done"] = done.returncode == 0
    _write(workdir / _RECORD, record)
    print(f"{name}: {'finished' if about['is_done'] else 'failed'}, {about['seconds']:.0f} s")
    return about["is_done"]


def _is_finished(record: dict, word: str, seed: int, values) -> bool:
    """True if the run is done; UsageError if it was made with other changes."""
    about = record["runs"].get(f"{word}-{seed}")
    if about is None or not about["is_done"]:
        return False
    if about["set"] != list(values.set):
        raise command_line.UsageError(
            f"{word}-{seed} was run with --set {about['set']}: choose another --workdir"
        )
    return True


def _tabulate(record: dict, finished, values, workdir: pathlib.Path, wanted: int) -> None:
    runs = [
        ablations.read(workdir / f"{w}-{s}", w, s, record["runs"][f"{w}-{s}"]) for w, s in finished
    ]
    minutes = sum(r.about["seconds"] for r in runs) / 60
    commits = ", ".join(sorted({str(r.about["commit"])[:7] for r in runs}))
    config = json.loads((workdir / f"{finished[0][0]}-{finished[0][1]}/config.json").read_text())
    changes = " ".join(f"--set={shlex.quote(c)}" for c in values.set)
    note = (
        f"`python -m experiments sweep --config={values.config} --seeds={','.join(values.seeds)}"
        f"{' ' + changes if changes else ''}`, commit {commits}: {len(runs)} of {wanted} runs of "
        f"{config['num_steps']} steps, {minutes:.0f} minutes in all "
        f"({minutes / len(runs):.1f} a run). Mean ± standard deviation over seeds."
    )
    blocks = ablations.write(runs, workdir, note, values.references)
    print(f"{workdir / 'ablations.md'}: {len(blocks)} tables of {len(runs)} runs")
    if values.readme:
        text = (workdir / "ablations.md").read_text("utf-8")
        ablations.put_into(pathlib.Path(values.readme), text)
        print(f"{values.readme}: its section is filled")


def _words_of(config: str) -> list[str]:
    """WORDS of a config file."""
    path = pathlib.Path(config)
    if not path.is_file():
        raise command_line.UsageError(f"config file {config!r} does not exist")
    spec = importlib.util.spec_from_file_location("swept", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "WORDS"):
        raise command_line.UsageError(f"{config} has no WORDS: name them with --words")
    return list(module.WORDS)


def _read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {"runs": {}}


def _write(path: pathlib.Path, record: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
