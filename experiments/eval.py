"""eval: a policy folder on the config's splits. Records and figures go into the workdir.

The oracle has no part in it: mask figures come from `annotate` afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from absl import flags

from experiments import command_line
from svrl_jax import config as config_lib
from svrl_jax.evals import evaluate, stats
from svrl_jax.protocol.prompts import prompt_hash
from svrl_jax.records import Record, write_records
from svrl_jax.search.build import describe
from svrl_jax.training import assemble, run_folder, task_source
from svrl_jax.training.labels import EVAL_STEP, SearchFree


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--config, --workdir, --policy, --regime."""
    command_line.define_config(values, argv)
    command_line.define_workdir(values)
    flags.DEFINE_string(
        "policy", None, "Hugging Face folder to evaluate; default: config.model.folder",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_enum(
        "regime", "agent", ["agent", "direct"], "tools allowed, or none", flag_values=values
    )


def main(call: command_line.Call) -> int:
    """Evaluates every split and mode of `config.eval`."""
    config = command_line.config_of(call.values)
    config_lib.check(config, training=False)
    workdir = command_line.workdir_of(call.values)
    run_folder.check_workdir(workdir, config)
    splits = task_source.eval_splits(config)
    policy = assemble.policy_folder(call.values.policy or config.model.folder)
    bench = assemble.assemble(config)
    params = assemble.policy_params(bench, policy)
    run = run_folder.RunFolder(workdir, config)  # last: until here nothing is written
    search_free = SearchFree(bench, run.path / "search_free.json", print)
    summary: dict = {"policy": str(call.values.policy or config.model.folder)}
    for split, mode in itertools.product(splits, config.eval.modes):
        rows = []
        for number, tasks in enumerate(task_source.eval_chunks(config, split)):
            free = dict(zip([t.id for t in tasks], search_free.of(tasks), strict=True))
            bench.sampler.set_params(params)
            groups = bench.run(
                tasks,
                bench.sampler,
                step=EVAL_STEP,
                group_size=1,
                regime=call.values.regime,
                temperature=evaluate.TEMPERATURES[mode],
                query_choice=config.eval.query_choice,
                policy_name=policy.name,
            )
            episodes = [g[0] for g in groups]
            scorer = config.reward.scorer
            rows += evaluate.make_rows(episodes, tasks, scorer=scorer, search_free=free)
            records = [Record(e, t) for e, t in zip(episodes, tasks, strict=True)]
            name = f"eval_{call.values.regime}_{split.replace('/', '_')}_{mode}"
            write_records(run.episodes, name + (f"_{number:04d}" if number else ""), records)
        found = stats.figures(rows)
        summary.setdefault(split, {})[mode] = found
        shown = {k: found[k] for k in ("acc", "sr", "over_search", "under_search", "r_format", "n")}
        print(f"{split}, {mode}: " + "  ".join(f"{k} {_figure(v)}" for k, v in shown.items()))
    summary["labels"] = {
        "scorer": config.reward.scorer,
        "regime": call.values.regime,
        "prompt": prompt_hash(bench.builder.texts[call.values.regime]),
        "query_choice": config.eval.query_choice,
        "search": describe(config.search, bench.tools),
    }
    run.write_json("eval.json", summary)
    return 0


def _figure(value) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
