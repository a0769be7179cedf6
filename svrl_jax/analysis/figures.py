"""metrics.jsonl -> the curves of a run (PNG)."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

# Okabe and Ito's palette: told apart by the colour-blind.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
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


def training_curves(metrics: Sequence[Mapping[str, float | None]], path: pathlib.Path) -> None:
    """Draws every panel over steps: raw values faint, a running mean of five steps on top."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(14, 7), layout="constrained")
    for axis, (title, names) in zip(axes.flat, _PANELS, strict=True):
        for colour, name in zip(_COLOURS, names, strict=False):
            points = [(m["step"] + 1, m[name]) for m in metrics if m.get(name) is not None]
            if not points:
                continue
            steps, values = np.array(points, float).T
            axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
            axis.plot(steps, _running_mean(values, 5), color=colour, label=name)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
    sums = np.cumsum(np.concatenate([[0.0], values]))
    first = np.maximum(np.arange(1, len(values) + 1) - width, 0)
    last = np.arange(1, len(values) + 1)
    return (sums[last] - sums[first]) / (last - first)
