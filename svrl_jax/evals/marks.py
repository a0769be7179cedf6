"""Scripted agents that give a figure its meaning: ceiling, always search, never search, a mask of
ones.

They run through the same episode code and tools as a policy. The script knows the golds but uses
them only where the picture or a shown item gives the answer away, so it is a ceiling for reading,
not an oracle of facts.
"""

from __future__ import annotations

from collections.abc import Callable

from svrl_jax import rng as rng_lib
from svrl_jax.data import facts, script
from svrl_jax.rollout.policy import TurnView
from svrl_jax.types import ToolCall

MARKS: dict[str, script.Habits] = {
    "scripted": script.Habits(),
    "always_search": script.Habits(always_search=True),
    "never_search": script.Habits(never_search=True),
    "all_ones": script.Habits(lazy_mask=True),
}


def scripted(
    habits: script.Habits, num_queries: int, known_share: float
) -> Callable[[TurnView], str]:
    """A function for `ScriptedPolicy`.

    Args:
      habits: what it does by habit.
      num_queries: k.
      known_share: share of entities that it recognises, as the initial policy was taught; places
        of the `ood` split are never recognised.
    """

    def write(view: TurnView) -> str:
        task = view.task
        calls: list[ToolCall] = [t.call for t in view.turns if t.call is not None]
        known = not task.source.endswith("/ood") and script.is_known(task.entity[0], known_share)
        return script.write_turn(
            task,
            calls,
            habits,
            rng_lib.host_rng("mark", task.id, len(calls)),
            regime=view.regime,
            known=known,
            guess=_GUESS.get(task.category, "unknown"),
            num_queries=num_queries,
        )

    return write


# What a script answers where nothing shows the answer: the commonest kind of thing.
_GUESS = {"region": "West Asia"} | {d: "Atlantic Ocean" for d in facts.DIRECTIONS}
