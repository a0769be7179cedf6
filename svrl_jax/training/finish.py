"""A trained policy beside the initial one -> summary.json, a table and the curves of the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from svrl_jax.evals import evaluate, marks, stats
from svrl_jax.protocol.prompts import prompt_hash
from svrl_jax.rewards.oracle import Oracle
from svrl_jax.rewards.search_free import describe_source
from svrl_jax.rollout.policy import ScriptedPolicy, TurnSampler
from svrl_jax.search.build import describe
from svrl_jax.training.assemble import Bench
from svrl_jax.training.labels import EVAL_STEP, SearchFree
from svrl_jax.training.oracles import describe_oracle
from svrl_jax.training.task_source import WORLD, eval_chunks, eval_splits

# Whose difference is worth an interval.
COMPARED = (
    "acc", "sr", "over_search", "under_search", "mask_balanced", "unique_queries", "r_format",
)  # fmt: skip


def evaluate_split(
    bench: Bench,
    sampler: TurnSampler,
    split: str,
    temperature: float,
    search_free: SearchFree,
    oracle: Oracle,
    name: str,
) -> list[stats.Row]:
    """Rows of one policy on one split, one episode a task; the keys are the same for every
    policy.
    """
    rows: list[stats.Row] = []
    for tasks in eval_chunks(bench.config, split):
        free = dict(zip([t.id for t in tasks], search_free.of(tasks), strict=True))
        groups = bench.run(
            tasks,
            sampler,
            step=EVAL_STEP,
            group_size=1,
            temperature=temperature,
            query_choice=bench.config.eval.query_choice,
            policy_name=name,
        )
        rows += evaluate.make_rows(
            [g[0] for g in groups],
            tasks,
            scorer=bench.config.reward.scorer,
            search_free=free,
            label=oracle.label,
        )
    return rows


def evaluate_policy(
    bench: Bench,
    params: Any,
    search_free: SearchFree,
    oracle: Oracle,
    name: str,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, list[stats.Row]]]:
    """split -> mode -> rows, for every split and mode of `config.eval`."""
    out: dict[str, dict[str, list[stats.Row]]] = {}
    for split, mode in itertools.product(eval_splits(bench.config), bench.config.eval.modes):
        say(f"evaluating the {name} policy on {split}, {mode}")
        for tasks in eval_chunks(bench.config, split):
            search_free.ensure(tasks)  # before set_params: it samples from the initial policy
        bench.sampler.set_params(params)
        rows = evaluate_split(
            bench, bench.sampler, split, evaluate.TEMPERATURES[mode], search_free, oracle, name
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
    for name, habits in marks.MARKS.items():
        script = marks.scripted(habits, config.rollout.num_queries, config.pretrain.known_share)
        policy = ScriptedPolicy(script, bench.tokenizer)
        out[name] = {
            split: stats.figures(
                evaluate_split(bench, policy, split, 0.0, search_free, oracle, name)
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
) -> dict[str, Any]:
    """Evaluates initial and trained parameters and the marks; returns the summary."""
    rows = {
        name: evaluate_policy(bench, params, search_free, oracle, name, say)
        for name, params in (("initial", bench.initial_params), ("trained", trained))
    }
    return summarise(bench, rows, evaluate_marks(bench, search_free, oracle))
