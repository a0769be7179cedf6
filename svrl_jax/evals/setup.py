"""A config and a bench -> what an evaluation needs beside its policy: scorers, filter, store."""

from __future__ import annotations

import pathlib
from typing import Any

from ml_collections import ConfigDict

from svrl_jax.evals import costs, evaluate
from svrl_jax.evals.store import GroupStore, group_name
from svrl_jax.protocol.prompts import message_of, prompt_hash
from svrl_jax.rewards import judge as judge_lib
from svrl_jax.search import filtered
from svrl_jax.search.build import chat_model, describe
from svrl_jax.search.record import SearchRecord
from svrl_jax.training.assemble import Bench


def scoring_of(config: ConfigDict, folder: pathlib.Path | None) -> evaluate.Scoring:
    """The scorers that the config names, with the judge where it is one of them.

    Args:
      folder: the run's; it keeps the verdicts unless `config.eval.judge_record` names a file. None
        keeps none.
    """
    scorers = tuple(config.eval.scorers) or (config.reward.scorer,)
    if judge_lib.JUDGE not in scorers:
        return evaluate.Scoring(scorers)
    path = config.eval.judge_record or (folder and folder / "judge.sqlite")
    judge = judge_lib.Judge(
        chat_model(config.eval.judge, judge_lib.JUDGE, judge_lib.KEY),
        config.eval.judge.model,
        SearchRecord(path, "replay_or_live") if path else None,
        config.eval.judge.concurrency,
    )
    return evaluate.Scoring(scorers, judge)


def open_store(
    bench: Bench,
    folder: pathlib.Path,
    actor: evaluate.Actor,
    regime: str,
    split: str,
    mode: str,
    scoring: evaluate.Scoring,
    *,
    replace: bool = False,
) -> GroupStore:
    """The group of a run folder that these episodes go into.

    Args:
      replace: episodes of another policy or prompt under this name are deleted, not refused.
    """
    config = bench.config
    about: dict[str, Any] = {
        "policy": actor.name,
        "digest": actor.digest,
        "regime": regime,
        "split": split,
        "mode": mode,
        "temperature": evaluate.TEMPERATURES[mode],
        "prompt": prompt_hash(message_of(bench.builder.texts, regime)),
        "query_choice": config.eval.query_choice,
        "filter": config.eval.filter if regime == "agent_verifier" else "",
        "search": describe(config.search, bench.tools),
        "scorers": scoring.scorers,
        "judge": scoring.judge.name if scoring.judge else "",
        "allowed_calls": evaluate.allowed_under(config.rollout, regime),
        "usd": costs.prices(config),
        "seconds": 0.0,
        "served": {},
    }
    name = group_name(actor.name, regime, split, mode)
    return GroupStore(folder, name, about, replace=replace)


def filter_of(config: ConfigDict) -> filtered.Filter:
    """What the regime `agent_verifier` filters items with: `config.eval.filter`."""
    if config.eval.filter == "words":
        return filtered.by_words
    return filtered.by_model(chat_model(config.eval.verifier, "verifier", filtered.KEY))
