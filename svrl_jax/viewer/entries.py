"""A Record -> what the page shows of it: one line of its index, and the episode in full.

Nothing is judged anew that was recorded: a stored score counts, else the first verdict beside the
records, else the answer is scored by the named scorer and the page says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

from svrl_jax.protocol.parse import fold
from svrl_jax.records import Record
from svrl_jax.rewards import answers, factors
from svrl_jax.rewards.judge import Verdict
from svrl_jax.types import Episode, OracleLabels, ToolCall, Turn

FACTORS = ("r_acc", "r_aware", "r_count", "r_qalign", "r_salign", "r_format")
IMAGE, TEXT = "image_search", "text_search"
TOOL_BITS = {IMAGE: 1, TEXT: 2}  # of an index line's `tools`
_JUDGED = {1: "good", 0: "poor", None: "no verdict"}  # of an executed query that was asked about
_INDEX_CHARS = 200  # of an answer or question in the index; the episode has all


class Pictures(Protocol):
    """Where pictures are put: PictureFolder or InlinePictures."""

    def add(self, data: bytes | None) -> dict | None:
        """Keeps a picture; returns its reference, or None where there is none."""


@dataclasses.dataclass(frozen=True)
class Notes:
    """What was said of an episode after it was recorded.

    Attributes:
      labels: a verifier's, used where the score has none; or None.
      oracle: that verifier's name, "" where it is not known.
      query_verdicts: a judge's 0/1 for each executed text query, None where it gave none; () where
        it was not asked.
      query_judge: that judge's name.
      verdicts: the scorers' on the answer, Acc's first; () where there are none.
    """

    labels: OracleLabels | None = None
    oracle: str = ""
    query_verdicts: tuple[int | None, ...] = ()
    query_judge: str = ""
    verdicts: tuple[Verdict, ...] = ()


@dataclasses.dataclass(frozen=True)
class Entry:
    """One episode for the page.

    Attributes:
      line: its figures in the index.
      task: the question, with golds.
      view: the episode in full, JSON values.
    """

    line: dict[str, Any]
    task: dict[str, Any]
    view: dict[str, Any]


def make_entry(record: Record, notes: Notes, scorer: str, pictures: Pictures) -> Entry:
    """Reads everything that the page shows but the tokens.

    Args:
      record: an episode, with task and score where they are known.
      notes: of `annotate`, `eval` and `rescore`.
      scorer: of the answer where there is neither a score nor a verdict.
      pictures: takes the pictures.
    Raises:
      ValueError: labels of another episode, or an unknown scorer.
    """
    episode, score = record.episode, record.score
    labels, oracle = notes.labels, notes.oracle
    if score is not None and score.labels is not None:
        labels, oracle = score.labels, ""
    if labels is not None and not labels.answered:
        labels = None
    r_acc, by = _r_acc(record, notes.verdicts, scorer)
    agreements = factors.mask_agreements(episode, labels) if labels else []
    task = _task(record, pictures)
    free = None if score is None else score.search_free
    turns = _turns(episode, labels, notes.query_verdicts, record, pictures)
    calls = episode.calls
    line = {
        "right": None if r_acc is None else r_acc >= 1.0,
        "reward": None if score is None else _rounded(score.total),
        "tools": _tools(calls),
        "calls": len(calls),
        "end": episode.end_reason,
        "agreement": _rounded(sum(agreements)),
        "outputs": len(agreements),
        "free": free,
        "answer": (episode.answer or "")[:_INDEX_CHARS],
    }
    view = {
        "policy": episode.policy,
        "regime": episode.regime,
        "step": episode.step,
        "sample": episode.sample,
        "attempt": episode.attempt,
        "seed": episode.seed,
        "temperature": _rounded(episode.temperature),
        "end": episode.end_reason,
        "answer": episode.answer,
        "right": line["right"],
        "free": free,
        "tokens": len(episode.ids),
        "prompt_tokens": episode.prompt_length,
        "policy_tokens": int(episode.loss_mask.sum()),
        "seconds": _rounded(sum(c.seconds for c in calls)),
        "turn_seconds": _sum_of_known(turn["seconds"] for turn in turns),
        "advantage": None if record.advantage is None else _rounded(record.advantage, 6),
        "score": _score(record),
        "computed": {
            "r_acc": r_acc,
            "r_format": factors.r_format(episode),
            "scorer": by,
            "is_ours": not notes.verdicts,
        },
        "verdicts": [_verdict(v) for v in notes.verdicts],
        "is_labelled": labels is not None,
        "oracle": oracle if labels is not None else "",
        "query_judge": notes.query_judge if notes.query_verdicts else "",
        "agreement": _rounded(sum(agreements) / len(agreements)) if agreements else None,
        "turns": turns,
    }
    return Entry(line, task, view)


def short_question(task: dict[str, Any]) -> str:
    """The question's start, for the index."""
    return task["question"][:_INDEX_CHARS]


def _r_acc(record: Record, verdicts: tuple[Verdict, ...], scorer: str) -> tuple[float | None, str]:
    """(value, who says so); None where nothing can be said: an answer that was left unscored, no
    task, or no gold that can be read.
    """
    if record.score is not None:
        is_unreadable = record.score.invalid_cause == "gold_unreadable"
        return None if is_unreadable else _rounded(record.score.r_acc), "score"
    if verdicts:
        return _rounded(verdicts[0].value), verdicts[0].scorer
    if record.task is None or not record.task.golds:
        return None, scorer
    try:
        return factors.r_acc(record.episode, record.task.golds, scorer), scorer
    except answers.UnreadableGold:
        return None, scorer


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return dataclasses.asdict(verdict) | {"value": _rounded(verdict.value)}


