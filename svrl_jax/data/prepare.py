"""A source (folder, file or Hugging Face data set) -> a prepared folder that the pipeline reads.

    OUT/NAME/prepared.json         what it is made of: written last, so without it nothing loads
    OUT/NAME/quarantine.jsonl      rows that cannot be read, with reasons
    OUT/NAME/index_SPLIT.parquet   questions and picture sizes: token counts without the pictures
    OUT/NAME/1.0.0/                the tfds data set (ArrayRecord)

Everything is built in a hidden folder beside it and moved there in one step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from svrl_jax.data import cells, tables
from svrl_jax.data.cells import RowError
from svrl_jax.data.datasets import DATASETS, TABLE_COLUMNS, DataSet, Place, tasks_of
from svrl_jax.data.prepared import MANIFEST, SCHEMA_VERSION
from svrl_jax.types import Task

QUARANTINE = "quarantine.jsonl"
_INDEX_COLUMNS = ("id", "question", "category", "width_px", "height_px")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")


class PrepareError(RuntimeError):
    """A data set that cannot be prepared; the message has the remedy."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Files to read.

    Attributes:
      name: as the user typed it.
      folder: of the files.
      files: split -> its files, in order.
      revision: commit of the hub's repository, or None.
    """

    name: str
    folder: pathlib.Path
    files: Mapping[str, tuple[pathlib.Path, ...]]
    revision: str | None = None


def prepare(
    dataset: str,
    source: str | None,
    out: str | os.PathLike,
    *,
    name: str | None = None,
    split: str | None = None,
    columns: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
    progress: Callable[[str, int, int], None] = lambda split, done, total: None,
) -> dict[str, Any]:
    """Builds one data set.

    Args:
      dataset: one of DATASETS; `table` for a file of the user's own.
      source: a folder with the published files, one file, or a hub id (`user/name[@revision]`);
        None takes the data set's own hub id.
      out: parent of the new folder.
      name: of the new folder; None takes `dataset`.
      split: of a source that is one file whose name does not say it.
      columns: Task field -> column of the user's own table; see TABLE_COLUMNS.
      say: takes a line for the user. Differences from the published counts are said, not raised.
      progress: (split, rows done, all rows).
    Returns:
      The manifest, as in prepared.json.
    Raises:
      PrepareError, tables.TableError: nothing is left behind.
    """
    if dataset not in DATASETS:
        raise PrepareError(f"no data set {dataset!r}; one of: {', '.join(DATASETS)}")
    spec, name = DATASETS[dataset], name or dataset
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise PrepareError(f"--name={name} is no plain folder name")
    target = pathlib.Path(out).absolute() / name
    if target.exists():
        raise PrepareError(f"{target} exists already: remove it, or choose another --out or --name")
    builder_of = _builders()
    with _exclusive(target):
        found = find_files(spec, source, split)
        reading = Reading(dataset, name, spec, found, columns or {}, progress)
        building = target.with_name(f".building-{name}")
        shutil.rmtree(building, ignore_errors=True)  # of a build that was killed
        try:
            builder_of[dataset](reading=reading, data_dir=building).download_and_prepare()
            made = building / dataset
            reading.refuse_empty()
            manifest = reading.write_beside(made)
            os.replace(made, target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    for line in differences(spec, manifest):
        say(line)
    return manifest


def find_files(spec: DataSet, source: str | None, split: str | None = None) -> Source:
    """The files of each split that the source has.

    Raises:
      PrepareError: there are none, or one file's split is not known.
    """
    if split is not None and split not in spec.splits:
        raise PrepareError(f"no split {split!r}; one of: {', '.join(spec.splits)}")
    typed = source or spec.hub_id
    if typed is None:
        raise PrepareError("this data set is on no hub: name its files by --source=DIR")
    path = pathlib.Path(typed)
    if path.is_file():
        splits = _splits_of_file(spec, path) if split is None else [split]
        return Source(typed, path.parent, {name: (path,) for name in splits})
    revision = None
    if not path.is_dir():
        path, revision = _download(spec, typed)
    files = {}
    for name, wanted in spec.splits.items():
        matches = (sorted(path.glob(pattern)) for pattern in wanted.patterns)
        matched = next(filter(None, matches), None)
        if matched and split in (None, name):
            files[name] = tuple(matched)
    if not files:
        patterns = ", ".join(s.patterns[0] for s in spec.splits.values())
        raise PrepareError(f"{path} holds none of the files {patterns}: is --source right?")
    return Source(typed, path, files, revision)


def differences(spec: DataSet, manifest: Mapping[str, Any]) -> list[str]:
    """Lines that name where a built data set differs from the published one; [] if nowhere."""
    lines = []
    for name, made in manifest["splits"].items():
        wanted = spec.splits[name]
        if wanted.num_tasks is not None and made["tasks"] + made["quarantined"] != wanted.num_tasks:
            lines.append(
                f"warning: {name} has {made['tasks']} tasks and {made['quarantined']} unreadable "
                f"rows, published are {wanted.num_tasks}"
            )
        if made["quarantined"]:
            lines.append(
                f"warning: {made['quarantined']} rows of {name} cannot be read, "
                f"{QUARANTINE} says why: " + _counts(made["reasons"])
            )
        for file in made["files"]:
            published = wanted.sha256.get(pathlib.PurePath(file["path"]).name)
            if published and file["sha256"] != published:
                lines.append(
                    f"warning: {file['path']} has sha256 {file['sha256'][:12]}..., "
                    f"published is {published[:12]}...: another revision or a broken download"
                )
    return lines


class Reading:
    """One pass over a source: its tasks, and the account of every row."""

    def __init__(
        self,
        dataset: str,
        name: str,
        spec: DataSet,
        source: Source,
        columns: Mapping[str, str],
        progress: Callable[[str, int, int], None],
    ):
        """Args: name: of the folder, first part of every task's source."""
        self.dataset, self.name, self.spec, self.source = dataset, name, spec, source
        self._progress = progress
        self._columns = _check_columns(spec, source, columns)
        self.splits = tuple(source.files)
        self.accounts = {s: _Account() for s in self.splits}

    def tasks(self, split: str) -> Iterator[tuple[Task, int, int]]:
        """(task, picture width, picture height) of every readable row, in published order."""
        files, account = self.source.files[split], self.accounts[split]
        total = sum(map(tables.num_rows, files))
        lookup = self.spec.prepare(files, self.source.folder)
        seen: set[str] = set()
        inside = self.spec.splits[split].picture_folders
        for file in files:
            folders = (file.parent, *(file.parent / name for name in inside), self.source.folder)
            for row in tables.rows_of(file):
                place = Place(self.name, split, account.rows, folders, self._columns, lookup)
                try:
                    for task in self._read(split, row, place, seen):
                        account.add(*task)
                        yield task
                except RowError as error:
                    account.quarantine(split, file.name, row, str(error))
                account.rows += 1
                if account.rows % 64 == 0 or account.rows == total:
                    self._progress(split, account.rows, total)

    def refuse_empty(self) -> None:
        """Raises PrepareError if a split has not one readable row."""
        for split, account in self.accounts.items():
            if not account.index["id"]:
                raise PrepareError(
                    f"no row of {split} can be read: {_counts(account.to_json()['reasons'])}"
                )

    def write_beside(self, folder: pathlib.Path) -> dict[str, Any]:
        """Writes index, quarantine and, last, the manifest into a built folder."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        for split, account in self.accounts.items():
            pq.write_table(pa.table(account.index), folder / f"index_{split}.parquet")
        with (folder / QUARANTINE).open("w", encoding="utf-8") as file:
            for account in self.accounts.values():
                file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in account.bad)
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "dataset": self.dataset,
            "name": self.name,
            "source": self.source.name,
            "revision": self.source.revision,
            "licence": self.spec.licence,
            "about": self.spec.about,
            "scorer": self.spec.scorer,
            "columns": self._columns,
            "splits": {
                split: account.to_json() | {"files": _files(self.source, split)}
                for split, account in self.accounts.items()
            },
        }
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")
        return manifest

    def _read(self, split: str, row, place: Place, seen: set[str]):
        """The row's tasks with their pictures' sizes: all of them, or none and a RowError."""
        found = []
        for task in tasks_of(self.spec, self.spec.splits[split], row, place):
            if task.id in seen:
                raise RowError(f"its id {task.id} was there before")
            width, height = cells.picture_size(task.picture) if task.picture else (0, 0)
            found.append((task, width, height))
        seen.update(task.id for task, _, _ in found)
        return found


class _Account:
    """What became of a split's rows."""

    def __init__(self):
        self.rows = 0
        self.bad: list[dict[str, Any]] = []
        self.index: dict[str, list] = {name: [] for name in _INDEX_COLUMNS}
        self.text_only = 0

    def add(self, task: Task, width_px: int, height_px: int) -> None:
        values = (task.id, task.question, task.category, width_px, height_px)
        for name, value in zip(_INDEX_COLUMNS, values, strict=True):
            self.index[name].append(value)
        self.text_only += not task.picture

    def quarantine(self, split: str, file: str, row: Any, reason: str) -> None:
        row_id = row.get("data_id", row.get("id")) if isinstance(row, dict) else None
        self.bad.append(
            {"split": split, "file": file, "row": self.rows, "id": _plain(row_id), "reason": reason}
        )

    def to_json(self) -> dict[str, Any]:
        reasons: dict[str, int] = {}
        for row in self.bad:
            kind = re.sub(r"\d+", "N", row["reason"].split(":")[0])
            reasons[kind] = reasons.get(kind, 0) + 1
        return {
            "rows": self.rows,
            "tasks": len(self.index["id"]),
            "text_only": self.text_only,
            "quarantined": len(self.bad),
            "reasons": reasons,
        }


