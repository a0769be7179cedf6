"""summary.json -> tables for the screen and for the run folder (Markdown)."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

TITLES = {
    "acc": "Acc",
    "sr": "SR",
    "over_search": "over-search",
    "under_search": "under-search",
    "mask_agreement": "mask, raw",
    "mask_balanced": "mask, balanced",
    "unique_queries": "unique queries",
    "r_format": "format",
    "n": "questions",
}
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_MODES = {"sampled": "T = 1", "greedy": "greedy"}


@dataclasses.dataclass(frozen=True)
class Block:
    """One table: `rows` are as long as `columns`; `note` stands below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @property
    def file_name(self) -> str:
        """Of its files, without suffix."""
        return re.sub(r"[^a-z0-9]+", "_", self.title.lower()).strip("_")[:80]


def block_markdown(block: Block) -> str:
    """A table as Markdown; cells from outside (questions, answers) cannot break out of it."""
    lines = [f"**{_cell_text(block.title)}**", "", _line(block.columns)]
    lines.append("|---" + "|--:" * (len(block.columns) - 1) + "|")
    lines += [_line(tuple(map(_cell_text, row))) for row in block.rows]
    return "\n".join([*lines, "", *([block.note, ""] if block.note else [])])


def write_csv(block: Block, path: pathlib.Path) -> None:
    """A table as CSV, its note left out."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([block.columns, *block.rows])


def blocks(summary: Mapping[str, Any]) -> list[Block]:
    """A table a split and mode (initial, trained, paired difference), then one of marks a split."""
    policies = [p for p in ("initial", "trained") if p in summary]
    found = []
    for split, modes in summary[policies[0]].items():
        for mode in modes:
            columns = ["", *policies]
            sides = [summary[p][split][mode] for p in policies]
            rows = [[title, *[_cell(s[key]) for s in sides]] for key, title in TITLES.items()]
            if "difference" in summary:
                columns.append("difference (95%)")
                gaps = summary["difference"][split][mode]
                for row, key in zip(rows, TITLES, strict=True):
                    row.append(_interval(gaps.get(key)))
            found.append(Block(f"{split}, {_MODES[mode]}", tuple(columns), _tuples(rows)))
        marks = summary["marks"]
        if not marks:
            continue
        rows = [[t, *[_cell(m[split][key]) for m in marks.values()]] for key, t in TITLES.items()]
        columns = ("", *[name.replace("_", " ") for name in marks])
        found.append(Block(f"{split}, scripted marks", columns, _tuples(rows)))
    return found


def footnote(summary: Mapping[str, Any]) -> str:
    """Names what the figures rest on."""
    labels = summary["labels"]
    return (
        f"scorer {labels['scorer']}; search_free by {labels['search_free']}; mask labels by the "
        f"{labels['oracle']} oracle; prompt {labels['prompt']}; the {labels['query_choice']} "
        f"proposal is run; {labels['draws_per_item']} picture draws an item; searches: "
        f"{labels['search']}. SR: share of "
        "questions on which a tool was called. Over-search: searched, among search_free questions. "
        "Under-search: neither searched nor right, among the others. Intervals: paired bootstrap "
        "over items."
    )


def as_markdown(summary: Mapping[str, Any]) -> str:
    """The tables as Markdown, the footnote behind them."""
    lines: list[str] = []
    for block in blocks(summary):
        lines += [f"**{block.title}**", "", _line(block.columns)]
        lines.append("|---" + "|--:" * (len(block.columns) - 1) + "|")
        lines += [*map(_line, block.rows), ""]
    return "\n".join([*lines, footnote(summary), ""])


def as_screen(summary: Mapping[str, Any]) -> RenderableType:
    """The tables for a terminal of 80 columns."""
    tables: list[RenderableType] = []
    for block in blocks(summary):
        table = Table(title=block.title, title_justify="left")
        for column in block.columns:
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        for row in block.rows:
            table.add_row(*row)
        tables.append(table)
    return Group(*tables, footnote(summary))


def _tuples(rows: list[list[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(map(tuple, rows))


def _cell_text(text: str) -> str:
    """Text as it may stand in a Markdown table: one line, nothing that acts."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("](", "]\\(")
    return re.sub(r"([|<>`*&])", lambda m: _ENTITIES.get(m[1], f"\\{m[1]}"), text)


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _interval(found: Mapping[str, float | None] | None) -> str:
    if found is None or found["difference"] is None:
        return ""
    return f"{found['difference']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"
