"""Every figure against values worked out by hand, and the paired interval."""

import dataclasses

import numpy as np
import pytest

from svrl_jax.evals import stats
from svrl_jax.rewards.audit import scripted_episode
from svrl_jax.types import OracleLabels, SearchItem, Task, ToolCall

BLANK = stats.Row("i", False, False, False, (), (), (), (), 0.0, 0)


def row(item="i", **changes):
    return dataclasses.replace(BLANK, item=item, **changes)


ROWS = [
    # Answered at once and right, could be: the ideal.
    row("a", is_right=True, search_free=True, r_format=1.0),
    # Searched without need.
    row(
        "b", is_right=True, search_free=True, has_searched=True, calls=1,
        mask=(1, 0), truth=(1, 1), agreement=(0.5,), r_format=1.0,
    ),
    # Needed a search and made two.
    row(
        "c", is_right=True, has_searched=True, calls=2, mask=(1, 0, 0, 1), truth=(1, 0, 1, 0),
        agreement=(1.0, 0.0), unique_queries=(5,), r_format=1.0,
    ),
    # Guessed where a search was needed.
    row("d"),
    # Searched, its mask unreadable, its answer wrong.
    row("e", has_searched=True, calls=1, agreement=(0.0,), unique_queries=(1,)),
    # A lucky guess: neither over- nor under-search.
    row("f", is_right=True, r_format=1.0),
]  # fmt: skip


def test_figures_by_hand():
    found = stats.figures(ROWS)
    assert set(stats.FIGURES) <= set(found)
    assert found == {
        "acc": pytest.approx(4 / 6),
        "sr": pytest.approx(3 / 6),
        "over_search": pytest.approx(1 / 2),
        "under_search": pytest.approx(1 / 4),  # d, among c d e f
        "mask_agreement": pytest.approx((0.5 + 1.0 + 0.0 + 0.0) / 4),
        # Useful kept: 2 of 4. Useless dropped: 1 of 2.
        "mask_balanced": pytest.approx((2 / 4 + 1 / 2) / 2),
        "unique_queries": pytest.approx(3.0),
        "r_format": pytest.approx(4 / 6),
        "calls_per_question": pytest.approx(4 / 6),
        "sr_calls": None,
        "tokens_per_question": 0.0,
        "n": 6,
        "n_unscored": 0,
        "n_search_free": 2,
        "n_search_needed": 4,
        "n_items_verified": 6,
    }


def test_what_is_undefined_is_none_and_no_number():
    found = stats.figures([row(is_right=True)])
    assert found["acc"] == 1.0 and found["n"] == 1
    for name in ("over_search", "mask_agreement", "mask_balanced", "unique_queries"):
        assert found[name] is None
    assert stats.figures([row(search_free=True)])["under_search"] is None
    assert stats.figures([])["acc"] is None


def test_a_mask_of_ones_is_told_from_a_good_one_by_balance_alone():
    skewed = (1, 1, 1, 1, 1, 1, 1, 0)
    lazy = stats.figures([row(mask=(1,) * 8, truth=skewed, agreement=(7 / 8,))])
    good = stats.figures([row(mask=skewed, truth=skewed, agreement=(1.0,))])
    assert lazy["mask_agreement"] == 7 / 8 and lazy["mask_balanced"] == 0.5
    assert good["mask_agreement"] == good["mask_balanced"] == 1.0
    # With items of one kind alone, balance says nothing.
    assert (
        stats.figures([row(mask=(1, 1), truth=(1, 1), agreement=(1.0,))])["mask_balanced"] is None
    )


def sample(count, rate, seed):
    right = np.random.default_rng(seed).random(count) < rate
    return [row(f"item{i // 2}", is_right=bool(r)) for i, r in enumerate(right)]


def test_identical_rows_differ_by_exactly_nothing():
    rows = sample(100, 0.4, 0)
    found = stats.paired_difference(rows, rows, "acc")
    assert found == {"difference": 0.0, "low": 0.0, "high": 0.0}
    assert stats.paired_difference(ROWS, ROWS, "mask_balanced")["difference"] == 0.0


