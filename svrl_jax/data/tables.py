"""Published files (parquet, JSON lines, JSON) -> rows, a few at a time, so memory stays flat."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

SUFFIXES = (".parquet", ".jsonl", ".json")
_ROWS_AT_ONCE = 16  # pictures of a megabyte each: little, and still quick


class TableError(RuntimeError):
    """A file that cannot be read at all, or a missing package; the message has the remedy."""


def missing_package(error: ImportError) -> TableError:
    """The error to raise where a package of the `data` extra is not installed."""
    return TableError(
        f"the package {error.name!r} is missing; install what data sets need with: "
        "pip install -e '.[data]'"
    )


def rows_of(path: pathlib.Path) -> Iterator[dict[str, Any] | str]:
    """Every row of a file in order: a dict, or the reason why it is unreadable.

    Raises:
      TableError: the file as a whole cannot be read.
    """
    reader = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows, ".json": _json_rows}
    if path.suffix not in reader:
        raise TableError(f"{path} is none of {SUFFIXES}: convert it first")
    yield from reader[path.suffix](path)


def num_rows(path: pathlib.Path) -> int:
    """How many rows `rows_of` gives."""
    if path.suffix == ".parquet":
        return _open_parquet(path).metadata.num_rows
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return sum(bool(line.strip()) for line in file)
    return sum(1 for _ in rows_of(path))


def column_names(path: pathlib.Path) -> list[str]:
    """Names of the columns (of the first row, where the file has no schema)."""
    if path.suffix == ".parquet":
        return list(_open_parquet(path).schema_arrow.names)
    return list(next((row for row in rows_of(path) if isinstance(row, dict)), {}))


def file_sha256(path: pathlib.Path) -> str:
    """sha256 of a file's bytes, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open_parquet(path: pathlib.Path):
    try:
        import pyarrow.parquet as pq  # late: an extra
    except ImportError as error:
        raise missing_package(error) from error
    import pyarrow

    try:
        # Buffered streams: a column chunk of gigabytes is never held whole.
        return pq.ParquetFile(path, memory_map=True, pre_buffer=False, buffer_size=1 << 20)
    except (pyarrow.ArrowException, OSError) as error:
        raise TableError(f"{path} is not readable parquet ({error}): fetch it again") from error


def _parquet_rows(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    import pyarrow

    try:
        for batch in _open_parquet(path).iter_batches(batch_size=_ROWS_AT_ONCE):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise TableError(f"{path} breaks off ({error}): fetch it again") from error


def _jsonl_rows(path: pathlib.Path) -> Iterator[dict[str, Any] | str]:
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                yield f"its line is not JSON ({error})"
                continue
            yield row if isinstance(row, dict) else "its line is no JSON object"


def _json_rows(path: pathlib.Path) -> Iterator[dict[str, Any] | str]:
    try:
        rows = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise TableError(f"{path} is not JSON ({error}): fetch it again") from error
    if not isinstance(rows, list):
        raise TableError(f"{path} is no JSON list of rows")
    for row in rows:
        yield row if isinstance(row, dict) else "it is no JSON object"
