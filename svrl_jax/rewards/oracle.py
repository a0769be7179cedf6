"""A Task and an Episode -> OracleLabels: the training-time verifier, and the one by rule (SPEC 3).

An item is useful if its title or text holds a gold alias of at least `min_alias` characters at word
borders, or if it is one of the task's evidence documents. A query is good if it names the task's
entity or, where no entity is known, if some item it retrieved is useful. Training only: rollout and
evaluation never import this module.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Protocol

from svrl_jax.rewards import factors
from svrl_jax.types import Episode, OracleLabels, SearchItem, Task, ToolCall, Turn

# A number with inner separators is one word, so that "500" is not found in "1,500" nor "14" in
# "3.14".
_WORD = re.compile(r"[0-9]+(?:[.,][0-9]+)+(?!\w)|\w+")


class Oracle(Protocol):
    """A training-time verifier.

    Attributes:
      name: for tables.
    """

    name: str

    def label(self, task: Task, episode: Episode) -> OracleLabels:
        """Labels of one episode."""
        ...

    def label_groups(
        self, tasks: Sequence[Task], groups: Sequence[Sequence[Episode]]
    ) -> list[list[OracleLabels]]:
        """Labels [P][G] of the tasks' episodes."""
        ...


class RuleOracle:
    """Labels by rule, for work without a network. Stateless.

    Args:
      min_alias: characters that a gold alias needs to count as evidence. Shorter ones ("no", "7")
        stand in almost any text.
    """

    name = "rule"

    def __init__(self, min_alias: int = 3):
        self.min_alias = min_alias

    def label(self, task: Task, episode: Episode) -> OracleLabels:
        """Labels of every item shown, every executed text query and every proposal.

        Failed and empty calls have no items, hence (). Where no entity is known, only an executed
        query has retrieved something to judge it by; the other proposals of its turn take its
        label, and a turn whose query was not executed gets zeros.

        Raises:
          ValueError: the episode is of another task.
        """
        if episode.task_id != task.id:
            raise ValueError(f"episode of task {episode.task_id!r} given with task {task.id!r}")
        return OracleLabels(
            items=tuple(
                tuple(int(self.is_useful(task, item)) for item in call.items)
                for call in episode.calls
            ),
            queries=tuple(
                int(self._is_good(task, call.query, call))
                for call in episode.calls
                if call.tool == "text_search"
            ),
            proposals=tuple(
                self._label_proposals(task, turn) for turn in factors.text_search_turns(episode)
            ),
        )

    def label_groups(
        self, tasks: Sequence[Task], groups: Sequence[Sequence[Episode]]
    ) -> list[list[OracleLabels]]:
        """Labels [P][G] of the tasks' episodes; see `label`."""
        return [[self.label(t, e) for e in g] for t, g in zip(tasks, groups, strict=True)]

    def is_useful(self, task: Task, item: SearchItem) -> bool:
        """Whether the item is evidence for one of the task's gold answers."""
        if item.id in task.evidence_ids:
            return True
        aliases = [g for g in task.golds if len(g.strip()) >= self.min_alias]
        return _names_any(item.title, aliases) or _names_any(item.text, aliases)

    def _is_good(self, task: Task, query: str, call: ToolCall | None) -> bool:
        if any(name.strip() for name in task.entity):
            return _names_any(query, task.entity)
        return call is not None and any(self.is_useful(task, item) for item in call.items)

    def _label_proposals(self, task: Task, turn: Turn) -> tuple[int, ...]:
        return tuple(int(self._is_good(task, q, turn.call)) for q in turn.parsed.proposals)


def _names_any(text: str, names: Iterable[str]) -> bool:
    """Whether one of the names stands in the text, word for word; case and punctuation aside."""
    inside = _word_string(text)
    # A name without a single word character has the empty word string and is never found.
    return any(name.strip() and name in inside for name in map(_word_string, names))


def _word_string(text: str) -> str:
    """The text's words, each between spaces: "Bhutan's 1,500 m" -> " bhutan s 1500 m "."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    words = (re.sub(r",(?=[0-9]{3}(?![0-9]))", "", word) for word in _WORD.findall(text))
    return f" {' '.join(words)} "
