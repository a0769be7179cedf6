"""python -m experiments MODE [flags]: one module a mode, each with flags of its own.

A user's mistake (a wrong key, a missing package, another run's folder) ends in one sentence on
stderr and exit status 2; anything else is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

# Told before jax is imported by a mode. CPU's logs would hide the progress line.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

MODES = {
    "train": "train a policy by GRPO under the SVRL reward, or go on with a stopped run",
    "eval": "evaluate a policy folder on the config's splits; writes records and figures",
    "analyse": "every table and figure of evaluated runs, and the failure report",
    "sweep": "one run for each word of a config and each seed, and tables over them; resumable",
    "import_traces": "make an evaluated run of another agent's recorded traces",
    "rescore": "score a run's recorded answers again, or judge what is unscored, without a rollout",
    "ask": "one picture and one question: print the episode",
    "prepare": "turn downloaded data sets, or a table of your own, into what train and eval read",
    "pretrain": "make the embedded default's initial policy and its labels again",
    "label": "find which tasks the initial policy answers without tools (search_free)",
    "annotate": "write oracle labels beside a run's recorded episodes and print mask figures",
    "index": "make a folder that config.search.kind=index searches, of your documents and pictures",
    "search-server": "serve a config's searches over HTTP: hosts share keys, limits and record",
    "record": "look into a record of searches, export it, or import one from traces",
    "check_release": "compare a released checkpoint with transformers on real rows; speed and MFU",
    "bench": "measure a suite: tokens a second and shares of the product rate, beside a peer",
    "view": "make a page to look at episodes of runs, models side by side; --serve shows it",
    "audit": "score scripted cheats under the full reward beside the honest script",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a mode; returns the exit status.

    Args:
      argv: program name, mode, flags; None takes the command line.
    """
    argv = list(sys.argv if argv is None else argv)
    if len(argv) < 2 or argv[1] in ("-h", "--help", "help"):
        print("usage: python -m experiments MODE [flags]; MODE --help lists the flags\n")
        for name, line in MODES.items():
            print(f"  {name:<13} {line}")
        return 0
    mode = argv[1]
    if mode not in MODES:
        print(f"error: unknown mode {mode!r}; one of: {', '.join(MODES)}", file=sys.stderr)
        return 2
    from experiments import command_line

    module = importlib.import_module(f"experiments.{mode.replace('-', '_')}")
    return command_line.run(module, [f"{argv[0]} {mode}", *argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
