"""What `view` is given -> sets of records with their labels, each set under its model's name.

A RUN is a run folder, a folder of record sets, one set, or traces of another agent (JSON lines).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from svrl_jax.data.traces import read_traces
from svrl_jax.evals import cases
from svrl_jax.processing.tokenizer import Tokenizer
from svrl_jax.protocol.prompts import PromptBuilder
from svrl_jax.records import Record, RecordError, read_records, record_files
from svrl_jax.rewards import factors
from svrl_jax.rewards.judge import Verdict
from svrl_jax.rollout.imported import episode_of_trace
from svrl_jax.types import OracleLabels
from svrl_jax.viewer.entries import Notes

TRAINING_SET = re.compile(r"step_\d+")
_TRACES_A_SET = 200


class ViewError(RuntimeError):
    """Something that cannot be shown; the message names it and the remedy."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One argument.

    Attributes:
      name: how the page calls it.
      path: a folder or a file.
      kind: `records` or `traces`.
    """

    name: str
    path: pathlib.Path
    kind: str

    @property
    def sets(self) -> list[pathlib.Path]:
        """Its files, by name."""
        if self.path.is_file():
            return [self.path]
        folder = self.path / "episodes"
        return list(record_files(folder if folder.is_dir() else self.path))


@dataclasses.dataclass(frozen=True)
class RecordSet:
    """Some records of a run.

    Attributes:
      run: they are of it.
      name: file name without suffix.
      records: any number.
      notes: what was said of them later, one a record.
      problem: why it could not be read, then without records, or why what was said of them could
        not, then without that; else "".
    """

    run: Run
    name: str
    records: list[Record]
    notes: list[Notes]
    problem: str = ""

    @property
    def is_training(self) -> bool:
        """Whether its episodes' step is one of training."""
        return TRAINING_SET.fullmatch(self.name) is not None


@dataclasses.dataclass(frozen=True)
class TraceReader:
    """What makes episodes of traces.

    Attributes:
      builder: of some policy's folder: its tokenizer counts the tokens.
      rollout_config, search_config: see `episode_of_trace`.
      pictures: task id -> encoded bytes; traces carry none.
      policy_name: of the agent that made them.
    """

    builder: PromptBuilder
    rollout_config: ConfigDict
    search_config: ConfigDict
    pictures: Mapping[str, bytes]
    policy_name: str


def parse_runs(arguments: list[str] | tuple[str, ...]) -> list[Run]:
    """Reads RUN or NAME=RUN; names are made unique.

    Raises:
      ViewError: no such path, or nothing in it that can be shown.
    """
    runs: list[Run] = []
    for argument in arguments:
        name, path = "", pathlib.Path(argument)
        if not path.exists() and "=" in argument:
            name, rest = argument.split("=", 1)
            path = pathlib.Path(rest)
        if not path.exists():
            raise ViewError(f"{str(path)!r} does not exist: name a run folder or a records file")
        name = name or _name_of(path)
        taken = {r.name for r in runs}
        unique = next(n for n in (name, *(f"{name} ({i})" for i in range(2, 99))) if n not in taken)
        run = Run(unique, path, _kind_of(path))
        if not run.sets:
            raise ViewError(f"{path} holds no recorded episodes: name a run folder or its episodes")
        runs.append(run)
    return runs


def read_sets(run: Run, traces: TraceReader | None) -> Iterator[RecordSet]:
    """Reads a run, set by set. A set that is damaged, or being replaced by a run that goes on,
    comes without records and says so; so does one whose labels or verdicts belong to others.

    Args:
      traces: needed for a run of kind `traces`.
    """
    if run.kind == "traces":
        yield from _read_trace_sets(run, traces)
        return
    for path in run.sets:
        try:
            records = read_records(path, has_pixels=False)
        except (RecordError, FileNotFoundError) as error:
            yield RecordSet(run, path.stem, [], [], str(error))
            continue
        try:
            yield RecordSet(run, path.stem, records, _read_notes(path, records))
        except NotesError as error:
            yield RecordSet(run, path.stem, records, [Notes()] * len(records), str(error))


