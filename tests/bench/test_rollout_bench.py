"""The rollout benchmark at its smallest: what it samples, counts and reports."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

from svrl_jax.bench import rollout
from svrl_jax.models.qwen_vl.flops import forward_flops
from svrl_jax.models.qwen_vl.model import QwenVL
from svrl_jax.rollout.scheduler import EnginePolicy

TINY = rollout.Workload(2, 2, 56, 8, 3, 5, 7)


def tiny_config():
    config = rollout.small_config()
    return dataclasses.replace(
        config,
        text_config=dataclasses.replace(config.text_config, num_hidden_layers=1),
        vision_config=dataclasses.replace(
            config.vision_config, depth=1, fullatt_block_indexes=(0,)
        ),
    )


def test_every_episode_gets_all_its_turns():
    config = tiny_config()
    inputs = rollout.make_prompts(TINY, config)
    policy = EnginePolicy(
        QwenVL(config, rngs=nnx.Rngs(0)), rollout.banned(config), rollout.rollout_config(TINY)
    )
    played = rollout.play(policy, TINY, inputs)
    assert played.sampled == TINY.num_sampled == 2 * 2 * 3 * 5
    assert 0 < played.busy_sampled <= played.sampled and played.busy_s <= played.seconds
    assert policy.engine.lengths.tolist() == [TINY.episode_tokens] * 4
    assert policy.counts["prefilled"] == 2 * TINY.prompt_tokens + 4 * 2 * TINY.tool_tokens
    assert TINY.prompt_tokens == inputs.prompt_ids.shape[1] == 8 + 2 + 4


def test_what_is_shared_is_counted_once():
    config = rollout.small_config()
    alone = dataclasses.replace(TINY, questions=1, group=1)
    grids = np.asarray([TINY.grid])
    expected = forward_flops(config, [TINY.episode_tokens - 1], grids, alone.num_sampled)
    assert rollout.count_flops(alone, config) == pytest.approx(expected)
    pair = dataclasses.replace(alone, group=2)
    prompt = forward_flops(config, [TINY.prompt_tokens], grids, 0)
    assert rollout.count_flops(pair, config) == pytest.approx(2 * expected - prompt)


def test_episodes_wait_for_their_tools_in_their_slots():
    config = tiny_config()
    slow = dataclasses.replace(TINY, lanes=2, slots=3, tool_s=0.2)
    inputs = rollout.make_prompts(slow, config)
    policy = EnginePolicy(
        QwenVL(config, rngs=nnx.Rngs(0)), rollout.banned(config), rollout.rollout_config(slow)
    )
    played = rollout.play(policy, slow, inputs)
    # Three slots for four episodes: the last begins when two turns of tools are over.
    assert played.sampled == slow.num_sampled and played.seconds >= 4 * slow.tool_s
