"""Others' traces and published caches -> rows of a search record: their questions replay offline.

Each trace's picture is joined by its id from the data set's rows, since image searches are recorded
under the picture's bytes. Summaries are taken over as they were written, with the settings that the
replay's config will ask for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from svrl_jax.data import cells, tables
from svrl_jax.data.traces import Trace, TraceCall
from svrl_jax.search.errors import ToolError
from svrl_jax.search.found import Found
from svrl_jax.search.fvqa_cache import CachedResult
from svrl_jax.search.record import SearchRecord, content_of_picture, fold_query


class ImportedError(RuntimeError):
    """Something that cannot be imported; the message names it and the remedy."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the imported calls count as having asked: those of the config that will replay them.

    Attributes:
      text, image: settings of the two searches.
      summary: of a page's summary.
    """

    text: Mapping[str, Any]
    image: Mapping[str, Any]
    summary: Mapping[str, Any]


def pictures_by_id(path: str | os.PathLike) -> dict[str, bytes]:
    """`data_id` -> picture bytes, of a parquet file in FVQA's row format.

    Raises:
      ImportedError: it has no row with an id and a picture.
    """
    return dict(_pictures(path))


def picture_keys_by_id(path: str | os.PathLike) -> dict[str, dict[str, str]]:
    """`data_id` -> what image searches of its picture are recorded under; no picture is kept.

    Raises:
      ImportedError: as of `pictures_by_id`.
    """
    return {data_id: content_of_picture(picture) for data_id, picture in _pictures(path)}


def _pictures(path: str | os.PathLike) -> Iterator[tuple[str, bytes]]:
    path = pathlib.Path(path)
    is_empty = True
    for row in tables.rows_of(path):
        if isinstance(row, dict) and row.get("data_id"):
            is_empty = False
            yield row["data_id"], cells.picture_bytes(row.get("images"), [path.parent])
    if is_empty:
        raise ImportedError(f"{path} has no row with a data_id and a picture: name FVQA's parquet")


def import_traces(
    record: SearchRecord,
    traces: Iterable[Trace],
    picture_keys: Mapping[str, Mapping[str, str]],
    settings: Settings,
) -> dict[str, int]:
    """Puts every search and summary of traces into a record.

    Args:
      picture_keys: `picture_keys_by_id`'s result; a trace's image search without one is left out.
    Returns:
      Rows by tool, and `no_picture`: image searches left out.
    """
    counts = dict.fromkeys(("image_search", "text_search", "summary", "no_picture"), 0)
    for trace in traces:
        for _, searched in trace.turns:
            if searched is None:
                continue
            tool, found = searched.call.tool, _found(searched)
            if tool == "text_search":
                content = {"query": fold_query(searched.call.query)}
                record.put(tool, content, settings.text, found)
                counts["summary"] += _summaries(record, searched, settings.summary)
            elif trace.task.id not in picture_keys:
                counts["no_picture"] += 1
                continue
            else:
                record.put(tool, picture_keys[trace.task.id], settings.image, found)
            counts[tool] += 1
    return counts


def import_fvqa_cache(
    record: SearchRecord,
    entries: Iterable[tuple[str, list[CachedResult]]],
    picture_keys: Mapping[str, Mapping[str, str]],
    image_settings: Mapping[str, Any],
    thumbnail_px: int,
) -> dict[str, int]:
    """Puts FVQA's published image searches into a record; their results have no links.

    Args:
      entries: of `fvqa_cache.read_cache`.
      picture_keys: `picture_keys_by_id`'s result; an entry without one is left out.
    Returns:
      Rows by tool, and `no_picture`: entries left out.
    """
    counts = dict.fromkeys(("image_search", "thumbnail", "no_picture"), 0)
    for data_id, results in entries:
        if data_id not in picture_keys:
            counts["no_picture"] += 1
            continue
        found = []
        for result in results:
            address = result.picture
            if isinstance(address, bytes):
                # No address that could be fetched: the record alone has this picture.
                address = f"sha256:{hashlib.sha256(result.picture).hexdigest()}"
                settings = {"thumbnail_px": thumbnail_px}
                record.put("thumbnail", {"link": address}, settings, result.picture)
                counts["thumbnail"] += 1
            found.append(dataclasses.asdict(Found(result.title, thumbnail_url=address)))
        record.put("image_search", picture_keys[data_id], image_settings, found)
        counts["image_search"] += 1
    return counts


def _found(searched: TraceCall) -> list[dict[str, str]]:
    return [
        dataclasses.asdict(Found(item.title, item.link, snippet, thumbnail or ""))
        for item, snippet, thumbnail in zip(
            searched.found, searched.snippets, searched.thumbnails, strict=True
        )
    ]


def _summaries(record: SearchRecord, searched: TraceCall, settings: Mapping[str, Any]) -> int:
    failures = {f["url"]: str(f.get("error", "")) for f in searched.failures if "url" in f}
    question = fold_query(searched.call.query)
    for item in searched.found:
        content = {"link": item.link, "question": question}
        if item.text:
            record.put("summary", content, settings, item.text)
        else:
            cause = failures.get(item.link, "no summary was written")
            kind = "blocked" if "403" in cause else "bad_response"
            record.put_failure("summary", content, settings, ToolError(cause, kind))
    return len(searched.found)
