"""Scored episodes -> the figures of a table, with intervals."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from svrl_jax.protocol.parse import fold
from svrl_jax.rewards import factors
from svrl_jax.types import Episode, OracleLabels

FIGURES = (
    "acc", "sr", "over_search", "under_search", "mask_agreement", "mask_balanced",
    "unique_queries", "r_format", "n",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One evaluated episode.

    Attributes:
      item: id of the distinct question behind it; intervals are taken over items.
      is_right: the answer scored full; None: unscored, which no figure counts as wrong.
      has_searched: any tool was called.
      search_free: the instance's label; None where unknown.
      mask: policy's 0/1 over verified items whose mask was readable, in order.
      truth: the labels of the same items; empty with `mask`.
      agreement: share of agreeing items a verified output (0 where the mask was unreadable), a
        number an output.
      unique_queries: unique well-formed proposals, a number a text search.
      r_format: 1 or 0.
      calls: tool calls.
      score: of the answer, in [0, 1]; None: unscored.
      allowed: tool calls that the episode might have made; 0: unknown.
      tokens: tokens that the policy wrote.
    """

    item: str
    is_right: bool | None
    has_searched: bool
    search_free: bool | None
    mask: tuple[int, ...]
    truth: tuple[int, ...]
    agreement: tuple[float, ...]
    unique_queries: tuple[int, ...]
    r_format: float
    calls: int
    score: float | None = None
    allowed: int = 0
    tokens: int = 0


def make_row(
    episode: Episode,
    item: str,
    is_right: bool | None,
    search_free: bool | None,
    labels: OracleLabels | None,
    r_format: float,
    *,
    score: float | None = None,
    allowed: int = 0,
) -> Row:
    """Reads an episode's figures; `labels.items` holds 0/1 for each executed call.

    Without labels nothing is said of masks: `mask`, `truth` and `agreement` are empty.
    """
    mask: list[int] = []
    truth: list[int] = []
    if labels is not None:
        outputs = iter(labels.items)
        for turn, following in zip(episode.turns, (*episode.turns[1:], None)):
            shown = () if turn.call is None else next(outputs)
            said = None if following is None else following.parsed.mask
            if shown and said is not None and len(said) == len(shown):
                mask += said
                truth += shown
    searches = factors.text_search_turns(episode)
    return Row(
        item=item,
        is_right=is_right,
        has_searched=episode.has_searched,
        search_free=search_free,
        mask=tuple(mask),
        truth=tuple(truth),
        agreement=tuple(factors.mask_agreements(episode, labels)) if labels else (),
        unique_queries=tuple(len({fold(q) for q in t.parsed.proposals}) for t in searches),
        r_format=r_format,
        calls=len(episode.calls),
        score=score,
        allowed=allowed,
        tokens=int(episode.loss_mask.sum()),
    )


def figures(rows: Sequence[Row]) -> dict[str, float | int | None]:
    """The figures of SPEC 6 over rows; fractions in [0, 1], None where undefined.

    acc: share right, of the scored. sr: share of questions on which a tool was called (SVRL's SR).
    sr_calls: calls over allowed calls (MMSearch-R1's). over_search: searched, over all search_free.
    under_search: not searched and wrong, over all that are scored and not search_free; questions
    without a label count in neither. mask_agreement:
    mean over verified outputs of the share of items on which mask and labels agree. mask_balanced:
    mean of the shares of useful items kept and of useless items dropped, over all items with a
    readable mask. unique_queries: mean of unique well-formed proposals a text search. r_format:
    mean.
    calls_per_question, tokens_per_question: means. n: rows; n_unscored: those without a verdict;
    n_search_free, n_search_needed, n_items_verified: denominators.
    """
    sums = {name: _sums(rows, name).sum(axis=0) for name in _PARTS}
    out: dict[str, float | int | None] = {name: _ratio(s) for name, s in sums.items()}
    out |= {
        "n": len(rows),
        "n_unscored": sum(r.is_right is None for r in rows),
        "n_search_free": sum(r.search_free is True for r in rows),
        "n_search_needed": sum(r.search_free is False and r.is_right is not None for r in rows),
        "n_items_verified": sum(len(r.mask) for r in rows),
    }
    return out


# Figure -> its parts, each (numerator, denominator) of one row; a figure is the mean of its parts'
# ratios of sums.
_PARTS: dict[str, tuple[Callable[[Row], tuple[float, float]], ...]] = {
    "acc": (lambda r: (r.is_right is True, r.is_right is not None),),
    "sr": (lambda r: (r.has_searched, 1),),
    "sr_calls": (lambda r: (r.calls if r.allowed else 0, r.allowed),),
    "over_search": (lambda r: (r.has_searched and r.search_free is True, r.search_free is True),),
    "under_search": (
        lambda r: (
            not r.has_searched and r.is_right is False and r.search_free is False,
            r.search_free is False and r.is_right is not None,
        ),
    ),
    "mask_agreement": (lambda r: (sum(r.agreement), len(r.agreement)),),
    "mask_balanced": (
        lambda r: (sum(m and t for m, t in zip(r.mask, r.truth)), sum(r.truth)),
        lambda r: (
            sum(not (m or t) for m, t in zip(r.mask, r.truth)),
            len(r.truth) - sum(r.truth),
        ),
    ),
    "unique_queries": (lambda r: (sum(r.unique_queries), len(r.unique_queries)),),
    "r_format": (lambda r: (r.r_format, 1),),
    "calls_per_question": (lambda r: (r.calls, 1),),
    "tokens_per_question": (lambda r: (r.tokens, 1),),
}


