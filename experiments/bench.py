"""bench: one of this project's benchmarks, by name, with its rows printed and written as JSON."""

from __future__ import annotations

import importlib
import json
import pathlib
from collections.abc import Sequence

from absl import flags

from experiments import command_line

# Name -> module with `measure(workloads, use_peer, report) -> list[dict]` and WORKLOADS, its names.
SUITES = {
    "rollout": "svrl_jax.bench.rollout",
    "train": "svrl_jax.bench.train",
    "prefix": "svrl_jax.bench.prefix",
}


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--suite, --workloads, --peer, --json."""
    flags.DEFINE_enum("suite", None, list(SUITES), "what is measured", flag_values=values)
    flags.DEFINE_list("workloads", None, "which of the suite's; default: all", flag_values=values)
    flags.DEFINE_bool(
        "peer", True, "also run the peer, in the same run (extra [bench])", flag_values=values
    )
    flags.DEFINE_string("json", None, "file for the rows, a JSON list", flag_values=values)


def main(call: command_line.Call) -> int:
    """Measures, prints, writes."""
    values = call.values
    if values.suite is None:
        raise command_line.UsageError(f"name a suite: --suite={'|'.join(SUITES)}")
    suite = importlib.import_module(SUITES[values.suite])
    unknown = set(values.workloads or ()) - set(suite.WORKLOADS)
    if unknown:
        raise command_line.UsageError(
            f"the suite {values.suite} has no workload {sorted(unknown)}; "
            f"known: {', '.join(suite.WORKLOADS)}"
        )
    workloads = values.workloads or list(suite.WORKLOADS)
    rows = suite.measure(workloads, use_peer=values.peer, report=print)
    for row in rows:
        print(json.dumps(row))
    if values.json:
        pathlib.Path(values.json).write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    return 0
