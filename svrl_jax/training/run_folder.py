"""A workdir -> the folder of one run: its config, environment, metrics and records.

    config.json         resolved config of the latest start
    environment.json    a list, one entry a start: packages, commit, device
    metrics.jsonl       one line a step, each step once
    episodes/           records of training episodes (svrl_jax.records)
    checkpoints/ export/ figures/ summary.json     written by others

A folder belongs to one config. What may change between starts, because it changes no step's result,
is left out of the hash that guards it: the number of steps, evaluation, saving, and who reads data.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from svrl_jax.records import Record, write_atomic, write_records

# Keys (with all below them) that may differ between two starts of one run.
FREE_KEYS = (
    "num_steps",
    "save_every",
    "keep_checkpoints",
    "log_episodes",
    "eval",
    "remote",
    "data.read_threads",
    "data.workers",
    "data.prefetch_batches",
)
CHECKPOINTS = "checkpoints"
# What a run writes into its folder.
OWN_NAMES = (
    "environment.json",
    "metrics.jsonl",
    "summary.json",
    "episodes",
    CHECKPOINTS,
    "export",
    "figures",
    "evals",
    "eval.json",
    "search_free.json",
    "judge.sqlite",
    "scaling",
    "mask_effect",
    "analysis",
    "oracle.sqlite",
)
# Distributions whose versions can change a result.
PACKAGES = (
    "svrl-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "ml_collections",
    "tokenizers",
    "safetensors",
    "pillow",
    "bm25s",
)


class RunFolderError(RuntimeError):
    """A workdir that cannot be used; the message names it and the remedy."""


class RunFolder:
    """One run's folder. Opening it again with the same config goes on with the run."""

    def __init__(self, workdir: str | os.PathLike, config: ConfigDict):
        """Opens or makes the folder.

        Args:
          workdir: absent, without a run, or an earlier start of the same run.
          config: the resolved config.
        Raises:
          RunFolderError: it holds another config's run, or a run without its config. Nothing is
            changed.
        """
        self.path = pathlib.Path(workdir).absolute()
        self.config = to_json_value(config.to_dict())
        self.is_new = check_workdir(self.path, config)
        starts = [*_read_starts(self.path), environment()]
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_json("config.json", self.config)  # first: it makes the folder ours
        self.write_json("environment.json", starts)
        for folder in (self.episodes, self.checkpoints, self.figures):
            folder.mkdir(exist_ok=True)
        self._keep_lines(read_metrics(self.metrics))

    @property
    def episodes(self) -> pathlib.Path:
        """Folder of training episodes' records."""
        return self.path / "episodes"

    @property
    def checkpoints(self) -> pathlib.Path:
        """Folder of orbax checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def export(self) -> pathlib.Path:
        """Hugging Face folder of the final policy."""
        return self.path / "export"

    @property
    def figures(self) -> pathlib.Path:
        """Folder of plots."""
        return self.path / "figures"

    @property
    def metrics(self) -> pathlib.Path:
        """The file of one line a step."""
        return self.path / "metrics.jsonl"

    def start_at(self, step: int) -> None:
        """Drops the metrics of steps >= `step`, all at once: they will be made again.

        Args:
          step: first step of this start; 0 for a new run, else the restored checkpoint's.
        """
        self._keep_lines([m for m in read_metrics(self.metrics) if m["step"] < step])

    def steps(self) -> list[int]:
        """Steps that have a line of metrics."""
        return [m["step"] for m in read_metrics(self.metrics)]

    def write(
        self, step: int, metrics: Mapping[str, Any], records: Sequence[Record] | None = None
    ) -> None:
        """Writes one step: its episodes, if any are given, then its line of metrics.

        Args:
          step: from 0; each once.
          metrics: numbers by name; None, NaN and infinities become null.
          records: episodes of the step, or None to write none.
        Raises:
          ValueError: the step has its line already (`start_at` was not called).
        """
        if step in self._written:
            raise ValueError(f"{self.metrics} has step {step} already; call start_at first")
        if records is not None:
            write_records(self.episodes, f"step_{step:06d}", records)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(_line({"step": step} | to_json_value(metrics)))
        self._written.add(step)

    def write_eval(self, step: int, figures: Any) -> None:
        """Writes the figures of an evaluation after `step` steps into evals/."""
        (self.path / "evals").mkdir(exist_ok=True)
        self.write_json(f"evals/step_{step:06d}.json", figures)

    def write_json(self, name: str, value: Any) -> None:
        """Writes a JSON file of the run, such as summary.json, all at once."""
        text = json.dumps(to_json_value(value), indent=2, allow_nan=False) + "\n"
        write_atomic(self.path / name, text.encode())

    def _keep_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Makes `lines` the whole file, without the torn one that a kill may have left."""
        write_atomic(self.metrics, "".join(map(_line, lines)).encode())
        self._written = {line["step"] for line in lines}


