"""The records that travel from stage to stage: Task -> Prompt -> Episode -> Score -> TrainBatch.

Axes, used in every signature of the package:

| letter | axis                     | letter | axis                  |
|--------|--------------------------|--------|-----------------------|
| P      | prompts (questions)      | N      | query heads           |
| G      | episodes of one prompt   | K      | key/value heads       |
| B      | rows, P * G              | H      | head width            |
| T      | tokens of a row, queries | V      | vocabulary            |
| S      | keys, cache length       | I      | images                |
| D      | model width              | L      | patches of all images |

Ids are the truth: an episode's arrays are written once, when a token is sampled or appended, and
the trainer receives those very arrays. Text is a view of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

SCHEMA_VERSION = 1

# Why an episode ended (SPEC 2). Only `answered` can have r_format 1.
END_REASONS = ("answered", "malformed", "tool_limit", "budget")
# What a policy turn does.
ACTIONS = ("answer", "image_search", "text_search")
# Breaches that are recorded while the episode goes on, and those that end it.
SOFT_VIOLATIONS = (
    "mask_missing",
    "mask_length",
    "query_count",
    "reason_empty",
    "tag_in_reason",
    "tag_in_action",
    "text_between",
    "text_after_action",
)
HARD_VIOLATIONS = ("no_action", "reason_unclosed", "no_usable_query", "tool_not_allowed")


@dataclasses.dataclass(frozen=True)
class Task:
    """One question about one picture.

    Attributes:
      id: unique over the data set; keys and records are made from it.
      question: text as the user would ask it.
      picture: encoded bytes (PNG, JPEG, ...); empty for a text-only task.
      golds: accepted answers, the truth first, then every alias. Never empty strings. Of a
        numerical InfoSeek question the last is the accepted range, written `[low, high]`.
      source: data set and split, such as `world/test`.
      category: kind of question, such as a relation's name.
      entity: names of what the picture shows; empty where unknown. A good query names one of them.
      evidence_ids: document ids that hold the answer, bridge documents of two-hop questions
        included; empty where unknown or where the picture alone answers.
      picture_url: public address of the picture, or None.
      item: id of the distinct (entity, relation) item behind this draw; equals `id` elsewhere.
    """

    id: str
    question: str
    picture: bytes
    golds: tuple[str, ...]
    source: str
    category: str
    entity: tuple[str, ...] = ()
    evidence_ids: tuple[str, ...] = ()
    picture_url: str | None = None
    item: str = ""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A task as the model first sees it.

    Attributes:
      task_id: the task's id.
      regime: `agent` (tools allowed) or `direct` (reason and answer only).
      text: the rendered chat text, one placeholder a picture.
      ids: int32[T], every picture placeholder expanded to its number of merged patches.
      positions: int32[3, T], M-RoPE (t, h, w).
      pixel_values: float32[L, C]; L = 0 without a picture.
      image_grid_thw: int32[I, 3], patches (t, h, w) of each picture in reading order.
    """

    task_id: str
    regime: str
    text: str
    ids: np.ndarray
    positions: np.ndarray
    pixel_values: np.ndarray
    image_grid_thw: np.ndarray


