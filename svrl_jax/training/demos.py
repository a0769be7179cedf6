"""Items and a script -> demonstrations: token ids with a loss mask, as a rollout would record them.

Reading is taught by swapping: in most demonstrations the answer inside the shown text, or the name
of the place, is replaced by another, so that copying from the results beats remembering.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from svrl_jax import rng as rng_lib
from svrl_jax.data import facts, pictures, script, sources, world
from svrl_jax.models.qwen_vl.rope import mrope_positions
from svrl_jax.protocol import render
from svrl_jax.protocol.prompts import PromptBuilder
from svrl_jax.search.local import LocalTools
from svrl_jax.training import tiny_policy
from svrl_jax.types import SearchItem, Task, ToolCall

_TURN_END = "<|im_end|>\n"
# Colour channels and direction of a drawn picture: the true one first, then pictures that no place
# or object has. They are shown under a swapped name, so that what was never seen is looked up, and
# with questions of colour, so that colours are seen and not remembered by flag.
_VARIANTS = tuple(
    (channels, step) for step in (1, -1) for channels in itertools.permutations((0, 1, 2))
)
_NAMED_COLOUR_DISTANCE = 70.0  # grey levels; what lies farther off has no name of ours


@dataclasses.dataclass(frozen=True)
class Demo:
    """One demonstration.

    Attributes:
      ids, loss_mask: int32[T]; 1 on what the policy writes.
      positions: int32[3, T].
      pixel_values: float32[L, C] of its picture; L = 0 without one.
      image_grid_thw: int32[I, 3], I in {0, 1}.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray
    pixel_values: np.ndarray
    image_grid_thw: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Swap:
    old: tuple[str, ...]
    new: str

    def __call__(self, text: str) -> str:
        pattern = "|".join(re.escape(o) for o in sorted(self.old, key=len, reverse=True))
        return re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda _: self.new, text)


