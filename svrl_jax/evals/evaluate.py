"""A policy and a split's tasks -> rows of figures. Labels come from outside: nothing here asks an
oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from svrl_jax.evals import stats
from svrl_jax.rewards import factors
from svrl_jax.types import Episode, OracleLabels, Task

# Mode of `config.eval.modes` -> the policy's temperature.
TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}


def make_rows(
    episodes: Sequence[Episode],
    tasks: Sequence[Task],
    *,
    scorer: str,
    search_free: Mapping[str, bool],
    label: Callable[[Task, Episode], OracleLabels] | None = None,
) -> list[stats.Row]:
    """One row an episode.

    Args:
      episodes, tasks: the same number, in the same order.
      scorer: of the answer; the table names it.
      search_free: task id -> label.
      label: 0/1 for each shown item, as `annotate` writes them; used for figures only, never shown
        to the policy. None: the mask figures are undefined.
    """
    return [
        stats.make_row(
            episode,
            task.item or task.id,
            factors.r_acc(episode, task.golds, scorer) >= 1.0,
            search_free[task.id],
            label(task, episode) if label else None,
            factors.r_format(episode),
        )
        for episode, task in zip(episodes, tasks, strict=True)
    ]
