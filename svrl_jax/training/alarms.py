"""Metrics of the steps so far -> alarms: what is known to go wrong in such runs, seen early.

Each alarm of `config.alarms` has a threshold, a number of steps in a row, and an action. Its state
follows from metrics.jsonl alone, so that a run that goes on has missed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

Line = Mapping[str, float | None]


class AlarmStop(RuntimeError):
    """An alarm whose action is `stop`; the message names it, its figures and the key."""


# Alarm -> (figure that it watches, whether too high is what is wrong, what it means).
WATCHED: dict[str, tuple[str, bool, str]] = {
    "sr_collapse": ("sr", False, "the policy has stopped searching"),
    "constant_mask": ("mask_constant_share", True, "the policy marks every item alike"),
    "length_growth": ("policy_tokens", True, "episodes grow longer than in the first steps"),
    "entropy_collapse": ("entropy", False, "the policy no longer explores"),
    "sampler_gap": ("logp_gap_mean", True, "sampler and trainer disagree on log-probs"),
    "kl": ("kl", True, "the policy is far from the initial one"),
    "skipped_updates": ("skipped_updates", True, "gradients are not finite"),
}


def check(lines: Sequence[Line], config: ConfigDict) -> dict[str, str]:
    """Alarms that the newest step raises.

    Args:
      lines: metrics of all steps so far, the newest last. A figure that is None never raises and
        breaks a row of steps.
      config: config.alarms.
    Returns:
      name -> sentence with figure and threshold, for each alarm whose last `steps` lines are all
      beyond its threshold (at or below it where too low is wrong, else above). An alarm whose
      action is `off` is not looked at.
    """
    found = {}
    for name, (figure, is_high, meaning) in WATCHED.items():
        alarm = config[name]
        if alarm.action == "off" or len(lines) < alarm.steps:
            continue
        measure = _measure(name, lines, config)
        if measure is None:
            continue
        values = [line[figure] for line in lines[-alarm.steps :]]
        if any(v is None for v in values):
            continue
        values = [measure(v) for v in values]
        beyond = [v > alarm.threshold if is_high else v <= alarm.threshold for v in values]
        if all(beyond):
            found[name] = (
                f"alarm {name}: {figure} {values[-1]:.4g} for {alarm.steps} steps "
                f"(config.alarms.{name}.threshold {alarm.threshold:g}): {meaning}"
            )
    return found


def stops(raised: Mapping[str, str], config: ConfigDict) -> list[str]:
    """Sentences of those alarms whose action is `stop`."""
    return [text for name, text in raised.items() if config[name].action == "stop"]


def _measure(
    name: str, lines: Sequence[Line], config: ConfigDict
) -> Callable[[float], float] | None:
    """What is compared with the threshold; None where it is not known yet."""
    if name != "length_growth":
        return float
    first = [line["policy_tokens"] for line in lines[: config.first_steps]]
    if len(lines) <= config.first_steps or any(v is None for v in first) or not np.mean(first):
        return None
    return lambda value: value / float(np.mean(first))
