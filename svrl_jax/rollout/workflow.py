"""A policy -> one that follows a fixed workflow: look the picture up, search text, then answer.

The baseline `rag` of the benchmarks. The environment writes the first turn and the beginning of the
second; the policy writes the queries and all that follows. What the environment wrote counts as
policy text (it stands in the turns) with log-prob 0, so such episodes are never trained on.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from svrl_jax.rollout.policy import Request, SampledTurn, StopRule, TurnSampler

LOOK_UP = "<reason>First the picture is looked up.</reason><search><img></search>"
ASK = "<reason>Then the question is searched for.</reason><verify>{mask}</verify><text_search>"


class FixedWorkflow:
    """A `TurnSampler` around another.

    Args:
      policy: writes what is left to it.
      tokenizer: with `encode_plain`.
      has_image_search: False begins with the text search.
    """

    def __init__(self, policy: TurnSampler, tokenizer, *, has_image_search: bool = True):
        self._policy, self._tokenizer = policy, tokenizer
        self._ask_at = int(has_image_search)
        self._written: list[SampledTurn] = []  # by us, not collected yet
        # Requests and our own tokens that the policy's context still lacks, by slot.
        self._held: dict[int, list[Request]] = collections.defaultdict(list)
        self._begun: dict[int, np.ndarray] = {}  # by slot: our beginning of the turn under way

    def submit(self, request: Request) -> None:
        """Queues one turn, or writes it where the workflow does."""
        number = len(request.view.turns)
        if request.is_new:
            self._held.pop(request.slot, None)
        if number < self._ask_at:
            ids = self._ids(LOOK_UP)[: request.max_new_tokens]
            self._held[request.slot] += [request, _own(request, ids)]
            ended = "action" if request.keep(ids.tolist(), 0) else "length"
            logps = np.zeros(len(ids), np.float32)
            self._written.append(SampledTurn(request.slot, ids, logps, ended))
            return
        begin = self._ids("")
        text = ""
        if number == self._ask_at:
            mask = ",".join("1" * len(request.view.items)) or " "
            text = ASK.format(mask=mask)
            begin = self._ids(text)
        if len(begin) >= request.max_new_tokens:
            ids = begin[: request.max_new_tokens]
            logps = np.zeros(len(ids), np.float32)
            self._written.append(SampledTurn(request.slot, ids, logps, "length"))
            return
        self._begun[request.slot] = begin
        parts = [*self._held.pop(request.slot, []), request, _own(request, begin)]
        self._policy.submit(
            dataclasses.replace(
                request,
                ids=np.concatenate([p.ids for p in parts]),
                positions=np.concatenate([p.positions for p in parts], axis=1),
                next_position=request.next_position + len(begin),
                pixel_values=_joined([p.pixel_values for p in parts]),
                image_grid_thw=np.concatenate([p.image_grid_thw for p in parts]),
                max_new_tokens=request.max_new_tokens - len(begin),
                is_new=any(p.is_new for p in parts),
                keep=_behind(request.keep, begin.tolist()),
                share_key=None,
                begin=text,
            )
        )

    def collect(self) -> list[SampledTurn]:
        """Turns of ours that are due, else the policy's."""
        if self._written:
            written, self._written = self._written, []
            return written
        return [self._whole(turn) for turn in self._policy.collect()]

    def discard(self) -> None:
        """Forgets every queued turn."""
        self._written, self._begun = [], {}
        self._held.clear()
        self._policy.discard()

    def _whole(self, turn: SampledTurn) -> SampledTurn:
        begin = self._begun.pop(turn.slot)
        return dataclasses.replace(
            turn,
            ids=np.concatenate([begin, turn.ids]).astype(np.int32),
            logps=np.concatenate([np.zeros(len(begin), np.float32), turn.logps]),
        )

    def _ids(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode_plain(text), np.int32).reshape(-1)


def _own(request: Request, ids: np.ndarray) -> Request:
    """Tokens of ours behind a request, as text goes on from it."""
    places = request.next_position + np.arange(len(ids), dtype=np.int32)
    return dataclasses.replace(
        request,
        ids=ids,
        positions=np.tile(places, (3, 1)),
        pixel_values=request.pixel_values[:0],
        image_grid_thw=request.image_grid_thw[:0],
        is_new=False,
    )


def _joined(pixels: list[np.ndarray]) -> np.ndarray:
    """Patches of several requests; those of a text-only one have no width."""
    some = [p for p in pixels if len(p)]
    return np.concatenate(some) if some else pixels[0]


def _behind(keep: StopRule, begin: list[int]) -> StopRule:
    """The stop rule of a turn of which the policy writes the rest."""

    def rule(ids, start):
        found = keep([*begin, *ids], start + len(begin))
        return None if found is None else (found[0] - len(begin), found[1])

    return rule