@dataclasses.dataclass(frozen=True)
class SearchItem:
    """One retrieved item, as the policy is shown it.

    Attributes:
      id: document id in its index, or the link of a web page.
      title: page title.
      link: address, or "".
      text: summary written for the query; "" where titles alone are shown.
      score: the index's own score; higher is nearer.
      picture: encoded thumbnail, or None.
      provider: what found it, such as `serper`; "" for the embedded world. Its rank is its place.
    """

    id: str
    title: str
    link: str = ""
    text: str = ""
    score: float = 0.0
    picture: bytes | None = None
    provider: str = ""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One executed tool call.

    Attributes:
      tool: `image_search` or `text_search`.
      query: the executed query; "" for an image search.
      items: the items shown to the policy (after those that did not fit were left out).
      status: `ok`, `empty` (answered, nothing found) or `failed` (did not answer).
      error: short cause when failed, else "".
      num_found: items found before any was left out for room.
      seconds: wall time of the call.
      failure: kind of failure, one of `search.errors.FAILURES`; "" unless failed.
    """

    tool: str
    query: str
    items: tuple[SearchItem, ...]
    status: str = "ok"
    error: str = ""
    num_found: int = 0
    seconds: float = 0.0
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """A policy turn as the grammar reads it (protocol/parse.py).

    Attributes:
      action: one of ACTIONS, or None where no readable action exists (hard violation).
      reason: text inside the reason tags, "" when empty or absent.
      mask: the verify block's 0/1 values; () for an empty block; None where it is missing or
        unreadable.
      proposals: well-formed queries of a text search in written order; () otherwise.
      num_proposals: all proposed queries, well-formed or not.
      answer: text of the answer, or None.
      violations: names from SOFT_VIOLATIONS and HARD_VIOLATIONS, each once.
    """

    action: str | None
    reason: str = ""
    mask: tuple[int, ...] | None = None
    proposals: tuple[str, ...] = ()
    num_proposals: int = 0
    answer: str | None = None
    violations: tuple[str, ...] = ()

    @property
    def is_hard(self) -> bool:
        """True if a violation ends the episode."""
        return any(v in HARD_VIOLATIONS for v in self.violations)


@dataclasses.dataclass(frozen=True)
class Turn:
    """One policy turn and what the environment put behind it.

    Attributes:
      text: decoded policy text of the turn, as sampled (end id left out).
      start, stop: ids[start:stop] are the policy's tokens (loss mask 1).
      end: ids[stop:end] are the environment's tokens behind it (turn end, tool text); the next
        turn starts there.
      parsed: the grammar's reading.
      call: the executed tool call, or None.
      items_to_verify: number of items of the latest tool output before this turn; None if no tool
        was called yet. The required mask length.
      seconds: wall time by the host's clock from the policy's being asked to its turn's being
        there, what it shared with other episodes' turns included; None where it was not taken, as
        in imported traces and older records. No two runs agree in it: equality leaves it out.
    """

    text: str
    start: int
    stop: int
    end: int
    parsed: ParsedTurn
    call: ToolCall | None = None
    items_to_verify: int | None = None
    seconds: float | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Episode:
    """A finished trajectory.

    Attributes:
      task_id, step, sample, seed, attempt: which draw this is; its keys follow from them.
      policy: name of what acted.
      regime: `agent` or `direct`.
      ids: int32[T], prompt, policy and environment tokens in order.
      loss_mask: int32[T], 1 on policy tokens.
      positions: int32[3, T].
      sampler_logps: float32[T], log-prob of each policy token under the sampler's distribution
        (raw logits over `temperature`, banned ids masked); 0 where loss_mask is 0.
      pixel_values, image_grid_thw: every picture in `ids`, in reading order.
      prompt_length: tokens of the first message.
      turns: in order.
      end_reason: one of END_REASONS.
      answer: final answer, or None.
      temperature: 0 means greedy.
      tool_failures: failed calls; an episode with any is flagged.
    """

    task_id: str
    step: int
    sample: int
    seed: int
    policy: str
    regime: str
    ids: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray
    sampler_logps: np.ndarray
    pixel_values: np.ndarray
    image_grid_thw: np.ndarray
    prompt_length: int
    turns: tuple[Turn, ...]
    end_reason: str
    answer: str | None
    temperature: float
    attempt: int = 0

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Executed tool calls in order."""
        return tuple(t.call for t in self.turns if t.call is not None)

    @property
    def has_searched(self) -> bool:
        """True if any tool was called, whatever it returned."""
        return bool(self.calls)

    @property
    def tool_failures(self) -> int:
        """Number of calls that did not answer."""
        return sum(c.status == "failed" for c in self.calls)

    @property
    def violations(self) -> tuple[str, ...]:
        """Every violation of every turn, in order."""
        return tuple(v for t in self.turns for v in t.parsed.violations)


@dataclasses.dataclass(frozen=True)
class OracleLabels:
    """What the training-time verifier says of one episode.

    Attributes:
      items: for each executed call in order, a 0/1 tuple over its shown items.
      queries: for each executed *text* call in order, 0/1 for the executed query.
      proposals: for each text-search turn, 0/1 over its well-formed proposals.
      answered: False if the oracle gave no usable answer; the episode then leaves the group.
    """

    items: tuple[tuple[int, ...], ...]
    queries: tuple[int, ...]
    proposals: tuple[tuple[int, ...], ...]
    answered: bool = True


@dataclasses.dataclass(frozen=True)
class Score:
    """An episode's reward, each factor kept (SPEC 3). All in [0, 1].

    Attributes:
      total: R.
      r_acc, r_aware, r_count, r_qalign, r_salign, r_format: the factors as they came out, switched
        off or not.
      valid: False if the episode leaves the group's statistics and the loss.
      invalid_cause: why, or "".
      labels: oracle labels, or None where no oracle was asked.
      search_free: the instance's label, or None where unknown.
    """

    total: float
    r_acc: float
    r_aware: float
    r_count: float
    r_qalign: float
    r_salign: float
    r_format: float
    valid: bool = True
    invalid_cause: str = ""
    labels: OracleLabels | None = None
    search_free: bool | None = None


@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """Rows for one update; a pytree of arrays, all int32 or float32.

    A row may hold several episodes. Two more axes: M, places for a row's trained tokens; E, places
    for the batch's episodes. Both are padded.

    Attributes:
      ids: int32[B, T], right-padded.
      positions: int32[3, B, T], each episode's own.
      group_id: int32[B, T], equal within what shares a prompt, -1 on padding.
      branch_id: int32[B, T], 0 for a shared prompt, else the episode's branch.
      target_index: int32[B, M], place in its row of each trained policy token.
      predictor_index: int32[B, M], place of the token whose output predicts it: the one before it
        in its episode, which may be a shared prompt's last.
      episode_index: int32[B, M], its episode.
      span_index: int32[B, M], part of the turn it belongs to, by `protocol.spans.SPANS`; for
        metrics only.
      loss_mask: float32[B, M], 1 where there is a trained token, 0 on padding.
      advantages: float32[E].
      old_per_token_logps: float32[B, M], sampler's.
      ref_per_token_logps: float32[B, M], frozen initial policy's.
      pixel_values: float32[L, C], each distinct picture once.
      image_grid_thw: host value, tuple of (t, h, w): fixes shapes.
      image_index: int32[B, T], row of the image features at picture tokens, -1 elsewhere.
    """

    ids: Any
    positions: Any
    group_id: Any
    branch_id: Any
    target_index: Any
    predictor_index: Any
    episode_index: Any
    span_index: Any
    loss_mask: Any
    advantages: Any
    old_per_token_logps: Any
    ref_per_token_logps: Any
    pixel_values: Any
    image_grid_thw: tuple[tuple[int, int, int], ...]
    image_index: Any
