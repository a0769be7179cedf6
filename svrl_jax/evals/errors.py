"""Cases -> query diversity, where the errors go, and the three ways to fail (SPEC 1 and 6)."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from svrl_jax.evals.calibration import Share, share
from svrl_jax.evals.cases import Case
from svrl_jax.evals.verifier import marks_of
from svrl_jax.protocol.parse import fold, token_overlap
from svrl_jax.rewards.factors import text_search_turns

# Where a wrong answer went wrong, in the order in which it is looked for.
CAUSES = (
    "not answered",
    "not searched, though needed",
    "not searched, though it can answer without tools",
    "not searched, need unknown",
    "a tool failed",
    "every query bad",
    "good query, nothing useful found",
    "useful item found, all such dropped",
    "useful item found, no readable mask of it",
    "useful item kept",
    "searched, no labels",
)
# The three failure modes of SPEC 1.
MODES = {
    "search decision": "did not search when it should, or searched when it need not",
    "noise": "kept items that do not help, or dropped ones that do",
    "use of evidence": "wrong although the query was good and useful evidence was there",
}


def query_diversity(cases: Sequence[Case]) -> dict[str, float | int | None]:
    """How different the proposals of a text search are.

    Returns:
      searches: text-search turns; unique: mean of unique well-formed proposals (k = 5 is best);
      proposed: mean of all written ones; overlap: mean pairwise share of words, in [0, 1];
      counts: {unique proposals: searches}.
    """
    lists = [t.parsed for c in cases for t in text_search_turns(c.episode)]
    unique = [len({fold(q) for q in p.proposals}) for p in lists]
    overlaps = [token_overlap(list(p.proposals)) for p in lists if len(p.proposals) > 1]
    return {
        "searches": len(lists),
        "unique": _mean(unique),
        "proposed": _mean([p.num_proposals for p in lists]),
        "overlap": _mean(overlaps),
        "counts": dict(sorted(collections.Counter(unique).items())),
    }


def error_table(cases: Sequence[Case]) -> dict[str, Share]:
    """What goes wrong given that the earlier step went right.

    A case has a good query where one of its executed text queries is called good: by the external
    judge where it was asked, else by the labels' verifier. Unscored cases are left out.

    Returns:
      acc_good_query; wrong_good_query: of cases with a good query (published: 38.4 and 33.7%).
      wrong_useful_found: of cases that were shown a useful item (33.8 and 29.1%).
      wrong_both: of cases with a good query and a useful item. irrelevant_items: of all shown
      (nearly 45%). good_queries: of executed text queries.
    """
    known = [c for c in cases if c.is_right is not None and c.labels is not None]
    good = [c for c in known if has_good_query(c)]
    found = [c for c in known if has_useful_item(c)]
    both = [c for c in good if has_useful_item(c)]
    shown = [u for c in known for items in c.labels.items for u in items]
    queries = [q for c in known for q in query_labels(c) if q is not None]
    return {
        "acc_good_query": share(c.is_right for c in good),
        "wrong_good_query": share(not c.is_right for c in good),
        "wrong_useful_found": share(not c.is_right for c in found),
        "wrong_both": share(not c.is_right for c in both),
        "irrelevant_items": share(not u for u in shown),
        "good_queries": share(queries),
    }


def causes_of_errors(cases: Sequence[Case]) -> dict[str, Share]:
    """Each cause's share of the wrong answers; every wrong answer has exactly one cause."""
    wrong = [cause_of(c) for c in cases if c.is_right is False]
    return {cause: Share(wrong.count(cause), len(wrong)) for cause in CAUSES}


def cause_of(case: Case) -> str:
    """The first of CAUSES that a wrong answer's case shows."""
    episode = case.episode
    if episode.end_reason != "answered":
        return "not answered"
    if not episode.has_searched:
        if case.search_free is None:
            return "not searched, need unknown"
        return CAUSES[2] if case.search_free else CAUSES[1]
    if episode.tool_failures:
        return "a tool failed"
    if case.labels is None:
        return "searched, no labels"
    if has_useful_item(case):
        if has_kept_useful(case):
            return "useful item kept"
        is_marked = any(useful for _, useful in _marks(case))
        return CAUSES[7] if is_marked else CAUSES[8]
    if any(call.tool == "text_search" for call in episode.calls) and not has_good_query(case):
        return "every query bad"
    return "good query, nothing useful found"


def failures(cases: Sequence[Case]) -> dict[str, tuple[Share, list[tuple[Case, str]]]]:
    """The three failure modes: how often each occurs, and its cases with what happened.

    Returns:
      mode -> (share, [(case, what)]). `search decision`: over cases with a label of need. `noise`:
      over cases with labels and a readable mask. `use of evidence`: over scored cases that had a
      good query (where they searched text) and a useful item. A case may be in several modes.
    """
    tests: dict[str, Callable[[Case], str | None]] = {
        "search decision": _search_failure,
        "noise": _noise_failure,
        "use of evidence": _evidence_failure,
    }
    out = {}
    for mode, test in tests.items():
        said = [(c, test(c)) for c in cases]
        eligible = [(c, what) for c, what in said if what is not None]
        failed = [(c, what) for c, what in eligible if what]
        out[mode] = Share(len(failed), len(eligible)), failed
    return out


def query_labels(case: Case) -> tuple[int | None, ...]:
    """0/1 of each executed text query: the external judge's, else the labels'."""
    if case.query_verdicts:
        return case.query_verdicts
    return () if case.labels is None else case.labels.queries


def has_good_query(case: Case) -> bool:
    """An executed text query is called good."""
    return any(q == 1 for q in query_labels(case))


def has_useful_item(case: Case) -> bool:
    """A useful item was shown."""
    return case.labels is not None and any(u for items in case.labels.items for u in items)


def has_kept_useful(case: Case) -> bool:
    """A useful item was shown and the policy's mask kept it; an unreadable mask keeps nothing."""
    return any(kept and useful for kept, useful in _marks(case))


def _search_failure(case: Case) -> str | None:
    if case.search_free is None or case.is_right is None:
        return None
    if case.search_free and case.episode.has_searched:
        return "searched, though it can answer without tools"
    if not case.search_free and not case.episode.has_searched and not case.is_right:
        return "did not search, though it cannot answer without tools"
    return ""


def _noise_failure(case: Case) -> str | None:
    marks = _marks(case)
    if not marks:
        return None
    kept = sum(k and not u for k, u in marks)
    dropped = sum(u and not k for k, u in marks)
    parts = [f"kept {kept} useless items"] * bool(kept)
    parts += [f"dropped {dropped} useful items"] * bool(dropped)
    return f"{' and '.join(parts)} of {len(marks)}" if parts else ""


def _evidence_failure(case: Case) -> str | None:
    asked_text = any(call.tool == "text_search" for call in case.episode.calls)
    if case.is_right is None or not has_useful_item(case):
        return None
    if asked_text and not has_good_query(case):
        return None
    if case.is_right:
        return ""
    if has_kept_useful(case):
        return "wrong with useful evidence shown"
    is_marked = any(useful for _, useful in _marks(case))
    return f"wrong with useful evidence shown, {'but dropped' if is_marked else 'not marked'}"


def _marks(case: Case) -> list[tuple[bool, bool]]:
    """(kept, useful) of every item with a readable mask."""
    return [(m.kept, m.useful) for m in marks_of([case])[0]]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
