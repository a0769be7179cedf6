"""Metrics of finished steps -> what the user sees while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

_COLUMNS = (
    ("reward", "reward"), ("acc", "Acc"), ("sr", "SR"), ("r_aware", "aware"), ("r_count", "count"),
    ("r_qalign", "qalign"), ("r_salign", "salign"), ("r_format", "format"),
)  # fmt: skip


class Progress:
    """One line a step, and on a terminal a bar of the rollout that is running."""

    def __init__(self, num_steps: int, start: int, console: Console | None = None):
        """Args: num_steps: of the whole run; start: first step of this start."""
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._num_steps, self._start = num_steps, start
        self._began = time.perf_counter()
        self._step_began: float | None = None
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} episodes"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("rollout", total=None)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line for the user."""
        self.console.print(text, markup=False)

    def rollout(self, finished: int, total: int) -> None:
        """Called as episodes end."""
        self._bar.update(self._task, completed=finished, total=total)

    def step(self, step: int, line: Mapping[str, float | None]) -> None:
        """Prints one finished step; time left is by the median pace of this start's steps."""
        done = step + 1 - self._start
        elapsed = time.perf_counter() - self._began
        left = (self._num_steps - step - 1) * elapsed / done
        shown = "  ".join(f"{title} {_figure(line[key])}" for key, title in _COLUMNS)
        self.say(
            f"step {step + 1}/{self._num_steps}  {shown}  "
            f"{line['tokens_per_s']:.0f} tokens/s  {line['step_s']:.1f} s  "
            f"left {int(left // 60)}:{int(left % 60):02d}"
        )


def _figure(value: float | None) -> str:
    return "  - " if value is None else f"{value:.2f}"