def test_a_known_shift_is_covered():
    covered, is_above_0 = [], []
    for seed in range(200):
        before, after = sample(300, 0.4, 5000 + seed), sample(300, 0.55, 90_000 + seed)
        found = stats.paired_difference(before, after, "acc", draws=400)
        assert found["low"] < found["difference"] < found["high"]
        covered.append(found["low"] <= 0.15 <= found["high"])
        is_above_0.append(found["low"] > 0)
    assert 0.9 < np.mean(covered) < 0.99
    assert np.mean(is_above_0) > 0.85


def test_pairing_makes_the_interval_narrower():
    before = sample(200, 0.5, 0)
    after = [
        dataclasses.replace(r, is_right=r.is_right or i % 20 == 0) for i, r in enumerate(before)
    ]
    paired = stats.paired_difference(before, after, "acc")
    apart = stats.paired_difference(before, sample(200, 0.52, 7), "acc")
    assert paired["low"] >= 0.0
    assert paired["high"] - paired["low"] < 0.5 * (apart["high"] - apart["low"])


def test_draws_of_one_item_go_together():
    """Ten copies of each item are no more evidence than one."""
    before, after = sample(40, 0.4, 1), sample(40, 0.6, 2)
    once = stats.paired_difference(before, after, "acc")
    often = stats.paired_difference(before * 10, after * 10, "acc")
    assert often["high"] - often["low"] == pytest.approx(once["high"] - once["low"], rel=0.15)


def test_an_undefined_difference_is_none():
    found = stats.paired_difference([row()], [row()], "over_search")
    assert found == {"difference": None, "low": None, "high": None}


def test_other_questions_cannot_be_compared():
    with pytest.raises(ValueError, match="same questions"):
        stats.paired_difference([row("a")], [row("b")], "acc")
    with pytest.raises(ValueError, match="same questions"):
        stats.paired_difference([row("a")], [row("a")] * 2, "acc")


TASK = Task("t", "q", b"", ("Thimphu",), "test", "c", entity=("Bhutan",), evidence_ids=("0",))
ITEMS = tuple(SearchItem(str(i), "x") for i in range(3))
R = "<reason>r</reason>"


def two_searches(first_mask, second_mask):
    return scripted_episode(
        TASK,
        [
            (f"{R}<search><img></search>", ToolCall("image_search", "", ITEMS)),
            (
                f"{R}<verify>{first_mask}</verify><text_search>a b, A b!, c d, e f</text_search>",
                ToolCall("text_search", "a b", ITEMS[:2]),
            ),
            (f"{R}<verify>{second_mask}</verify><answer>Thimphu</answer>", None),
        ],
        num_queries=5,
    )


def test_a_row_reads_masks_against_the_output_before_them():
    labels = OracleLabels(items=((1, 0, 0), (0, 1)), queries=(1,), proposals=((1, 1, 1, 1),))
    found = stats.make_row(two_searches("1,1,0", "0,1"), "i", True, False, labels, 1.0)
    assert found.mask == (1, 1, 0, 0, 1) and found.truth == (1, 0, 0, 0, 1)
    assert found.agreement == (pytest.approx(2 / 3), 1.0)
    assert found.unique_queries == (3,)  # "a b" and "A b!" are one
    assert found.has_searched and found.calls == 2 and found.is_right


def test_an_unreadable_mask_agrees_with_nothing_and_shows_no_items():
    labels = OracleLabels(items=((1, 0, 0), (0, 1)), queries=(1,), proposals=((1, 1, 1, 1),))
    found = stats.make_row(two_searches("1,1", "0,1"), "i", True, False, labels, 0.0)
    assert found.agreement == (0.0, 1.0)
    assert found.mask == (0, 1) and found.truth == (0, 1)


def test_without_labels_nothing_is_said_of_masks():
    found = stats.make_row(two_searches("1,1,0", "0,1"), "i", True, False, None, 1.0)
    assert found.mask == found.truth == found.agreement == ()
    assert found.unique_queries == (3,)
