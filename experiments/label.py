"""label: which tasks the initial policy answers without tools (search_free). Stops and goes on
freely.

Where the data set has a category of its own, or samples are drawn, the agreement of the sources is
printed.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from absl import flags
from ml_collections import ConfigDict

from experiments import command_line
from svrl_jax import config as config_lib
from svrl_jax.data import world
from svrl_jax.data.prepared import Prepared, PreparedSplit
from svrl_jax.rewards.search_free import CATEGORIES, agreement
from svrl_jax.training import assemble, task_source
from svrl_jax.training.labels import SearchFree, label_file
from svrl_jax.types import Task

_AT_ONCE = 32  # tasks whose pictures are held together


def define_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """--config, --out, --splits, --train_draws."""
    command_line.define_config(values, argv)
    flags.DEFINE_string(
        "out",
        None,
        "label file; default: beside the policy's weights, one a data set",
        flag_values=values,
    )
    flags.DEFINE_list(
        "splits", [], "of config.data.source; default: all of them", flag_values=values
    )
    flags.DEFINE_integer(
        "train_draws", 2, "draws of each training item of the embedded world", lower_bound=0,
        flag_values=values,
    )  # fmt: skip


def main(call: command_line.Call) -> int:
    """Labels every split."""
    config = command_line.config_of(call.values)
    config_lib.check(config, training=False)
    out = pathlib.Path(call.values.out) if call.values.out else None
    make(config, out, call.values.train_draws, call.values.splits)
    return 0


def make(
    config: ConfigDict, out: pathlib.Path | None, train_draws: int, splits: Sequence[str] = ()
) -> None:
    """Labels what is missing from `out` (default: the policy folder's file for this data set) and
    prints the shares.
    """
    rows_of = {split: _rows(config, split, train_draws) for split in splits or _all_splits(config)}
    bench = assemble.assemble(config)
    out = out or label_file(bench)
    search_free = SearchFree(bench, out, print)
    for split, rows in rows_of.items():
        _label(search_free, split, rows)
        _report(search_free, split, rows, config.reward)
    print(f"wrote {out}: {len(search_free.store)} labels")


def _all_splits(config: ConfigDict) -> tuple[str, ...]:
    if config.data.source == task_source.WORLD:
        return world.SPLITS
    return Prepared(config.data.source).splits


def _rows(config: ConfigDict, split: str, train_draws: int) -> Sequence[Task]:
    if config.data.source != task_source.WORLD:
        return task_source.prepared_split(config, split)
    if split not in world.SPLITS:
        raise command_line.UsageError(f"--splits has {split!r}; known: {', '.join(world.SPLITS)}")
    draws = train_draws if split == "train" else config.data.draws_per_item
    size = config.data.picture_width_px, config.data.picture_height_px
    return world.eval_tasks(split, draws, *size)


def _label(search_free: SearchFree, split: str, rows: Sequence[Task]) -> None:
    """Labels the missing rows, a few pictures at a time."""
    missing = [n for n, task_id in enumerate(_ids(rows)) if not search_free.store.has(task_id)]
    if missing:
        print(f"{split}: labelling {len(missing)} tasks with the initial policy (no tools)")
    for start in range(0, len(missing), _AT_ONCE):
        search_free.make([rows[number] for number in missing[start : start + _AT_ONCE]])
        print(f"{split}: {min(start + _AT_ONCE, len(missing))} of {len(missing)}", flush=True)


def _report(search_free: SearchFree, split: str, rows: Sequence[Task], reward: ConfigDict) -> None:
    """Prints the share of search_free tasks by source and category, and how the sources agree."""
    sources, categories = _by_source(search_free, rows, reward)
    by_category: dict[str, list[bool]] = {}
    for task_id, is_free in sources["greedy"].items():
        by_category.setdefault(categories[task_id], []).append(is_free)
    shares = "  ".join(f"{k or '-'} {sum(v) / len(v):.2f}" for k, v in sorted(by_category.items()))
    for name, labels in sources.items():
        if labels:
            print(f"{split}: search_free by {name} {sum(labels.values())}/{len(labels)}")
    if by_category:
        print(f"{split}: greedy by category  ({shares})")
    names = [name for name, labels in sources.items() if labels]
    for one, other in ((a, b) for i, a in enumerate(names) for b in names[i + 1 :]):
        found = agreement(sources[one], sources[other])
        kappa = "-" if found["kappa"] is None else f"{found['kappa']:.2f}"
        print(
            f"{split}: {one} and {other} agree on {found['share']:.3f} of {found['n']} (kappa "
            f"{kappa}; only {one} free {found['only_first_free']}, only {other} free "
            f"{found['only_second_free']})"
        )


def _by_source(
    search_free: SearchFree, rows: Sequence[Task], reward: ConfigDict
) -> tuple[Mapping[str, dict[str, bool]], dict[str, str]]:
    """source -> task id -> label, and task id -> category."""
    ids = _ids(rows)
    is_prepared = isinstance(rows, PreparedSplit)
    kinds = rows.categories if is_prepared else [task.category for task in rows]
    categories = dict(zip(ids, kinds, strict=True))
    made = {task_id: search_free.store.of_id(task_id) for task_id in ids}
    rated = {i: label.rate >= reward.search_free_rate for i, label in made.items() if label.samples}
    return {
        "greedy": {i: label.greedy for i, label in made.items()},
        f"rate >= {reward.search_free_rate:g}": rated,
        "category": {i: CATEGORIES[c] for i, c in categories.items() if c in CATEGORIES},
    }, categories


def _ids(rows: Sequence[Task]) -> list[str]:
    return rows.ids if isinstance(rows, PreparedSplit) else [task.id for task in rows]
