"""The runs of a sweep -> tables over configs and seeds, and what each change moves.

Means and spreads are over seeds; intervals of differences are over questions, all seeds of a
question together, so they say how sure the difference is for these seeds.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from svrl_jax.analysis.figures import COLOURS, MARKERS, pyplot, save
from svrl_jax.analysis.tables import TITLES, Block, block_markdown, write_csv
from svrl_jax.evals import stats
from svrl_jax.evals.cases import read_run, rows_of

FIGURES = (
    "acc", "sr", "over_search", "under_search", "mask_balanced", "unique_queries", "r_format",
)  # fmt: skip
_MODES = {"sampled": "T = 1", "greedy": "greedy"}
_BEGIN, _END = "<!-- ablations: begin -->", "<!-- ablations: end -->"


class ReadmeError(RuntimeError):
    """A file that has no place for the tables."""


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One finished run of a sweep.

    Attributes:
      word: its config's.
      seed: its seed.
      rows: mode -> rows of the trained policy, in the order of the questions.
      about: minutes, commit and so on, from the sweep.
    """

    word: str
    seed: int
    rows: Mapping[str, Sequence[stats.Row]]
    about: Mapping[str, Any]


def read(folder: pathlib.Path, word: str, seed: int, about: Mapping[str, Any]) -> SweepRun:
    """The trained policy's rows of a run folder."""
    groups = [g for g in read_run(folder) if g.about["policy"] == "trained"]
    return SweepRun(word, seed, {g.about["mode"]: rows_of(g.cases) for g in groups}, about)


def means(runs: Sequence[SweepRun], mode: str) -> Block:
    """Mean and standard deviation over seeds of every figure."""
    rows = []
    for word in _words(runs):
        of = [stats.figures(r.rows[mode]) for r in runs if r.word == word]
        cells = (_spread([f[name] for f in of]) for name in FIGURES)
        rows.append((word, str(len(of)), *cells))
    columns = ("reward", "seeds", *(TITLES[name] for name in FIGURES))
    return Block(f"Ablations, {_MODES[mode]}", columns, tuple(rows))


def differences(runs: Sequence[SweepRun], mode: str, reference: str) -> Block:
    """Each reward minus the reference at equal steps and seeds, with 95% intervals.

    A difference whose interval leaves out 0 is marked with `!`.
    """
    rows = []
    for word in _words(runs):
        if word == reference:
            continue
        pair = _paired(runs, mode, reference, word)
        cells = []
        for name in FIGURES:
            gap = stats.paired_difference(*pair, name) if pair[0] else None
            cells.append(_gap(gap))
        rows.append((word, *cells))
    return Block(
        f"Ablations, {_MODES[mode]}: difference from {reference}",
        ("reward", *(TITLES[name] for name in FIGURES)),
        tuple(rows),
        "Paired by seed and question; 95% bootstrap intervals over questions. ! marks those that "
        "leave out 0.",
    )


def write(
    runs: Sequence[SweepRun], out: pathlib.Path, note: str, references: Sequence[str]
) -> list[Block]:
    """Writes ablations.md, a CSV a table and the figure; returns the tables."""
    out.mkdir(parents=True, exist_ok=True)
    modes = [m for m in _MODES if all(m in r.rows for r in runs)]
    blocks = []
    for mode in modes:
        blocks.append(means(runs, mode))
        known = [r for r in references if r in _words(runs)]
        found = [differences(runs, mode, reference) for reference in known]
        blocks += [block for block in found if block.rows]
    for block in blocks:
        write_csv(block, out / f"{block.file_name}.csv")
    text = "\n".join([note, "", *map(block_markdown, blocks)])
    (out / "ablations.md").write_text(text, encoding="utf-8")
    if modes:
        draw(runs, modes, out / "ablations")
    return blocks


def draw(runs: Sequence[SweepRun], modes: Sequence[str], path: pathlib.Path) -> list[pathlib.Path]:
    """Every figure by reward: a small mark a seed, a large one the mean."""
    plt = pyplot()
    words = _words(runs)
    figure, axes = plt.subplots(
        1, len(FIGURES), figsize=(2.4 * len(FIGURES), 1.2 + 0.4 * len(words)), sharey=True,
        layout="constrained",
    )  # fmt: skip
    for axis, name in zip(axes, FIGURES, strict=True):
        for number, mode in enumerate(modes):
            for y, word in enumerate(words):
                values = [stats.figures(r.rows[mode])[name] for r in runs if r.word == word]
                values = [v for v in values if v is not None]
                at = y + 0.2 * (number - (len(modes) - 1) / 2)
                style = {"color": COLOURS[number], "marker": MARKERS[number], "linestyle": ""}
                axis.plot(values, [at] * len(values), markersize=3, alpha=0.6, **style)
                if values:
                    axis.plot(
                        [np.mean(values)], [at], markersize=7, **style,
                        label=_MODES[mode] if y == 0 else None,
                    )  # fmt: skip
        axis.set_title(TITLES[name], fontsize=9)
        axis.set_xlabel("queries" if name == "unique_queries" else "share")
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(words)), words)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=7)
    return save(figure, path)


def put_into(readme: pathlib.Path, text: str) -> None:
    """Replaces what stands between the marks of a Markdown file.

    Raises:
      ReadmeError: the file has no such marks.
    """
    before = readme.read_text("utf-8")
    if before.count(_BEGIN) != 1 or before.count(_END) != 1:
        raise ReadmeError(f"{readme} needs the lines {_BEGIN} and {_END}, once each")
    pattern = re.compile(re.escape(_BEGIN) + ".*" + re.escape(_END), re.DOTALL)
    after = pattern.sub(lambda _: f"{_BEGIN}\n\n{text.strip()}\n\n{_END}", before)
    readme.write_text(after, encoding="utf-8")


def _words(runs: Sequence[SweepRun]) -> list[str]:
    return list(dict.fromkeys(r.word for r in runs))


def _paired(
    runs: Sequence[SweepRun], mode: str, reference: str, word: str
) -> tuple[list[stats.Row], list[stats.Row]]:
    """Rows of the seeds that both have, seed by seed."""
    sides = [{r.seed: r.rows[mode] for r in runs if r.word == w} for w in (reference, word)]
    seeds = sorted(set(sides[0]) & set(sides[1]))
    before, after = ([row for s in seeds for row in side[s]] for side in sides)
    return before, after


def _spread(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    spread = f" ± {np.std(known, ddof=1):.3f}" if len(known) > 1 else ""
    return f"{np.mean(known):.3f}{spread}"


def _gap(gap: Mapping[str, float | None] | None) -> str:
    if gap is None or gap["difference"] is None:
        return "-"
    mark = "!" if gap["low"] > 0 or gap["high"] < 0 else ""
    return f"{gap['difference']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}]{mark}"
