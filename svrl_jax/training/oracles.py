"""`config.reward.oracle` -> the verifier that labels a run's episodes."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from ml_collections import ConfigDict

from svrl_jax.rewards import model_oracle
from svrl_jax.rewards.model_oracle import ModelOracle
from svrl_jax.rewards.oracle import Oracle, RuleOracle
from svrl_jax.rollout.writer import Writer
from svrl_jax.search.build import chat_model
from svrl_jax.search.errors import ToolError
from svrl_jax.search.record import SearchRecord
from svrl_jax.training.assemble import Bench

RECORD = "oracle.sqlite"  # in a run's folder, where the config names no file
INITIAL = "initial policy"
REPLY_TOKENS = 64  # two lines of 0 and 1, and some room


def make_oracle(bench: Bench, folder: pathlib.Path | None) -> Oracle:
    """The oracle of a run.

    Args:
      folder: of the run, which keeps a model's replies; None keeps none.
    Raises:
      SearchRecordError: a record that cannot be used.
    """
    reward = bench.config.reward
    if reward.oracle == "rule":
        return RuleOracle(reward.min_alias_chars)
    if reward.oracle == "policy":
        return policy_oracle(bench)
    return endpoint_oracle(reward, folder)


def describe_oracle(reward: ConfigDict) -> str:
    """The oracle's name in tables."""
    if reward.oracle == "rule":
        return RuleOracle.name
    return model_oracle.name_of(INITIAL if reward.oracle == "policy" else reward.oracle_chat.model)


def policy_oracle(bench: Bench) -> ModelOracle:
    """The frozen initial policy as the oracle."""
    return ModelOracle(_initial_policy(bench), INITIAL)


def endpoint_oracle(reward: ConfigDict, folder: pathlib.Path | None) -> ModelOracle:
    """The oracle behind `reward.oracle_chat`; see `make_oracle`."""
    return ModelOracle(endpoint_writer(reward, folder), reward.oracle_chat.model)


def endpoint_writer(reward: ConfigDict, folder: pathlib.Path | None) -> model_oracle.WriteAll:
    """Asks `reward.oracle_chat` and keeps its replies; see `make_oracle`."""
    path = reward.oracle_record or (folder / RECORD if folder is not None else None)
    record = None if path is None else SearchRecord(path, "replay_or_live")
    chat = reward.oracle_chat
    complete = chat_model(chat, "oracle", model_oracle.KEY)
    return model_oracle.over_threads(complete, chat.model, record, chat.concurrency)


def _initial_policy(bench: Bench) -> model_oracle.WriteAll:
    """The frozen initial policy, on the run's own sampler between rollouts."""
    rollout = bench.config.rollout
    writer = Writer(
        bench.sampler,
        bench.builder,
        slots=rollout.slots,
        capacity=rollout.budget,
        max_new_tokens=REPLY_TOKENS,
    )

    def write_all(prompts: Sequence[tuple[str, str]]) -> list[str | ToolError]:
        with bench.sampler.lent(bench.initial_params):
            return writer(prompts)

    return write_all
