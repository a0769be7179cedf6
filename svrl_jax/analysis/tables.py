"""summary.json -> a table for the screen and for the run folder (Markdown)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

TITLES = {
    "acc": "Acc", "sr": "SR", "over_search": "over-search", "under_search": "under-search",
    "mask_agreement": "mask raw", "mask_balanced": "mask balanced",
    "unique_queries": "unique queries", "r_format": "format", "n": "n",
}  # fmt: skip


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """(row name, cells by TITLES): policies by split and mode, their difference, then the marks."""
    rows: list[tuple[str, list[str]]] = []
    policies = [p for p in ("initial", "trained") if p in summary]
    splits = list(summary[policies[0]])
    for split in splits:
        for mode in summary[policies[0]][split]:
            for policy in policies:
                figures = summary[policy][split][mode]
                rows.append((f"{split}, {mode}: {policy}", [_cell(figures[k]) for k in TITLES]))
            if "difference" in summary:
                found = summary["difference"][split][mode]
                cells = [_interval(found.get(k)) for k in TITLES]
                rows.append((f"{split}, {mode}: difference (95%)", cells))
        for mark, by_split in summary["marks"].items():
            cells = [_cell(by_split[split][k]) for k in TITLES]
            rows.append((f"{split}: mark {mark}", cells))
    return rows


def footnote(summary: Mapping[str, Any]) -> str:
    """Names what the figures rest on."""
    labels = summary["labels"]
    return (
        f"scorer {labels['scorer']}; search_free by {labels['search_free']}; mask labels by the "
        f"{labels['oracle']} oracle; prompt {labels['prompt']}; over-search = searched among "
        "search_free, under-search = neither searched nor right among the others; SR = share of "
        f"questions searched; {labels['draws_per_item']} picture draws an item; intervals are "
        "paired and over items"
    )


def as_markdown(summary: Mapping[str, Any]) -> str:
    """The table as Markdown, its footnote behind it."""
    lines = ["| | " + " | ".join(TITLES.values()) + " |", "|---" * (len(TITLES) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in summary_rows(summary)]
    return "\n".join([*lines, "", footnote(summary), ""])


def as_screen(summary: Mapping[str, Any]) -> Table:
    """The table for a terminal."""
    table = Table(caption=footnote(summary), caption_justify="left")
    table.add_column("")
    for title in TITLES.values():
        table.add_column(title, justify="right")
    for name, cells in summary_rows(summary):
        style = "bold" if "trained" in name else "dim" if "mark" in name else ""
        table.add_row(name, *cells, style=style)
    return table


def _cell(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _interval(found: Mapping[str, float | None] | None) -> str:
    if found is None or found["difference"] is None:
        return ""
    return f"{found['difference']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"
