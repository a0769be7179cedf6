"""Calls and their answers in one sqlite file, keyed by content: a run can be made again offline.

A row's key is what was asked (a folded query, the sha256 of picture bytes, a link with the question
a summary is for) and the settings of what was asked (provider, number of results, model). Keys of
accounts are no part of it. Several processes may share a file (WAL): a row that `ask` has returned
is on disk.

Modes: `record` asks and keeps; `replay` never asks; `replay_or_live` asks for what is missing.
Failures are kept too, so that a replay fails where the run did; a failure that may pass is asked
again outside `replay`, and never takes the place of an answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
import sqlite3
import threading
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from svrl_jax.search.errors import PASSING, PERMANENT, ToolError

MODES = ("record", "replay", "replay_or_live")
_FORM = 1
_TABLE = """
CREATE TABLE IF NOT EXISTS answers (
  key TEXT PRIMARY KEY,
  tool TEXT NOT NULL,      -- text_search, image_search, page, summary, thumbnail
  asked TEXT NOT NULL,     -- JSON: content and settings, from which the key is made
  failure TEXT NOT NULL,   -- kind, or ''
  answer TEXT NOT NULL,    -- JSON, or the failure's message
  blob BLOB                -- bytes of a picture, or NULL
) WITHOUT ROWID
"""


class SearchRecordError(RuntimeError):
    """A record file that cannot be used; the message names it and the remedy."""


class SearchRecord:
    """An open record; shared by threads."""

    def __init__(self, path: str | os.PathLike, mode: str):
        """Opens a record, or makes one where the mode may write.

        Raises:
          SearchRecordError: none there to replay, or a file that is no record.
        """
        if mode not in MODES:
            raise ValueError(f"record mode {mode!r} is not one of {MODES}")
        self.path, self.mode = pathlib.Path(path), mode
        if mode == "replay" and not self.path.is_file():
            raise SearchRecordError(
                f"the record {self.path} does not exist: name one with config.search.record_file, "
                "or make it with config.search.record_mode=record"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._flights: dict[str, threading.Event] = {}
        try:
            self._db = sqlite3.connect(
                self.path, timeout=60.0, isolation_level=None, check_same_thread=False
            )
            if mode != "replay":
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute(_TABLE)
                if self._form() == 0:
                    self._db.execute(f"PRAGMA user_version={_FORM}")
            if self._form() != _FORM:
                raise SearchRecordError(
                    f"{self.path} is no search record of this version: name another file"
                )
            self._db.execute("SELECT key FROM answers LIMIT 1")
        except sqlite3.Error as error:
            raise SearchRecordError(f"{self.path} is no search record ({error})") from error

    def ask(
        self,
        tool: str,
        content: Mapping[str, Any],
        settings: Mapping[str, Any],
        live: Callable[[], Any],
        *,
        keeps_failures: bool = True,
    ) -> Any:
        """The answer to a call: the record's, or that of `live`, which is then kept.

        Args:
          tool: kind of call.
          content, settings: JSON objects; together they are the key.
          live: gives a JSON value, or bytes, or raises ToolError; the same call is made by one
            thread at a time.
          keeps_failures: False keeps answers only, so that a failure is asked again.
        Raises:
          ToolError: recorded, or of `live`; (not_recorded) `replay` and no such row.
        """
        asked = json.dumps([content, settings], sort_keys=True, ensure_ascii=False)
        key = key_of(tool, asked)
        with self._alone(key):
            row = None if self.mode == "record" else self._find(key)
            may_ask = self.mode != "replay"
            if row is not None and not (may_ask and row[0] in PASSING):
                return _answer(row)
            if not may_ask:
                raise ToolError(f"the record holds no such {tool}", "not_recorded")
            try:
                found = live()
            except ToolError as error:
                # Permanent ones are the setup's, not the call's.
                if keeps_failures and error.kind not in (*PERMANENT, "no_address"):
                    self.keep(key, tool, asked, error.kind, str(error), None)
                raise
            self.put(tool, content, settings, found)
            return found

    def put(self, tool: str, content: Mapping, settings: Mapping, answer: Any) -> None:
        """Keeps an answer: a JSON value, or bytes."""
        asked = json.dumps([content, settings], sort_keys=True, ensure_ascii=False)
        blob = answer if isinstance(answer, bytes) else None
        text = "" if blob is not None else json.dumps(answer, ensure_ascii=False)
        self.keep(key_of(tool, asked), tool, asked, "", text, blob)

    def put_failure(self, tool: str, content: Mapping, settings: Mapping, error: ToolError) -> None:
        """Keeps a failure, unless an answer is there."""
        asked = json.dumps([content, settings], sort_keys=True, ensure_ascii=False)
        self.keep(key_of(tool, asked), tool, asked, error.kind, str(error), None)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row by key, as JSON values; `blob` is bytes or None."""
        with self._lock:
            rows = self._db.execute(
                "SELECT key, tool, asked, failure, answer, blob FROM answers ORDER BY key"
            ).fetchall()
        names = ("key", "tool", "asked", "failure", "answer", "blob")
        for row in rows:
            yield dict(zip(names, row, strict=True))

    def counts(self) -> dict[tuple[str, str], int]:
        """(tool, failure kind or "") -> number of rows."""
        with self._lock:
            rows = self._db.execute(
                "SELECT tool, failure, COUNT(*) FROM answers GROUP BY tool, failure ORDER BY 1, 2"
            ).fetchall()
        return {(tool, failure): count for tool, failure, count in rows}

    def snapshot(self) -> str:
        """Twelve hex digits of all that is recorded: equal where replays are equal."""
        digest = hashlib.sha256()
        for row in self.rows():
            body = row["blob"] if row["blob"] is not None else row["answer"].encode()
            parts = (row["key"], row["failure"], hashlib.sha256(body).hexdigest())
            digest.update("\n".join((*parts, "")).encode())
        return digest.hexdigest()[:12]

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()

    def _form(self) -> int:
        return self._db.execute("PRAGMA user_version").fetchone()[0]

    def _find(self, key: str):
        with self._lock:
            return self._db.execute(
                "SELECT failure, answer, blob FROM answers WHERE key = ?", (key,)
            ).fetchone()

    def keep(
        self, key: str, tool: str, asked: str, failure: str, answer: str, blob: bytes | None
    ) -> None:
        """Keeps a row as it stands in the file; see `put` and `put_failure`."""
        # A failure takes the place of a failure only; an answer takes any.
        update = "WHERE excluded.failure = '' OR answers.failure != ''"
        with self._lock:
            self._db.execute(
                "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                "failure = excluded.failure, answer = excluded.answer, blob = excluded.blob "
                f"{update}",
                (key, tool, asked, failure, answer, blob),
            )

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """One thread at a time for a key: the next finds the first one's row."""
        while True:
            with self._lock:
                mine = key not in self._flights
                event = self._flights.setdefault(key, threading.Event())
            if mine:
                break
            event.wait()
        try:
            yield
        finally:
            with self._lock:
                del self._flights[key]
            event.set()


def key_of(tool: str, asked: str) -> str:
    """A row's key, 32 hex digits."""
    return hashlib.sha256(f"{_FORM}\n{tool}\n{asked}".encode()).hexdigest()[:32]


def fold_query(query: str) -> str:
    """Form in which two queries are one call: NFKC, casefold, single spaces."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", query).casefold())
    return re.sub(r"\s+", " ", text).strip()


def content_of_picture(picture: bytes) -> dict[str, str]:
    """What a picture is recorded under."""
    return {"picture_sha256": hashlib.sha256(picture).hexdigest()}


def _answer(row) -> Any:
    failure, answer, blob = row
    if failure:
        raise ToolError(answer, failure)
    return blob if blob is not None else json.loads(answer)
