"""metrics.jsonl of one or more runs -> curves over steps (PNG, SVG), and what all figures share."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

# Okabe and Ito's palette: told apart by the colour-blind; markers tell apart what colours repeat.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", ":", "-.")
_PANELS = (
    (
        "reward and its factors",
        ("reward", "r_aware", "r_count", "r_qalign", "r_salign", "r_format"),
    ),
    ("Acc and search", ("acc", "sr", "over_search", "under_search")),
    ("unique queries of a text search", ("unique_queries",)),
    ("KL to the initial policy (nats a token)", ("kl",)),
    ("entropy (nats a token)", ("entropy",)),
    ("seconds a step", ("rollout_s", "update_s", "step_s")),
)
# (panel, metric): of several runs a panel shows one metric, a line a run.
_OVERLAID = (
    ("reward (mean of valid episodes)", "reward"),
    ("Acc (share right)", "acc"),
    ("SR (share that searched)", "sr"),
    ("over-search (share of search_free)", "over_search"),
    ("under-search (share of the others)", "under_search"),
    ("r_aware (mean)", "r_aware"),
    ("r_count (mean)", "r_count"),
    ("r_qalign (mean)", "r_qalign"),
    ("verify agreement, r_salign (mean)", "r_salign"),
    ("r_format (share)", "r_format"),
    ("unique queries of a text search", "unique_queries"),
    ("turns of an episode", "turns"),
    ("policy tokens of an episode", "policy_tokens"),
    ("KL to the initial policy (nats a token)", "kl"),
    ("entropy (nats a token)", "entropy"),
)


def training_curves(metrics: Sequence[Mapping[str, float | None]], path: pathlib.Path) -> None:
    """Draws every panel over steps: raw values faint, a running mean of five steps on top."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(14, 7), layout="constrained")
    for axis, (title, names) in zip(axes.flat, _PANELS, strict=True):
        for colour, name in zip(COLOURS, names, strict=False):
            _curve(axis, metrics, name, color=colour, label=name)
        _finish(axis, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def dynamics(
    runs: Mapping[str, Sequence[Mapping[str, float | None]]], path: pathlib.Path
) -> list[pathlib.Path]:
    """Overlays the runs, a panel a metric, and writes PATH.png and PATH.svg.

    Args:
      runs: name -> lines of metrics.
    """
    plt = pyplot()
    figure, axes = plt.subplots(3, 5, figsize=(20, 10), layout="constrained")
    for axis, (title, metric) in zip(axes.flat, _OVERLAID, strict=True):
        for number, (name, metrics) in enumerate(runs.items()):
            style = _LINES[number // len(COLOURS) % len(_LINES)]
            colour = COLOURS[number % len(COLOURS)]
            _curve(axis, metrics, metric, color=colour, label=name, linestyle=style)
        _finish(axis, title)
    return save(figure, path)


def pyplot():
    """matplotlib.pyplot without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure, path: pathlib.Path) -> list[pathlib.Path]:
    """Writes PATH.png and PATH.svg and closes the figure; equal figures give equal bytes."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    png, svg = path.with_suffix(".png"), path.with_suffix(".svg")
    with matplotlib.rc_context({"svg.hashsalt": "svrl_jax"}):
        figure.savefig(png, dpi=110)
        figure.savefig(svg, metadata={"Date": None})
    pyplot().close(figure)
    return [png, svg]


def _curve(axis, metrics, name: str, **style) -> None:
    points = [(m["step"] + 1, m[name]) for m in metrics if m.get(name) is not None]
    if not points:
        return
    steps, values = np.array(points, float).T
    axis.plot(steps, values, **(style | {"label": None, "alpha": 0.2, "linewidth": 1}))
    axis.plot(steps, _running_mean(values, 5), **style)


def _finish(axis, title: str) -> None:
    axis.set_title(title)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
    sums = np.cumsum(np.concatenate([[0.0], values]))
    first = np.maximum(np.arange(1, len(values) + 1) - width, 0)
    last = np.arange(1, len(values) + 1)
    return (sums[last] - sums[first]) / (last - first)
