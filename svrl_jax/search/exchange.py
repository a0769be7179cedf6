"""A search record <-> JSON lines, for moving or merging records."""

from __future__ import annotations

import base64
import json
import os
import pathlib

from svrl_jax.search.errors import FAILURES
from svrl_jax.search.record import SearchRecord, SearchRecordError, key_of


def export_rows(record: SearchRecord, path: str | os.PathLike) -> int:
    """Writes every row; returns how many."""
    count = 0
    with pathlib.Path(path).open("w", encoding="utf-8") as file:
        for row in record.rows():
            blob = row["blob"]
            row["blob"] = None if blob is None else base64.b64encode(blob).decode()
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def import_rows(record: SearchRecord, path: str | os.PathLike) -> int:
    """Adds the rows of an export, as `SearchRecord.put` would; returns how many were read.

    Raises:
      SearchRecordError: a line that is no row; rows before it are kept.
    """
    count = 0
    with pathlib.Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                is_whole = key_of(row["tool"], row["asked"]) == row["key"]
                blob = None if row["blob"] is None else base64.b64decode(row["blob"], validate=True)
                texts = (row["failure"], row["answer"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SearchRecordError(f"{path}, line {number}: no row ({error})") from error
            if not is_whole or row["failure"] not in ("", *FAILURES):
                raise SearchRecordError(f"{path}, line {number}: its key or kind is wrong")
            record.keep(row["key"], row["tool"], row["asked"], *texts, blob)
            count += 1
    return count
