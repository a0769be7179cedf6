"""Recorded runs of other agents (MMSearch-R1 style JSON lines) -> turns, calls and what came back.

Source of the form: the traces of stayreal233/MMSearch-R1-Reproduction. A line holds the row's
question and answers and `rounds`; a round holds the turn's text, and for a search what the provider
gave, the page summaries and which pages could not be read. `rollout.imported` makes Episodes of
these; a recorded search takes its results from `TraceCall.found`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from svrl_jax.data import cells
from svrl_jax.types import SearchItem, Task, ToolCall

SOURCE = "traces"
_BROKEN = "_hard_failure"  # end of the status of a run that a tool's failure broke off


class TraceError(RuntimeError):
    """A trace file that cannot be read; the message names the line and what is wrong."""


@dataclasses.dataclass(frozen=True)
class TraceCall:
    """One search of a trace.

    Attributes:
      call: what the agent was shown, as our record; `failed` with no item where the run broke off
        there, `empty` where nothing was found.
      found: every result in the provider's order, as SearchItem: `text` is the page's summary, ""
        where there is none or the page could not be read; `id` the link, or the title of a
        picture's page.
      snippets: the provider's own short text of each of `found`, "" where it gave none.
      thumbnails: the address of each of `found`, None where it has none.
      failures: pages that could not be read, each with its cause, as recorded.
    """

    call: ToolCall
    found: tuple[SearchItem, ...]
    snippets: tuple[str, ...]
    thumbnails: tuple[str | None, ...]
    failures: tuple[Mapping[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Trace:
    """One question and what an agent did with it.

    Attributes:
      task: the row, without its picture, which traces do not carry; join it by the id.
      turns: (text of the policy's turn, the search that followed or None).
      answer: final answer, None where the run broke off.
      status: the source's own word for the end, such as `answered`.
      exact_match: the source's own verdict, against the truth alone; None where it gave none.
    """

    task: Task
    turns: tuple[tuple[str, TraceCall | None], ...]
    answer: str | None
    status: str
    exact_match: bool | None


def read_traces(path: str | os.PathLike) -> Iterator[Trace]:
    """Reads one trace a line.

    Raises:
      TraceError: a line that is no such trace.
    """
    path = pathlib.Path(path)
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield _trace(json.loads(line))
            except KeyError as error:
                raise TraceError(f"{path}, line {number}: it has no {error.args[0]}") from error
            except (ValueError, TypeError, AttributeError) as error:
                raise TraceError(f"{path}, line {number}: {error}") from error


def _trace(line: Mapping[str, Any]) -> Trace:
    status = line["terminal_status"]
    rounds = line["rounds"]
    turns = []
    for number, one in enumerate(rounds):
        is_broken = status.endswith(_BROKEN) and number == len(rounds) - 1
        turns.append((one["response"], _call(one, is_broken)))
    return Trace(
        task=Task(
            id=line["data_id"],
            question=cells.question(line["question"]),
            picture=b"",
            golds=cells.answers(line["ground_truth"], line.get("candidate_answers")),
            source=SOURCE,
            category=cells.text_or_empty(line.get("category")),
            item=line["data_id"],
        ),
        turns=tuple(turns),
        answer=line["final_answer"],
        status=status,
        exact_match=line.get("exact_match"),
    )


def _call(one: Mapping[str, Any], is_broken: bool) -> TraceCall | None:
    action = one["action"]
    if action == "answer":
        return None
    if action == "image_search":
        results, failures = one["image_results"], one["failures"]
        found = tuple(SearchItem(id=r["title"], title=r["title"]) for r in results)
        snippets = ("",) * len(found)
        thumbnails = tuple(r.get("thumbnail_url") for r in results)
        query, shown = "", found
    elif action == "text_search":
        results, failures = one["search_results"], one["reader_failures"]
        summaries = {s["url"]: s["summary"] for s in one["summaries"]}
        found = tuple(
            SearchItem(
                id=r["url"], title=r["title"], link=r["url"], text=summaries.get(r["url"], "")
            )
            for r in results
        )
        snippets = tuple(r.get("snippet", "") for r in results)
        thumbnails = (None,) * len(found)
        query, shown = one["query"], tuple(item for item in found if item.text)
    else:
        raise ValueError(f"action {action!r} is not known")
    status = "failed" if is_broken else "ok" if shown else "empty"
    causes = sorted({str(f.get("error", "")) for f in failures})
    call = ToolCall(
        tool=action,
        query=query,
        items=() if is_broken else shown,
        status=status,
        error="; ".join(causes) or "the run broke off here" if is_broken else "",
        num_found=len(found),
    )
    return TraceCall(call, found, snippets, thumbnails, tuple(failures))
