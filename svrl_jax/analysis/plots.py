"""Groups of cases -> figures (PNG and SVG), in Okabe and Ito's colours, told apart by shape too."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from svrl_jax.analysis.figures import COLOURS, MARKERS, pyplot, save
from svrl_jax.evals import calibration, errors, stats, verifier
from svrl_jax.evals.cases import Group, rows_of


def acc_and_sr(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """Acc and SR of every group with 95% intervals."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.45 * len(groups)), layout="constrained")
    for number, (name, label) in enumerate((("acc", "Acc"), ("sr", "SR"))):
        for y, group in enumerate(groups):
            found = stats.interval(rows_of(group.cases), name)
            if found["value"] is None:
                continue
            gap = [[found["value"] - found["low"]], [found["high"] - found["value"]]]
            axis.errorbar(
                found["value"], y + 0.16 * (number - 0.5), xerr=[g for g in gap],
                color=COLOURS[number], marker=MARKERS[number], capsize=2, linestyle="",
                label=label if y == 0 else None,
            )  # fmt: skip
    axis.set_yticks(range(len(groups)), [g.title for g in groups])
    axis.invert_yaxis()
    axis.set_xlim(-0.02, 1.02)
    axis.set_xlabel("share of questions (95% interval over items)")
    axis.grid(alpha=0.3)
    axis.legend()
    return save(figure, path)


def calibration_curve(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """Share searched against the tool-free success rate."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
    axis.plot([0, 1], [1, 0], color="0.7", linestyle="--", label="searches just when it must")
    for number, group in enumerate(groups):
        bins = [b for b in calibration.search_curve(group.cases) if b.rate is not None]
        if not bins:
            continue
        axis.plot(
            [b.rate for b in bins], [b.searched.value for b in bins],
            color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)],
            label=group.title,
        )  # fmt: skip
    axis.set_xlabel("tool-free success rate of the initial policy (share of samples)")
    axis.set_ylabel("searched (share of questions)")
    axis.set_ylim(-0.03, 1.03)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    return save(figure, path)


def unique_queries(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """How many of the proposals of a text search are different."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
    width = 0.8 / max(len(groups), 1)
    for number, group in enumerate(groups):
        found = errors.query_diversity(group.cases)
        for k, count in found["counts"].items():
            axis.bar(
                k + width * (number - (len(groups) - 1) / 2), count / found["searches"], width,
                color=COLOURS[number % len(COLOURS)], hatch=("", "//", "..", "xx")[number // 6 % 4],
                edgecolor="white",
            )  # fmt: skip
        axis.bar(0, 0, color=COLOURS[number % len(COLOURS)], label=group.title)
    axis.set_xlabel("unique well-formed queries of a text search")
    axis.set_ylabel("share of text searches")
    axis.legend(fontsize=7)
    return save(figure, path)


def causes(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """Where the wrong answers went wrong."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 1.8 + 0.45 * len(groups)), layout="constrained")
    for y, group in enumerate(groups):
        left = 0.0
        for number, (cause, share) in enumerate(errors.causes_of_errors(group.cases).items()):
            value = share.value or 0.0
            axis.barh(
                y, value, left=left, color=COLOURS[number % len(COLOURS)], edgecolor="white",
                hatch=("", "//")[number // len(COLOURS)], label=cause if y == 0 else None,
            )  # fmt: skip
            left += value
    axis.set_yticks(range(len(groups)), [g.title for g in groups])
    axis.invert_yaxis()
    axis.set_xlabel("share of wrong answers")
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.3, -0.15), ncols=2)
    return save(figure, path)


def verifier_by_rank(groups: Sequence[Group], path: pathlib.Path) -> list[pathlib.Path]:
    """Useful kept and noise dropped by tool and rank."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for axis, tool in zip(axes, ("image_search", "text_search"), strict=True):
        for number, group in enumerate(groups):
            marks = [m for m in verifier.marks_of(group.cases)[0] if m.tool == tool]
            ranks = sorted({m.rank for m in marks})
            found = [verifier.confusion(m for m in marks if m.rank == r) for r in ranks]
            colour = COLOURS[number % len(COLOURS)]
            for style, marker, name in (("-", "o", "useful_kept"), ("--", "s", "noise_dropped")):
                points = [(r, getattr(f, name)) for r, f in zip(ranks, found)]
                points = [p for p in points if p[1] is not None]
                if points:
                    axis.plot(
                        *zip(*points), color=colour, linestyle=style, marker=marker,
                        label=f"{group.title}: {name.replace('_', ' ')}",
                    )  # fmt: skip
        axis.set_title(tool.replace("_", " "))
        axis.set_xlabel("rank of the item")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=6)
    axes[0].set_ylabel("share of items")
    return save(figure, path)


def scaling(results: Sequence[Mapping[str, Any]], path: pathlib.Path) -> list[pathlib.Path]:
    """Acc and tokens against K."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for number, result in enumerate(results):
        widths = [w for w in result["widths"] if w["acc"] is not None]
        style = {
            "color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)],
        }  # fmt: skip
        name = f"{result['policy']}, {result['split']}"
        ks = [w["k"] for w in widths]
        left.fill_between(
            ks, [w["low"] for w in widths], [w["high"] for w in widths], alpha=0.15,
            color=style["color"],
        )  # fmt: skip
        left.plot(ks, [w["acc"] for w in widths], label=name, **style)
        right.plot(ks, [w["tokens"] for w in widths], label=name, **style)
    left.set_ylabel("Acc (share of questions, 95% interval)")
    right.set_ylabel("generated tokens a question")
    for axis in (left, right):
        axis.set_xlabel("parallel text searches K")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    return save(figure, path)


def mask_effect(results: Sequence[Mapping[str, Any]], path: pathlib.Path) -> list[pathlib.Path]:
    """Acc with all items, the kept alone, the dropped alone."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for number, result in enumerate(results):
        for x, arm in enumerate(("all", "kept", "dropped")):
            found = result["acc"][arm]
            if found["value"] is None:
                continue
            gap = [[found["value"] - found["low"]], [found["high"] - found["value"]]]
            axis.errorbar(
                x + 0.1 * (number - (len(results) - 1) / 2), found["value"], yerr=gap, capsize=3,
                color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)],
                label=f"{result['policy']}, {result['split']}" if x == 0 else None,
            )  # fmt: skip
    axis.set_xticks(range(3), ["all items", "kept alone", "dropped alone"])
    axis.set_ylabel("Acc (share of questions with a mixed mask)")
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
    return save(figure, path)
