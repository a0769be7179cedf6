"""rescore RUN: the verdicts of a run's recorded episodes again, without a new rollout.

Scorers are added or changed, others' verdicts stay, and answers that a judge left unscored are
judged again; a verdict that a judge gave is kept. Which judge: the run's config, unless flags say
otherwise.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence

from absl import flags
from ml_collections import ConfigDict

from experiments import command_line
from svrl_jax.evals import cases, setup, stats
from svrl_jax.records import read_records
from svrl_jax.rewards.answers import SCORERS
from svrl_jax.rewards.judge import JUDGE, Verdict, count_unscored

TAKES_ARGUMENT = True


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--scorers, --endpoint, --model."""
    flags.DEFINE_list(
        "scorers", [], "the first is Acc's; default: those that the run was scored by",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "endpoint", None, "of the judge, such as http://HOST/v1", flag_values=values
    )
    flags.DEFINE_string("model", None, "the judge's name there", flag_values=values)


def main(call: command_line.Call) -> int:
    """Writes NAME.verdicts.jsonl beside every evaluated set of RUN; prints a line a group."""
    if len(call.arguments) != 1:
        raise command_line.UsageError("name one run folder: python -m experiments rescore RUN")
    folder = pathlib.Path(call.arguments[0])
    groups = cases.group_files(folder)
    if not groups:
        raise command_line.UsageError(f"{folder} holds no evaluated episodes: run `eval` first")
    config = ConfigDict(json.loads((folder / "config.json").read_text("utf-8")))
    if call.values.endpoint:
        config.eval.judge.endpoint = call.values.endpoint
    if call.values.model:
        config.eval.judge.model = call.values.model
    for path in groups:
        about = json.loads(path.read_text("utf-8"))
        ours = [s for s in about["scorers"] if s in (*SCORERS, JUDGE)]
        config.eval.scorers = tuple(call.values.scorers or ours)
        _rescore(folder, path, about, config)
    return 0


def _rescore(folder: pathlib.Path, path: pathlib.Path, about: dict, config: ConfigDict) -> None:
    scoring = setup.scoring_of(config, folder)
    rows, verdicts = [], []
    for name in cases.set_paths(folder / "episodes", path.stem):
        records = read_records(name)
        before = cases.read_verdicts(name)
        found = [
            (*new, *_others(before.get((r.episode.task_id, r.episode.sample), {}), new))
            for r, new in zip(records, scoring(records), strict=True)
        ]
        cases.write_verdicts(name, records, found)
        verdicts += [v for of in found for v in of]
        rows += [
            stats.make_row(
                r.episode, r.task.item or r.task.id,
                None if of[0].value is None else of[0].value >= 1.0, None, None, 0.0,
            )
            for r, of in zip(records, found, strict=True)
        ]  # fmt: skip
    figures = stats.figures(rows)
    about |= {
        "scorers": list(dict.fromkeys((*scoring.scorers, *about["scorers"]))),
        "judge": scoring.judge.name if scoring.judge else about["judge"],
        "n_unscored": figures["n_unscored"],
    }
    cases.write_about(path, about)
    acc = "-" if figures["acc"] is None else f"{figures['acc']:.3f}"
    left = count_unscored(v for v in verdicts if v.scorer == JUDGE or v.value is None)
    causes = ", ".join(f"{cause} {n}" for cause, n in sorted(left.items()))
    print(
        f"{path.stem}: acc by {scoring.scorers[0]} {acc} of {figures['n']}, unscored "
        f"{figures['n_unscored']}" + (f" ({causes})" if causes else "")
    )


def _others(before: Mapping[str, Verdict], new: Sequence[Verdict]) -> list[Verdict]:
    """Earlier verdicts of scorers that are not asked again."""
    asked = {verdict.scorer for verdict in new}
    return [verdict for scorer, verdict in before.items() if scorer not in asked]
