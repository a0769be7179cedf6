"""eval: a policy on the config's splits, under one or more regimes. Stopped, it goes on with the
same command, row by row.

The policy is a Hugging Face folder, a run folder or one of its checkpoints, or a model behind an
OpenAI-compatible server (key: POLICY_API_KEY). Records, verdicts
and figures go into the workdir; the oracle has no part in it: mask figures come from `annotate`
afterwards, tables and figures from `analyse`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from absl import flags

from experiments import command_line
from svrl_jax import config as config_lib
from svrl_jax.evals import actors, evaluate, mask_effect, scaling, setup, stats
from svrl_jax.protocol.prompts import message_of, prompt_hash
from svrl_jax.search.build import describe
from svrl_jax.training import assemble, run_folder, task_source
from svrl_jax.training.labels import SearchFree

_SILENT_S = 30.0  # between two lines of progress


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--config, --workdir, --policy, --name, --regime, --scaling, --mask_effect."""
    command_line.define_config(values, argv)
    command_line.define_workdir(values)
    flags.DEFINE_string(
        "policy", None,
        "a Hugging Face folder, a run folder, a checkpoint, or http://HOST/v1 of a server, whose "
        "model is config.remote.model; default: config.model.folder",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "name", None, "the policy's name in records and tables; default: its folder's",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_list(
        "regime", ["agent"], f"one or more of {', '.join(evaluate.REGIMES)}", flag_values=values
    )
    flags.DEFINE_list(
        "scaling", [], "also run K parallel text searches a question, such as 1,2,5,10,15",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_bool(
        "mask_effect", False, "also go on with only the kept items, and only the dropped ones",
        flag_values=values,
    )  # fmt: skip


def main(call: command_line.Call) -> int:
    """Evaluates every regime, split and mode."""
    config = command_line.config_of(call.values)
    config_lib.check(config, training=False)
    regimes, widths = _choices(call.values)
    workdir = command_line.workdir_of(call.values)
    run_folder.check_workdir(workdir, config)
    splits = task_source.eval_splits(config)
    bench = assemble.assemble(config, has_weights=not actors.is_served(call.values.policy))
    actor = actors.load(bench, call.values.policy, call.values.name)
    run = run_folder.RunFolder(workdir, config)  # last: until here nothing is written
    scoring = setup.scoring_of(config, run.path)
    search_free = SearchFree(bench, run.path / "search_free.json", print)
    summary: dict = {"policy": str(call.values.policy or config.model.folder)}
    for regime, split, mode in itertools.product(regimes, splits, config.eval.modes):
        store = setup.open_store(bench, run.path, actor, regime, split, mode, scoring)
        rows = evaluate.evaluate(
            bench, actor, split, mode, scoring,
            search_free=search_free,
            regime=regime,
            samples=config.eval.samples if mode == "sampled" else 1,
            store=store,
            keep=setup.filter_of(config) if regime == "agent_verifier" else None,
            progress=_Progress(f"{regime}, {split}, {mode}"),
        )  # fmt: skip
        found = stats.figures(rows)
        store.note(n=found["n"], n_unscored=found["n_unscored"])
        summary.setdefault(regime, {}).setdefault(split, {})[mode] = found
        shown = {k: found[k] for k in ("acc", "sr", "over_search", "under_search", "n_unscored")}
        line = "  ".join(f"{k} {_figure(v)}" for k, v in (shown | {"n": found["n"]}).items())
        print(f"{regime}, {split}, {mode}: {line}", flush=True)
    search_free.store.write(run.path / "search_free.json")
    summary["labels"] = {
        "scorers": list(scoring.scorers),
        "prompt": {r: prompt_hash(message_of(bench.builder.texts, r)) for r in regimes},
        "query_choice": config.eval.query_choice,
        "search": describe(config.search, bench.tools),
    }
    run.write_json("eval.json", summary)
    if widths:
        for split in splits:
            scaling.run(bench, run.path, actor, split, widths, scoring, print)
    if call.values.mask_effect:
        for split in splits:
            mask_effect.run(bench, run.path, actor, split, scoring, print)
    return 0


def _choices(values: flags.FlagValues) -> tuple[list[str], list[int]]:
    """(regimes, widths) as typed; UsageError for what is not known."""
    unknown = [r for r in values.regime if r not in evaluate.REGIMES]
    if unknown or not values.regime:
        raise command_line.UsageError(
            f"--regime has {unknown}; known: {', '.join(evaluate.REGIMES)}"
        )
    try:
        widths = sorted({int(w) for w in values.scaling})
    except ValueError:
        widths = [0]
    if any(w < 1 for w in widths):
        raise command_line.UsageError("--scaling wants numbers of searches, such as 1,2,5")
    return values.regime, widths


class _Progress:
    """Prints how far a long evaluation is, now and then."""

    def __init__(self, name: str):
        self._name, self._next = name, time.monotonic() + _SILENT_S

    def __call__(self, finished: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SILENT_S
            print(f"{self._name}: {finished} of {total} episodes under way are done", flush=True)


def _figure(value) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
