"""config.data -> the tasks of a run: the embedded world's, or those of a prepared folder."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import jax
from ml_collections import ConfigDict

from svrl_jax.config import ConfigError
from svrl_jax.data import world
from svrl_jax.data.pipeline import TasksAlone, TaskStream, fit_rows
from svrl_jax.data.prepared import Prepared, PreparedSplit
from svrl_jax.protocol.prompts import PromptBuilder
from svrl_jax.types import Task

WORLD = "world"


def train_stream(
    config: ConfigDict,
    builder: PromptBuilder,
    position: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> TaskStream | TasksAlone:
    """Batches of (tasks, prompts or None) from row `position` on: this host's share of each.

    Args:
      say: takes a line about rows that do not fit.
    Raises:
      PreparedError: config.data.source holds no such split.
      ConfigError: no row fits the limits.
    """
    data = config.data
    if data.source == WORLD:
        size = data.picture_width_px, data.picture_height_px
        return TasksAlone(
            world.TrainStream(config.seed, data.prompts_per_step, *size, position=position)
        )
    rows = prepared_split(config, data.split)
    try:
        fit = fit_rows(rows, lambda question, size: builder.measure(question, size, "agent"))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    say(
        f"{rows.source}: {len(fit.kept)} rows, {int(fit.num_tokens[fit.kept].mean())} prompt tokens"
    )
    if fit.num_shrunk or fit.left_out:
        say(
            f"{rows.source}: {fit.num_shrunk} pictures made smaller, {len(fit.left_out)} rows left "
            f"out, for prompts of at most {builder.max_tokens} tokens"
        )
    return TaskStream(
        rows,
        fit.kept,
        _BuildAgent(builder),
        seed=config.seed,
        batch_size=data.prompts_per_step,
        position=position,
        host=jax.process_index(),
        num_hosts=jax.process_count(),
        read_threads=data.read_threads,
        workers=data.workers,
        prefetch_batches=data.prefetch_batches,
    )


def eval_splits(config: ConfigDict) -> tuple[str, ...]:
    """Names of the splits to evaluate on: those of config.eval.splits, or all but the training's.

    Raises:
      PreparedError: one of them is not there.
    """
    if config.data.source == WORLD:
        return tuple(config.eval.splits) or tuple(s for s in world.SPLITS if s != "train")
    if not config.eval.splits:
        splits = Prepared(config.data.source).splits
        return tuple(s for s in splits if s not in ("train", config.data.split))
    for split in config.eval.splits:
        prepared_split(config, split)
    return tuple(config.eval.splits)


def eval_tasks(config: ConfigDict, split: str) -> list[Task]:
    """A split's tasks: of the world `data.draws_per_item` an item; the first `eval.num_items` items
    or all.
    """
    return [task for chunk in eval_chunks(config, split) for task in chunk]


def eval_chunks(config: ConfigDict, split: str) -> Iterator[list[Task]]:
    """The same tasks, no more at a time than should be held with their pictures cut to patches.

    A real picture of 1,152 tokens takes 22 MB so: `rollout.slots` tasks of a prepared split. The
    world's pictures are small, and one chunk keeps the lanes full.
    """
    data = config.data
    if data.source == WORLD:
        size = data.picture_width_px, data.picture_height_px
        tasks = world.eval_tasks(split, data.draws_per_item, *size)
        keep = config.eval.num_items * data.draws_per_item
        yield tasks[:keep] if keep else tasks
        return
    rows = prepared_split(config, split)
    keep = min(len(rows), config.eval.num_items or len(rows))
    for start in range(0, keep, config.rollout.slots):
        yield [rows[n] for n in range(start, min(start + config.rollout.slots, keep))]


def prepared_split(config: ConfigDict, split: str) -> PreparedSplit:
    """`SPLIT` of config.data.source, or `SET/SPLIT` of the folder beside it.

    Raises:
      PreparedError: it is not there.
    """
    folder = pathlib.Path(config.data.source)
    name, _, last = split.rpartition("/")
    return Prepared(folder.parent / name if name else folder).split(last)


def max_prompt_tokens(config: ConfigDict) -> int:
    """config.data.max_prompt_tokens, or less where the budget would leave no room for one turn."""
    room = config.rollout.budget - config.rollout.max_turn_tokens
    return min(config.data.max_prompt_tokens, room)


class _BuildAgent:
    """The task's prompt under the agent regime; may be pickled to worker processes."""

    def __init__(self, builder: PromptBuilder):
        self._builder = builder

    def __call__(self, task: Task):
        return self._builder.build(task, "agent")
