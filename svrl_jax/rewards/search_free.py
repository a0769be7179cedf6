"""Which instances the initial policy answers without any tool -> `search_free` labels.

SPEC 3: one tool-free greedy pass of the *initial* policy under the direct prompt; right means
search_free. Beside it the success rate over n samples at temperature 1. Labels belong to one
(policy, prompt, scorer), whose fingerprint stands in the file; with another one they are made anew.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence

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

    def get(self, task: Task) -> Label:
        """The task's label; KeyError naming the task if it has none."""
        return self._labels[task.id]

    def is_free(self, task: Task, config: ConfigDict) -> bool:
        """The label that the reward uses.

        Raises:
          ValueError: `search_free_source` is unknown, or `rate` is asked of a label without
          samples.
        """
        label = self.get(task)
        if config.search_free_source == "greedy":
            return label.greedy
        if config.search_free_source != "rate":
            raise ValueError(
                f"reward.search_free_source must be 'greedy' or 'rate', "
                f"got {config.search_free_source!r}"
            )
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
