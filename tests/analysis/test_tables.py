import io

import pytest
from rich.console import Console

from svrl_jax.analysis import tables

FIGURES = {
    "acc": 0.5, "sr": 0.25, "over_search": None, "under_search": 0.125, "mask_agreement": 0.75,
    "mask_balanced": 0.625, "unique_queries": 3.0, "r_format": 1.0, "n": 300,
}  # fmt: skip
MODES = {"sampled": FIGURES, "greedy": FIGURES | {"acc": 0.6}}
GAP = {"difference": 0.0825, "low": -0.01, "high": 0.175}
NONE = {"difference": None, "low": None, "high": None}


@pytest.fixture
def summary():
    gaps = {"acc": GAP, "over_search": NONE}
    return {
        "initial": {"test": MODES, "ood": MODES},
        "trained": {"test": MODES, "ood": MODES},
        "difference": {s: {m: gaps for m in MODES} for s in ("test", "ood")},
        "marks": {"scripted": {"test": FIGURES, "ood": FIGURES | {"acc": 0.9}}},
        "labels": {
            "scorer": "em", "search_free": "initial policy, greedy", "oracle": "rule",
            "query_choice": "first", "prompt": "0123456789ab", "draws_per_item": 2,
            "search": "local",
        },
    }  # fmt: skip


def test_a_table_for_each_split_and_mode_and_one_of_marks(summary):
    found = tables.blocks(summary)
    titles = [b.title for b in found]
    assert titles == [
        "test, T = 1", "test, greedy", "test, scripted marks",
        "ood, T = 1", "ood, greedy", "ood, scripted marks",
    ]  # fmt: skip
    for block in found:
        assert all(len(row) == len(block.columns) for row in block.rows)
        assert [row[0] for row in block.rows] == list(tables.TITLES.values())
    assert found[0].columns == ("", "initial", "trained", "difference (95%)")
    assert found[0].rows[0] == ("Acc", "0.500", "0.500", "+0.083 [-0.010, +0.175]")
    assert found[0].rows[2] == ("over-search", "-", "-", "")  # undefined, not zero
    assert found[0].rows[-1][:3] == ("questions", "300", "300")
    assert found[5].rows[0] == ("Acc", "0.900")


def test_markdown_holds_every_cell_and_the_footnote(summary):
    text = tables.as_markdown(summary)
    lines = text.splitlines()
    assert "| Acc | 0.500 | 0.500 | +0.083 [-0.010, +0.175] |" in lines
    assert sum(line.startswith("|---") for line in lines) == 6
    for part in ("scorer em", "0123456789ab", "rule oracle", "first", "2 picture draws"):
        assert part in text


def test_a_single_policy_needs_no_difference(summary):
    del summary["trained"], summary["difference"]
    assert tables.blocks(summary)[0].columns == ("", "initial")


def test_the_screen_form_fits_80_columns_uncut(summary):
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=False).print(tables.as_screen(summary))
    text = out.getvalue()
    assert "+0.083 [-0.010, +0.175]" in text and "…" not in text
    assert max(map(len, text.splitlines())) <= 80
