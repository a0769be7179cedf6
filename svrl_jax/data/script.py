"""Task and what the tools returned -> the text a scripted agent writes next.

The script serves three ends: demonstrations from which the initial policy learns the protocol (with
deliberate bad habits, at rates that are config), the scripted ceiling that gives a figure its
meaning, and plain baselines (always search, never search, a mask of ones). It never sees the
network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence

import numpy as np

from svrl_jax.data import facts
from svrl_jax.types import SearchItem, Task, ToolCall

# Wordings of a query by relation; {} is the place's name. All of them find the place's summary.
TEMPLATES = {
    "capital": (
        "capital of {}", "{} capital", "{} capital city",
        "capital city of {}", "city capital {}", "largest city capital {}",
    ),
    "region": (
        "{} country located", "country {}", "{} country",
        "{} is a country in", "country located {}", "which country is {}",
    ),
    **{
        d: (
            f"{d} of {{}}", f"{{}} border {d}", f"directly {d} of {{}}",
            f"what lies {d} of {{}}", f"{{}} to the {d}", f"{{}} {d} neighbour",
        )
        for d in facts.DIRECTIONS
    },
}  # fmt: skip


_WORDS = {2: "two", 3: "three", 4: "four", 5: "five"}


@dataclasses.dataclass(frozen=True)
class Habits:
    """What one scripted episode does by habit.

    Attributes:
      needless_search: looks the picture up although the answer is plain.
      lazy_mask: keeps every item.
      repeats: 0 for five different queries, else how many different ones are repeated.
      never_search: answers at once, by a guess where it must.
      always_search: looks the picture up whatever the question.
    """

    needless_search: bool = False
    lazy_mask: bool = False
    repeats: int = 0
    never_search: bool = False
    always_search: bool = False


def draw_habits(
    rng: np.random.Generator, needless_search: float, lazy_mask: float, repeat_queries: float
) -> Habits:
    """Habits of one demonstration, each drawn by itself at its rate in [0, 1]."""
    draws = rng.random(4)
    repeats = (1 if draws[3] < 0.5 else 2) if draws[2] < repeat_queries else 0
    return Habits(bool(draws[0] < needless_search), bool(draws[1] < lazy_mask), repeats)


def is_known(title: str, share: float) -> bool:
    """Whether the initial policy is taught to recognise an entity, by the hash of its title."""
    return int(hashlib.sha256(f"known {title}".encode()).hexdigest()[:8], 16) < share * 2**32


def useful_items(items: Sequence[SearchItem], golds: Sequence[str], evidence: Sequence[str]):
    """0/1 an item: it holds a gold of at least three characters, or is an evidence document."""
    return tuple(int(i.id in evidence or holds_gold(i, golds) is not None) for i in items)


def holds_gold(item: SearchItem, golds: Sequence[str]) -> str | None:
    """The gold that stands in the item's shown text or title, else None."""
    for gold in golds:
        if len(gold) >= 3 and re.search(
            rf"(?<!\w){re.escape(gold)}(?!\w)", f"{item.title} {item.text}", re.IGNORECASE
        ):
            return gold
    return None


def write_turn(
    task: Task,
    calls: Sequence[ToolCall],
    habits: Habits,
    rng: np.random.Generator,
    *,
    regime: str,
    known: bool,
    guess: str,
    num_queries: int = 5,
    max_text_searches: int = 2,
) -> str:
    """The next turn's text.

    Args:
      task: its golds are used only where the picture or a shown item gives them away, or the
        entity is `known`.
      calls: executed so far, in order.
      habits: of this episode.
      rng: draws the wordings.
      regime: `direct` writes reason and answer alone.
      known: the entity's name is recognised from the picture.
      guess: what is answered where the answer cannot be seen.
    """
    name, relation = task.entity[0], task.category
    plain = relation in facts.VISUAL or (known and relation in facts.NAMING)
    if regime == "direct":
        answer = task.golds[0] if plain else guess
        return f"<reason>{_first_reason(relation, known, name)}</reason>{_answer(answer)}"
    if not calls:
        wants = not plain or habits.needless_search or habits.always_search
        if habits.never_search or not wants:
            answer = task.golds[0] if plain else guess
            return (
                f"<reason>{_first_reason(relation, known, name)}</reason>{_verify(None)}"
                + _answer(answer)
            )
        if known and relation in facts.FACTS and not habits.always_search:
            queries = _queries(relation, name, habits, rng, num_queries)
            reason = f"known {name}, {_plan(habits, num_queries)}"
            return f"<reason>{reason}</reason>{_verify(())}{_text_search(queries)}"
        return "<reason>look it up</reason><search><img></search>"
    return _after_results(task, calls, habits, rng, known, guess, num_queries, max_text_searches)