def check_workdir(workdir: str | os.PathLike, config: ConfigDict) -> bool:
    """Refuses what `RunFolder` would refuse, without writing anything.

    Returns:
      True if the folder holds no run yet.
    Raises:
      RunFolderError: it holds another config's run, or a run without its config.
    """
    path = pathlib.Path(workdir).absolute()
    before = _read_config(path)
    if before is None:
        _refuse_strangers(path)
    else:
        _refuse_other_run(path, before, to_json_value(config.to_dict()))
    return before is None


def config_hash(config: Mapping[str, Any]) -> str:
    """Sixteen hex digits that two starts of one run share; FREE_KEYS are left out."""
    guarded = _without_free_keys(to_json_value(config))
    return hashlib.sha256(json.dumps(guarded, sort_keys=True).encode()).hexdigest()[:16]


def _without_free_keys(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in config.items():
        if prefix + key not in FREE_KEYS:
            is_group = isinstance(value, dict)
            found[key] = _without_free_keys(value, f"{prefix}{key}.") if is_group else value
    return found


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl in order; [] without a file.

    A last line that a kill cut short is left out; any other unreadable line raises RunFolderError.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        return []
    lines = path.read_text("utf-8").split("\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):  # a whole line ends in a newline
        try:
            found.append(json.loads(line))
        except ValueError:
            raise RunFolderError(
                f"line {number} of {path} is not JSON: repair it or choose another --workdir"
            ) from None
    return found


def to_json_value(value: Any) -> Any:
    """Mappings, sequences, NumPy and JAX scalars as plain JSON; undefined numbers as null."""
    if isinstance(value, Mapping):
        return {str(k): to_json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(v) for v in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return to_json_value(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def file_digest(path: str | os.PathLike) -> str:
    """Sixteen hex digits of a file's content."""
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:16]


def environment() -> dict[str, Any]:
    """When, with what and on what this process runs; null where unknown."""
    devices = jax.devices()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": _has_changes(),
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "num_processes": jax.process_count(),
        "num_cpus": os.cpu_count(),
    }


def _line(metrics: Mapping[str, Any]) -> str:
    return json.dumps(metrics, allow_nan=False) + "\n"


def _read_config(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        return json.loads((path / "config.json").read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise RunFolderError(
            f"{path / 'config.json'} is not readable JSON: choose another --workdir, "
            "or restore that file"
        ) from None


def _read_starts(path: pathlib.Path) -> list[Any]:
    try:
        return json.loads((path / "environment.json").read_text("utf-8"))
    except FileNotFoundError:
        return []
    except ValueError:
        raise RunFolderError(
            f"{path / 'environment.json'} is not readable JSON: remove it, or choose another "
            "--workdir"
        ) from None


def _refuse_strangers(path: pathlib.Path) -> None:
    """Without a config.json, files of our names are somebody else's; a log beside them is fine."""
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"workdir {path} is a file: choose another --workdir")
    found = [name for name in OWN_NAMES if (path / name).exists()]
    if found:
        raise RunFolderError(
            f"workdir {path} has {found[0]} but no config.json, so it is not known whose run it "
            "is: choose another --workdir"
        )


def _refuse_other_run(path: pathlib.Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    if config_hash(before) == config_hash(now):
        return
    differing = _differing_keys(_without_free_keys(before), _without_free_keys(now))
    shown = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
    raise RunFolderError(
        f"workdir {path} holds a run of another config (first differing keys: {shown}): "
        "choose another --workdir, or set these keys back to go on with that run"
    )


def _differing_keys(a: Any, b: Any, prefix: str = "") -> list[str]:
    """Dotted keys, in b's order, whose values differ or that only one side has."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [] if a == b else [prefix]
    found = []
    for key in [*b, *(k for k in a if k not in b)]:
        name = f"{prefix}.{key}" if prefix else key
        if key not in a or key not in b:
            found.append(name)
        else:
            found += _differing_keys(a[key], b[key], name)
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str | None:
    """Output of git in the package's own checkout, or None where there is none."""
    root = pathlib.Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None  # installed: a repository further up would be somebody else's
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _has_changes() -> bool | None:
    status = _git("status", "--porcelain", "--untracked-files=no")
    return None if status is None else bool(status)
