"""Run folders -> every table and figure of SPEC 6, and the failure report, as files.

RUN/analysis/report.md          all tables, figures linked
RUN/analysis/NAME.csv           each table
RUN/analysis/NAME.png, .svg     each figure
RUN/analysis/failures.md        the three failure modes, with example episodes
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from svrl_jax.analysis import blocks, figures, plots
from svrl_jax.analysis.episode_text import episode_markdown
from svrl_jax.analysis.tables import Block, block_markdown, write_csv
from svrl_jax.evals import errors
from svrl_jax.evals.cases import Group, read_run
from svrl_jax.training.run_folder import read_metrics

EXAMPLES = 3  # episodes of each failure mode
_SOURCES = {
    "initial": "the initial policy's tool-free greedy pass",
    "self": "the policy's own tool-free greedy answers",
    "category": "the data set's category",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder as it is analysed.

    Attributes:
      name: for legends.
      path: the folder.
      groups: what was evaluated in it.
      metrics: lines of its training, [] where it did not train.
    """

    name: str
    path: pathlib.Path
    groups: tuple[Group, ...]
    metrics: tuple[Mapping[str, Any], ...]

    def results(self, folder: str) -> list[dict[str, Any]]:
        """The figures that `eval` left in `scaling` or `mask_effect`, by name."""
        found = sorted((self.path / folder).glob("*.json"))
        found = [p for p in found if not p.name.endswith(".about.json")]
        return [json.loads(p.read_text("utf-8")) for p in found]


def load(path: pathlib.Path, *, scorer: str = "", source: str = "initial") -> Run:
    """Reads a run folder; see `cases.read_run`. With several runs, groups carry its name."""
    groups = tuple(read_run(path, scorer=scorer, source=source))
    return Run(path.name, path, groups, tuple(read_metrics(path / "metrics.jsonl")))


def write(
    runs: Sequence[Run],
    out: pathlib.Path,
    *,
    source: str = "initial",
    say: Callable[[str], None] = lambda _: None,
) -> list[pathlib.Path]:
    """Analyses the runs together and writes the files of the module's list.

    Args:
      runs: their training curves are overlaid, their groups stand in one table; each policy is
        compared with the first one that answered the same split in the same mode and regime.
      source: of search_free, for the notes.
      say: takes a line for each file group.
    Returns:
      Paths of what was written.
    """
    out.mkdir(parents=True, exist_ok=True)
    groups = _named(runs)
    tables: list[Block] = []
    if groups:
        tables += [blocks.benchmark(groups), blocks.published_benchmark()]
        tables += [blocks.search_calibration(groups, _SOURCES[source]), blocks.search_curve(groups)]
        tables += [blocks.query_diversity(groups), *blocks.where_errors_go(groups)]
        tables += [blocks.verifier_quality(groups)]
    comparisons = [blocks.compare(*pair) for pair in pairs(groups)]
    tables += [blocks.comparison(c) for c in comparisons]
    scaling = [r for run in runs for r in run.results("scaling")]
    effects = [r for run in runs for r in run.results("mask_effect")]
    tables += [blocks.scaling(scaling)] if scaling else []
    tables += [blocks.mask_effect(effects)] if effects else []
    written = []
    for table in tables:
        written.append(out / f"{table.file_name}.csv")
        write_csv(table, written[-1])
    if comparisons:
        written.append(out / "flips.csv")
        write_csv(blocks.flips(comparisons), written[-1])
    say(f"{len(written)} tables")
    drawn = _draw(runs, groups, scaling, effects, out)
    say(f"{len(drawn)} figures")
    written += [p for paths in drawn.values() for p in paths]
    (out / "failures.md").write_text(failure_report(groups), encoding="utf-8")
    (out / "report.md").write_text(_report(runs, tables, drawn), encoding="utf-8")
    return [*written, out / "failures.md", out / "report.md"]


def pairs(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """(first, other) of groups that answered the same split in the same mode and regime."""
    found = []
    firsts: dict[tuple, Group] = {}
    for group in groups:
        key = tuple(group.about[k] for k in ("regime", "split", "mode"))
        first = firsts.setdefault(key, group)
        if first is not group:
            found.append((first, group))
    return found


def failure_report(groups: Sequence[Group], examples: int = EXAMPLES) -> str:
    """The three failure modes of every group as Markdown, with example episodes of each.

    Episodes that a policy, page or data set wrote stand in fenced blocks.
    """
    lines = ["# Failures", ""]
    for group in groups:
        lines += [f"## {group.title}", ""]
        for mode, (share, failed) in errors.failures(group.cases).items():
            lines += [f"### {mode}: {share}", "", errors.MODES[mode].capitalize() + ".", ""]
            if not share.denominator:
                lines += ["No episode tells: labels are missing (`annotate`, `label`).", ""]
            counts: dict[str, int] = {}
            for _, what in failed:
                counts[what] = counts.get(what, 0) + 1
            by_count = sorted(counts.items(), key=lambda pair: -pair[1])[:5]
            lines += [f"* {what}: {n}" for what, n in by_count] + [""] * bool(by_count)
            lines += [episode_markdown(case, what) for case, what in failed[:examples]]
    return "\n".join(lines)


def _named(runs: Sequence[Run]) -> list[Group]:
    """All groups; with several runs a policy's name says which run it is of."""
    if len(runs) == 1:
        return _in_order(runs[0].groups)
    return [
        dataclasses.replace(g, about={**g.about, "policy": f"{run.name}/{g.about['policy']}"})
        for run in runs
        for g in _in_order(run.groups)
    ]


def _in_order(groups: Sequence[Group]) -> list[Group]:
    """The initial policy first, then by name: differences are from it."""
    return sorted(groups, key=lambda g: (g.about["policy"] != "initial", g.name))


def _draw(runs, groups, scaling, effects, out) -> dict[str, list[pathlib.Path]]:
    """title -> files of every figure that there are data for."""
    drawn: dict[str, list[pathlib.Path]] = {}
    trained = {run.name: run.metrics for run in runs if run.metrics}
    if trained:
        drawn["Training dynamics"] = figures.dynamics(trained, out / "dynamics")
    if groups:
        drawn["Acc and SR"] = plots.acc_and_sr(groups, out / "acc_and_sr")
        drawn["Search calibration"] = plots.calibration_curve(groups, out / "calibration_curve")
        drawn["Query diversity"] = plots.unique_queries(groups, out / "unique_queries")
        drawn["Causes of wrong answers"] = plots.causes(groups, out / "causes")
        drawn["Verifier quality"] = plots.verifier_by_rank(groups, out / "verifier")
    if scaling:
        drawn["Test-time scaling"] = plots.scaling(scaling, out / "scaling")
    if effects:
        drawn["Does the mask matter?"] = plots.mask_effect(effects, out / "mask_effect")
    return drawn


def _report(runs: Sequence[Run], tables: Sequence[Block], drawn) -> str:
    names = ", ".join(run.name for run in runs)
    lines = [f"# Analysis of {names}", ""]
    lines += ["Failures and example episodes: [failures.md](failures.md).", ""]
    for title, paths in drawn.items():
        lines += [f"## {title}", "", f"![{title}]({paths[0].name})", ""]
    lines += ["## Tables", ""]
    return "\n".join([*lines, *map(block_markdown, tables)])
