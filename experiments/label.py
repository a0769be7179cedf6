"""label: which tasks the initial policy answers without tools (search_free). Stops and goes on
freely.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict

from experiments import command_line
from svrl_jax import config as config_lib
from svrl_jax.data import world
from svrl_jax.training import assemble
from svrl_jax.training.labels import SHIPPED_NAME, SearchFree


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--config, --out, --train_draws."""
    command_line.define_config(values, argv)
    flags.DEFINE_string(
        "out", None, "label file; default: beside the policy's weights", flag_values=values
    )
    flags.DEFINE_integer(
        "train_draws", 2, "draws of each training item", lower_bound=0, flag_values=values
    )


def main(call: command_line.Call) -> int:
    """Labels training draws and the evaluation splits."""
    config = command_line.config_of(call.values)
    config_lib.check(config, training=False)
    out = pathlib.Path(call.values.out) if call.values.out else None
    make(config, out, call.values.train_draws)
    return 0


def make(config: ConfigDict, out: pathlib.Path | None, train_draws: int) -> None:
    """Labels what is missing from `out` (default: the policy folder's file) and prints the
    shares.
    """
    bench = assemble.assemble(config)
    out = out or bench.folder / SHIPPED_NAME
    search_free = SearchFree(bench, out, print)
    size = (config.data.picture_width_px, config.data.picture_height_px)
    for split in world.SPLITS:
        draws = train_draws if split == "train" else config.data.draws_per_item
        tasks = world.eval_tasks(split, draws, *size)
        free = search_free.of(tasks)
        by_kind: dict[str, list[bool]] = {}
        for task, is_free in zip(tasks, free, strict=True):
            by_kind.setdefault(task.category, []).append(is_free)
        shares = "  ".join(f"{k} {sum(v) / len(v):.2f}" for k, v in sorted(by_kind.items()))
        if free:
            print(f"{split}: search_free {sum(free)}/{len(free)}  ({shares})")
    print(f"wrote {out}: {len(search_free.store)} labels")
