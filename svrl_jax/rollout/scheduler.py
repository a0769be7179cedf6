"""Requests -> sampled turns with our own model: which slots are prefilled and decoded when.

Continuous: a finished turn frees its lane at once, and the next context takes it, while the
others go on decoding. Which requests share a program changes nothing but rounding, since a draw's
key depends on its episode, turn and position only.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.models.qwen_vl.model import QwenVL
from svrl_jax.rollout.engine import Append, Engine, Lane
from svrl_jax.rollout.policy import Request, SampledTurn

ENOUGH_TO_PREFILL = 8  # requests that are worth a prefill program while others decode ...
PATIENCE = 2  # ... and decode calls after which fewer are


@dataclasses.dataclass
class _Active:
    """A turn being sampled: its first token's index and what was drawn so far."""

    request: Request
    start: int
    ids: list[int] = dataclasses.field(default_factory=list)
    logps: list[float] = dataclasses.field(default_factory=list)


class EnginePolicy:
    """A `TurnSampler` over an `Engine`.

    Args:
      model: structure and first parameters.
      banned: ids that are never drawn (`banned_ids`); the trainer must be given the same.
      config: `config.rollout` (slots, lanes, budget, decode_chunk, cache_dtype, top_k, top_p).
      pausing: ids behind which a turn may be over (`episodes.pausing_ids`); changes no token.
      prepare: given parameters -> those to sample from, on the sampler's device; None takes them as
        they are.

    Attributes:
      counts: the engine's, and `held`: tokens that a slot held already when a turn was queued.
    """

    def __init__(
        self,
        model: QwenVL,
        banned: Sequence[int],
        config: ConfigDict,
        prepare: Callable[[nnx.State], nnx.State] | None = None,
        pausing: Sequence[int] = (),
    ):
        is_banned, is_pausing = np.zeros((2, model.config.text_config.vocab_size), bool)
        is_banned[list(banned)], is_pausing[list(pausing)] = True, True
        self.engine = Engine(
            model,
            banned=is_banned,
            slots=config.slots,
            lanes=config.lanes,
            capacity=config.budget,
            decode_chunk=config.decode_chunk,
            cache_dtype=config.cache_dtype,
            pausing=is_pausing,
            top_k=config.top_k,
            top_p=config.top_p,
        )
        self.counts = self.engine.counts
        self._pending: collections.deque[Request] = collections.deque()
        self._ready: collections.deque[_Active] = collections.deque()
        self._active: list[_Active] = []
        self._beginnings: dict[int, Request] = {}  # slot -> the request that began its context
        self._num_waited = 0
        self._prepare = prepare

    def set_params(self, params: nnx.State) -> None:
        """Samples from these parameters from now on.

        Raises:
          ValueError: turns are still queued; they would mix two policies.
        """
        if self._pending or self._ready or self._active:
            raise ValueError("set_params while turns are queued; collect them first")
        self._beginnings = {}
        self.engine.set_params(params if self._prepare is None else self._prepare(params))

    @contextlib.contextmanager
    def lent(self, params: nnx.State) -> Iterator[None]:
        """Samples from other parameters within the block, and from those of before behind it.

        Raises:
          ValueError: turns are queued.
        """
        before = self.engine.params
        self.set_params(params)
        try:
            yield
        finally:
            self.discard()
            self.engine.set_params(before)

    def submit(self, request: Request) -> None:
        """Queues one turn.

        Raises:
          ValueError: no room for the turn in the slot, or nothing to append.
        """
        held = 0 if request.is_new else int(self.engine.lengths[request.slot])
        if held + len(request.ids) + request.max_new_tokens > self.engine.capacity:
            raise ValueError(
                f"slot {request.slot}: {held} tokens held, {len(request.ids)} new and up to "
                f"{request.max_new_tokens} sampled are more than {self.engine.capacity}"
            )
        if not len(request.ids) or request.max_new_tokens < 1:
            raise ValueError("a request appends at least one token and samples at least one")
        self.counts["held"] += held
        self._pending.append(request)

    def collect(self) -> list[SampledTurn]:
        """Runs until at least one queued turn is finished; [] only if none is queued."""
        while self._pending or self._ready or self._active:
            self._fill_lanes()
            ids, logps = self.engine.decode([_lane(one) for one in self._active])
            finished = []
            for one, row_ids, row_logps in zip(self._active, ids, logps, strict=True):
                turn = self._advance(one, row_ids, row_logps)
                if turn is not None:
                    finished.append(turn)
            if finished:
                done = {turn.slot for turn in finished}
                self._active = [one for one in self._active if one.request.slot not in done]
                return finished
        return []

    def discard(self) -> None:
        """Forgets every queued turn; their slots' contexts are emptied when next taken."""
        self._pending.clear()
        self._ready.clear()
        self._active = []
        self._beginnings = {}
        self._num_waited = 0

    def _fill_lanes(self) -> None:
        """Gives free lanes to contexts that are ready, and makes pending ones ready if need be."""
        free = self.engine.lanes - len(self._active)
        short = free - len(self._ready)
        if short > 0 and self._pending:
            # A prefill for one or two rows costs as much as for eight: wait a little for more.
            self._num_waited += 1
            is_enough = len(self._pending) >= min(short, ENOUGH_TO_PREFILL)
            if is_enough or self._num_waited > PATIENCE or not (self._active or self._ready):
                self._prefill()
                self._num_waited = 0
        while self._ready and len(self._active) < self.engine.lanes:
            self._active.append(self._ready.popleft())

    def _prefill(self) -> None:
        """Appends every pending request's tokens; a shared prompt once, then copied."""
        batch, self._pending = list(self._pending), collections.deque()
        for request in batch:
            if request.is_new:
                self._beginnings.pop(request.slot, None)
                self.engine.clear(request.slot)
        leaders: dict[object, Request] = {}
        followers: dict[int, list[int]] = collections.defaultdict(list)
        appends, rests = [], []
        for request in batch:
            count = len(request.ids)
            if request.is_new and request.share_key is not None:
                count = request.share_length or count
                leader = leaders.get(request.share_key)
                donor = self._donor(request, count) if leader is None else None
                if donor is not None:
                    # Its last hidden state is another token's, so the last token is fed again.
                    self.engine.copy(donor, [request.slot], count - 1)
                    rests.append(_append(request, count - 1, len(request.ids)))
                    continue
                if count < len(request.ids):
                    rests.append(_append(request, count, len(request.ids)))
                if leader is not None:
                    followers[leader.slot].append(request.slot)
                    continue
                leaders[request.share_key] = request
            appends.append(_append(request, 0, count))
        self.engine.append(appends)
        for source, targets in followers.items():
            self.engine.copy(source, targets)
        self.engine.append(rests)  # what stands behind a shared beginning
        self._beginnings.update({r.slot: r for r in batch if r.is_new and r.share_key is not None})
        for request in batch:
            self._ready.append(_Active(request, int(self.engine.lengths[request.slot])))

    def _donor(self, request: Request, count: int) -> int | None:
        """A slot that holds the first `count` tokens of a request since an earlier prefill."""
        if count < 2 or request.ids[count - 1] == self.engine.config.image_token_id:
            return None
        for slot, other in self._beginnings.items():
            # Keys of another call may mean another prompt: what counts is what was appended.
            if (
                other.share_key == request.share_key
                and self.engine.lengths[slot] >= count
                and np.array_equal(other.ids[:count], request.ids[:count])
                and np.array_equal(other.pixel_values, request.pixel_values)
            ):
                return slot
        return None

    def _advance(self, one: _Active, ids: np.ndarray, logps: np.ndarray) -> SampledTurn | None:
        """Adds a chunk to a turn; returns it if it is finished, the overshoot undone."""
        request, seen = one.request, len(one.ids)
        room = request.max_new_tokens - seen
        one.ids += ids[:room].tolist()
        one.logps += logps[:room].tolist()
        stop = request.keep(one.ids, seen)
        if stop is None and len(one.ids) < request.max_new_tokens:
            return None
        count, ended = (len(one.ids), "length") if stop is None else stop
        self.engine.truncate(request.slot, one.start + count)
        return SampledTurn(
            slot=request.slot,
            ids=np.asarray(one.ids[:count], np.int32),
            logps=np.asarray(one.logps[:count], np.float32),
            ended=ended,
        )


