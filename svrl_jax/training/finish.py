"""A trained policy beside the initial one -> summary.json, a table and the curves of the run."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

from svrl_jax.evals import actors, evaluate, marks, setup, stats
from svrl_jax.protocol.prompts import prompt_hash
from svrl_jax.rewards.oracle import Oracle
from svrl_jax.rewards.search_free import describe_source
from svrl_jax.rollout.policy import ScriptedPolicy
from svrl_jax.search.build import describe
from svrl_jax.training.assemble import Bench
from svrl_jax.training.labels import SearchFree
from svrl_jax.training.oracles import describe_oracle
from svrl_jax.training.run_folder import config_hash
from svrl_jax.training.task_source import WORLD, eval_splits

# Whose difference is worth an interval.
COMPARED = (
    "acc", "sr", "over_search", "under_search", "mask_balanced", "unique_queries", "r_format",
)  # fmt: skip


def evaluate_policy(
    bench: Bench,
    params: Any,
    search_free: SearchFree,
    oracle: Oracle,
    name: str,
    say: Callable[[str], None] = lambda _: None,
    *,
    digest: str = "",
    folder: pathlib.Path | None = None,
) -> dict[str, dict[str, list[stats.Row]]]:
    """split -> mode -> rows, for every split and mode of `config.eval`.

    Args:
      digest: of the parameters; with another one the folder's episodes of this name are replaced.
      folder: a run's, which keeps episodes and verdicts; None keeps nothing.
    """
    actor = evaluate.Actor(name, digest, bench.sampler, params)
    scoring = setup.scoring_of(bench.config, folder)
    out: dict[str, dict[str, list[stats.Row]]] = {}
    for split, mode in itertools.product(eval_splits(bench.config), bench.config.eval.modes):
        say(f"evaluating the {name} policy on {split}, {mode}")
        store = None
        if folder is not None:
            store = setup.open_store(
                bench, folder, actor, "agent", split, mode, scoring, replace=True
            )
        rows = evaluate.evaluate(
            bench,
            actor,
            split,
            mode,
            scoring,
            search_free=search_free,
            label=oracle.label,
            store=store,
            samples=bench.config.eval.samples if mode == "sampled" else 1,
        )
        out.setdefault(split, {})[mode] = rows
    return out


def evaluate_marks(bench: Bench, search_free: SearchFree, oracle: Oracle) -> dict[str, Any]:
    """mark -> split -> figures of the scripted agents, over the same tasks and tools.

    {} where the tasks are not the embedded world's, the only one that the scripts know.
    """
    config, out = bench.config, {}
    if config.data.source != WORLD:
        return out
    scoring = evaluate.Scoring((config.reward.scorer,))
    for name, habits in marks.MARKS.items():
        script = marks.scripted(habits, config.rollout.num_queries, config.pretrain.known_share)
        actor = evaluate.Actor(name, "script", ScriptedPolicy(script, bench.tokenizer))
        out[name] = {
            split: stats.figures(
                evaluate.evaluate(
                    bench,
                    actor,
                    split,
                    "greedy",
                    scoring,
                    search_free=search_free,
                    label=oracle.label,
                )  # fmt: skip
            )
            for split in eval_splits(config)
        }
    return out


def summarise(
    bench: Bench,
    rows: dict[str, dict[str, dict[str, list[stats.Row]]]],
    mark_figures: dict[str, Any],
) -> dict[str, Any]:
    """The run's summary.

    Args:
      rows: policy (`initial`, `trained`) -> split -> mode -> rows.
      mark_figures: from `evaluate_marks`.
    Returns:
      {initial, trained} x split x mode x figures; `difference` (trained - initial, paired, 95%
      intervals over items) x split x mode; `marks`; `labels` naming scorer, prompt and label
      source.
    """
    summary: dict[str, Any] = {policy: figures_of(splits) for policy, splits in rows.items()}
    if {"initial", "trained"} <= set(rows):
        summary["difference"] = {
            split: {
                mode: {
                    figure: stats.paired_difference(before, rows["trained"][split][mode], figure)
                    for figure in COMPARED
                }
                for mode, before in modes.items()
            }
            for split, modes in rows["initial"].items()
        }
    summary["marks"] = mark_figures
    config = bench.config
    summary["labels"] = {
        "scorer": config.reward.scorer,
        "search_free": describe_source(config.reward),
        "oracle": describe_oracle(config.reward),
        "query_choice": config.eval.query_choice,
        "prompt": prompt_hash(bench.builder.texts["agent"]),
        "search": describe(config.search, bench.tools),
        "draws_per_item": config.data.draws_per_item if config.data.source == WORLD else 1,
    }
    return summary


def figures_of(rows: dict[str, dict[str, list[stats.Row]]]) -> dict[str, dict[str, Any]]:
    """split -> mode -> figures."""
    return {
        split: {mode: stats.figures(r) for mode, r in modes.items()}
        for split, modes in rows.items()
    }


def compare(
    bench: Bench,
    trained: Any,
    search_free: SearchFree,
    oracle: Oracle,
    say: Callable[[str], None],
    folder: pathlib.Path,
) -> dict[str, Any]:
    """Evaluates initial and trained parameters and the marks, or with `config.eval.compare` off the
    trained alone; returns the summary.

    Args:
      folder: the run's; it keeps the episodes.
    """
    config = bench.config
    policies = [("trained", f"{config_hash(config.to_dict())}, {config.num_steps} steps", trained)]
    if config.eval.compare:
        policies.insert(0, ("initial", actors.digest_of(bench.folder), bench.initial_params))
    rows = {
        name: evaluate_policy(
            bench, params, search_free, oracle, name, say, digest=digest, folder=folder
        )
        for name, digest, params in policies
    }
    search_free.store.write(folder / "search_free.json")
    marks_found = evaluate_marks(bench, search_free, oracle) if config.eval.compare else {}
    return summarise(bench, rows, marks_found)
