"""A finished episode and another query, other items or a fresh draw -> how it would have gone on.

Test-time scaling runs many queries from one point of an episode; whether a mask matters is asked by
going on with the kept items alone. A branch has its trunk's past, token by token, and its own
future under the same rules. What the branches of one point have in common is computed once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ml_collections import ConfigDict

from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.processing.images import ImageProcessor
from svrl_jax.rollout import episodes as episodes_lib
from svrl_jax.rollout import tools as tools_lib
from svrl_jax.rollout.policy import TurnSampler
from svrl_jax.rollout.transcript import Transcript
from svrl_jax.types import Episode, Prompt, SearchItem, Task


@dataclasses.dataclass(frozen=True)
class Branch:
    """Where an episode leaves its trunk.

    Exactly one of `query`, `items` and neither says how: neither draws the next turn afresh.

    Attributes:
      task, prompt: the trunk's.
      trunk: a finished episode.
      num_turns: turns that are kept, in [0, turns of the trunk].
      sample: number of the branch; names its draws and stands in its record.
      query: the last kept turn, a text search, runs this query instead of its own.
      items: the last kept turn's search showed these instead of what it found.
      temperature: of the first new turn; None takes that of the rules.
      origin: (episode, number of its turns) that the branch has in common with its siblings, where
        that is less than `num_turns` of the trunk; None: all of them.
      only_turn: break the branch off (`budget`) behind its first new turn, before any search.
    """

    task: Task
    prompt: Prompt
    trunk: Episode
    num_turns: int
    sample: int
    query: str | None = None
    items: tuple[SearchItem, ...] | None = None
    temperature: float | None = None
    only_turn: bool = False
    origin: tuple[Episode, int] | None = None

    def __post_init__(self):
        """Raises ValueError where the parts do not fit."""
        if self.query is not None and self.items is not None:
            raise ValueError("a branch has another query or other items, not both")
        if not 0 <= self.num_turns <= len(self.trunk.turns):
            raise ValueError(f"the trunk has {len(self.trunk.turns)} turns, not {self.num_turns}")
        if self.query is None and self.items is None:
            return
        last = self.trunk.turns[self.num_turns - 1] if self.num_turns else None
        if last is None or last.parsed.action not in ("text_search", "image_search"):
            raise ValueError("only a turn that searches can have another query or other items")
        if self.query is not None and last.parsed.action != "text_search":
            raise ValueError("only a text search has a query")


def run_branches(
    branches: Sequence[Branch],
    policy: TurnSampler,
    tools: tools_lib.Tools | None,
    tokenizer,
    model_config: QwenVLConfig,
    rollout_config: ConfigDict,
    search_config: ConfigDict,
    *,
    temperature: float,
    query_choice: str,
    processor: ImageProcessor | None = None,
) -> list[Episode]:
    """Runs every branch to its end.

    Args:
      branches: any number; those of one trunk that leave it at one turn share its tokens.
      policy: as in `run_episodes`.
      tools: run the branches' queries and whatever searches follow.
      tokenizer, model_config, rollout_config, search_config: as in `run_episodes`.
      temperature: of the turns behind the first new one; 0 is greedy.
      query_choice: of later searches.
      processor: as in `run_episodes`.
    Returns:
      One episode a branch, in order; its first turns are the trunk's.
    """
    with tools_lib.ToolRunner(
        tools, timeout_s=rollout_config.tool_timeout_s, workers=rollout_config.slots
    ) as runner:
        running, calls = [], []
        for branch in branches:
            trunk = branch.trunk
            rules = episodes_lib.Rules(
                tokenizer=tokenizer,
                rollout=rollout_config,
                search=search_config,
                seed=trunk.seed,
                step=trunk.step,
                regime=trunk.regime,
                temperature=temperature,
                query_choice=query_choice,
                policy_name=trunk.policy,
                attempt=trunk.attempt,
                pictures=episodes_lib.tool_pictures(processor, rollout_config),
            )
            running.append(_resume(branch, rules, model_config))
            calls.append(
                None
                if branch.query is None
                else runner.start("text_search", branch.query, branch.task)
            )
        for branch, one, call in zip(branches, running, calls, strict=True):
            _answer(branch, one, call)
        try:
            episodes_lib.run_all(running, policy, runner, rollout_config)
        except BaseException:
            policy.discard()
            raise
    return [one.finished() for one in running]


def _resume(branch: Branch, rules: episodes_lib.Rules, model_config) -> episodes_lib.Running:
    """The trunk as it stood at the branch's turn, its last search not yet answered."""
    (one,) = episodes_lib.make_running(
        [branch.task], [branch.prompt], [branch.sample], model_config, rules
    )
    trunk, turns = branch.trunk, list(branch.trunk.turns[: branch.num_turns])
    is_open = branch.query is not None or branch.items is not None
    length = turns[-1].end if turns else trunk.prompt_length
    if is_open:
        last = turns[-1]
        length = last.stop + len(_turn_end(trunk, last.stop, rules.tokenizer))
        turns[-1] = dataclasses.replace(last, call=None, end=length)
        query = last.call.query if branch.query is None and last.call else branch.query
        one.wanted_call = (last.parsed.action, query or "")
    one.transcript = Transcript.of_episode(branch.prompt, model_config, trunk, length)
    one.turns = turns
    one.set_items(() if is_open or not turns or turns[-1].call is None else turns[-1].call.items)
    one.end_reason = None
    if branch.temperature is not None:
        one.temperature = branch.temperature
    if branch.only_turn:
        one.last_turn = branch.num_turns + 1
    # Equal trunks at an equal length: the same tokens, and pictures of the prompt lie before them.
    if branch.origin is not None:
        trunk, count = branch.origin
        length = trunk.turns[count - 1].end if count else trunk.prompt_length
    one.shared = (("branch", id(trunk), length), length)
    return one


def _answer(branch: Branch, one: episodes_lib.Running, call) -> None:
    if branch.items is not None:
        one.add_tool_answer(tools_lib.ToolAnswer(tuple(branch.items), "", 0.0))
    elif call is not None:
        while not call.is_over():
            tools_lib.wait_for_any([call])
        one.add_tool_answer(call.answer())


def _turn_end(trunk: Episode, stop: int, tokenizer):
    """Tokens that the environment put right behind the policy's: fewer where it wrote an end id."""
    has_end_id = int(trunk.ids[stop - 1]) in {int(i) for i in tokenizer.eos_ids}
    return tokenizer.encode("\n" if has_end_id else episodes_lib.TURN_END)