def banned_ids(config: QwenVLConfig, num_used: int) -> tuple[int, ...]:
    """Ids that no policy may write: picture tokens, and rows of the vocabulary without a text.

    Sampler and trainer leave the same ids out of the softmax, or their log-probs differ.

    Args:
      num_used: `len(tokenizer)`; the model's head may have more rows.
    """
    pictures = {
        config.image_token_id,
        config.video_token_id,
        config.vision_start_token_id,
        config.vision_end_token_id,
    }
    size = config.text_config.vocab_size
    return tuple(sorted({i for i in pictures if i < num_used} | set(range(num_used, size))))


def _append(request: Request, start: int, stop: int) -> Append:
    """Tokens [start, stop) of a request; its pictures go with the first of them."""
    return Append(
        slot=request.slot,
        ids=request.ids[start:stop],
        positions=request.positions[:, start:stop],
        pixel_values=request.pixel_values if start == 0 else request.pixel_values[:0],
        image_grid_thw=request.image_grid_thw if start == 0 else request.image_grid_thw[:0],
    )


def _lane(one: _Active) -> Lane:
    request = one.request
    return Lane(
        slot=request.slot,
        next_position=request.next_position + len(one.ids),
        key=request.key,
        temperature=request.temperature,
        limit=request.max_new_tokens - len(one.ids),
    )
