"""A policy -> one that follows a fixed workflow: look the picture up, search text, then answer.

The baseline `rag` of the benchmarks. The reason of each turn is the policy's; where its action is
not the workflow's, the turn is written on from its reason: to the image search by rule, to queries
or an answer by the policy. Such text counts as the policy's with log-prob 0, so these episodes are
never trained on.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from svrl_jax.protocol import parse
from svrl_jax.rollout.policy import Request, SampledTurn, StopRule, TurnSampler

STEPS = ("image_search", "text_search", "answer")
_LOOK_UP = "<search><img></search>"
_OPEN = {"text_search": "<text_search>", "answer": "<answer>"}


@dataclasses.dataclass
class _Context:
    """What a slot holds: requests as they came and, as such, turns that were written.

    Attributes:
      request: of the turn under way.
      parts: everything before its turn.
      is_stale: the policy's own context has something else.
      begin: tokens of the turn under way that the policy goes on from, or None.
    """

    request: Request
    parts: list[Request]
    is_stale: bool = False
    begin: np.ndarray | None = None


class FixedWorkflow:
    """A `TurnSampler` around another.

    Args:
      policy: writes what is left to it.
      tokenizer: with `encode_plain`, `decode` and `eos_ids`.
      steps: actions in order; the last one is that of every further turn.
    """

    def __init__(self, policy: TurnSampler, tokenizer, steps: tuple[str, ...] = STEPS):
        self._policy, self._tokenizer, self._steps = policy, tokenizer, steps
        self.counts = policy.counts
        self._contexts: dict[int, _Context] = {}  # by slot

    def submit(self, request: Request) -> None:
        """Queues one turn."""
        context = self._contexts.get(request.slot)
        if request.is_new or context is None:
            context = self._contexts[request.slot] = _Context(request, [])
        context.request = request
        context.parts.append(request)
        self._policy.submit(_whole(context.parts) if context.is_stale else request)
        context.is_stale = False

    def collect(self) -> list[SampledTurn]:
        """Turns with the workflow's actions, or such as no action could be written into."""
        finished: list[SampledTurn] = []
        while not finished:
            turns = self._policy.collect()
            if not turns:
                return []
            for turn in turns:
                done = self._settle(self._contexts[turn.slot], turn)
                if done is not None:
                    finished.append(done)
        return finished

    def discard(self) -> None:
        """Forgets every queued turn."""
        self._contexts.clear()
        self._policy.discard()

    def _settle(self, context: _Context, turn: SampledTurn) -> SampledTurn | None:
        """The finished turn, or None where the policy was asked to write on."""
        if context.begin is not None:
            turn = dataclasses.replace(
                turn,
                ids=np.concatenate([context.begin, turn.ids]).astype(np.int32),
                logps=np.concatenate([np.zeros(len(context.begin), np.float32), turn.logps]),
            )
            context.begin = None
            return _kept(context, turn)
        request = context.request
        wanted = self._steps[min(len(request.view.turns), len(self._steps) - 1)]
        ids = turn.ids[:-1] if turn.ended == "eos" else turn.ids
        parsed = parse.parse_turn(
            self._tokenizer.decode(ids),
            num_queries=1,
            items_to_verify=len(request.view.items),
            regime="agent",
            ended=True,
        )
        if parsed.action == wanted or turn.ended == "length":
            return _kept(context, turn)
        text = f"<reason>{parsed.reason}</reason>"
        if wanted == "image_search":
            done = self._ids(text + _LOOK_UP)
            context.is_stale = True
            return _kept(context, _written(request, done))
        mask = parsed.mask or (1,) * len(request.view.items)
        text += f"<verify>{','.join(map(str, mask)) or ' '}</verify>{_OPEN[wanted]}"
        begin = self._ids(text)
        room = request.max_new_tokens - len(begin)
        if room < 1:
            context.is_stale = True
            return _kept(context, _written(request, begin))
        context.begin = begin
        whole = _whole([*context.parts, _own(request, begin)])
        self._policy.submit(
            dataclasses.replace(
                whole,
                max_new_tokens=room,
                keep=_behind(request.keep, begin.tolist()),
                begin=text,
            )
        )
        return None

    def _ids(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode_plain(text), np.int32).reshape(-1)


def _kept(context: _Context, turn: SampledTurn) -> SampledTurn:
    """The turn, which is part of the context from now on."""
    context.parts.append(_own(context.request, turn.ids))
    return turn


def _written(request: Request, ids: np.ndarray) -> SampledTurn:
    """A turn without the policy, cut at its limit."""
    ids = ids[: request.max_new_tokens]
    found = request.keep(ids.tolist(), 0)
    logps = np.zeros(len(ids), np.float32)
    return SampledTurn(request.slot, ids, logps, "length" if found is None else found[1])


def _own(request: Request, ids: np.ndarray) -> Request:
    """Tokens behind a request, as text goes on from it."""
    places = request.next_position + np.arange(len(ids), dtype=np.int32)
    return dataclasses.replace(
        request,
        ids=np.asarray(ids, np.int32),
        positions=np.tile(places, (3, 1)),
        next_position=request.next_position + len(ids),
        pixel_values=request.pixel_values[:0],
        image_grid_thw=request.image_grid_thw[:0],
    )


def _whole(parts: list[Request]) -> Request:
    """All parts as one new context; the last one says how to sample."""
    some = [p.pixel_values for p in parts if len(p.pixel_values)]
    return dataclasses.replace(
        parts[-1],
        ids=np.concatenate([p.ids for p in parts]),
        positions=np.concatenate([p.positions for p in parts], axis=1),
        pixel_values=np.concatenate(some) if some else parts[0].pixel_values,
        image_grid_thw=np.concatenate([p.image_grid_thw for p in parts]),
        is_new=True,
        share_key=None,
    )


def _behind(keep: StopRule, begin: list[int]) -> StopRule:
    """The stop rule of a turn of which the policy writes the rest."""

    def rule(ids, start):
        found = keep([*begin, *ids], start + len(begin))
        return None if found is None else (found[0] - len(begin), found[1])

    return rule
