"""Every statistic of SPEC 6 against values worked out by hand on twelve episodes."""

import dataclasses
import math

import pytest

from svrl_jax.analysis import published
from svrl_jax.evals import calibration, costs, errors, stats, verifier
from svrl_jax.evals.calibration import Share
from svrl_jax.evals.cases import rows_of
from svrl_jax.evals.verifier import Confusion
from tests.evals.twelve import group, twelve

CASES = twelve()


def test_search_calibration():
    assert calibration.search_calibration(CASES) == {
        "acc": Share(5, 11),  # 1 4 5 6 7; 12 is unscored
        "acc_searched": Share(3, 7),
        "acc_not_searched": Share(2, 4),
        "sr": Share(8, 12),
        "sr_calls": Share(11, 36),
        "sr_image": Share(4, 12),
        "sr_text": Share(6, 12),
        "over_search": Share(1, 3),  # 5 of 1 2 5
        "under_search": Share(1, 8),  # 3 of 3 4 6 7 8 9 10 11
        "needed_searched": Share(7, 9),
        "unlabelled": Share(0, 12),
        "unscored": Share(1, 12),
    }
    assert str(Share(1, 8)) == "0.125 (1/8)" and str(Share(0, 0)) == "-"


def test_the_figures_of_a_table_say_the_same():
    found = stats.figures(rows_of(CASES))
    shares = calibration.search_calibration(CASES)
    for name in ("acc", "sr", "sr_calls", "over_search", "under_search"):
        assert found[name] == pytest.approx(shares[name].value)
    assert found["n_unscored"] == 1 and found["n"] == 12
    assert found["n_search_free"] == 3 and found["n_search_needed"] == 8
    assert found["calls_per_question"] == pytest.approx(11 / 12)
    assert found["unique_queries"] == pytest.approx(25 / 7)
    assert found["r_format"] == pytest.approx(11 / 12)  # all but 11
    confusion = verifier.by_part(verifier.marks_of(CASES)[0])["all"]
    assert found["mask_balanced"] == pytest.approx(confusion.balanced)


def test_the_curve_and_its_area():
    curve = calibration.search_curve(CASES)
    assert [(b.rate, b.searched) for b in curve] == [
        (0.0, Share(5, 6)),
        (0.25, Share(1, 2)),
        (None, Share(0, 0)),
        (0.75, Share(0, 1)),
        (1.0, Share(1, 2)),
    ]
    # 28 pairs of a searched (5 6 7 8 9 10 11) and an unsearched question (1 2 3 4):
    # 5 wins 0.5 of 4, each of 6 7 8 10 11 wins 3.5, 9 wins 2.5.
    assert calibration.search_auroc(CASES) == pytest.approx(20.5 / 28)
    assert calibration.auroc([1, 2, 3, 4], [False, False, True, True]) == 1.0
    assert calibration.auroc([1, 1], [True, False]) == 0.5
    assert calibration.auroc([1, 2], [True, True]) is None


def test_query_diversity():
    found = errors.query_diversity(CASES)
    overlap = found.pop("overlap")
    assert found == {
        "searches": 7, "unique": pytest.approx(25 / 7), "proposed": 5.0,
        "counts": {1: 1, 2: 1, 3: 1, 4: 1, 5: 3},
    }  # fmt: skip
    # Pairs of equal queries among ten: 3 unique (a b c c c) 3, 2 (a b b b b) 6, 4 (a b c d d) 1,
    # 1 (a a a a a) 10, 5: none.
    assert overlap == pytest.approx((0.3 + 0.6 + 0.1 + 1.0) / 7)


def test_where_the_errors_go():
    assert errors.error_table(CASES) == {
        "acc_good_query": Share(1, 4),  # 7 of 7 8 10 11
        "wrong_good_query": Share(3, 4),
        "wrong_useful_found": Share(3, 6),  # 8 10 11 of 5 6 7 8 10 11
        "wrong_both": Share(3, 4),
        "irrelevant_items": Share(14, 21),
        "good_queries": Share(4, 5),
    }
    found = errors.causes_of_errors(CASES)
    assert sum(s.numerator for s in found.values()) == 6
    hit = {name for name, share in found.items() if share.numerator}
    assert hit == {
        "not answered",  # 11
        "not searched, though needed",  # 3
        "not searched, though it can answer without tools",  # 2
        "every query bad",  # 9
        "useful item found, all such dropped",  # 8
        "useful item kept",  # 10
    }
    assert all(found[name] == Share(1, 6) for name in hit)


def test_an_external_judges_view_of_a_query_goes_before_the_labels():
    changed = [
        dataclasses.replace(c, query_verdicts=(0,)) if c.task.id == "t10" else c for c in CASES
    ]
    assert errors.error_table(changed)["wrong_good_query"] == Share(2, 3)
    assert errors.cause_of(changed[9]) == "useful item kept"  # evidence was there all the same


