"""Counts of a rollout -> the figures that say whether the machine was busy with what matters."""

from __future__ import annotations

import collections
import time

# What policies count; see `Engine` and `EnginePolicy`. Seconds are of the host's clock.
NAMES = (
    "tokens_per_s",
    "lane_occupancy",
    "slot_occupancy",
    "tool_wait_share",
    "prefill_share",
    "decode_share",
    "saved_by_sharing",
    "saved_by_warm_caches",
    "prefill_padding",
    "decode_padding",
    "picture_padding",
    "compiles",
)


class RolloutFigures:
    """Figures of one call of `run_episodes` (or several: they add up), readable while it runs.

    Attributes:
      counts: `sampled` tokens kept, `tool_wait_s` in which nothing was sampled for want of a tool's
        answer, `slot_s` (seconds times slots that held an episode), and all that the policy counts.
      slots: of the config.
    """

    def __init__(self):
        self.counts: collections.Counter[str] = collections.Counter()
        self.slots = 0
        self._seconds = 0.0
        self._started: float | None = None
        self._policy_counts: collections.Counter[str] = collections.Counter()
        self._before: collections.Counter[str] = collections.Counter()

    def begin(self, slots: int, policy_counts: collections.Counter[str]) -> None:
        """Starts the clock; the policy's counts so far are others'."""
        self.slots, self._started = slots, time.perf_counter()
        self._policy_counts, self._before = policy_counts, policy_counts.copy()

    def end(self) -> None:
        """Stops the clock and takes over what the policy counted since `begin`."""
        self._seconds, self._started = self.seconds, None
        self.counts += self._policy_counts - self._before
        self._policy_counts = self._before = collections.Counter()

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        now = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._seconds + now

    def line(self) -> dict[str, float | None]:
        """The figures by NAMES: shares are fractions in [0, 1]; None where undefined.

        `saved_*` are shares of the tokens that a sampler without either would have prefilled: one
        that sends each sample's whole history every turn. Padding is the share of a program's
        places that held nothing.
        """
        n = self.counts + (self._policy_counts - self._before)
        needed = n["prefilled"] + n["copied"] + n["held"]
        return {
            "tokens_per_s": _share(n["sampled"], self.seconds),
            "lane_occupancy": _share(n["decoded"], n["lane_places"]),
            "slot_occupancy": _share(n["slot_s"], self.slots * self.seconds),
            "tool_wait_share": _share(n["tool_wait_s"], self.seconds),
            "prefill_share": _share(n["prefill_s"], self.seconds),
            "decode_share": _share(n["decode_s"], self.seconds),
            "saved_by_sharing": _share(n["copied"], needed),
            "saved_by_warm_caches": _share(n["held"], needed),
            "prefill_padding": _rest(n["prefilled"], n["prefill_places"]),
            "decode_padding": _rest(n["decoded"], n["decode_places"]),
            "picture_padding": _rest(n["patches"], n["patch_places"]),
            "compiles": float(n["compiles"]),
        }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rest(part: float, whole: float) -> float | None:
    return 1.0 - part / whole if whole else None
