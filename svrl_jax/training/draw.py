"""Tasks of a step -> scored groups; groups without spread are drawn again, up to a bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from svrl_jax import grpo
from svrl_jax.rewards import score as rewards
from svrl_jax.rewards.oracle import Oracle
from svrl_jax.rollout.figures import RolloutFigures
from svrl_jax.training.assemble import Bench
from svrl_jax.training.metrics import Clock
from svrl_jax.types import Episode, Prompt, Score, Task


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A step's groups.

    Attributes:
      episodes, scores: [P][G], each group's last draw.
      totals, valid: float32[P, G] and bool[P, G], of `grpo.stack_totals`.
      num_resampled: draws that were made anew, over all groups.
      speed: figures of all draws together, named `rollout_...`; see `RolloutFigures.line`.
    """

    episodes: list[list[Episode]]
    scores: list[list[Score]]
    totals: np.ndarray
    valid: np.ndarray
    num_resampled: int
    speed: dict[str, float | None]


def draw_groups(
    bench: Bench,
    tasks: Sequence[Task],
    prompts: Sequence[Prompt] | None,
    free: Sequence[bool | None],
    oracle: Oracle,
    step: int,
    clock: Clock,
    progress: Callable[[int, int], None] | None = None,
) -> Drawn:
    """Samples and scores the groups of a step.

    A group whose *shaped* rewards are equal teaches nothing; it is drawn again, with keys of its
    own, at most `grpo.max_resamples` times. Groups in which all are right stay where their shaped
    rewards differ.

    Args:
      bench: its sampler holds the policy's parameters.
      prompts: of the tasks, where they were built ahead.
      free: [P], search_free labels.
      clock: gets the laps `rollout` and `reward`.
    """
    config = bench.config
    episodes: list[list[Episode]] = [[] for _ in tasks]
    scores: list[list[Score]] = [[] for _ in tasks]
    speed = RolloutFigures()
    wanted, num_resampled = list(range(len(tasks))), 0
    for attempt in range(config.grpo.max_resamples + 1):
        chosen = [tasks[p] for p in wanted]
        groups = bench.run(
            chosen,
            bench.sampler,
            step=step,
            prompts=None if prompts is None else [prompts[p] for p in wanted],
            group_size=config.rollout.group_size,
            temperature=config.rollout.temperature,
            query_choice=config.rollout.query_choice,
            progress=progress,
            attempt=attempt,
            figures=speed,
        )
        clock.lap("rollout")
        verdicts = oracle.label_groups(chosen, groups)  # [P][G] OracleLabels
        found = rewards.score_groups(
            groups,
            chosen,
            config.reward,
            verdicts,
            [free[p] for p in wanted],
            config.rollout.num_queries,
        )
        for p, group, marks in zip(wanted, groups, found, strict=True):
            episodes[p], scores[p] = group, marks
        totals, valid = grpo.stack_totals(scores, len(tasks), config.rollout.group_size)
        equal = grpo.equal_groups(totals, valid, config.grpo.equal_tolerance)
        clock.lap("reward")
        wanted = [int(p) for p in np.flatnonzero(equal)]
        if not wanted or attempt == config.grpo.max_resamples:
            break
        num_resampled += len(wanted)
    line = {f"rollout_{name}": value for name, value in speed.line().items()}
    return Drawn(episodes, scores, totals, valid, num_resampled, line)
