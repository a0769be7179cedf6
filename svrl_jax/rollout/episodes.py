"""Tasks and prompts -> finished episodes: the loop between a policy and the search tools.

This is the host's side: it knows turns, limits and the budget, and nothing of caches or devices. A
policy turn is sampled; its text is read by the grammar; a search runs on a worker thread while
other episodes go on; what it found is appended as the next non-policy turn.

    prompt | turn 1 ... <|im_end|> \\n | <|im_start|>user \\n <information> ... | turn 2 ...
    mask 0 |   1            0          |                 0                      |   1
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from ml_collections import ConfigDict

from svrl_jax import rng
from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.processing.images import ImageProcessor
from svrl_jax.protocol import parse, render
from svrl_jax.rollout import tools as tools_lib
from svrl_jax.rollout.figures import RolloutFigures
from svrl_jax.rollout.information import ToolPictures, information_pieces
from svrl_jax.rollout.policy import Request, SampledTurn, TurnSampler, TurnView
from svrl_jax.rollout.transcript import Transcript
from svrl_jax.types import Episode, ParsedTurn, Prompt, SearchItem, Task, ToolCall, Turn

TURN_END = "<|im_end|>\n"  # what the chat template puts behind an assistant's turn


def run_episodes(
    tasks: Sequence[Task],
    prompts: Sequence[Prompt],
    policy: TurnSampler,
    tools: tools_lib.Tools | None,
    tokenizer,
    model_config: QwenVLConfig,
    rollout_config: ConfigDict,
    search_config: ConfigDict,
    *,
    seed: int,
    step: int,
    group_size: int,
    regime: str,
    temperature: float,
    query_choice: str,
    policy_name: str,
    progress: Callable[[int, int], None] | None = None,
    first_sample: int = 0,
    on_episode: Callable[[Episode], None] | None = None,
    attempt: int = 0,
    processor: ImageProcessor | None = None,
    figures: RolloutFigures | None = None,
) -> list[list[Episode]]:
    """Runs `group_size` episodes of every task to their end.

    Args:
      tasks: [P].
      prompts: [P], of the same tasks in the same order.
      policy: what answers a turn.
      tools: the searches; None only where the regime is `direct`.
      tokenizer: encodes templates and tool text, decodes turns.
      model_config: gives the position rule its picture token and merge size.
      rollout_config, search_config: `config.rollout` and `config.search`.
      seed, step: with the task, the sample and the turn they name every draw.
      group_size: G, at least 1.
      regime: one of `prompts.REGIMES`; `direct` has no tools.
      temperature: of the policy; 0 is greedy.
      query_choice: which well-formed proposal runs: `random` (one drawn with the episode's own key)
        or `first`.
      policy_name: recorded in the episodes.
      progress: called with (finished, total) whenever an episode ends.
      first_sample: number of a task's first sample; its draws are those of that number.
      on_episode: takes each episode as it ends, in whatever order that happens.
      attempt: 0, or how often these episodes are drawn anew (a group without spread); other
        attempts have other keys.
      processor: cuts the items' thumbnails; needed where items have any and
        `rollout.tool_picture_pixels` is above 0.
      figures: takes this call's.
    Returns:
      [P][G] episodes. Which slot or batch an episode ran in leaves no trace in it.
    Raises:
      ValueError: tasks and prompts do not belong together, or an unknown choice.
    """
    if [t.id for t in tasks] != [p.task_id for p in prompts]:
        raise ValueError("prompts must be those of the tasks, in the same order")
    if any(p.regime != regime for p in prompts):
        raise ValueError(f"every prompt must be of the regime {regime!r}")
    if query_choice not in ("random", "first"):
        raise ValueError(f"query_choice must be 'random' or 'first', got {query_choice!r}")
    rules = Rules(
        tokenizer=tokenizer,
        rollout=rollout_config,
        search=search_config,
        seed=seed,
        step=step,
        regime=regime,
        temperature=temperature,
        query_choice=query_choice,
        policy_name=policy_name,
        attempt=attempt,
        pictures=tool_pictures(processor, rollout_config),
    )
    running = make_running(
        tasks, prompts, range(first_sample, first_sample + group_size), model_config, rules
    )
    with tools_lib.ToolRunner(
        tools, timeout_s=rollout_config.tool_timeout_s, workers=rollout_config.slots
    ) as runner:
        try:
            run_all(running, policy, runner, rollout_config, progress, on_episode, figures)
        except BaseException:
            policy.discard()  # or its next user would find turns of these episodes
            raise
    episodes = [one.finished() for one in running]
    return [episodes[i : i + group_size] for i in range(0, len(episodes), group_size)]


class StopRule:
    """Where a turn ends: the token that completes an action in the *decoded* text, or an end id.

    Tags are plain text, and their borders merge with neighbours into one token, so tags are never
    looked for in ids. Every tag ends in `>`, which is one byte and so lies within one token: the
    text is decoded at tokens that hold one.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._end_ids = frozenset(int(i) for i in tokenizer.eos_ids)
        self._closes: dict[int, bool] = {}

    def __call__(self, ids: Sequence[int], start: int = 0) -> tuple[int, str] | None:
        """(number of tokens kept, `action` | `eos`), or None while the turn goes on.

        Args:
          ids: the turn's tokens so far.
          start: tokens before it were looked at before and did not end the turn.
        """
        for i in range(start, len(ids)):
            if ids[i] in self._end_ids:
                return i + 1, "eos"
            if self._may_close(ids[i]):
                text = self._tokenizer.decode(ids[: i + 1])
                if parse.action_end(text) is not None:
                    return i + 1, "action"
        return None

    def _may_close(self, token_id: int) -> bool:
        if token_id not in self._closes:
            self._closes[token_id] = ">" in self._tokenizer.decode([token_id])
        return self._closes[token_id]


def pausing_ids(tokenizer) -> tuple[int, ...]:
    """Ids behind which `StopRule` may end a turn: end ids, and tokens that hold a `>`."""
    closing = (i for i in range(len(tokenizer)) if ">" in tokenizer.decode([i]))
    return tuple(sorted({*closing, *(int(i) for i in tokenizer.eos_ids)}))


@dataclasses.dataclass(frozen=True)
class Rules:
    """What all episodes of a call have in common."""

    tokenizer: object
    rollout: ConfigDict
    search: ConfigDict
    seed: int
    step: int
    regime: str
    temperature: float
    query_choice: str
    policy_name: str
    attempt: int = 0
    pictures: ToolPictures | None = None

    @property
    def max_turns(self) -> int:
        """Every allowed tool call, and the turn that answers or asks for one too many."""
        return self.rollout.max_image_searches + self.rollout.max_text_searches + 1


def tool_pictures(
    processor: ImageProcessor | None, rollout_config: ConfigDict
) -> ToolPictures | None:
    """What cuts thumbnails; None where none are shown."""
    if processor is None or not rollout_config.tool_picture_pixels:
        return None
    return ToolPictures(processor, rollout_config.tool_picture_pixels)


def make_running(tasks, prompts, samples, model_config, rules: Rules) -> list[Running]:
    """An episode at its beginning for each task and sample number, task by task."""
    names = [(p, g) for p in range(len(tasks)) for g in samples]
    hashes = [rng.task_hash(task.id) for task in tasks]
    rows = [
        (rules.seed, rules.step, hashes[p], g, turn, rules.attempt)
        for p, g in names
        for turn in range(rules.max_turns)
    ]
    keys = rng.turn_keys(rows).reshape(len(names), rules.max_turns, 2)
    stop_rule = StopRule(rules.tokenizer)
    return [
        Running(rules, tasks[p], prompts[p], g, p, keys[i], stop_rule, model_config)
        for i, (p, g) in enumerate(names)
    ]


def run_all(
    running: list[Running],
    policy: TurnSampler,
    runner: tools_lib.ToolRunner,
    config: ConfigDict,
    progress: Callable[[int, int], None] | None = None,
    on_episode: Callable[[Episode], None] | None = None,
    figures: RolloutFigures | None = None,
) -> None:
    """Moves every episode to its end: free slots are filled, turns sampled, tools waited for.

    Args:
      config: config.rollout. With `deterministic`, tool results come in when no turn is being
        sampled and every call is over, in the order of the calls: which episodes share a program
        then does not depend on how long tools take.
    """
    queue = collections.deque(running)
    free = collections.deque(range(config.slots))
    sampling: dict[int, Running] = {}  # by slot
    waiting: dict[int, tuple[Running, tools_lib.PendingCall]] = {}  # by slot
    num_done = 0
    figures = RolloutFigures() if figures is None else figures
    figures.begin(config.slots, policy.counts)
    last = time.perf_counter()

    def settle(slot, one):
        """Sends an episode's next turn to the policy, or takes it off its slot if it is over."""
        nonlocal num_done
        if one.end_reason is None:
            sampling[slot] = one
            policy.submit(one.request(slot))
            return
        free.append(slot)
        num_done += 1
        if on_episode is not None:
            on_episode(one.finished())
        if progress is not None:
            progress(num_done, len(running))

    def wait(calls):
        start = time.perf_counter()
        tools_lib.wait_for_any(calls)
        figures.counts["tool_wait_s"] += time.perf_counter() - start

    while queue or sampling or waiting:
        while queue and free:
            settle(free.popleft(), queue.popleft())
        if config.deterministic and waiting and not sampling:
            while open_calls := [c for _, c in waiting.values() if not c.is_over()]:
                wait(open_calls)
        is_tick = not (config.deterministic and sampling)
        for slot in [s for s, (_, call) in waiting.items() if is_tick and call.is_over()]:
            one, call = waiting.pop(slot)
            one.add_tool_answer(call.answer())
            settle(slot, one)
        if sampling:
            for sampled in policy.collect():
                figures.counts["sampled"] += len(sampled.ids)
                one = sampling.pop(sampled.slot)
                one.add_turn(sampled)
                if one.wanted_call is None:
                    settle(sampled.slot, one)
                else:
                    call = runner.start(*one.wanted_call, one.task, one.tools_left_s)
                    waiting[sampled.slot] = (one, call)
        elif waiting:
            wait([call for _, call in waiting.values()])
        now = time.perf_counter()
        figures.counts["slot_s"] += (now - last) * (len(sampling) + len(waiting))
        last = now
    figures.end()


class Running:
    """One episode under way.

    Attributes:
      task: its question.
      end_reason: None while it goes on.
      wanted_call: (tool, query) to run next, or None.
      transcript, turns: what has been so far.
      temperature: of the next turn; the later ones have the rules'.
      last_turn: number of turns at which it is broken off, or None.
      shared: (key, number of leading tokens) of a past that other episodes have too, or None.
    """

    def __init__(self, rules, task, prompt, sample, prompt_index, keys, stop_rule, model_config):
        self.task: Task = task
        self.end_reason: str | None = None
        self.wanted_call: tuple[str, str] | None = None
        self.temperature: float = rules.temperature
        self.last_turn: int | None = None
        self.shared: tuple[Hashable, int] | None = None
        self._rules: Rules = rules
        self._prompt: Prompt = prompt
        self._sample = sample
        self._prompt_index = prompt_index
        self._keys = keys
        self._stop_rule = stop_rule
        self._config = model_config
        self.transcript = Transcript(prompt, model_config)
        self.turns: list[Turn] = []
        self._num_sent = 0  # tokens that the policy's context holds
        self._asked_at = 0.0  # by time.perf_counter
        self._items: tuple[SearchItem, ...] = ()  # of the latest tool output
        self._turn_end = rules.tokenizer.encode(TURN_END)
        # A prompt without room for an answer is over before it begins; the record says so.
        if self._room() < rules.rollout.answer_reserve:
            self.end_reason = "budget"

    def request(self, slot: int) -> Request:
        """What the policy is asked next: the tokens it has not seen yet, then a turn."""
        ids, positions = self.transcript.since(self._num_sent)
        pixel_values, grids = self.transcript.pictures(self._num_sent)
        is_new = self._num_sent == 0
        self._num_sent = len(self.transcript)
        share_key, share_length = self._prompt_index, None
        if self.shared is not None:
            share_key, share_length = self.shared
        self._asked_at = time.perf_counter()
        return Request(
            slot=slot,
            ids=ids,
            positions=positions,
            next_position=self.transcript.next_position,
            pixel_values=pixel_values,
            image_grid_thw=grids,
            key=self._keys[len(self.turns)],
            temperature=self.temperature,
            max_new_tokens=min(self._rules.rollout.max_turn_tokens, self._room()),
            is_new=is_new,
            keep=self._stop_rule,
            view=TurnView(self.task, self._rules.regime, tuple(self.turns), self._items),
            share_key=share_key if is_new else None,
            share_length=share_length if is_new else None,
        )

    def add_turn(self, sampled: SampledTurn) -> None:
        """Reads a sampled turn and decides what comes next: a tool call, or the end."""
        seconds = time.perf_counter() - self._asked_at
        start = len(self.transcript)
        self.transcript.append_sampled(sampled.ids, sampled.logps)
        self._num_sent = len(self.transcript)
        had_end_id = sampled.ended == "eos"
        text = self._rules.tokenizer.decode(sampled.ids[:-1] if had_end_id else sampled.ids)
        parsed = parse.parse_turn(
            text + sampled.tail,
            num_queries=self._rules.rollout.num_queries,
            items_to_verify=self._items_to_verify(),
            regime=parse.grammar_of(self._rules.regime),
            # What the stopping token brought along behind the tag is no violation; a tail is.
            ended=sampled.ended == "action" and not sampled.tail,
        )
        self.transcript.append_environment(
            self._rules.tokenizer.encode("\n") if had_end_id else self._turn_end
        )
        self.turns.append(
            Turn(
                text=text,
                start=start,
                stop=start + len(sampled.ids),
                end=len(self.transcript),
                parsed=parsed,
                items_to_verify=self._items_to_verify(),
                seconds=seconds,
            )
        )
        self.temperature = self._rules.temperature
        self._decide(parsed, sampled.ended)
        if len(self.turns) == self.last_turn and self.end_reason is None:
            self.end_reason, self.wanted_call = "budget", None

    def add_tool_answer(self, answer: tools_lib.ToolAnswer) -> None:
        """Appends what a tool found, as far as it fits, or ends the episode for want of room."""
        tool, query = self.wanted_call
        self.wanted_call = None
        rules, room = self._rules, self._room()
        texts = render.render_items(tool, answer.items, rules.search)
        if rules.pictures is None and rules.rollout.tool_picture_pixels:
            if any(item.picture is not None for item in answer.items):
                raise ValueError(
                    "items have pictures and no processor is given: give one, or set "
                    "config.rollout.tool_picture_pixels to 0"
                )
        prefix, pieces, suffix = information_pieces(
            rules.tokenizer, texts, answer.status, answer.items, rules.pictures, self._config
        )
        room -= rules.rollout.answer_reserve + len(prefix) + len(suffix)
        num_shown = int(np.sum(np.cumsum([len(piece) for piece in pieces]) <= room))
        # Items leave from the last one on, whole; a note (no items at all) fits or does not.
        if num_shown == 0:
            self.end_reason = "budget"
        else:
            self.transcript.append_environment(prefix)
            for piece in pieces[:num_shown]:
                self.transcript.append_environment(
                    piece.ids, piece.pixel_values, piece.image_grid_thw
                )
            self.transcript.append_environment(suffix)
        self._items = answer.items[:num_shown]
        self.turns[-1] = dataclasses.replace(
            self.turns[-1],
            end=len(self.transcript),
            call=ToolCall(
                tool=tool,
                query=query,
                items=self._items,
                status=answer.status,
                error=answer.error,
                num_found=len(answer.items),
                seconds=answer.seconds,
                failure=answer.failure,
            ),
        )

    @property
    def tools_left_s(self) -> float:
        """What is left of the episode's seconds for tool calls; inf without a limit."""
        limit = self._rules.rollout.episode_tools_timeout_s
        used = sum(turn.call.seconds for turn in self.turns if turn.call is not None)
        return limit - used if limit else float("inf")

    def set_items(self, items: tuple[SearchItem, ...]) -> None:
        """What the latest search is taken to have shown."""
        self._items = items

    def finished(self) -> Episode:
        """The record of an episode that is over."""
        rules = self._rules
        return Episode(
            task_id=self.task.id,
            step=rules.step,
            sample=self._sample,
            seed=rules.seed,
            policy=rules.policy_name,
            regime=rules.regime,
            prompt_length=len(self._prompt.ids),
            turns=tuple(self.turns),
            end_reason=self.end_reason,
            answer=self.turns[-1].parsed.answer if self.end_reason == "answered" else None,
            temperature=rules.temperature,
            attempt=rules.attempt,
            **self.transcript.arrays(),
        )

    def _room(self) -> int:
        """Tokens that a turn may take now, if its end is to fit behind it."""
        return self._rules.rollout.budget - len(self.transcript) - len(self._turn_end)

    def _items_to_verify(self) -> int | None:
        return len(self._items) if any(t.call for t in self.turns) else None

    def _decide(self, parsed: ParsedTurn, ended: str) -> None:
        if ended == "length":
            self.end_reason = "budget"
        elif parsed.is_hard:
            self.end_reason = "malformed"
        elif parsed.action == "answer":
            self.end_reason = "answered"
        elif self._is_over_limit(parsed.action):
            self.end_reason = "tool_limit"
        elif parsed.action == "image_search":
            self.wanted_call = ("image_search", "")
        else:
            self.wanted_call = ("text_search", self._choose_query(parsed.proposals))

    def _is_over_limit(self, tool: str) -> bool:
        limits = {
            "image_search": self._rules.rollout.max_image_searches,
            "text_search": self._rules.rollout.max_text_searches,
        }
        made = sum(t.call is not None and t.call.tool == tool for t in self.turns)
        return made >= limits[tool]

    def _choose_query(self, proposals: tuple[str, ...]) -> str:
        if self._rules.query_choice == "first":
            return proposals[0]
        turn = len(self.turns) - 1
        rules = self._rules
        attempt = (rules.attempt,) if rules.attempt else ()
        draw = rng.host_rng(rules.seed, rules.step, self.task.id, self._sample, turn, *attempt)
        return proposals[int(draw.integers(len(proposals)))]
