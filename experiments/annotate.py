"""annotate RUN: labels beside a run's recorded episodes, and the mask figures they give.

python -m experiments annotate RUN
python -m experiments annotate RUN --config=CONFIG --oracle=model --labels=oracle,query_judge

Labels of `oracle` are a verifier's view of every item and query; those of `query_judge` an external
judge's view of each executed query. Models are asked by the config's `reward.oracle_chat`
(`ORACLE_API_KEY`); replies are kept in RUN/oracle.sqlite, so that a stopped annotation goes on.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from experiments import command_line
from svrl_jax.evals import stats
from svrl_jax.records import Record, read_records, record_files, write_atomic
from svrl_jax.rewards.model_oracle import QueryJudge
from svrl_jax.rewards.oracle import Oracle, RuleOracle
from svrl_jax.training import assemble, oracles

TAKES_ARGUMENT = True
KINDS = ("oracle", "query_judge")


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--labels, --oracle, --min_alias_chars, --config."""
    command_line.define_config(values, argv)
    flags.DEFINE_list("labels", ["oracle"], f"which of {', '.join(KINDS)}", flag_values=values)
    flags.DEFINE_enum(
        "oracle", "rule", ["rule", "model", "policy"],
        "which verifier labels: by rule, behind an endpoint, or config.model.folder itself",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer(
        "min_alias_chars", 3, "rule: shorter aliases are no evidence", lower_bound=1,
        flag_values=values,
    )  # fmt: skip


def main(call: command_line.Call) -> int:
    """Writes NAME.labels.jsonl beside each NAME.jsonl of RUN/episodes; prints a line a set."""
    values = call.values
    if len(call.arguments) != 1:
        raise command_line.UsageError("name one run folder: python -m experiments annotate RUN")
    unknown = sorted(set(values.labels) - set(KINDS))
    if unknown or not values.labels:
        raise command_line.UsageError(f"--labels={','.join(unknown)}: known are {', '.join(KINDS)}")
    run = pathlib.Path(call.arguments[0])
    paths = list(record_files(run / "episodes"))
    if not paths:
        raise command_line.UsageError(f"{run / 'episodes'} holds no recorded episodes")
    oracle = _oracle(values, run) if "oracle" in values.labels else None
    judge = None
    if "query_judge" in values.labels:
        reward = command_line.config_of(values).reward
        judge = QueryJudge(oracles.endpoint_writer(reward, run), reward.oracle_chat.model)
    for path in paths:
        records = list(read_records(path, has_pixels=False))
        if any(record.task is None for record in records):
            raise command_line.UsageError(f"{path} has episodes without their task")
        lines = _known(path, records)
        said = [f"{path.stem}: {len(records)} episodes"]
        if oracle is not None:
            said += _label(oracle, values.oracle, records, lines)
        if judge is not None:
            said += _judge(judge, records, lines)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_atomic(path.with_suffix(".labels.jsonl"), text.encode("utf-8"))
        print(", ".join(said))
    for one in filter(None, (getattr(oracle, "unanswered", None), judge and judge.unanswered)):
        print("no verdict: " + ", ".join(f"{count} x {cause}" for cause, count in one.items()))
    return 0


def _oracle(values: flags.FlagValues, run: pathlib.Path) -> Oracle:
    if values.oracle == "rule":
        return RuleOracle(values.min_alias_chars)
    config = command_line.config_of(values)
    if values.oracle == "model":
        return oracles.endpoint_oracle(config.reward, run)
    return oracles.policy_oracle(assemble.assemble(config))


def _known(path: pathlib.Path, records: Sequence[Record]) -> list[dict[str, Any]]:
    """A line a record: what an earlier annotation wrote, or task and sample alone."""
    before = {}
    labels = path.with_suffix(".labels.jsonl")
    if labels.exists():
        for line in map(json.loads, labels.read_text("utf-8").splitlines()):
            before[line["task_id"], line["sample"]] = line
    names = [(r.episode.task_id, r.episode.sample) for r in records]
    return [before.get(name, {"task_id": name[0], "sample": name[1]}) for name in names]


def _label(
    oracle: Oracle, name: str, records: Sequence[Record], lines: list[dict[str, Any]]
) -> list[str]:
    """Adds the oracle's labels to the lines; returns its figures, as text."""
    groups = oracle.label_groups([r.task for r in records], [[r.episode] for r in records])
    rows = []
    for record, line, (labels,) in zip(records, lines, groups, strict=True):
        line.update(
            oracle=name if name == "rule" else oracle.name,
            items=labels.items,
            queries=labels.queries,
            proposals=labels.proposals,
            answered=labels.answered,
        )
        if labels.answered:
            rows.append(stats.make_row(record.episode, record.task.item, False, False, labels, 0.0))
    found = stats.figures(rows)
    queries = [q for line in lines if line["answered"] for q in line["queries"]]
    return [
        f"{found['n_items_verified']} items verified",
        f"mask agreement {_figure(found['mask_agreement'])}",
        f"balanced {_figure(found['mask_balanced'])}",
        f"good queries {_figure(float(np.mean(queries)) if queries else None)}",
    ]


def _judge(judge: QueryJudge, records: Sequence[Record], lines: list[dict[str, Any]]) -> list[str]:
    """Adds the judge's verdicts to the lines; returns its figure, as text."""
    verdicts = judge.judge([r.task for r in records], [r.episode for r in records])
    for line, row in zip(lines, verdicts, strict=True):
        line.update(query_judge=row, query_judge_name=judge.name)
    known = [v for row in verdicts for v in row if v is not None]
    return [f"queries judged good {_figure(float(np.mean(known)) if known else None)}"]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