def _builders() -> Mapping[str, type]:
    try:
        from svrl_jax.data import builders  # late: an extra
    except ImportError as error:
        raise tables.missing_package(error) from error
    return builders.BUILDERS


@contextlib.contextmanager
def _exclusive(target: pathlib.Path):
    """Refuses a second build of the same folder; the lock goes with its process."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f".lock-{target.name}")
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PrepareError(f"{target} is being built by another process") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _download(spec: DataSet, typed: str) -> tuple[pathlib.Path, str]:
    """The hub's files in its cache, and the commit they are of."""
    if not _HUB_ID.fullmatch(typed):
        raise PrepareError(f"--source={typed} is neither a file, a folder nor a hub id")
    import huggingface_hub

    hub_id, _, revision = typed.partition("@")
    if not revision and hub_id == spec.hub_id:
        revision = spec.revision
    patterns = [p.removeprefix("**/") for s in spec.splits.values() for p in s.patterns]
    try:
        path = huggingface_hub.snapshot_download(
            hub_id, repo_type="dataset", revision=revision or None, allow_patterns=patterns
        )
    except Exception as error:  # offline, refused, not found: the hub's errors are of many kinds
        logging.getLogger(__name__).debug("download of %s", hub_id, exc_info=True)
        reason = " ".join(str(error).split())[:200]
        raise PrepareError(
            f"{hub_id} cannot be fetched ({type(error).__name__}: {reason}): download its files by "
            "other means and name their folder by --source"
        ) from error
    return pathlib.Path(path), pathlib.Path(path).name


