"""A trace of another agent -> an Episode of ours, for evaluation, annotation and the viewer.

Turn texts are tokenised here, as there are no sampled ids, and log-probs are 0: such an episode is
for reading, never for training. Our grammar reads the turns, so what the other protocol lacks
(masks, five queries) shows as violations.
"""

from __future__ import annotations

import numpy as np
from ml_collections import ConfigDict

from svrl_jax.data.traces import Trace
from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.protocol import parse, render
from svrl_jax.rollout.episodes import TURN_END
from svrl_jax.rollout.information import information_pieces
from svrl_jax.rollout.transcript import Transcript
from svrl_jax.types import Episode, ParsedTurn, Prompt, Turn


def episode_of_trace(
    trace: Trace,
    prompt: Prompt,
    tokenizer,
    model_config: QwenVLConfig,
    rollout_config: ConfigDict,
    search_config: ConfigDict,
    *,
    policy_name: str,
) -> Episode:
    """Plays a trace into an episode.

    Args:
      trace: what was recorded.
      prompt: of the trace's task, with its picture where that is at hand.
      tokenizer, model_config: of whatever shall read the episode.
      rollout_config: gives the allowed calls and the number of queries.
      search_config: how items are written.
      policy_name: of the agent that made the trace.
    Returns:
      Episode with every recorded turn. Its end reason is by our rules where they say one
      (`answered`, `malformed`, `tool_limit`), else `budget`, as where the run broke off.
    """
    transcript = Transcript(prompt, model_config)
    turns: list[Turn] = []
    end_reason = "budget"
    for text, searched in trace.turns:
        items_to_verify = None
        if turns and turns[-1].call is not None:
            items_to_verify = len(turns[-1].call.items)
        parsed = parse.parse_turn(
            text,
            num_queries=rollout_config.num_queries,
            items_to_verify=items_to_verify,
            regime=prompt.regime,
            ended=False,
        )
        start = len(transcript)
        ids = tokenizer.encode_plain(text)
        transcript.append_sampled(ids, np.zeros(len(ids), np.float32))
        transcript.append_environment(tokenizer.encode(TURN_END))
        call = None if searched is None else searched.call
        if call is not None:
            texts = render.render_items(call.tool, call.items, search_config)
            prefix, items, suffix = information_pieces(tokenizer, texts, call.status)
            transcript.append_environment(np.concatenate([prefix, *(i.ids for i in items), suffix]))
        end_reason = _end_reason(parsed, turns, rollout_config)
        turns.append(
            Turn(text, start, start + len(ids), len(transcript), parsed, call, items_to_verify)
        )
    return Episode(
        task_id=trace.task.id,
        step=0,
        sample=0,
        seed=0,
        policy=policy_name,
        regime=prompt.regime,
        **transcript.arrays(),
        prompt_length=len(prompt.ids),
        turns=tuple(turns),
        end_reason=end_reason,
        answer=trace.answer if end_reason == "answered" else None,
        temperature=1.0,
    )


def _end_reason(parsed: ParsedTurn, before: list[Turn], config: ConfigDict) -> str:
    if parsed.is_hard:
        return "malformed"
    if parsed.action == "answer":
        return "answered"
    limits = {
        "image_search": config.max_image_searches,
        "text_search": config.max_text_searches,
    }
    made = sum(t.call is not None and t.call.tool == parsed.action for t in before)
    return "tool_limit" if made >= limits[parsed.action] else "budget"