def _after_results(task, calls, habits, rng, known, guess, num_queries, max_text_searches) -> str:
    name, relation, last = task.entity[0], task.category, calls[-1]
    useful = useful_items(last.items, task.golds, task.evidence_ids)
    if last.tool == "image_search":
        first = 0 if last.items else None  # a search that failed or found nothing names no item
        best = next((i for i, item in enumerate(last.items) if item.id == name), first)
    else:
        best = next((i for i, item in enumerate(last.items) if holds_gold(item, task.golds)), None)
    if relation in facts.VISUAL:
        best = None
    reason = _cite(best, useful, habits.lazy_mask)
    mask = tuple(1 for _ in useful) if habits.lazy_mask else useful
    head = f"<reason>{reason}</reason>{_verify(mask)}"
    asking = f"<reason>{reason}, {_plan(habits, num_queries)}</reason>{_verify(mask)}"
    if relation in facts.VISUAL:
        return head + _answer(task.golds[0])
    if last.tool == "image_search":
        seen = name if known else last.items[best].title if last.items else None
        if seen is None or relation in facts.NAMING:
            return head + _answer(seen or guess)
        return asking + _text_search(_queries(relation, seen, habits, rng, num_queries))
    if best is not None:
        return head + _answer(holds_gold(last.items[best], task.golds))
    asked = sum(c.tool == "text_search" for c in calls)
    if asked < max_text_searches:
        subject = _subject_of(last.query, relation) or name
        return asking + _text_search(_queries(relation, subject, habits, rng, num_queries))
    return head + _answer(guess)


def _first_reason(relation: str, known: bool, name: str) -> str:
    if relation in facts.VISUAL:
        return "plain to see"
    return f"known {name}" if known else "not known"


def _plan(habits: Habits, count: int) -> str:
    """Says beforehand how many different queries follow.

    So the choice is one word early in the turn, as with `all help` for masks: reinforcement finds
    it. Without the word the choice is spread over five queries and did not move.
    """
    ways = habits.repeats or count
    return "ask one way" if ways == 1 else f"ask {_WORDS.get(ways, str(ways))} ways"


def _cite(best: int | None, useful: tuple[int, ...], lazy: bool) -> str:
    """Names the items that help, the one to read first in front; `all` where every item is kept."""
    order = ([best] if best is not None else []) + [
        i for i, u in enumerate(useful) if u and i != best
    ]
    if lazy:
        return "all help" + (f" #{best + 1}" if best is not None else "")
    if best is not None and not useful[best]:
        return f"read #{best + 1} none help"
    return "only" + "".join(f" #{i + 1}" for i in order) + " help" if order else "none help"


def _verify(mask: tuple[int, ...] | None) -> str:
    return f"<verify>{','.join(map(str, mask)) if mask else ' '}</verify>"


def _answer(text: str) -> str:
    return f"<answer> {text}</answer>"


def _text_search(queries: Sequence[str]) -> str:
    quoted = [f'"{q}"' if "," in q else q for q in queries]
    return f"<text_search> {', '.join(quoted)}</text_search>"


def _queries(relation, name, habits: Habits, rng: np.random.Generator, count: int) -> list[str]:
    # From a random wording on in the order of the table, so that which wording follows is plain
    # from the last one and from the number of ways that the plan names.
    templates = TEMPLATES[relation]
    start = int(rng.integers(len(templates)))
    distinct = habits.repeats or count
    chosen = [templates[(start + i) % len(templates)].format(name) for i in range(distinct)]
    return [chosen[i % len(chosen)] for i in range(count)]


def _subject_of(query: str, relation: str) -> str | None:
    """The name inside a query of ours, by the wordings of its relation."""
    for template in TEMPLATES[relation]:
        match = re.fullmatch(re.escape(template).replace(r"\{\}", "(.+)"), query)
        if match:
            return match.group(1)
    return None
