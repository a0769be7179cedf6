"""The benchmarks' own scorers: an answer and the gold aliases -> a score, by published rules.

Sources: MMSearch-R1's reward (EvolvingLMMs-Lab/multimodal-search-r1, SQuAD's normalisation);
infoseek_eval.py of edchengg/infoseek_eval @c8ef023; MMSearch's token F1 (CaraJ7/MMSearch,
arXiv:2409.12959); SimpleVQA's three grades (SimpleVQA/SimpleVQA @a5c0ebe, simpleVQA_eval.py), which
LiveVQA's judge shares. Where the official verdict is a judge model's, `read_grade` reads it and
`grade_by_rule` stands in offline; a table names which.
"""

from __future__ import annotations

import collections
import json
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence

GRADES = ("correct", "incorrect", "not_attempted")

_NUMBERS = re.compile(r"[-+]?\.?\d+(?:,\d{3})*\.?\d*(?:[eE][-+]?\d+)?")
_FEWEST_SHARED = 0.5 - 1e-12  # overlap over union of two ranges that counts as right
_CLOSED = frozenset({"yes", "no", "noanswer"})  # match whole or not at all
_REFUSAL = re.compile(
    r"\b(?:(?:i|we) (?:do not|don't|cannot|can't|am unable to|could not) \w+"
    r"|(?:not|un)\s?(?:known|sure|certain|clear|able to \w+)\b"
    r"|(?:cannot|can't|could not) be (?:determined|identified|answered)"
    r"|no (?:answer|idea|information)|insufficient information|n/?a)\b",
    re.IGNORECASE,
)
_MAX_REFUSAL_WORDS = 20  # a longer text says something beside it
_VERDICTS = {
    "a": "correct", "correct": "correct", "正确": "correct",
    "b": "incorrect", "incorrect": "incorrect", "wrong": "incorrect", "错误": "incorrect",
    "c": "not_attempted", "not_attempted": "not_attempted", "未尝试": "not_attempted",
}  # fmt: skip


def normalise_published(text: str) -> str:
    """SQuAD's normalisation: lower case, ASCII punctuation and articles removed, white space
    folded.

    One departure: a text of articles and punctuation only keeps itself in lower case, so that a
    gold "A" does not turn into "" and match an empty answer.
    """
    lowered = text.lower()
    bare = "".join(c for c in lowered if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split()) or " ".join(lowered.split())


def em_published(answer: str, golds: Sequence[str]) -> float:
    """1 if a gold equals the answer under `normalise_published`, else 0."""
    given = normalise_published(answer)
    return float(any(given == normalise_published(gold) for gold in golds))


def infoseek(answer: str, golds: Sequence[str]) -> float:
    """InfoSeek's official verdict, 0 or 1.

    A gold of the form `[low, high]` makes the question numerical, and then only ranges count: the
    first number of the answer, or its first two where they rise, must lie inside, or the two ranges
    must share half of their union. An answer without a number counts as 0, as officially. Times and
    names are exact matches over the accepted list, which carries the official leniency (a year off,
    the year of a date).
    """
    ranges = [found for found in map(read_range, golds) if found is not None]
    if not ranges:
        return em_published(answer, golds)
    numbers = _first_numbers(answer)
    return float(any(_is_in_range(numbers, wanted) for wanted in ranges))


def read_range(gold: str) -> tuple[float, float] | None:
    """(low, high) of a gold written `[low, high]`, else None."""
    if not gold.startswith("["):
        return None
    try:
        low, high = json.loads(gold)
        return float(low), float(high)
    except (TypeError, ValueError):
        return None


def infoseek_final(unseen_question: float, unseen_entity: float) -> float:
    """InfoSeek's final figure: the harmonic mean of its two splits' means, all in [0, 1]."""
    parts = (max(unseen_question, 1e-12), max(unseen_entity, 1e-12))
    return 2.0 / sum(1.0 / part for part in parts)


def mmsearch_f1(answer: str, golds: Sequence[str]) -> float:
    """Best token F1 over the gold and its alternatives, in [0, 1]; yes and no match whole."""
    return max(_token_f1(normalise_published(answer), normalise_published(g)) for g in golds)


