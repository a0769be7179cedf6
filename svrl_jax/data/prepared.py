"""A prepared folder (see data.prepare) -> its splits, each row a Task by number."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from svrl_jax.data import tables
from svrl_jax.types import Task

SCHEMA_VERSION = 1
MANIFEST = "prepared.json"
TFDS_FOLDER = "1.0.0"


class PreparedError(RuntimeError):
    """A folder that holds no finished data set; the message names it and the remedy."""


class Prepared:
    """One data set on disk.

    Attributes:
      folder: as `prepare` made it.
      manifest: its prepared.json.
    """

    def __init__(self, folder: str | os.PathLike):
        """Reads the manifest alone.

        Raises:
          PreparedError: there is none, or another version wrote it.
        """
        self.folder = pathlib.Path(folder)
        try:
            self.manifest: dict[str, Any] = json.loads((self.folder / MANIFEST).read_text("utf-8"))
        except (OSError, ValueError):
            raise PreparedError(
                f"{self.folder} holds no finished data set: make one with `python -m experiments "
                "prepare --dataset=NAME --source=FILES --out=FOLDER`"
            ) from None
        found = self.manifest["schema_version"]
        if found != SCHEMA_VERSION:
            raise PreparedError(
                f"{self.folder} has schema {found}, this version reads {SCHEMA_VERSION}: remove it "
                "and prepare it again"
            )

    @property
    def digest(self) -> str:
        """sha256 of the manifest, hence of the sources' digests and the counts."""
        return hashlib.sha256((self.folder / MANIFEST).read_bytes()).hexdigest()

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of its splits."""
        return tuple(self.manifest["splits"])

    def split(self, name: str) -> PreparedSplit:
        """One split.

        Raises:
          PreparedError: there is no such split, or rows are missing.
        """
        if name not in self.manifest["splits"]:
            raise PreparedError(
                f"{self.folder} has no split {name!r}; it has {', '.join(self.splits)}"
            )
        return PreparedSplit(self, name)


class PreparedSplit(Sequence[Task]):
    """Rows of one split, read from disk one by one; may be pickled to a worker process."""

    def __init__(self, data: Prepared, name: str):
        """Opens the index; the records are opened at the first read."""
        self.data, self.name = data, name
        self.source = f"{data.manifest['name']}/{name}"
        self._records = None
        self._index = _read_index(data.folder / f"index_{name}.parquet")
        count = data.manifest["splits"][name]["tasks"]
        if len(self._index["id"]) != count:
            raise PreparedError(
                f"{data.folder}: the index of {name} has {len(self._index['id'])} of {count} rows: "
                "remove the folder and prepare it again"
            )

    def __len__(self) -> int:
        return len(self._index["id"])

    def __getitem__(self, number: int) -> Task:
        """The row as a task. Numbers from 0, in published order."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self.source} has {len(self)} rows, none has number {number}")
        row = self._open()[number]
        return Task(
            id=row["id"].decode(),
            question=row["question"].decode(),
            picture=bytes(row["picture"]),
            golds=_texts(row["golds"]),
            source=self.source,
            category=row["category"].decode(),
            entity=_texts(row["entity"]),
            evidence_ids=_texts(row["evidence_ids"]),
            picture_url=row["picture_url"].decode() or None,
            item=row["id"].decode(),
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_records": None}

    @property
    def ids(self) -> list[str]:
        """Task ids in order, from the index alone."""
        return self._index["id"].to_pylist()

    @property
    def questions(self) -> list[str]:
        """Questions in order, from the index alone."""
        return self._index["question"].to_pylist()

    @property
    def categories(self) -> list[str]:
        """Categories in order, from the index alone."""
        return self._index["category"].to_pylist()

    @property
    def sizes_px(self) -> np.ndarray:
        """int32[rows, 2], (width, height) of each upright picture; 0 without one."""
        return np.stack([self._index[c].to_numpy() for c in ("width_px", "height_px")], axis=1)

    def _open(self):
        if self._records is None:
            try:
                import tensorflow_datasets as tfds  # late: an extra
            except ImportError as error:
                raise tables.missing_package(error) from error
            builder = tfds.builder_from_directory(self.data.folder / TFDS_FOLDER)
            records = builder.as_data_source(split=self.name)
            if len(records) != len(self):
                raise PreparedError(
                    f"{self.data.folder}: {self.name} has {len(records)} of {len(self)} records: "
                    "remove the folder and prepare it again"
                )
            self._records = records
        return self._records


def _read_index(path: pathlib.Path):
    try:
        import pyarrow.parquet as pq  # late: an extra
    except ImportError as error:
        raise tables.missing_package(error) from error
    try:
        return pq.read_table(path)
    except OSError as error:
        raise PreparedError(
            f"{path} cannot be read ({error}): remove its folder and prepare it again"
        ) from error


def _texts(values: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(value.decode() for value in values)
