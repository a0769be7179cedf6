"""What answers a turn: a request (the tokens to append to a context) -> the sampled turn.

`episodes.py` speaks to every policy through `TurnSampler`: our own model (`EnginePolicy` in
`scheduler.py`), a script (`ScriptedPolicy`, for the ceiling and for cheats), a served model
(`remote.py`). So all of them run through the same episode code.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import numpy as np

from svrl_jax.types import SearchItem, Task, Turn

# How a turn ended: the token that completed an action's closing tag, an end id, or the token limit.
ENDINGS = ("action", "eos", "length")

# keep(ids, start) -> (number of tokens kept, "action" | "eos"), or None while the turn goes on.
# Tokens before `start` were looked at before and did not end the turn.
StopRule = Callable[[Sequence[int], int], "tuple[int, str] | None"]


@dataclasses.dataclass(frozen=True)
class TurnView:
    """The episode as text, for policies that read text; the engine does not look at it.

    Attributes:
      task: the question.
      regime: `agent` or `direct`.
      turns: finished turns, oldest first.
      items: items of the latest tool output; () if it had none or no tool was called yet.
    """

    task: Task
    regime: str
    turns: tuple[Turn, ...]
    items: tuple[SearchItem, ...]


@dataclasses.dataclass(frozen=True)
class Request:
    """Append these tokens to the slot's context (or start it afresh), then sample one turn.

    Attributes:
      slot: which context, in [0, slots).
      ids: int32[n], n >= 1, tokens to append.
      positions: int32[3, n], M-RoPE positions of `ids`. Sampled tokens go on at `next_position`.
      next_position: position (all three axes) of the first sampled token.
      pixel_values: float32[L, C], pictures whose placeholders stand in `ids`; L = 0 for none.
      image_grid_thw: int32[I, 3] of those pictures.
      key: uint32[2], key data of the turn's draws (`rng.turn_keys`).
      temperature: 0 is greedy.
      max_new_tokens: limit of sampled tokens, >= 1.
      is_new: True empties the slot first.
      keep: the stop rule.
      view: the episode as text.
      share_key: requests with equal keys have equal `ids` (the first `share_length` of them) and
        pictures, so that these may be computed once; None shares nothing. Only for new contexts.
      begin: text that `ids` end in and that the turn begins with; what is sampled goes on from it.
        A policy that reads `view` instead of `ids` is told here.
      share_length: None for all of `ids`; else fewer, and at least those of every picture.
    """

    slot: int
    ids: np.ndarray
    positions: np.ndarray
    next_position: int
    pixel_values: np.ndarray
    image_grid_thw: np.ndarray
    key: np.ndarray
    temperature: float
    max_new_tokens: int
    is_new: bool
    keep: StopRule
    view: TurnView
    share_key: Hashable | None = None
    share_length: int | None = None
    begin: str = ""


@dataclasses.dataclass(frozen=True)
class SampledTurn:
    """One turn, exactly as sampled.

    Attributes:
      slot: the request's slot.
      ids: int32[m], m >= 1, the stopping token included.
      logps: float32[m], under the sampler's distribution (`sampling.py`); 0 for a script.
      ended: one of ENDINGS.
      tail: text that the policy wrote on behind its first action; it is in no array.
    """

    slot: int
    ids: np.ndarray
    logps: np.ndarray
    ended: str
    tail: str = ""


class TurnSampler(Protocol):
    """A policy: any number of requests go in, finished turns come out in any order.

    Attributes:
      counts: whatever the policy counts, from its beginning; see `figures.RolloutFigures`.
    """

    counts: collections.Counter[str]

    def submit(self, request: Request) -> None:
        """Queues one turn. A slot has at most one turn queued."""
        ...

    def collect(self) -> list[SampledTurn]:
        """Runs until at least one queued turn is finished; [] only if none is queued."""
        ...

    def discard(self) -> None:
        """Forgets every queued turn: the episodes that asked for them ended early."""
        ...


class ScriptedPolicy:
    """Answers each turn by a function of what the episode looks like as text.

    Args:
      script: view of the episode -> text of the turn. A text without an action gets an end id.
      tokenizer: with `encode_plain` and `im_end_id`.
    """

    def __init__(self, script: Callable[[TurnView], str], tokenizer):
        self._script = script
        self._tokenizer = tokenizer
        self._queue: list[Request] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def submit(self, request: Request) -> None:
        """Queues one turn."""
        self._queue.append(request)

    def collect(self) -> list[SampledTurn]:
        """Answers every queued turn."""
        queue, self._queue = self._queue, []
        return [self._answer(request) for request in queue]

    def discard(self) -> None:
        """Forgets every queued turn."""
        self._queue = []

    def _answer(self, request: Request) -> SampledTurn:
        return turn_of_text(
            request, self._script(request.view).removeprefix(request.begin), self._tokenizer
        )


def turn_of_text(request: Request, text: str, tokenizer, *, is_cut: bool = False) -> SampledTurn:
    """A text that a script or a server wrote -> the turn, cut behind its first action.

    Args:
      tokenizer: with `encode_plain`, `decode` and `im_end_id`.
      is_cut: the writer had no room to end; without an action the turn then ended by `length`.
    Returns:
      The turn, log-probs 0. A text without an action gets an end id.
    """
    ids = [int(i) for i in tokenizer.encode_plain(text)]
    stop = request.keep(ids, 0)
    tail = ""
    if stop is not None:
        tail = tokenizer.decode(ids[stop[0] :])
        ids, ended = ids[: stop[0]], stop[1]
    elif is_cut and ids:
        ended = "length"
    else:
        ids, ended = [*ids, tokenizer.im_end_id], "eos"
    if len(ids) > request.max_new_tokens:
        ids, ended, tail = ids[: request.max_new_tokens], "length", ""
    return SampledTurn(
        slot=request.slot,
        ids=np.asarray(ids, np.int32),
        logps=np.zeros(len(ids), np.float32),
        ended=ended,
        tail=tail,
    )