def grade_by_rule(
    answer: str | None, golds: Sequence[str], is_right: Callable[[str, Sequence[str]], bool]
) -> str:
    """One of GRADES without a judge: `not_attempted` for no answer or a plain refusal.

    Args:
      is_right: decides the rest, such as exact match. A right answer is never a refusal.
    """
    if answer is None or not answer.strip():
        return "not_attempted"
    if is_right(answer, golds):
        return "correct"
    is_short = len(answer.split()) <= _MAX_REFUSAL_WORDS
    return "not_attempted" if is_short and _REFUSAL.search(answer) else "incorrect"


def read_grade(reply: str) -> str | None:
    """The grade in a judge's reply (A, B or C, or the word, also Chinese); None if unreadable.

    An unreadable verdict is no grade: the caller counts it and never takes it for "wrong".
    """
    text = reply.replace("*", " ").replace("NOT ATTEMPTED", "not_attempted").lower()
    words = re.findall(r"[a-z_]+|[\u4e00-\u9fff]+", text.replace("not attempted", "not_attempted"))
    found = {_VERDICTS[word] for word in words if word in _VERDICTS}
    return found.pop() if len(found) == 1 and len(words) <= 4 else None


def grade_figures(grades: Iterable[str]) -> dict[str, float | int | None]:
    """SimpleVQA's figures: shares of each grade, and what follows from them.

    Returns:
      n; correct, incorrect, not_attempted: shares in [0, 1]; correct_given_attempted: None where
      nothing was attempted; f1: harmonic mean of it and correct, 0 where both are 0, None if n is
      0.
    """
    counts = collections.Counter(grades)
    n = sum(counts.values())
    if not n:
        return {"n": 0} | dict.fromkeys((*GRADES, "correct_given_attempted", "f1"))
    shares = {grade: counts[grade] / n for grade in GRADES}
    attempted = counts["correct"] + counts["incorrect"]
    given = counts["correct"] / attempted if attempted else None
    both = (given or 0.0) + shares["correct"]
    f1 = 2 * (given or 0.0) * shares["correct"] / both if both else 0.0
    return {"n": n} | shares | {"correct_given_attempted": given, "f1": f1}


def infoseek_figures(scores: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Means of the two splits and the final figure.

    Args:
      scores: the tasks' category (`val_unseen_question`, `val_unseen_entity`) -> verdicts.
    Returns:
      unseen_question, unseen_entity, final: in [0, 1]; None where a split is empty.
    """
    means: dict[str, float | None] = {}
    for part in ("unseen_question", "unseen_entity"):
        values = [v for name, found in scores.items() if name.endswith(part) for v in found]
        means[part] = sum(values) / len(values) if values else None
    question, entity = means["unseen_question"], means["unseen_entity"]
    is_whole = question is not None and entity is not None
    return means | {"final": infoseek_final(question, entity) if is_whole else None}


def _first_numbers(text: str) -> tuple[float, ...]:
    """The first number of a text, or its first two where they rise."""
    spaced = re.sub(r"(?<=\d)-", " - ", text)  # "9-10" is a range, not a negative number
    # Officially points at the edges go, so ".5" is read as 5.
    found = [float(n.replace(",", "").strip(".")) for n in _NUMBERS.findall(spaced)[:2]]
    if not found:
        return (0.0, 0.0)
    return tuple(found) if len(found) == 2 and found[0] <= found[1] else (found[0],)


def _is_in_range(numbers: tuple[float, ...], wanted: tuple[float, float]) -> bool:
    low, high = wanted
    if all(low <= number <= high for number in numbers):
        return True
    if len(numbers) == 1:
        return False
    shared = max(0.0, min(numbers[1], high) - max(numbers[0], low))
    union = (numbers[1] - numbers[0]) + (high - low) + 2e-12 - shared
    return shared / union >= _FEWEST_SHARED


def _token_f1(given: str, wanted: str) -> float:
    if given != wanted and (given in _CLOSED or wanted in _CLOSED):
        return 0.0
    left, right = given.split(), wanted.split()
    shared = sum((collections.Counter(left) & collections.Counter(right)).values())
    return 2 * shared / (len(left) + len(right))