def tokenizer_of(run: Run) -> Tokenizer | None:
    """The tokenizer of a run's policy: of its export, else of its initial policy; None if neither
    is at hand (ids are shown instead).
    """
    folder = run.path if run.path.is_dir() else run.path.parent
    folder = folder.parent if folder.name == "episodes" else folder
    candidates = [folder / "export"]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no run's: no matter
        config = json.loads((folder / "config.json").read_text("utf-8"))
        candidates.append(pathlib.Path(config["model"]["folder"]))
    for candidate in candidates:
        if (candidate / "tokenizer.json").is_file():
            return Tokenizer.from_folder(candidate)
    return None


class NotesError(ValueError):
    """A file of labels or verdicts that does not belong to its records."""


def _name_of(path: pathlib.Path) -> str:
    path = path.absolute()
    return (
        path.parent.name if path.name == "episodes" else path.stem if path.is_file() else path.name
    )


def _kind_of(path: pathlib.Path) -> str:
    if path.is_dir():
        return "records"
    with path.open("rb") as file:
        first = file.readline()
    try:
        line = json.loads(first)
    except ValueError:
        line = None
    if isinstance(line, dict) and "rounds" in line:
        return "traces"
    if isinstance(line, dict) and "schema_version" in line:
        return "records"
    raise ViewError(f"{path} holds neither records nor traces: name a run folder or such a file")


def _read_notes(path: pathlib.Path, records: list[Record]) -> list[Notes]:
    """One a record; empty ones where nobody said anything."""
    names = [(r.episode.task_id, r.episode.sample) for r in records]
    labels = _read_beside(path, names, cases.read_labels, ".labels.jsonl", "annotate")
    verdicts = _read_beside(path, names, cases.read_verdicts, ".verdicts.jsonl", "rescore")
    try:
        notes = [_notes_of(labels.get(n, {}), verdicts.get(n, {})) for n in names]
        for record, note in zip(records, notes, strict=True):
            if note.labels is not None and note.labels.answered:
                factors.mask_agreements(record.episode, note.labels)  # or they are of another
    except (ValueError, KeyError, TypeError) as error:
        raise NotesError(_strange(path, ".labels.jsonl", "annotate")) from error
    return notes


def _read_beside(path, names, read, suffix: str, remedy: str) -> dict[tuple[str, int], Any]:
    """What `read` finds beside a set; all of it is of the set's own episodes."""
    try:
        found = read(path)
    except (ValueError, KeyError, TypeError) as error:
        raise NotesError(_strange(path, suffix, remedy)) from error
    if found.keys() - set(names):
        raise NotesError(_strange(path, suffix, remedy))
    return found


def _strange(path: pathlib.Path, suffix: str, remedy: str) -> str:
    return f"{path.with_suffix(suffix)} does not belong to {path.name}: {remedy} the run again"


def _notes_of(line: Mapping[str, Any], verdicts: Mapping[str, Verdict]) -> Notes:
    """A line of `annotate` may hold an oracle's labels, a judge's of queries, or both."""
    labels = None
    if "items" in line:
        labels = OracleLabels(
            items=tuple(tuple(x) for x in line["items"]),
            queries=tuple(line["queries"]),
            proposals=tuple(tuple(x) for x in line["proposals"]),
            answered=line["answered"],
        )
    return Notes(
        labels=labels,
        oracle=str(line.get("oracle", "")),
        query_verdicts=tuple(line.get("query_judge", ())),
        query_judge=str(line.get("query_judge_name", "")),
        verdicts=tuple(verdicts.values()),
    )


def _read_trace_sets(run: Run, reader: TraceReader | None) -> Iterator[RecordSet]:
    if reader is None:
        raise ViewError(f"{run.path} holds traces: a tokenizer is needed to read them")
    waiting: list[Record] = []
    for trace in read_traces(run.path):
        picture = reader.pictures.get(trace.task.id, b"")
        task = dataclasses.replace(trace.task, picture=picture)
        episode = episode_of_trace(
            trace,
            reader.builder.build(trace.task, "agent"),  # its picture was not recorded as tokens
            reader.builder.tokenizer,
            reader.builder.config,
            reader.rollout_config,
            reader.search_config,
            policy_name=reader.policy_name,
        )
        waiting.append(Record(episode, task))
        if len(waiting) == _TRACES_A_SET:
            yield RecordSet(run, "traces", waiting, [Notes()] * len(waiting))
            waiting = []
    if waiting:
        yield RecordSet(run, "traces", waiting, [Notes()] * len(waiting))
