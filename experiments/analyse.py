"""analyse RUN [RUN ...]: every table and figure of evaluated runs, and the failure report.

Works from what `eval`, `train`, `annotate` and `rescore` left in the folders; runs no policy, judge
or oracle. Several runs stand in one table and their training curves in one figure.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence

from absl import flags

from experiments import command_line
from svrl_jax.analysis import report
from svrl_jax.evals.cases import LABEL_SOURCES

TAKES_ARGUMENT = True


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--out, --scorer, --search_free."""
    flags.DEFINE_string(
        "out", None, "folder of the files; default: analysis/ in the first run", flag_values=values
    )
    flags.DEFINE_string(
        "scorer", "", "Acc's; default: the first that a run was scored by", flag_values=values
    )
    flags.DEFINE_enum(
        "search_free", "initial", LABEL_SOURCES,
        "whose label over- and under-search go by: the initial policy's, the policy's own "
        "tool-free greedy answers, or the data set's category",
        flag_values=values,
    )  # fmt: skip


def main(call: command_line.Call) -> int:
    """Writes the files and prints where they are."""
    if not call.arguments:
        raise command_line.UsageError("name a run folder: python -m experiments analyse RUN")
    paths = [pathlib.Path(a) for a in call.arguments]
    for path in paths:
        if not (path / "config.json").is_file():
            raise command_line.UsageError(f"{path} is no run folder (it has no config.json)")
    start = time.perf_counter()
    source = call.values.search_free
    runs = [report.load(p, scorer=call.values.scorer, source=source) for p in paths]
    if not any(run.groups or run.metrics for run in runs):
        raise command_line.UsageError(
            f"{', '.join(map(str, paths))}: nothing is evaluated or trained there; run `eval`"
        )
    for run in runs:
        for group in run.groups:
            if all(c.labels is None for c in group.cases):
                print(f"{run.name}: {group.title} has no labels; `annotate` makes them")
    out = pathlib.Path(call.values.out) if call.values.out else paths[0] / "analysis"
    written = report.write(runs, out, source=source, say=print)
    print(f"{out}: {len(written)} files in {time.perf_counter() - start:.1f} s; see report.md")
    return 0
