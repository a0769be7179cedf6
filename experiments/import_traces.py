"""import_traces: recorded runs of another agent become an evaluated run.

MMSearch-R1 style JSON lines. Our grammar reads the turns, so what the other protocol lacks (masks,
five queries) shows as violations; verdicts are by the config's scorers and the file's own. Then
`annotate` and `analyse` work as on any run.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from absl import flags

from experiments import command_line
from svrl_jax import config as config_lib
from svrl_jax.data.traces import read_traces
from svrl_jax.evals import cases, costs, setup, stats
from svrl_jax.evals.store import GroupStore, group_name
from svrl_jax.protocol.prompts import prompt_hash
from svrl_jax.records import Record, write_records
from svrl_jax.rewards.judge import Verdict
from svrl_jax.rollout.imported import episode_of_trace
from svrl_jax.training import assemble, run_folder

SOURCE_SCORER = "source"  # the file's own exact_match, against the truth alone
_SPLIT = "traces"


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--config, --workdir, --traces, --name, --allowed_calls."""
    command_line.define_config(values, argv)
    command_line.define_workdir(values)
    flags.DEFINE_string("traces", None, "JSON lines, one trace a line", flag_values=values)
    flags.DEFINE_string("name", "MMSearch-R1-7B", "the agent that made them", flag_values=values)
    flags.DEFINE_integer(
        "allowed_calls", 2, "tool calls that the agent might make (MMSearch-R1: two)",
        lower_bound=1, flag_values=values,
    )  # fmt: skip


def main(call: command_line.Call) -> int:
    """Writes the traces as one group of the workdir's run."""
    values = call.values
    config = command_line.config_of(values)
    config_lib.check(config, training=False)
    if not values.traces:
        raise command_line.UsageError("name the file: --traces=FILE")
    workdir = command_line.workdir_of(values)
    run_folder.check_workdir(workdir, config)
    traces = list(read_traces(values.traces))
    tokenizer, builder, model_config = assemble.text_side(config)
    run = run_folder.RunFolder(workdir, config)
    scoring = setup.scoring_of(config, run.path)
    name = group_name(values.name, "agent", _SPLIT, "sampled")
    store = GroupStore(run.path, name, _about(values, config, scoring, builder.texts["agent"]))
    records = [
        Record(
            episode_of_trace(
                trace, builder.build(trace.task, "agent"), tokenizer, model_config,
                config.rollout, config.search, policy_name=values.name,
            ),
            dataclasses.replace(trace.task, source=f"{trace.task.source}/{_SPLIT}"),
        )
        for trace in traces
    ]  # fmt: skip
    path = write_records(run.path / "episodes", f"{name}_0000", records)
    verdicts = [
        (*found, _own(trace.exact_match))
        for found, trace in zip(scoring(records), traces, strict=True)
    ]
    cases.write_verdicts(path, records, verdicts)
    shares = {
        scorer: stats.mean([of[i].value for of in verdicts])
        for i, scorer in enumerate((*scoring.scorers, SOURCE_SCORER))
    }
    store.note(n=len(records), n_unscored=sum(of[0].value is None for of in verdicts))
    print(f"{pathlib.Path(values.traces).name}: {len(records)} traces, acc by " + ", ".join(
        f"{scorer} {'-' if share is None else format(share, '.3f')}"
        for scorer, share in shares.items()
    ))  # fmt: skip
    return 0


def _own(exact_match: bool | None) -> Verdict:
    if exact_match is None:
        return Verdict(SOURCE_SCORER, None, cause="not given")
    return Verdict(SOURCE_SCORER, float(exact_match))


def _about(values, config, scoring, prompt: str) -> dict:
    digest = run_folder.file_digest(values.traces)
    return {
        "policy": values.name, "digest": digest, "regime": "agent", "split": _SPLIT,
        "mode": "sampled", "temperature": None, "prompt": prompt_hash(prompt),
        "query_choice": "", "filter": "", "search": f"traces {digest}",
        "scorers": (*scoring.scorers, SOURCE_SCORER),
        "judge": scoring.judge.name if scoring.judge else "",
        "allowed_calls": values.allowed_calls, "usd": dict(costs.free()),
        "seconds": 0.0, "served": {},
    }  # fmt: skip
