"""The episodes of one evaluation in a run folder, kept row by row.

    evals/GROUP.json               what the group is of and was made with
    episodes/GROUP_0000.jsonl      a finished chunk of its questions, in their order
    episodes/GROUP_0000.journal    the chunk under way: every finished episode, as it ended

A kill at any moment loses the episodes under way and no finished one; the next start runs what is
missing and nothing else.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from svrl_jax.evals.cases import write_about
from svrl_jax.records import Journal, Record, read_records, write_records
from svrl_jax.training.run_folder import RunFolderError, to_json_value
from svrl_jax.types import Episode, Task

# What a group's episodes depend on beside the run's config: with another value they are others.
GUARDED = ("policy", "digest", "regime", "split", "mode", "prompt", "query_choice", "filter")

Key = tuple[str, int]  # task id, sample


def group_name(policy: str, regime: str, split: str, mode: str) -> str:
    """`eval_POLICY_REGIME_SPLIT_MODE`, as file names allow."""
    parts = (policy, regime, split, mode)
    return "_".join(["eval", *(re.sub(r"[^A-Za-z0-9-]+", "-", p) for p in parts)])


class GroupStore:
    """One group of a run folder; see the module."""

    def __init__(
        self,
        folder: pathlib.Path,
        name: str,
        about: Mapping[str, Any],
        *,
        replace: bool = False,
    ):
        """Opens or begins the group.

        Args:
          folder: the run's.
          about: JSON values; those named in GUARDED must be those of an earlier start.
          replace: another evaluation under this name is deleted.
        Raises:
          RunFolderError: the folder holds another evaluation under this name.
        """
        self._episodes = folder / "episodes"
        self._episodes.mkdir(parents=True, exist_ok=True)
        (folder / "evals").mkdir(exist_ok=True)
        self._path = folder / "evals" / f"{name}.json"
        self.name = name
        self.about: dict[str, Any] = dict(to_json_value(about))
        if self._path.is_file():
            before = json.loads(self._path.read_text("utf-8"))
            other = [key for key in GUARDED if before[key] != self.about[key]]
            if other and not replace:
                key = other[0]
                raise RunFolderError(
                    f"{self._path} is of another evaluation ({key} was {before[key]!r}, is now "
                    f"{self.about[key]!r}): choose another --workdir, or --name"
                )
            if other:
                self._delete()
            else:
                self.about |= {name: before[name] for name in ("seconds", "served")}
        self.note()

    def note(self, **changes: Any) -> None:
        """Changes values of `about` and writes it."""
        self.about |= to_json_value(changes)
        write_about(self._path, self.about)

    def count(self, counts: Mapping[str, int]) -> None:
        """Adds to what a served policy counted (`served`)."""
        served = self.about["served"]
        self.note(served={name: served.get(name, 0) + n for name, n in counts.items()})

    def _delete(self) -> None:
        """Deletes the group's sets, journals and what lies beside them."""
        for path in self._episodes.glob(f"{self.name}_[0-9][0-9][0-9][0-9].*"):
            path.unlink()

    def chunk(self, number: int) -> Chunk:
        """One chunk of the group's questions."""
        return Chunk(self._episodes, f"{self.name}_{number:04d}")


class Chunk:
    """A chunk of questions and its finished episodes.

    Attributes:
      path: of its set.
      done: (task id, sample) -> record.
    """

    def __init__(self, episodes: pathlib.Path, name: str):
        """Reads what is there."""
        self._folder, self._name = episodes, name
        self._journal = Journal(episodes, name)
        self._tasks: dict[str, Task] = {}
        self.path = episodes / f"{name}.jsonl"
        records = read_records(self.path) if self.path.is_file() else []
        self._is_whole = bool(records)
        found = self._journal.read()
        self._is_whole &= not found
        self.done: dict[Key, Record] = {
            (r.episode.task_id, r.episode.sample): r for r in (*records, *found)
        }

    def missing(self, tasks: Sequence[Task], samples: int) -> list[tuple[int, list[Task]]]:
        """(sample, tasks) of what is still to be run, samples without a task left out."""
        self._tasks = {t.id: t for t in tasks}
        left = [(s, [t for t in tasks if (t.id, s) not in self.done]) for s in range(samples)]
        return [(s, some) for s, some in left if some]

    def add(self, episode: Episode) -> None:
        """Keeps an episode of one of the tasks that `missing` was given."""
        record = Record(episode, self._tasks[episode.task_id])
        self._journal.add(record)
        self.done[episode.task_id, episode.sample] = record
        self._is_whole = False

    def close(self, tasks: Sequence[Task], samples: int) -> list[Record]:
        """The records of the tasks in order, kept as one set."""
        keys = [(t.id, s) for t in tasks for s in range(samples)]
        records = [self.done[key] for key in keys]
        if not self._is_whole:
            others = [r for key, r in self.done.items() if key not in set(keys)]
            write_records(self._folder, self._name, [*records, *others])
        self._journal.remove()
        return records
