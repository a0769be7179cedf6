"""The embedded default: real pictures and real text -> Tasks, split by item, with no network.

Items are split by (entity, relation): `test` items are pairs never trained on, and training sees
their place in other relations; `ood` items belong to places held out altogether. Objects have one
item each. Paraphrases and picture draws multiply an item into tasks and are counted apart.
"""

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Sequence

from svrl_jax import rng as rng_lib
from svrl_jax.data import facts, pictures
from svrl_jax.types import Task

SPLITS = ("train", "test", "ood")
# In-distribution test items by relation: 150 in all.
_TEST_QUOTA = {
    "name": 24, "capital": 28, "region": 22, "north": 9, "south": 9, "east": 9, "west": 9,
    "top": 12, "bottom": 12, "object": 16,
}  # fmt: skip
_OOD_ITEMS = 160  # whole places are held out until at least this many items are
_NUM_OBJECTS = 120


@functools.cache
def split_items() -> dict[str, tuple[facts.Item, ...]]:
    """Split name -> its items, ordered by id. The split depends on the items' ids alone."""
    everything = facts.items()
    objects = sorted((i for i in everything if i.relation == "object"), key=_rank)[:_NUM_OBJECTS]
    kept = [i for i in everything if i.relation != "object" or i in objects]
    held_out = _held_out_places(kept)
    out: dict[str, list[facts.Item]] = {s: [] for s in SPLITS}
    out["ood"] = [i for i in kept if i.entity.title in held_out]
    rest = sorted((i for i in kept if i.entity.title not in held_out), key=_rank)
    taken = dict.fromkeys(_TEST_QUOTA, 0)
    left = collections.Counter(i.entity.title for i in rest)  # items that training can still get
    for item in rest:
        # A place keeps at least one item to train on; an object has one item only.
        is_spare = left[item.entity.title] > 1 or not item.entity.is_flag
        is_test = is_spare and taken[item.relation] < _TEST_QUOTA[item.relation]
        taken[item.relation] += is_test
        left[item.entity.title] -= is_test
        out["test" if is_test else "train"].append(item)
    return {s: tuple(sorted(v, key=lambda i: i.id)) for s, v in out.items()}


def make_task(item: facts.Item, split: str, draw: int, width_px: int, height_px: int) -> Task:
    """One draw of an item: a paraphrase and a picture, both named by (split, item, draw)."""
    task_id = f"world/{split}/{item.id}#{draw}"
    rng = rng_lib.host_rng("world", task_id)
    questions = facts.QUESTIONS[item.relation]
    picture = pictures.draw(item.entity.code, rng, width_px, height_px, is_flag=item.entity.is_flag)
    return Task(
        id=task_id,
        question=questions[int(rng.integers(len(questions)))],
        picture=pictures.to_png(picture),
        golds=item.golds,
        source=f"world/{split}",
        category=item.relation,
        entity=item.entity.names,
        evidence_ids=item.evidence_ids,
        item=item.id,
    )


def eval_tasks(split: str, draws: int, width_px: int, height_px: int) -> list[Task]:
    """Every item of a split, `draws` times, item by item."""
    return [
        make_task(item, split, draw, width_px, height_px)
        for item in split_items()[split]
        for draw in range(draws)
    ]


class TrainStream:
    """An endless, seeded stream of training tasks whose whole state is one row counter.

    Epoch e goes through all training items in an order of its own; a task's draw number is its
    epoch, so no picture comes twice.
    """

    def __init__(
        self, seed: int, batch_size: int, width_px: int, height_px: int, position: int = 0
    ):
        if batch_size < 1:
            raise ValueError(f"data.prompts_per_step must be at least 1, got {batch_size}")
        self.items: Sequence[facts.Item] = split_items()["train"]
        self.seed, self.batch_size = seed, batch_size
        self.width_px, self.height_px = width_px, height_px
        self.position = position  # rows handed out so far

    def __iter__(self):
        return self

    def __next__(self) -> list[Task]:
        rows = range(self.position, self.position + self.batch_size)
        self.position += self.batch_size
        return [self._row(r) for r in rows]

    def _row(self, row: int) -> Task:
        epoch, place = divmod(row, len(self.items))
        item = self.items[int(_order(self.seed, epoch, len(self.items))[place])]
        return make_task(item, "train", epoch, self.width_px, self.height_px)


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int):
    return rng_lib.host_rng("world order", seed, epoch).permutation(count)


def _held_out_places(items: Sequence[facts.Item]) -> set[str]:
    by_place: dict[str, int] = {}
    for item in items:
        if item.entity.is_flag:
            by_place[item.entity.title] = by_place.get(item.entity.title, 0) + 1
    rich = sorted((t for t, n in by_place.items() if n >= 6), key=_digest)
    chosen, total = set(), 0
    for title in rich:
        if total >= _OOD_ITEMS:
            break
        chosen.add(title)
        total += by_place[title]
    return chosen


def _rank(item: facts.Item) -> str:
    return _digest(item.id)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
