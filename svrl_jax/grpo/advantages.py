"""Rewards of explicit groups -> advantages.

GRPO (arXiv:2402.03300, eq. 3) and Dr. GRPO (arXiv:2503.20783, section 3). Groups are rows of a
[P, G] array, never found by stride or position in a flat list: an episode that failed stays in its
place with `valid` False, so it cannot shift its neighbours into another group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from svrl_jax.types import Score

# Which objectives divide by the group's spread. `dapo` (arXiv:2503.14476) and `gspo`
# (arXiv:2507.18071) centre as GRPO does.
SCALES_BY_STD = {"dr_grpo": False, "grpo": True, "dapo": True, "gspo": True}


def stack_totals(
    scores: Sequence[Sequence[Score | None]], num_prompts: int, group_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rewards of a step as arrays; a missing one leaves its group rather than becoming 0.

    Args:
      scores: [P][G]; None where an episode has no score.
      num_prompts: P, questions of the step.
      group_size: G, episodes of each question.
    Returns:
      rewards float32[P, G], 0 where missing, and valid bool[P, G], False where the score is None,
      its total is not finite, or its own `valid` is False.
    Raises:
      ValueError: the list is not P x G. Nothing is broadcast.
    """
    if len(scores) != num_prompts:
        raise ValueError(f"rewards: {len(scores)} groups of scores for {num_prompts} prompts")
    rewards = np.zeros((num_prompts, group_size), np.float32)
    valid = np.zeros((num_prompts, group_size), bool)
    for p, group in enumerate(scores):
        if len(group) != group_size:
            raise ValueError(
                f"rewards: {len(group)} scores for the {group_size} episodes of prompt {p}"
            )
        for g, score in enumerate(group):
            if score is not None and score.valid and np.isfinite(score.total):
                rewards[p, g] = score.total
                valid[p, g] = True
    return rewards, valid


def equal_groups(rewards: np.ndarray, valid: np.ndarray, tolerance: float = 1e-6) -> np.ndarray:
    """Groups that hold no preference.

    Args:
      rewards: float32[P, G], total reward of each episode. Entries that are not valid are ignored.
      valid: bool[P, G].
      tolerance: largest max - min that still counts as equal, in units of reward.
    Returns:
      bool[P], True where the valid rewards differ by at most `tolerance`, or fewer than two are
      valid.
    Raises:
      ValueError: as `group_advantages`.
    """
    rewards, valid = _checked(rewards, valid)
    highest = np.where(valid, rewards, -np.inf).max(axis=1)
    lowest = np.where(valid, rewards, np.inf).min(axis=1)
    # A group without valid members has highest -inf and lowest inf: it counts as equal.
    return highest - lowest <= tolerance


def group_advantages(
    rewards: np.ndarray,
    valid: np.ndarray,
    *,
    objective: str = "dr_grpo",
    eps: float = 1e-6,
    equal_tolerance: float = 1e-6,
) -> np.ndarray:
    """Centres, and for GRPO scales, rewards within each prompt's group.

    Args:
      rewards: float32[P, G], total reward of each episode, in [0, 1].
      valid: bool[P, G], False where an episode has no reward; such entries get 0 and are left out
        of the statistics (their reward may be NaN).
      objective: `dr_grpo` subtracts the mean; the others also divide by the sample standard
        deviation (ddof 1) + eps.
      eps: added to the standard deviation. Unitless.
      equal_tolerance: groups whose rewards differ by at most this get exact zeros; without it the
        rounding of a mean would leave a gradient of 1e-8, which Adam scales up to a full step.
    Returns:
      float32[P, G], mean 0 over the valid entries of a row. Equal rewards, or fewer than two valid
      ones, give exact zeros.
    Raises:
      ValueError: shapes differ, a valid reward is not finite, the objective is unknown, or G < 2,
        where no group statistic exists.
    """
    if objective not in SCALES_BY_STD:
        raise ValueError(f"unknown objective {objective!r}; one of {sorted(SCALES_BY_STD)}")
    equal = equal_groups(rewards, valid, equal_tolerance)
    rewards, valid = _checked(rewards, valid)
    count = valid.sum(axis=1, keepdims=True)
    mean = rewards.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(valid, rewards - mean, 0.0)
    if SCALES_BY_STD[objective]:
        variance = (centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)
        centred = centred / (np.sqrt(variance) + eps)
    return np.where(equal[:, None], 0.0, centred).astype(np.float32)


def _checked(rewards: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rewards float64[P, G] with 0 at invalid entries (0 * NaN would be NaN), valid bool[P, G]."""
    rewards = np.asarray(rewards, np.float64)
    valid = np.asarray(valid, bool)
    if rewards.ndim != 2 or rewards.shape != valid.shape:
        raise ValueError(f"rewards {rewards.shape} and valid {valid.shape} must both be [P, G]")
    if rewards.shape[1] < 2:
        raise ValueError("a group of one episode has no statistics; set rollout.group_size >= 2")
    if not np.isfinite(rewards[valid]).all():
        raise ValueError("a valid reward is not finite; mark the episode invalid instead")
    return np.where(valid, rewards, 0.0), valid