def interval(
    rows: Sequence[Row], figure: str, *, seed: int = 0, draws: int = 4000
) -> dict[str, float | None]:
    """One figure with its 95% bootstrap interval over items.

    Args:
      rows: an item's rows are drawn together.
      figure: a key of `figures` that is a ratio.
      seed, draws: of the bootstrap.
    Returns:
      {value, low, high}; None where undefined.
    """
    sums = _item_sums(rows, figure)
    value = _ratio(sums.sum(axis=0)) if rows else None
    if value is None:
        return {"value": None, "low": None, "high": None}
    ratios = _drawn_ratios([sums], seed, draws)[0]
    low, high = np.percentile(ratios[np.isfinite(ratios)], [2.5, 97.5])
    return {"value": value, "low": float(low), "high": float(high)}


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of those that are not None; None without any."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> dict[str, float | int]:
    """Whether two policies differ on the same questions: McNemar's exact test (two-sided binomial).

    Args:
      before, after: right or not, the same questions in the same order.
    Returns:
      both, neither, only_before, only_after: counts; p: in [0, 1], 1 where no question differs.
    Raises:
      ValueError: lengths differ.
    """
    pairs = list(zip(before, after, strict=True))
    only_before, only_after = pairs.count((True, False)), pairs.count((False, True))
    n, fewer = only_before + only_after, min(only_before, only_after)
    tail = sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n
    return {
        "both": pairs.count((True, True)),
        "neither": pairs.count((False, False)),
        "only_before": only_before,
        "only_after": only_after,
        "p": min(1.0, 2 * tail),
    }


def paired_difference(
    before: Sequence[Row], after: Sequence[Row], figure: str, *, seed: int = 0, draws: int = 4000
) -> dict[str, float | None]:
    """after - before of one figure, with a 95% bootstrap interval over items.

    Items are drawn with replacement and all of an item's rows go together, in both policies at
    once: the same questions are compared.

    Args:
      before, after: rows of the same questions in the same order.
      figure: a key of `figures` that is a ratio.
      seed, draws: of the bootstrap.
    Returns:
      {difference, low, high}; None where undefined.
    Raises:
      ValueError: the rows are not of the same questions.
    """
    if [r.item for r in before] != [r.item for r in after]:
        raise ValueError("a paired comparison needs the same questions in the same order")
    sides = [_item_sums(rows, figure) for rows in (before, after)]
    ends = [_ratio(s.sum(axis=0)) if len(s) else None for s in sides]
    if None in ends:
        return {"difference": None, "low": None, "high": None}
    ratios = _drawn_ratios(sides, seed, draws)
    gaps = ratios[1] - ratios[0]
    low, high = np.percentile(gaps[np.isfinite(gaps)], [2.5, 97.5])
    return {"difference": ends[1] - ends[0], "low": float(low), "high": float(high)}


def _item_sums(rows: Sequence[Row], figure: str) -> np.ndarray:
    """float[items, parts, 2]: numerators and denominators, an item's rows together."""
    names = {item: i for i, item in enumerate(dict.fromkeys(r.item for r in rows))}
    sums = np.zeros((len(names), len(_PARTS[figure]), 2))
    np.add.at(sums, np.array([names[r.item] for r in rows], int), _sums(rows, figure))
    return sums


def _drawn_ratios(sides: Sequence[np.ndarray], seed: int, draws: int) -> list[np.ndarray]:
    """float[draws] a side: the figure over items drawn with replacement, the same for all sides."""
    count = len(sides[0])
    weights = _weights(count, seed, draws)
    out = []
    for sums in sides:
        drawn = (weights @ sums.reshape(count, -1)).reshape(draws, -1, 2)
        with np.errstate(invalid="ignore", divide="ignore"):
            out.append((drawn[..., 0] / drawn[..., 1]).mean(axis=1))
    return out


@functools.lru_cache(maxsize=2)
def _weights(count: int, seed: int, draws: int) -> np.ndarray:
    """float64[draws, count]: how often each item is drawn."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)


def _sums(rows: Sequence[Row], figure: str) -> np.ndarray:
    """float[rows, parts, 2]: numerator and denominator."""
    parts = _PARTS[figure]
    values = [[part(row) for part in parts] for row in rows]
    return np.array(values, np.float64).reshape(len(rows), len(parts), 2)


def _ratio(sums: np.ndarray) -> float | None:
    if (sums[:, 1] == 0).any():
        return None
    return float((sums[:, 0] / sums[:, 1]).mean())
