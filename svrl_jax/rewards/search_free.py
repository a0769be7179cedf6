"""Which instances the initial policy answers without any tool -> `search_free` labels.

SPEC 3: one tool-free greedy pass of the *initial* policy under the direct prompt; right means
search_free. Beside it the success rate over n samples at temperature 1. Labels belong to one
(policy, prompt, scorer), whose fingerprint stands in the file; with another one they are made anew.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

from ml_collections import ConfigDict

from svrl_jax.records import write_atomic
from svrl_jax.rewards.answers import score_answer
from svrl_jax.types import Episode, Task


@dataclasses.dataclass(frozen=True)
class Label:
    """One instance: `greedy` right or not; `rate` in [0, 1] over `samples`, None if 0 samples."""

    greedy: bool
    rate: float | None = None
    samples: int = 0


# What FVQA's own `category` column says of a row: another policy's label, not a rule.
CATEGORIES = {"search_free": True, "search_required": False}
SOURCES = ("greedy", "rate", "category")


class LabelStore:
    """Labels by task id, on disk as one JSON file."""

    def __init__(
        self, shipped: pathlib.Path | None, own: pathlib.Path | None, fingerprint: dict[str, str]
    ):
        """Reads what belongs to this fingerprint.

        Args:
          shipped: labels that came with the policy; read only. None or missing: none.
          own: the run's file, to which new labels are added; None keeps them in memory.
          fingerprint: names (policy, prompt, scorer); a file of another one is not used.
        """
        self.fingerprint, self._own = dict(fingerprint), own
        self._labels: dict[str, Label] = {}
        self.stale: list[pathlib.Path] = []  # files of another policy, prompt or scorer
        for path in (shipped, own):
            if path is not None and path.is_file():
                self._read(path)

    def __len__(self) -> int:
        return len(self._labels)

    def missing(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks without a label."""
        return [t for t in tasks if t.id not in self._labels]

    def has(self, task_id: str) -> bool:
        """True if the task has a label."""
        return task_id in self._labels

    def get(self, task: Task) -> Label:
        """The task's label; KeyError naming the task if it has none."""
        return self.of_id(task.id)

    def of_id(self, task_id: str) -> Label:
        """The label of a task's id; KeyError naming it if it has none."""
        return self._labels[task_id]

    def is_free(self, task: Task, config: ConfigDict) -> bool:
        """The label that the reward uses; of `category` where the task has none, the greedy one.

        Raises:
          ValueError: `search_free_source` is unknown, or `rate` is asked of a label without
          samples.
        """
        source = config.search_free_source
        if source not in SOURCES:
            raise ValueError(f"reward.search_free_source must be one of {SOURCES}, got {source!r}")
        if source == "category" and task.category in CATEGORIES:
            return CATEGORIES[task.category]
        label = self.get(task)
        if source != "rate":
            return label.greedy
        if label.rate is None:
            raise ValueError(
                f"task {task.id!r} has no success rate: label again with "
                "reward.search_free_samples above 0, or set reward.search_free_source='greedy'"
            )
        return label.rate >= config.search_free_rate

    def add(self, labels: dict[str, Label]) -> None:
        """Adds labels and writes the run's file."""
        self._labels |= labels
        if self._own is not None:
            self.write(self._own)

    def write(self, path: pathlib.Path) -> None:
        """Writes every label: task id -> [greedy, rate, samples]."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {k: [int(v.greedy), v.rate, v.samples] for k, v in sorted(self._labels.items())}
        body = {"fingerprint": self.fingerprint, "labels": rows}
        write_atomic(path, (json.dumps(body, ensure_ascii=False) + "\n").encode("utf-8"))

    def _read(self, path: pathlib.Path) -> None:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["fingerprint"] != self.fingerprint:
            self.stale.append(path)
            return
        self._labels |= {k: Label(bool(g), r, n) for k, (g, r, n) in body["labels"].items()}


def make_labels(
    tasks: Sequence[Task],
    run_direct: Callable[[Sequence[Task], int, float], list[list[Episode]]],
    scorer: str,
    samples: int,
) -> dict[str, Label]:
    """Labels tasks by the initial policy's tool-free episodes.

    Args:
      tasks: any number.
      run_direct: (tasks, group size, temperature) -> episodes [P][G] under the direct prompt.
      scorer: of the answer, as in training.
      samples: n of the success rate; 0 makes the greedy label alone.
    """

    def rights(group, task):
        return [score_answer(e.answer, task.golds, scorer) >= 1.0 for e in group]

    greedy = run_direct(tasks, 1, 0.0)
    sampled = run_direct(tasks, samples, 1.0) if samples else [[] for _ in tasks]
    out = {}
    for task, one, many in zip(tasks, greedy, sampled, strict=True):
        hits = rights(many, task)
        rate = sum(hits) / len(hits) if hits else None
        out[task.id] = Label(rights(one, task)[0], rate, len(hits))
    return out


def needs_policy(task: Task, config: ConfigDict) -> bool:
    """True if the task's label must come from the initial policy."""
    return config.search_free_source != "category" or task.category not in CATEGORIES


def describe_source(config: ConfigDict) -> str:
    """Where labels come from, for tables."""
    if config.search_free_source == "category":
        return "the data set's category, else the initial policy's greedy pass"
    return f"initial policy, {config.search_free_source}"


def agreement(one: Mapping[str, bool], other: Mapping[str, bool]) -> dict[str, float | int | None]:
    """How far two sources agree on the tasks that both label.

    Returns:
      n, both_free, both_required, only_first_free, only_second_free: counts; share: agreeing, in
      [0, 1]; kappa: Cohen's, None where a source never varies. All None but n if n is 0.
    """
    pairs = [(one[i], other[i]) for i in one if i in other]
    n = len(pairs)
    counts = {
        "both_free": pairs.count((True, True)),
        "both_required": pairs.count((False, False)),
        "only_first_free": pairs.count((True, False)),
        "only_second_free": pairs.count((False, True)),
    }
    if not n:
        return {"n": 0} | dict.fromkeys([*counts, "share", "kappa"])
    share = (counts["both_free"] + counts["both_required"]) / n
    first, second = (sum(side) / n for side in zip(*pairs, strict=True))
    chance = first * second + (1 - first) * (1 - second)
    is_fixed = first in (0.0, 1.0) or second in (0.0, 1.0)
    kappa = None if is_fixed else (share - chance) / (1 - chance)
    return {"n": n} | counts | {"share": share, "kappa": kappa}
