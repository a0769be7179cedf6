"""Cases with labels -> how well the policy's masks tell useful items from noise (SPEC 6).

A mask that is always 1 can agree with a skewed oracle: balanced accuracy and the Matthews
coefficient stand beside raw agreement.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from svrl_jax.evals.cases import Case


@dataclasses.dataclass(frozen=True)
class Mark:
    """One retrieved item and two opinions of it.

    Attributes:
      tool: what found it.
      rank: its place, from 1.
      kept: the policy's.
      useful: the label.
    """

    tool: str
    rank: int
    kept: bool
    useful: bool


@dataclasses.dataclass(frozen=True)
class Confusion:
    """Counts of items by the policy's mask and the label."""

    kept_useful: int
    kept_noise: int
    dropped_useful: int
    dropped_noise: int

    @property
    def n(self) -> int:
        """All items."""
        return self.kept_useful + self.kept_noise + self.dropped_useful + self.dropped_noise

    @property
    def agreement(self) -> float | None:
        """Share on which mask and label agree, in [0, 1]; None without items."""
        return _ratio(self.kept_useful + self.dropped_noise, self.n)

    @property
    def useful_kept(self) -> float | None:
        """Share of the useful that is kept; None where none is useful."""
        return _ratio(self.kept_useful, self.kept_useful + self.dropped_useful)

    @property
    def noise_dropped(self) -> float | None:
        """Share of the noise that is dropped; None where there is none."""
        return _ratio(self.dropped_noise, self.dropped_noise + self.kept_noise)

    @property
    def balanced(self) -> float | None:
        """Mean of `useful_kept` and `noise_dropped`; None where one is undefined."""
        if self.useful_kept is None or self.noise_dropped is None:
            return None
        return (self.useful_kept + self.noise_dropped) / 2

    @property
    def matthews(self) -> float | None:
        """Matthews correlation in [-1, 1]; None where a mask or label never varies."""
        a, b, c, d = self.kept_useful, self.kept_noise, self.dropped_useful, self.dropped_noise
        product = (a + b) * (a + c) * (d + b) * (d + c)
        return (a * d - b * c) / math.sqrt(product) if product else None

    def figures(self) -> dict[str, float | int | None]:
        """All of it by name."""
        names = ("n", "agreement", "balanced", "matthews", "useful_kept", "noise_dropped")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in names}


def confusion(marks: Iterable[Mark]) -> Confusion:
    """Counts the marks."""
    counts = {(k, u): 0 for k in (True, False) for u in (True, False)}
    for mark in marks:
        counts[mark.kept, mark.useful] += 1
    return Confusion(
        counts[True, True], counts[True, False], counts[False, True], counts[False, False]
    )


def marks_of(cases: Sequence[Case]) -> tuple[list[Mark], int]:
    """Every item with a readable mask and a label, and how many items had no readable mask.

    The mask of an output stands in the next turn. An output behind which the episode ended before
    the policy wrote on is in neither count.
    """
    marks: list[Mark] = []
    unmasked = 0
    for case in cases:
        if case.labels is None:
            continue
        outputs = iter(case.labels.items)
        turns = case.episode.turns
        for turn, following in zip(turns, (*turns[1:], None)):
            if turn.call is None:
                continue
            useful = next(outputs)
            if following is None or not useful:
                continue
            mask = following.parsed.mask
            if mask is None or len(mask) != len(useful):
                unmasked += len(useful)
                continue
            marks += [
                Mark(turn.call.tool, rank, bool(k), bool(u))
                for rank, (k, u) in enumerate(zip(mask, useful), start=1)
            ]
    return marks, unmasked


def by_part(marks: Sequence[Mark]) -> dict[str, Confusion]:
    """`all`, then each tool, then each tool's ranks: name -> counts."""
    parts = {"all": confusion(marks)}
    for tool in sorted({m.tool for m in marks}):
        of_tool = [m for m in marks if m.tool == tool]
        parts[tool] = confusion(of_tool)
        for rank in sorted({m.rank for m in of_tool}):
            parts[f"{tool}, rank {rank}"] = confusion(m for m in of_tool if m.rank == rank)
    return parts


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None
