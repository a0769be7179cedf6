"""A step's episodes, scores and update -> its line of metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from svrl_jax.bench.rate import product_rate
from svrl_jax.models.qwen_vl.flops import PEAK_FLOPS
from svrl_jax.protocol.parse import fold, token_overlap
from svrl_jax.rewards.score import count_invalid
from svrl_jax.search.errors import FAILURES
from svrl_jax.types import END_REASONS, Episode, Score

FACTORS = ("r_acc", "r_aware", "r_count", "r_qalign", "r_salign", "r_format")


class Clock:
    """Seconds of a step's parts."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Ends the part called `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._start


def of_step(
    episodes: Sequence[Sequence[Episode]],
    scores: Sequence[Sequence[Score]],
    update: Mapping[str, float | None],
    clock: Clock,
    rate: float | None = None,
) -> dict[str, float | None]:
    """Flat numbers: fractions in [0, 1], tokens, seconds; None where undefined.

    Rewards are means over valid episodes; shares and lengths are over all of them.

    Args:
      rate: operations a second that the devices can make, see `machine_rate`; None leaves the
        update's share of it undefined.
    """
    flat = [e for group in episodes for e in group]
    marks = [s for group in scores for s in group]
    valid = [s for s in marks if s.valid]
    known = [(e, s) for e, s in zip(flat, marks, strict=True) if s.search_free is not None]
    lists = [t.parsed.proposals for e in flat for t in e.turns if t.parsed.action == "text_search"]
    overlaps = [token_overlap(list(q)) for q in lists if len(q) > 1]
    marks_made = [m for e in flat for t in e.turns for m in t.parsed.mask or ()]
    line: dict[str, float | None] = {"reward": _mean([s.total for s in valid])}
    line |= {name: _mean([getattr(s, name) for s in valid]) for name in FACTORS}
    line |= {
        "acc": _mean([s.r_acc >= 1.0 for s in valid]),
        "sr": _mean([e.has_searched for e in flat]),
        "over_search": _mean([e.has_searched for e, s in known if s.search_free]),
        "under_search": _mean(
            [not e.has_searched and s.r_acc < 1.0 for e, s in known if not s.search_free]
        ),
        "mask_ones": _mean(marks_made) if marks_made else None,
        "mask_constant_share": max(np.mean(marks_made), 1 - np.mean(marks_made))
        if marks_made
        else None,
        "unique_queries": _mean([len({fold(q) for q in queries}) for queries in lists]),
        "query_overlap": _mean(overlaps),
        "calls": _mean([len(e.calls) for e in flat]),
        "turns": _mean([len(e.turns) for e in flat]),
        "episode_tokens": _mean([len(e.ids) for e in flat]),
        "policy_tokens": _mean([int(e.loss_mask.sum()) for e in flat]),
        "search_free_share": _mean([s.search_free for _, s in known]),
        "groups_with_spread": _mean([len({round(s.total, 6) for s in g}) > 1 for g in scores]),
    }
    failures = Counter(c.failure for e in flat for c in e.calls if c.failure)
    line |= {f"tool_failed_{kind}": failures[kind] for kind in FAILURES}
    ends = Counter(e.end_reason for e in flat)
    line |= {f"ended_{reason}": ends[reason] / len(flat) for reason in END_REASONS}
    line |= {f"invalid_{cause}": n for cause, n in count_invalid(scores).items()}
    line |= dict(update)
    line |= {f"{name}_s": seconds for name, seconds in clock.seconds.items()}
    line["step_s"] = clock.total
    # Calls run side by side, so this is no part of step_s.
    line["tools_s"] = sum(c.seconds for e in flat for c in e.calls)
    line["update_share_of_rate"] = (
        update["update_flops"] / max(clock.seconds["update"], 1e-9) / rate if rate else None
    )
    sampled = sum(int(e.loss_mask.sum()) for e in flat)
    line["tokens_per_s"] = sampled / max(clock.seconds["rollout"], 1e-9)
    return line


def machine_rate() -> float:
    """Operations a second of all devices: the vendor's bfloat16 peak where the device is known
    (models/qwen_vl/flops.py), else a float32 product measured now, in half a second."""
    devices = jax.devices()
    peak = PEAK_FLOPS.get(devices[0].device_kind)
    return len(devices) * (product_rate() if peak is None else peak)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
