"""annotate RUN: rule-oracle labels beside a run's recorded episodes, and the mask figures they
give.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import numpy as np
from absl import flags

from experiments import command_line
from svrl_jax.evals import stats
from svrl_jax.records import read_records, record_files, write_atomic
from svrl_jax.rewards.oracle import RuleOracle

TAKES_ARGUMENT = True


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--oracle, --min_alias_chars."""
    flags.DEFINE_enum("oracle", "rule", ["rule"], "which verifier labels", flag_values=values)
    flags.DEFINE_integer(
        "min_alias_chars", 3, "shorter aliases are no evidence", lower_bound=1, flag_values=values
    )


def main(call: command_line.Call) -> int:
    """Writes NAME.labels.jsonl beside each NAME.jsonl of RUN/episodes; prints a line a set."""
    if len(call.arguments) != 1:
        raise command_line.UsageError("name one run folder: python -m experiments annotate RUN")
    folder = pathlib.Path(call.arguments[0]) / "episodes"
    paths = list(record_files(folder))
    if not paths:
        raise command_line.UsageError(f"{folder} holds no recorded episodes")
    oracle = RuleOracle(call.values.min_alias_chars)
    for path in paths:
        lines, rows = [], []
        for record in read_records(path):
            episode, task = record.episode, record.task
            if task is None:
                raise command_line.UsageError(f"{path} has episodes without their task")
            labels = oracle.label(task, episode)
            lines.append(
                {
                    "task_id": task.id, "sample": episode.sample, "oracle": call.values.oracle,
                    "items": labels.items, "queries": labels.queries,
                    "proposals": labels.proposals, "answered": labels.answered,
                }
            )  # fmt: skip
            rows.append(stats.make_row(episode, task.item, False, False, labels, 0.0))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomic(path.with_suffix(".labels.jsonl"), text.encode("utf-8"))
        found = stats.figures(rows)
        queries = [q for line in lines for q in line["queries"]]
        print(
            f"{path.stem}: {len(lines)} episodes, {found['n_items_verified']} items verified, mask "
            f"agreement {_figure(found['mask_agreement'])}, balanced "
            f"{_figure(found['mask_balanced'])}, good queries "
            f"{_figure(float(np.mean(queries)) if queries else None)}"
        )
    return 0


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
