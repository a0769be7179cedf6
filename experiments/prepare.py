"""prepare: downloaded files of a data set, or a table of your own -> what train and eval read.

python -m experiments prepare --dataset=fvqa --source=DOWNLOADS --out=prepared
python -m experiments train --config=CONFIG --config.data.source=prepared/fvqa
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import command_line
from svrl_jax.data import prepare
from svrl_jax.data.datasets import DATASETS, TABLE_COLUMNS


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--dataset, --source, --out, --name, --split, --columns."""
    known = "; ".join(f"{name}: {spec.about}" for name, spec in DATASETS.items())
    flags.DEFINE_enum("dataset", None, list(DATASETS), known, flag_values=values)
    flags.DEFINE_string(
        "source", None, "folder with the published files, one file, or a hub id with @revision; "
        "default: the data set's own hub id", flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string("out", "prepared", "parent of the new folder", flag_values=values)
    flags.DEFINE_string("name", None, "name of the new folder; default: --dataset", values)
    flags.DEFINE_string(
        "split", None, "only this split; needed for one file whose name does not say it",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_list(
        "columns", [], "of a table of your own, FIELD:COLUMN each; defaults: "
        + ", ".join(f"{field}:{column}" for field, column in TABLE_COLUMNS.items()),
        flag_values=values,
    )  # fmt: skip


def main(call: command_line.Call) -> int:
    """Builds one data set and says what it holds."""
    values = call.values
    if values.dataset is None:
        raise command_line.UsageError(f"name a data set: --dataset={'|'.join(DATASETS)}")
    with _bar() as bar:
        lines: dict[str, int] = {}

        def progress(split: str, done: int, total: int) -> None:
            if split not in lines:
                lines[split] = bar.add_task(split, total=total)
            bar.update(lines[split], completed=done)

        manifest = prepare.prepare(
            values.dataset,
            values.source,
            values.out,
            name=values.name,
            split=values.split,
            columns=_columns(values.columns),
            say=lambda line: bar.console.print(line, highlight=False, soft_wrap=True, markup=False),
            progress=progress,
        )
    for split, made in manifest["splits"].items():
        print(
            f"{split}: {made['tasks']} tasks of {made['rows']} rows, {made['text_only']} without "
            f"a picture, {made['quarantined']} unreadable"
        )
    folder = f"{values.out}/{manifest['name']}"
    print(f"wrote {folder}: use it by --config.data.source={folder}")
    return 0


def _columns(pairs: Sequence[str]) -> dict[str, str]:
    wrong = [pair for pair in pairs if ":" not in pair]
    if wrong:
        raise command_line.UsageError(f"--columns has {wrong[0]!r}; write FIELD:COLUMN,...")
    return dict(pair.split(":", 1) for pair in pairs)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"),
        TimeRemainingColumn(), console=Console(file=sys.stdout),
    )  # fmt: skip
