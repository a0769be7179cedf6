"""audit: scripted cheats under the full reward, beside the honest script. Exit status 1 if one
wins.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags
from rich.console import Console
from rich.table import Table

from experiments import command_line
from svrl_jax import config as config_lib
from svrl_jax.rewards.audit import audit


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--config."""
    command_line.define_config(values, argv)


def main(call: command_line.Call) -> int:
    """Prints a row a cheat and task kind."""
    config = command_line.config_of(call.values)
    config_lib.check(config, training=False)
    rows = audit(config.reward, config.rollout.num_queries)
    table = Table()
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        style = "bold red" if row["beats"] else ""
        table.add_row(
            *[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()],
            style=style,
        )
    Console().print(table)
    beating = [f"{r['cheat']} on {r['task_kind']}" for r in rows if r["beats"]]
    print(f"cheats that beat the honest script: {', '.join(beating) or 'none'}")
    return 1 if beating else 0
