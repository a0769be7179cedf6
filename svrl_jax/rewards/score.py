"""[P][G] Episodes, their Tasks and oracle labels -> [P][G] Scores, every factor kept.

    R = (1 - w_format) * r_acc * r_aware * r_count * r_qalign * r_salign + w_format * r_format

SPEC 3, after SVRL (arXiv:2609.08025). Which factors take part is config (`config.reward`).
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from ml_collections import ConfigDict

from svrl_jax.rewards import answers, factors
from svrl_jax.types import Episode, OracleLabels, Score, Task

# Why an episode leaves its group's statistics, in the order in which they are looked for.
INVALID_CAUSES = ("gold_unreadable", "tool_failed", "oracle_unanswered")


def score_episode(
    episode: Episode,
    task: Task,
    config: ConfigDict,
    labels: OracleLabels | None,
    search_free: bool | None,
    num_queries: int,
) -> Score:
    """Scores one episode, of any number of turns and any end.

    Every factor is computed, switched on or not. r_qalign and r_salign are 1 where no oracle was
    asked or it did not answer: such an episode is invalid by default (`drop_unanswered_oracle`),
      and one that
    is kept does not pay for the oracle's silence. `Score.labels` tells the cases apart.

    Args:
      episode: as recorded.
      task: the one it belongs to.
      config: the reward config.
      labels: the oracle's, or None if it was not asked.
      search_free: the instance's label. None (unknown) is not search_free, so r_aware is 1, and is
        kept as None on the score. Training goes through `score_groups`, which refuses None.
      num_queries: k of r_count.
    Raises:
      ValueError: episode and task, or episode and labels, do not belong together; or labels are
        None although a verification factor is on and tools were called.
    """
    if episode.task_id != task.id:
        raise ValueError(f"episode of task {episode.task_id!r} given with task {task.id!r}")
    uses_oracle = config.use_qalign or config.use_salign
    if labels is None and uses_oracle and episode.has_searched:
        raise ValueError(
            f"episode {task.id!r} called tools and has no oracle labels: label it, or set "
            "reward.use_qalign and reward.use_salign to False"
        )
    try:
        r_acc = factors.r_acc(episode, task.golds, config.scorer)
    except answers.UnreadableGold:
        return Score(
            *[0.0] * 7, valid=False, invalid_cause="gold_unreadable", labels=labels,
            search_free=search_free,
        )  # fmt: skip
    has_labels = labels is not None and labels.answered
    values = {
        "r_acc": r_acc,
        "r_aware": factors.r_aware(episode, search_free, config.search_free_scale),
        "r_count": factors.r_count(episode, num_queries, config.count_floor),
        "r_qalign": factors.r_qalign(episode, labels, config.qalign_floor, config.qalign_over)
        if has_labels
        else 1.0,
        "r_salign": factors.r_salign(episode, labels, config.salign_floor) if has_labels else 1.0,
        "r_format": factors.r_format(episode),
    }
    cause = _invalid_cause(episode, labels, config)
    return Score(
        total=total_reward(values, episode.has_searched, config),
        **values,
        valid=not cause,
        invalid_cause=cause,
        labels=labels,
        search_free=search_free,
    )


def total_reward(values: dict[str, float], has_searched: bool, config: ConfigDict) -> float:
    """R from the factors, in [0, 1].

    `search_penalty` p is MMSearch-R1's flat factor: r_acc counts (1 - p) if any tool was called.
    With `gate` False (an ablation, ours: the method's text gives no formula for it) the
    verification factors no longer multiply r_acc but stand beside it with equal weight, so a wrong
    answer earns from a mask that agrees with the oracle:

        (1 - w) * (r_acc * r_aware * r_count + r_qalign * r_salign) / 2 + w * r_format

    It needs at least one verification factor switched on; with none the gate has nothing to do.
    """
    outcome = values["r_acc"] * (1.0 - config.search_penalty * has_searched)
    outcome *= values["r_aware"] if config.use_aware else 1.0
    outcome *= values["r_count"] if config.use_count else 1.0
    verification = values["r_qalign"] if config.use_qalign else 1.0
    verification *= values["r_salign"] if config.use_salign else 1.0
    is_gated = config.gate or not (config.use_qalign or config.use_salign)
    main = outcome * verification if is_gated else (outcome + verification) / 2
    return (1.0 - config.w_format) * main + config.w_format * values["r_format"]


def score_groups(
    episodes: Sequence[Sequence[Episode]],
    tasks: Sequence[Task],
    config: ConfigDict,
    labels: Sequence[Sequence[OracleLabels | None]] | None,
    search_free: Sequence[bool | None],
    num_queries: int,
) -> list[list[Score]]:
    """Scores a step's episodes for training.

    Args:
      episodes: [P][G], group p holds episodes of tasks[p].
      tasks: [P].
      config: the reward config.
      labels: [P][G], or None if no oracle was asked.
      search_free: [P], labels of the tasks.
      num_queries: k of r_count.
    Returns:
      [P][G]. An episode that leaves the group's statistics keeps its place with `valid` False.
    Raises:
      ValueError: lengths differ (nothing is broadcast or cut), an episode stands in another task's
        group, or a label that a switched-on factor needs is missing.
    """
    group_size = len(episodes[0]) if episodes else 0
    _check_length("tasks", tasks, len(episodes), "groups")
    _check_length("search_free", search_free, len(episodes), "groups")
    if labels is None:
        labels = [[None] * len(group) for group in episodes]
    _check_length("labels", labels, len(episodes), "groups")
    for p, (group, group_labels) in enumerate(zip(episodes, labels)):
        _check_length(f"episodes[{p}]", group, group_size, "episodes a group")
        _check_length(f"labels[{p}]", group_labels, group_size, "episodes a group")
    unknown = [task.id for task, label in zip(tasks, search_free) if label is None]
    if config.use_aware and unknown:
        raise ValueError(
            f"{len(unknown)} of {len(tasks)} tasks have no search_free label (first: "
            f"{unknown[0]!r}): make the labels (mode `label`), or set reward.use_aware to False"
        )
    return [
        [
            score_episode(episode, task, config, episode_labels, is_free, num_queries)
            for episode, episode_labels in zip(group, group_labels)
        ]
        for group, task, group_labels, is_free in zip(episodes, tasks, labels, search_free)
    ]


def count_invalid(scores: Sequence[Sequence[Score]]) -> dict[str, int]:
    """Number of invalid episodes by cause, every cause named (0 where none)."""
    causes = collections.Counter(s.invalid_cause for group in scores for s in group if not s.valid)
    return {cause: causes[cause] for cause in INVALID_CAUSES}


def _invalid_cause(episode: Episode, labels: OracleLabels | None, config: ConfigDict) -> str:
    if config.drop_flagged and episode.tool_failures:
        return "tool_failed"
    uses_oracle = config.use_qalign or config.use_salign
    is_silent = episode.has_searched and labels is not None and not labels.answered
    if config.drop_unanswered_oracle and uses_oracle and is_silent:
        return "oracle_unanswered"
    return ""


def _check_length(name: str, values: Sequence, expected: int, what: str) -> None:
    if not hasattr(values, "__len__") or len(values) != expected:
        given = len(values) if hasattr(values, "__len__") else f"a {type(values).__name__}"
        raise ValueError(f"score_groups: {name} holds {given}, expected {expected} {what}")