class DemoMaker:
    """Draws demonstrations of one phase of the curriculum (config.pretrain.phases)."""

    def __init__(self, builder: PromptBuilder, tools: LocalTools, config: ConfigDict, seed: int):
        """Args: config: the whole config's `pretrain`, `data` and `search` are read."""
        self.builder, self.tools, self.config, self.seed = builder, tools, config, seed
        data = config.data
        self.items = world.split_items()["train"]
        self._answers = {
            r: sorted({i.golds[0] for i in self.items if i.relation == r}) for r in facts.QUESTIONS
        }
        self._titles = [
            t for t in sources.documents_by_title() if re.fullmatch(r"[A-Z][\w '-]{2,24}", t)
        ]
        self._patches = functools.lru_cache(maxsize=6000)(self._draw_patches)
        self._prompt_ids = functools.lru_cache(maxsize=4096)(self._encode_prompt)
        self._draw = functools.lru_cache(maxsize=None)(self._draw_picture)
        self._look_up = functools.lru_cache(maxsize=None)(self._search_image)
        self._plain = functools.lru_cache(maxsize=100_000)(builder.tokenizer.encode_plain)
        blank = Image.new("RGB", (data.picture_width_px, data.picture_height_px))
        pixels, self.picture_grid = builder.processor([blank])  # int32[1, 3], of every picture
        self._no_picture = pixels[:0], self.picture_grid[:0]
        self._shares = functools.lru_cache(maxsize=None)(self._cumulative_shares)

    def draw(self, name: str, phase: ConfigDict, index: int) -> Demo:
        """Demonstration number `index` of the phase called `name`."""
        rng = rng_lib.host_rng("demo", self.seed, name, index)
        if rng.random() < phase.copy_share:
            return self._copy(phase, index, rng)
        shares = self._shares(phase.visual, phase.naming, phase.fact)
        item = self.items[int(np.searchsorted(shares, rng.random()))]
        known = script.is_known(item.entity.title, self.config.pretrain.known_share)
        questions = facts.QUESTIONS[item.relation]
        task = Task(
            id=f"demo/{name}/{index}",
            question=questions[int(rng.integers(len(questions)))],
            picture=b"",
            golds=item.golds,
            source="demo",
            category=item.relation,
            entity=item.entity.names,
            evidence_ids=item.evidence_ids,
        )
        draw = int(rng.integers(self.config.pretrain.picture_draws))
        variant = 0
        regime = "direct" if rng.random() < phase.direct_share else "agent"
        habits = script.draw_habits(
            rng, phase.needless_search, phase.lazy_mask, phase.repeat_queries
        )
        swaps = self._swaps(task, known, phase, rng) if regime == "agent" else ()
        is_renamed = any(swap.old == task.entity for swap in swaps)
        if rng.random() < phase.novel_pictures:
            chosen = int(rng.integers(1, len(_VARIANTS)))
            if task.category in facts.VISUAL:
                colour = self._colour(item.entity, task.category, chosen)
                if colour is not None:
                    variant = chosen
                    task = dataclasses.replace(task, golds=facts.colour_golds(colour))
            elif is_renamed:
                variant = chosen
        return self._play(
            task, (item.entity, draw, variant), regime, habits, known, swaps, phase, rng
        )

    def _cumulative_shares(self, visual: float, naming: float, fact: float) -> np.ndarray:
        weights = {"visual": visual, "naming": naming, "fact": fact}
        raw = np.array([weights[_kind(i.relation)] for i in self.items], np.float64)
        return np.cumsum(raw / raw.sum())

    def _copy(self, phase: ConfigDict, index: int, rng) -> Demo:
        """Random ids written twice; what is learnt is the second writing.

        Copying what stands above is a circuit that forms late and then serves every later phase:
        names into queries, answers out of results. It forms soonest on few different ids, so their
        number doubles every `copy_doubling` demonstrations from 64 on.
        """
        first = len(tiny_policy.SPECIAL_TOKENS)
        most = self.builder.tokenizer.vocab_size - first
        if phase.copy_doubling:
            most = min(most, int(64 * 2 ** min(index / phase.copy_doubling, 16)))
        once = first + rng.integers(most, size=int(rng.integers(4, 24)))
        ids = np.tile(once, 2).astype(np.int32)
        mask = (np.arange(len(ids)) > len(once)).astype(np.int32)
        positions, _ = mrope_positions(ids, np.zeros((0, 3), np.int32), self.builder.config)
        return Demo(ids, mask, positions, *self._no_picture)

    def _play(self, task, picture, regime, habits, known, swaps, phase, rng) -> Demo:
        tokenizer = self.builder.tokenizer
        shown_task = _swap_task(task, swaps)
        answers = self._answers[task.category]
        guess = answers[int(rng.integers(len(answers)))]
        segments = [(self._prompt_ids(task.question, regime), 0)]
        calls: list[ToolCall] = []
        searches = 2 if rng.random() < phase.second_search else 1
        while True:
            text = script.write_turn(
                shown_task, calls, habits, rng, regime=regime, known=known, guess=guess,
                max_text_searches=searches,
            )  # fmt: skip
            segments.append((tokenizer.encode_plain(text), 1))
            if phase.first_turn_only:
                break
            call = self._run(text, task, picture, swaps, phase, rng)
            if call is None:
                break
            calls.append(call)
            texts = render.render_items(call.tool, call.items, self.config.search)
            prefix, shown, suffix = render.wrap_information(texts, call.status)
            segments.append((tokenizer.encode(_TURN_END + prefix), 0))
            segments += [(self._plain(t), 0) for t in shown]
            segments.append((tokenizer.encode(suffix), 0))
        ids = np.concatenate([s for s, _ in segments]).astype(np.int32)
        mask = np.concatenate([np.full(len(s), m, np.int32) for s, m in segments])
        pixel_values, grids = self._patches(*picture)
        positions, _ = mrope_positions(ids, grids, self.builder.config)
        return Demo(ids, mask, positions, pixel_values, grids)

    def _run(self, text, task, picture, swaps, phase, rng) -> ToolCall | None:
        """Executes the search that a turn asks for, with the swaps put into what it shows."""
        if "<search>" in text:
            items, tool, query = self._look_up(*picture[:2], task.question), "image_search", ""
        elif "<text_search>" in text:
            proposals = text.split("<text_search>")[1].split("</text_search>")[0].split(",")
            query = proposals[int(rng.integers(len(proposals)))].strip().strip('"')
            real_query = query
            for swap in swaps:
                real_query = real_query.replace(swap.new, swap.old[0])
            items, tool = self.tools.text_search(real_query, task), "text_search"
        else:
            return None
        if phase.max_items and len(items) > phase.max_items:
            items = self._fewer(items, task, phase.max_items, rng)
        shown = tuple(_swap_item(i, swaps) for i in items)
        return ToolCall(tool, query, shown, status="ok" if shown else "empty")

    def _fewer(self, items: Sequence[SearchItem], task: Task, count: int, rng) -> list[SearchItem]:
        """`count` of the items in their order, one useful item among them if there is one."""
        useful = [
            i for i, u in enumerate(script.useful_items(items, task.golds, task.evidence_ids)) if u
        ]
        keep = {useful[0]} if useful else set()
        others = [i for i in rng.permutation(len(items)) if i not in keep]
        keep |= set(others[: max(0, int(rng.integers(1, count + 1)) - len(keep))])
        return [items[i] for i in sorted(keep)]

    def _swaps(self, task: Task, known: bool, phase: ConfigDict, rng) -> tuple[_Swap, ...]:
        swaps = []
        if not known and rng.random() < phase.swap_names:
            swaps.append(_Swap(task.entity, self._titles[int(rng.integers(len(self._titles)))]))
        if task.category in facts.FACTS and rng.random() < phase.swap_answers:
            pool = self._answers[task.category] if rng.random() < 0.6 else self._titles
            new = pool[int(rng.integers(len(pool)))]
            swaps.append(_Swap(task.golds, new))
        return tuple(swaps)

    def _draw_picture(self, entity: facts.Entity, draw: int) -> np.ndarray:
        rng = rng_lib.host_rng("demo picture", entity.title, draw)
        data = self.config.data
        return pictures.draw(
            entity.code, rng, data.picture_width_px, data.picture_height_px, is_flag=entity.is_flag
        )

    def _colour(self, entity: facts.Entity, part: str, variant: int) -> str | None:
        """What a novel picture shows, if it has a name."""
        data = self.config.data
        clean = pictures.clean_picture(
            entity.code, data.picture_width_px, data.picture_height_px, is_flag=entity.is_flag
        )
        return facts.colour_at(_vary(clean, variant), part, _NAMED_COLOUR_DISTANCE)

    def _draw_patches(self, entity: facts.Entity, draw: int, variant: int):
        picture = np.ascontiguousarray(_vary(self._draw(entity, draw), variant))
        return self.builder.processor([Image.fromarray(picture)])

    def _search_image(self, entity: facts.Entity, draw: int, question: str) -> list[SearchItem]:
        picture = pictures.to_png(self._draw(entity, draw))
        return self.tools.image_search(Task("", question, picture, ("",), "demo", ""))

    def _encode_prompt(self, question: str, regime: str) -> np.ndarray:
        blank = np.full(
            (self.config.data.picture_height_px, self.config.data.picture_width_px, 3),
            255,
            np.uint8,
        )
        task = Task("", question, pictures.to_png(blank), ("",), "demo", "")
        return self.builder.build(task, regime).ids


def _vary(picture: np.ndarray, variant: int) -> np.ndarray:
    channels, step = _VARIANTS[variant]
    return picture[:, ::step, list(channels)]


def _swap_task(task: Task, swaps: Sequence[_Swap]) -> Task:
    golds, entity, evidence = task.golds, task.entity, task.evidence_ids
    for swap in swaps:
        golds = (swap.new,) if swap.old == golds or set(swap.old) & set(golds) else golds
        evidence = tuple(swap.new if e in swap.old else e for e in evidence)
        entity = (swap.new,) if swap.old == entity else entity
    return dataclasses.replace(task, golds=golds, entity=entity, evidence_ids=evidence)


def _swap_item(item: SearchItem, swaps: Sequence[_Swap]) -> SearchItem:
    for swap in swaps:
        title = swap(item.title)
        item = dataclasses.replace(
            item, title=title, text=swap(item.text), id=title if title != item.title else item.id
        )
    return item


def _kind(relation: str) -> str:
    if relation in facts.VISUAL:
        return "visual"
    return "naming" if relation in facts.NAMING else "fact"