def _splits_of_file(spec: DataSet, path: pathlib.Path) -> list[str]:
    """The splits that a file's name says it holds."""
    if len(spec.splits) == 1:
        return list(spec.splits)
    found = [n for n, wanted in spec.splits.items() if any(map(path.match, wanted.patterns))]
    if not found:
        raise PrepareError(
            f"{path.name} does not say which split it is: add --split, one of "
            f"{', '.join(spec.splits)}"
        )
    return found


def _check_columns(spec: DataSet, source: Source, columns: Mapping[str, str]) -> dict[str, str]:
    """Task field -> column, each of which the source has."""
    is_table = spec.tasks is DATASETS["table"].tasks
    if not is_table:
        if columns:
            raise PrepareError("--columns is for tables of your own; this data set's are known")
        return {}
    unknown = set(columns) - set(TABLE_COLUMNS)
    if unknown:
        raise PrepareError(f"--columns names {sorted(unknown)}; known: {sorted(TABLE_COLUMNS)}")
    resolved = TABLE_COLUMNS | dict(columns)
    for file in (file for files in source.files.values() for file in files):
        there = tables.column_names(file)
        needed = {"question", "answer"} | set(columns)
        missing = sorted(field for field in needed if resolved[field] not in there)
        if missing:
            raise PrepareError(
                f"{file} has no column {resolved[missing[0]]!r} for the {missing[0]}; its columns "
                f"are {there}: name them by --columns=question:COLUMN,answer:COLUMN,..."
            )
    return resolved


def _files(source: Source, split: str) -> list[dict[str, Any]]:
    return [
        {
            "path": os.path.relpath(file, source.folder),
            "bytes": file.stat().st_size,
            "sha256": tables.file_sha256(file),
        }
        for file in source.files[split]
    ]


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | type(None)) else str(value)


def _counts(reasons: Mapping[str, int]) -> str:
    shown = sorted(reasons.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{count} x {reason}" for reason, count in shown[:5])