def _score(record: Record) -> dict[str, Any] | None:
    score = record.score
    if score is None:
        return None
    values = {name: _rounded(getattr(score, name)) for name in ("total", *FACTORS)}
    return values | {"valid": score.valid, "invalid_cause": score.invalid_cause}


def _task(record: Record, pictures: Pictures) -> dict[str, Any]:
    task = record.task
    if task is None:
        return {"id": record.episode.task_id, "question": "", "golds": [], "source": "",
                "category": "", "evidence": [], "picture": None}  # fmt: skip
    return {
        "id": task.id,
        "question": task.question,
        "golds": list(task.golds),
        "source": task.source,
        "category": task.category,
        "evidence": list(task.evidence_ids),
        "picture": pictures.add(task.picture),
    }


def _turns(
    episode: Episode,
    labels: OracleLabels | None,
    query_verdicts: tuple[int | None, ...],
    record: Record,
    pictures: Pictures,
) -> list[dict[str, Any]]:
    evidence = set(record.task.evidence_ids) if record.task else set()
    items = iter(labels.items if labels else ())
    queries = iter(labels.queries if labels else ())
    proposals = iter(labels.proposals if labels else ())
    judged = iter(query_verdicts)
    out = []
    for turn, following in zip(episode.turns, (*episode.turns[1:], None)):
        parsed, call = turn.parsed, turn.call
        is_text = parsed.action == "text_search"
        good = next(proposals, None) if is_text else None
        useful = next(items, None) if call is not None else None
        has_query = call is not None and call.tool == TEXT
        query_good = next(queries, None) if has_query else None
        query_judged = _JUDGED[next(judged, None)] if has_query and query_verdicts else None
        out.append(
            {
                "action": parsed.action,
                "text": turn.text,
                "reason": parsed.reason,
                "mask": None if parsed.mask is None else list(parsed.mask),
                "mask_wanted": turn.items_to_verify,
                "answer": parsed.answer,
                "violations": list(parsed.violations),
                "tokens": turn.stop - turn.start,
                "environment_tokens": turn.end - turn.stop,
                "seconds": _rounded(turn.seconds),
                "proposals": _proposals(turn, good, query_good, query_judged),
                "ill_formed": parsed.num_proposals - len(parsed.proposals) if is_text else 0,
                "call": call and _call(call, following, useful, evidence, pictures),
            }
        )  # fmt: skip
    return out


def _proposals(
    turn: Turn, good: tuple[int, ...] | None, query_good: int | None, query_judged: str | None
) -> list[dict[str, Any]]:
    """Proposals as written, the executed one and repeated ones marked.

    An executed query that was not proposed (another branch of the episode) comes last.
    """
    executed = turn.call.query if turn.call is not None and turn.call.tool == TEXT else None
    seen: set[str] = set()
    out: list[dict[str, Any]] = []
    for number, text in enumerate(turn.parsed.proposals):
        folded = fold(text)
        is_executed = executed is not None and text == executed
        out.append(
            {
                "text": text,
                "executed": is_executed,
                "duplicate": folded in seen,
                "proposed": True,
                "good": good[number] if good is not None and number < len(good) else None,
                "judged": query_judged if is_executed else None,
            }
        )
        seen.add(folded)
        if is_executed:
            executed = None
            if out[-1]["good"] is None:
                out[-1]["good"] = query_good
    if executed:
        out.append({"text": executed, "executed": True, "duplicate": False, "proposed": False,
                    "good": query_good, "judged": query_judged})  # fmt: skip
    return out


def _call(
    call: ToolCall,
    following: Turn | None,
    useful: tuple[int, ...] | None,
    evidence: set[str],
    pictures: Pictures,
) -> dict[str, Any]:
    mask = None if following is None else following.parsed.mask
    if mask is not None and len(mask) != len(call.items):
        mask = None
    items = [
        {
            "id": item.id,
            "title": item.title,
            "link": item.link,
            "text": item.text,
            "provider": item.provider,
            "score": _rounded(item.score),
            "picture": pictures.add(item.picture),
            "kept": None if mask is None else mask[number],
            "useful": None if useful is None else useful[number],
            "is_evidence": item.id in evidence,
        }
        for number, item in enumerate(call.items)
    ]
    return {
        "tool": call.tool,
        "query": call.query,
        "status": call.status,
        "error": call.error,
        "failure": call.failure,
        "seconds": _rounded(call.seconds),
        "num_found": call.num_found,
        "is_verified": following is not None,
        "has_mask": mask is not None,
        "items": items,
    }


def _tools(calls: tuple[ToolCall, ...]) -> int:
    return sum(TOOL_BITS[tool] for tool in {call.tool for call in calls})


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    """None where none is known."""
    known = [v for v in values if v is not None]
    return _rounded(sum(known)) if known else None


def _rounded(value: float | None, digits: int = 4) -> float | None:
    """Short in JSON; None for None and for what is no number."""
    if value is None:
        return None
    value = float(value)
    return round(value, digits) if abs(value) < 1e300 else None