def test_verifier_quality():
    marks, unmasked = verifier.marks_of(CASES)
    assert unmasked == 2  # those of 11
    parts = verifier.by_part(marks)
    found = parts["all"]
    assert found == Confusion(7, 6, 1, 8) and found.n == 22
    assert found.agreement == pytest.approx(15 / 22)
    assert found.useful_kept == pytest.approx(7 / 8)
    assert found.noise_dropped == pytest.approx(8 / 14)
    assert found.balanced == pytest.approx((7 / 8 + 8 / 14) / 2)
    assert found.matthews == pytest.approx(50 / math.sqrt(13 * 8 * 14 * 9))
    assert parts["image_search"] == Confusion(2, 2, 1, 4)
    assert parts["image_search, rank 1"] == Confusion(2, 0, 1, 1)
    assert parts["text_search"] == Confusion(5, 4, 0, 4)
    assert set(parts) >= {f"text_search, rank {r}" for r in (1, 2, 3)}


def test_a_mask_of_ones_and_no_items():
    ones = Confusion(8, 2, 0, 0)
    assert ones.agreement == 0.8 and ones.balanced == 0.5 and ones.matthews is None
    empty = Confusion(0, 0, 0, 0)
    assert empty.agreement is None and empty.balanced is None and empty.matthews is None


def test_the_three_failure_modes():
    found = errors.failures(CASES)
    assert {mode: share for mode, (share, _) in found.items()} == {
        "search decision": Share(2, 11),  # 3 and 5
        "noise": Share(5, 7),  # 6 7 8 9 12
        "use of evidence": Share(3, 6),  # 8 10 11
    }
    what = {mode: {c.task.id: w for c, w in cases} for mode, (_, cases) in found.items()}
    assert what["search decision"] == {
        "t3": "did not search, though it cannot answer without tools",
        "t5": "searched, though it can answer without tools",
    }
    assert what["noise"]["t8"] == "dropped 1 useful items of 4"
    assert what["noise"]["t9"] == "kept 3 useless items of 3"
    assert what["use of evidence"] == {
        "t8": "wrong with useful evidence shown, but dropped",
        "t10": "wrong with useful evidence shown",
        "t11": "wrong with useful evidence shown, not marked",
    }


def test_costs():
    found = costs.cost_of(group())
    generated = sum(int(c.episode.loss_mask.sum()) for c in CASES)
    read = sum(t.start for c in CASES for t in c.episode.turns)
    assert found["image_searches"] == pytest.approx(4 / 12)
    assert found["text_searches"] == pytest.approx(7 / 12)
    assert found["tool_s"] == pytest.approx(11 * 0.5 / 12) and found["seconds"] == 0.5
    assert found["generated"] == pytest.approx(generated / 12)
    money = 4 * 0.015 + 7 * 0.001 + read * 1.0 / 1e6 + generated * 10.0 / 1e6
    assert found["usd"] == pytest.approx(money / 12)
    # One turn of one episode by hand: a question of 17 bytes is read, then the answer written.
    direct = dataclasses.replace(group(), cases=CASES[:1])
    one = costs.cost_of(direct)
    assert one["read"] == len("Which city is it?")
    text = "<reason>r</reason><verify> </verify><answer>Thimphu</answer>"
    assert one["generated"] == len(text)


def test_mcnemar():
    before = [True] * 3 + [False] * 5 + [False]
    after = [True, True, False] + [True] * 5 + [False]
    found = stats.mcnemar(before, after)
    # 6 flips, 1 one way: 2 * (1 + 6) / 64.
    assert found == {
        "both": 2, "neither": 1, "only_before": 1, "only_after": 5, "p": 2 * 7 / 64,
    }  # fmt: skip
    assert stats.mcnemar([True], [True])["p"] == 1.0
    assert stats.mcnemar([True, False], [False, True])["p"] == 1.0
    with pytest.raises(ValueError):
        stats.mcnemar([True], [])


def test_intervals_hold_the_figure_and_an_undefined_one_has_none():
    rows = rows_of(CASES)
    found = stats.interval(rows, "acc")
    assert found["value"] == pytest.approx(5 / 11) and found["low"] < 5 / 11 < found["high"]
    assert stats.interval(rows[:1], "unique_queries") == {"value": None, "low": None, "high": None}
    assert stats.interval([], "acc")["value"] is None


def test_the_published_verifier_table_follows_from_its_counts():
    found = Confusion(*published.VERIFIER["SVRL-7B"])
    assert found.n == 5490 and round(100 * found.agreement, 1) == 71.3
    assert round(100 * found.useful_kept, 1) == 97.2
    assert round(100 * found.noise_dropped, 1) == 41.5
    assert round(100 * found.balanced, 1) == 69.4
    assert found.matthews == pytest.approx(0.4758, abs=5e-5)


@pytest.mark.parametrize("policy, acc", [("MMSearch-R1++", 56.4), ("SVRL-7B", 65.3)])
def test_the_published_calibration_gives_back_acc(policy, acc):
    searched, yes, no = published.CALIBRATION[policy]
    parts = [(searched, yes), (published.NUM_QUESTIONS - searched, no)]
    assert round(calibration.accuracy_of_parts(parts), 1) == acc
    sr = published.BENCHMARKS[policy][0][1]
    assert round(100 * searched / published.NUM_QUESTIONS, 1) == sr
