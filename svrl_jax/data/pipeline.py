"""A prepared split -> batches of tasks with their prompts built, endless, in one global order.

The state is one number, the rows handed out by all hosts together: row r is place r mod N of epoch
r div N, and each epoch has an order of its own, drawn from (seed, epoch). So every row comes
exactly once an epoch, a stopped run goes on anywhere, and with any number of hosts that divides the
batch: batch b of P rows is rows bP to bP + P - 1, of which host h of H has the h-th P / H.

Rows that cannot fit are known beforehand, from the index alone (`fit_rows`), and are no part of the
epoch, so nothing is dropped while running and all hosts agree.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

import numpy as np
from absl import flags

from svrl_jax import rng as rng_lib
from svrl_jax.data import tables
from svrl_jax.data.prepared import PreparedSplit
from svrl_jax.types import Prompt, Task

Batch = tuple[list[Task], list[Prompt]]


@dataclasses.dataclass(frozen=True)
class Fit:
    """Which rows of a split training uses.

    Attributes:
      kept: int64[K], numbers of the rows that fit, rising.
      num_tokens: int32[rows], tokens of each row's prompt.
      num_shrunk: kept rows whose picture is made smaller.
      left_out: ids of the rows that do not fit even so.
    """

    kept: np.ndarray
    num_tokens: np.ndarray
    num_shrunk: int
    left_out: tuple[str, ...]


def fit_rows(rows: PreparedSplit, measure: Callable) -> Fit:
    """Measures every row by its question and its picture's size; nothing is decoded.

    Args:
      measure: (question, (width, height)) -> protocol.prompts.PromptSize.
    Raises:
      ValueError: no row fits.
    """
    sizes = [measure(q, s) for q, s in zip(rows.questions, rows.sizes_px.tolist(), strict=True)]
    fits = np.array([size.fits for size in sizes], bool)
    if not fits.any():
        shortest = min(size.num_tokens for size in sizes)
        raise ValueError(
            f"no row of {rows.source} fits: the shortest prompt has {shortest} tokens; raise "
            "config.data.max_prompt_tokens or config.rollout.budget"
        )
    return Fit(
        kept=np.flatnonzero(fits),
        num_tokens=np.array([size.num_tokens for size in sizes], np.int32),
        num_shrunk=sum(size.is_shrunk and size.fits for size in sizes),
        left_out=tuple(i for i, fit in zip(rows.ids, fits, strict=True) if not fit),
    )


class TaskStream:
    """Endless batches of one host; the whole state is `position`.

    Attributes:
      position: rows handed out so far, by all hosts together.
    """

    def __init__(
        self,
        rows: Sequence[Task],
        kept: np.ndarray,
        build: Callable[[Task], Prompt],
        *,
        seed: int,
        batch_size: int,
        position: int = 0,
        host: int = 0,
        num_hosts: int = 1,
        read_threads: int = 0,
        workers: int = 0,
        prefetch_batches: int = 2,
    ):
        """Starts to read ahead at once.

        Args:
          rows: the split.
          kept: int64[K], numbers of its rows that are used.
          build: makes a task's prompt; with workers it is pickled.
          seed: of the epochs' orders.
          batch_size: P, rows of a batch over all hosts.
          position: where to go on; any number.
          host, num_hosts: this host of how many; num_hosts divides batch_size.
          read_threads: of each process, 0 reads when asked.
          workers: processes, 0 for this one only. The order does not depend on either.
          prefetch_batches: batches held ready by each process.
        """
        if batch_size < 1 or batch_size % num_hosts:
            raise ValueError(
                f"a batch of {batch_size} rows (config.data.prompts_per_step) cannot be shared by "
                f"{num_hosts} hosts: make it a multiple"
            )
        self.position, self.num_rows = position, len(kept)
        self._batch_size = batch_size
        self._places = _Places(rows, kept, seed, position, host, num_hosts, batch_size)
        self._batches = _read_ahead(
            self._places, build, batch_size // num_hosts, read_threads, workers, prefetch_batches
        )

    def __iter__(self):
        return self

    def __next__(self) -> Batch:
        tasks_and_prompts = next(self._batches)
        self.position += self._batch_size
        tasks, prompts = zip(*tasks_and_prompts, strict=True)
        return list(tasks), list(prompts)

    @property
    def epoch(self) -> int:
        """Whole passes over the rows so far."""
        return self.position // self.num_rows

    def close(self) -> None:
        """Stops reading ahead."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


class TasksAlone:
    """A stream of tasks whose prompts the step builds: (tasks, None), and its position."""

    def __init__(self, tasks):
        """Args: tasks: an iterator of lists of tasks with a `position`."""
        self._tasks = tasks

    def __iter__(self):
        return self

    def __next__(self) -> tuple[list[Task], None]:
        return next(self._tasks), None

    @property
    def position(self) -> int:
        """Rows handed out so far."""
        return self._tasks.position

    def close(self) -> None:
        """Nothing reads ahead."""


@dataclasses.dataclass(frozen=True)
class _Places:
    """This host's rows in the order in which they are handed out, numbered from 0 without end."""

    rows: Sequence[Task]
    kept: np.ndarray
    seed: int
    position: int
    host: int
    num_hosts: int
    batch_size: int

    def __len__(self) -> int:
        return sys.maxsize // self.num_hosts // 2

    def __getitem__(self, index: int) -> Task:
        return self.rows[self.row_number(index)]

    def row_number(self, index: int) -> int:
        """Number of the row in its split."""
        share = self.batch_size // self.num_hosts
        batch, place = divmod(index, share)
        row = self.position + batch * self.batch_size + self.host * share + place
        epoch, place = divmod(row, len(self.kept))
        return int(self.kept[epoch_order(self.seed, epoch, len(self.kept))[place]])


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """int[count], a permutation that (seed, epoch) alone decides."""
    return rng_lib.host_rng("row order", seed, epoch).permutation(count)


def _read_ahead(places, build, share: int, read_threads: int, workers: int, prefetch: int):
    try:
        import grain  # late: an extra
    except ImportError as error:
        raise tables.missing_package(error) from error

    # Batches are made of the map, before worker processes divide it: else each worker would batch
    # its own rows and the order would depend on their number.
    batches = (
        grain.MapDataset.source(places).map(_Build(build)).batch(share, batch_fn=list)
    ).to_iter_dataset(
        grain.ReadOptions(
            num_threads=read_threads, prefetch_buffer_size=prefetch if read_threads else 0
        )
    )
    if workers:
        if not flags.FLAGS.is_parsed():  # grain reads its own; our modes parse others
            flags.FLAGS.mark_as_parsed()
        batches = batches.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=prefetch)
        )
    return iter(batches)


@dataclasses.dataclass(frozen=True)
class _Build:
    """Task -> (task, prompt), for worker processes."""

    build: Callable[[Task], Prompt]

    def __call__(self, task: Task) -> tuple[Task, Prompt]:
        return task, self.build(task)
