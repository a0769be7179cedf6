"""Cases -> whether the policy searches when it must (SPEC 6, search calibration).

Every share carries its numerator and denominator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata

from svrl_jax.evals.cases import Case


@dataclasses.dataclass(frozen=True)
class Share:
    """A share that can be checked: `numerator` of `denominator`."""

    numerator: float
    denominator: float

    @property
    def value(self) -> float | None:
        """In [0, 1]; None where undefined."""
        return self.numerator / self.denominator if self.denominator else None

    def __str__(self) -> str:
        """`0.500 (3/6)`; `-` where undefined."""
        if self.value is None:
            return "-"
        return f"{self.value:.3f} ({self.numerator:g}/{self.denominator:g})"


def share(flags) -> Share:
    """Of the true ones among some booleans."""
    flags = list(flags)
    return Share(sum(map(bool, flags)), len(flags))


def search_calibration(cases: Sequence[Case]) -> dict[str, Share]:
    """The table of search calibration.

    Returns:
      acc, acc_searched, acc_not_searched: over the scored.
      sr: questions searched (SVRL's). sr_calls: calls over allowed calls (MMSearch-R1's).
      sr_image, sr_text: questions with such a call.
      over_search: searched, of the search_free. needed_searched: of those not search_free.
      under_search: neither searched nor right, of the scored that are not search_free.
      unlabelled: questions without a label. unscored: answers without a verdict.
    """
    scored = [c for c in cases if c.is_right is not None]
    needed = [c for c in scored if c.search_free is False]
    allowed = sum(c.allowed for c in cases)
    return {
        "acc": share(c.is_right for c in scored),
        "acc_searched": share(c.is_right for c in scored if c.episode.has_searched),
        "acc_not_searched": share(c.is_right for c in scored if not c.episode.has_searched),
        "sr": share(c.episode.has_searched for c in cases),
        "sr_calls": Share(sum(len(c.episode.calls) for c in cases), allowed),
        "sr_image": share(_has_call(c, "image_search") for c in cases),
        "sr_text": share(_has_call(c, "text_search") for c in cases),
        "over_search": share(c.episode.has_searched for c in cases if c.search_free),
        "under_search": share(not (c.episode.has_searched or c.is_right) for c in needed),
        "needed_searched": share(c.episode.has_searched for c in cases if c.search_free is False),
        "unlabelled": share(c.search_free is None for c in cases),
        "unscored": share(c.is_right is None for c in cases),
    }


@dataclasses.dataclass(frozen=True)
class Bin:
    """Questions of one range of tool-free success rates: [low, high), the last one closed.

    Attributes:
      low, high: of the rate.
      rate: mean of the rates; None if empty.
      searched: share that the policy searched.
    """

    low: float
    high: float
    rate: float | None
    searched: Share


def search_curve(cases: Sequence[Case], num_bins: int = 5) -> list[Bin]:
    """How often the policy searches against how often the question is answered without tools.

    A calibrated policy falls from 1 to 0. Questions without a rate are left out.
    """
    known = [(c.rate, c.episode.has_searched) for c in cases if c.rate is not None]
    bins = []
    for i in range(num_bins):
        low, high = i / num_bins, (i + 1) / num_bins
        some = [(r, s) for r, s in known if low <= r and (r < high or i == num_bins - 1)]
        mean = sum(r for r, _ in some) / len(some) if some else None
        bins.append(Bin(low, high, mean, share(s for _, s in some)))
    return bins


def search_auroc(cases: Sequence[Case]) -> float | None:
    """How well the search choice follows need: the chance that a question that was searched has a
    lower tool-free success rate than one that was not, ties counting half.

    0.5 is chance, 1 perfect; None where all or none were searched, or no rate is known.
    """
    known = [(c.rate, c.episode.has_searched) for c in cases if c.rate is not None]
    return auroc([1.0 - r for r, _ in known], [s for _, s in known])


def auroc(scores: Sequence[float], positive: Sequence[bool]) -> float | None:
    """Area under the ROC curve by ranks (Mann and Whitney), ties counting half."""
    is_positive = np.asarray(positive, bool)
    num_positive, num_negative = int(is_positive.sum()), int((~is_positive).sum())
    if not num_positive or not num_negative:
        return None
    ranks = rankdata(np.asarray(scores, float))
    wins = ranks[is_positive].sum() - num_positive * (num_positive + 1) / 2
    return float(wins / (num_positive * num_negative))


def accuracy_of_parts(parts: Sequence[tuple[int, float]]) -> float:
    """Acc of a whole from (questions, Acc) of its parts: the check on published tables."""
    return sum(n * acc for n, acc in parts) / sum(n for n, _ in parts)


def _has_call(case: Case, tool: str) -> bool:
    return any(call.tool == tool for call in case.episode.calls)
