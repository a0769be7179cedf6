"""Prompts (system, user) -> what our own model writes, greedily; text alone, no episode."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from svrl_jax.processing.tokenizer import Tokenizer
from svrl_jax.protocol.prompts import PromptBuilder
from svrl_jax.rollout.policy import Request, StopRule, TurnSampler, TurnView
from svrl_jax.search.errors import ToolError
from svrl_jax.types import Prompt, Task


class Writer:
    """Writes replies with a `TurnSampler`.

    Args:
      sampler: whose parameters write; nothing may be queued in it.
      builder: whose tokenizer and template prompts are made with.
      slots: contexts at once.
      capacity: tokens that a context holds.
      max_new_tokens: of a reply.
    """

    def __init__(
        self,
        sampler: TurnSampler,
        builder: PromptBuilder,
        *,
        slots: int,
        capacity: int,
        max_new_tokens: int,
    ):
        self._sampler, self._builder, self._tokenizer = sampler, builder, builder.tokenizer
        self._slots, self._capacity, self._max_new = slots, capacity, max_new_tokens

    def __call__(self, prompts: Sequence[tuple[str, str]]) -> list[str | ToolError]:
        """The reply to each prompt, or (bad_response) why there is none: no room, or no end."""
        replies: list[str | ToolError] = [ToolError("not asked", "bad_response")] * len(prompts)
        queue: collections.deque[tuple[int, Prompt]] = collections.deque()
        for i, (system, user) in enumerate(prompts):
            prompt = self._prompt(str(i), system, user)
            if len(prompt.ids) + self._max_new > self._capacity:
                replies[i] = ToolError(f"{len(prompt.ids)} tokens leave no room", "bad_response")
            else:
                queue.append((i, prompt))
        free, asked = collections.deque(range(self._slots)), {}
        while queue or asked:
            while queue and free:
                slot = free.popleft()
                asked[slot], prompt = queue.popleft()
                self._sampler.submit(self._request(slot, prompt))
            for turn in self._sampler.collect():
                free.append(turn.slot)
                ids = turn.ids[:-1] if turn.ended == "eos" else turn.ids
                replies[asked.pop(turn.slot)] = (
                    self._tokenizer.decode(ids)
                    if turn.ended == "eos"
                    else ToolError("the reply has no end", "bad_response")
                )
        return replies

    def _prompt(self, name: str, system: str, user: str) -> Prompt:
        own = self._builder
        builder = PromptBuilder(own.tokenizer, own.processor, own.config, {"direct": system})
        return builder.build(Task(name, user, b"", (), "", ""), "direct")

    def _request(self, slot: int, prompt: Prompt) -> Request:
        return Request(
            slot=slot,
            ids=prompt.ids,
            positions=prompt.positions,
            next_position=int(prompt.positions.max()) + 1,
            pixel_values=prompt.pixel_values,
            image_grid_thw=prompt.image_grid_thw,
            key=np.zeros(2, np.uint32),
            temperature=0.0,
            max_new_tokens=self._max_new,
            is_new=True,
            keep=_until_end(self._tokenizer),
            view=TurnView(Task(prompt.task_id, "", b"", (), "", ""), prompt.regime, (), ()),
        )


def _until_end(tokenizer: Tokenizer) -> StopRule:
    ends = frozenset(int(i) for i in tokenizer.eos_ids)

    def keep(ids: Sequence[int], start: int) -> tuple[int, str] | None:
        at = next((i for i in range(start, len(ids)) if ids[i] in ends), None)
        return None if at is None else (at + 1, "eos")

    return keep
