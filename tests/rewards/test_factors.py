"""Each factor of the reward against values worked out by hand from SPEC 3's table."""

import dataclasses

import pytest

from svrl_jax.rewards import audit, factors
from svrl_jax.types import OracleLabels, SearchItem, Task, ToolCall

R, V0, A = "<reason>r</reason>", "<verify> </verify>", "<answer>Thimphu</answer>"
TASK = Task("t", "q", b"", ("Thimphu",), "test", "c", entity=("Bhutan",))


def call(tool, num_items, **fields):
    items = tuple(SearchItem(str(i), f"title {i}") for i in range(num_items))
    return ToolCall(tool, "aa" if tool == "text_search" else "", items, **fields)


def text_turn(mask=" ", queries="aa, bb, cc, dd, ee"):
    return f"{R}<verify>{mask}</verify><text_search>{queries}</text_search>"


def answer_turn(mask=" "):
    return f"{R}<verify>{mask}</verify>{A}"


def episode(*turns, regime="agent"):
    return audit.scripted_episode(TASK, turns, num_queries=5, regime=regime)


DIRECT = episode((answer_turn(), None))


def one_search(mask, num_items=4, queries="aa, bb, cc, dd, ee"):
    return episode(
        (text_turn(queries=queries), call("text_search", num_items)), (answer_turn(mask), None)
    )


def labels(items, queries=(1,), num_proposals=5):
    return OracleLabels(items, queries, tuple((q,) * num_proposals for q in queries))


def test_without_tools_every_search_factor_is_one():
    none = OracleLabels((), (), ())
    assert factors.r_aware(DIRECT, True, 0.1) == 1.0
    assert factors.r_count(DIRECT, 5, 0.1) == 1.0
    assert factors.r_qalign(DIRECT, none, 0.5, "executed") == 1.0
    assert factors.r_salign(DIRECT, none, 0.5) == 1.0
    assert factors.r_acc(DIRECT, TASK.golds, "em") == 1.0
    assert factors.r_format(DIRECT) == 1.0


def test_aware_pays_lambda_only_for_needless_search():
    searched = one_search("1,1,1,1")
    assert factors.r_aware(searched, True, 0.1) == 0.1
    assert factors.r_aware(searched, False, 0.1) == 1.0
    assert factors.r_aware(searched, None, 0.1) == 1.0


@pytest.mark.parametrize(
    "queries, value",
    [
        ("aa, bb, cc, dd, ee", 1.0),
        ("aa, aa, AA!, bb, cc", 0.6),
        ("aa, aa, aa, aa, aa", 0.2),
        ("aa, bb, cc, dd, e", 0.8),  # "e" is not well formed
        ("aa, bb, cc, dd, ee, ff, gg", 1.0),  # capped
        ("aa 1, aa 2, aa 3, aa 4, aa 5", 1.0),
    ],
)
def test_count_is_unique_well_formed_proposals_over_k(queries, value):
    assert factors.r_count(one_search("1,1,1,1", queries=queries), 5, 0.1) == pytest.approx(value)


def test_count_is_a_mean_over_turns_with_a_floor():
    two = episode(
        (text_turn(queries="aa, aa, aa, aa, aa"), call("text_search", 1)),
        (text_turn("1"), call("text_search", 1)),
        (answer_turn("1"), None),
    )
    assert factors.r_count(two, 5, 0.1) == pytest.approx(0.6)
    none_usable = episode((text_turn(queries="a, b"), None))
    assert factors.r_count(none_usable, 5, 0.1) == 0.1
    assert factors.r_count(one_search("1,1,1,1", queries="aa, aa"), 20, 0.1) == 0.1


def test_qalign_over_executed_or_all_proposals():
    found = one_search("1,1,1,1")
    mixed = OracleLabels(((1, 1, 1, 1),), (1,), ((1, 0, 0, 0, 1),))
    assert factors.r_qalign(found, mixed, 0.5, "executed") == 1.0
    assert factors.r_qalign(found, mixed, 0.5, "all") == pytest.approx(0.7)
    bad = dataclasses.replace(mixed, queries=(0,))
    assert factors.r_qalign(found, bad, 0.5, "executed") == 0.5
    assert factors.r_qalign(found, bad, 0.0, "executed") == 0.0
    with pytest.raises(ValueError, match="executed"):
        factors.r_qalign(found, mixed, 0.5, "every")


@pytest.mark.parametrize(
    "mask, agreement",
    [
        ("1,0,0,1", 1.0),
        ("1,1,1,1", 0.5),
        ("0,1,1,0", 0.0),
        ("1,0,0", 0.0),  # wrong length
        ("1,0,0,1,1", 0.0),
        (" ", 0.0),
        ("yes", 0.0),  # unreadable
    ],
)
def test_salign_is_the_share_of_agreeing_items(mask, agreement):
    found = one_search(mask)
    assert factors.mask_agreements(found, labels(((1, 0, 0, 1),))) == [agreement]
    assert factors.r_salign(found, labels(((1, 0, 0, 1),)), 0.5) == 0.5 + agreement / 2


def test_a_missing_mask_is_no_agreement():
    found = episode((text_turn(), call("text_search", 2)), (R + A, None))
    assert factors.mask_agreements(found, labels(((1, 0),))) == [0.0]
    assert factors.r_format(found) == 0.0


def test_each_output_is_judged_by_the_mask_of_the_next_turn():
    found = episode(
        (f"{R}<search><img></search>", call("image_search", 2)),
        (text_turn("1,0"), call("text_search", 3)),
        (answer_turn("0,0,1"), None),
    )
    right = labels(((1, 0), (0, 0, 1)))
    assert factors.mask_agreements(found, right) == [1.0, 1.0]
    # The mean is over outputs, not over items.
    off = labels(((1, 1), (0, 0, 1)))
    assert factors.r_salign(found, off, 0.5) == pytest.approx(0.5 + 0.5 * 0.75)


def test_outputs_without_items_are_skipped():
    failed = episode(
        (text_turn(), call("text_search", 0, status="failed")),
        (text_turn(" "), call("text_search", 2)),
        (answer_turn("1,0"), None),
    )
    assert factors.mask_agreements(failed, labels(((), (1, 0)), (1, 1))) == [1.0]
    only = episode((text_turn(), call("text_search", 0, status="empty")), (answer_turn(), None))
    assert factors.r_salign(only, labels(((),)), 0.5) == 1.0
    assert factors.r_format(failed) == factors.r_format(only) == 1.0


def test_an_output_never_reached_is_skipped_and_a_broken_turn_behind_it_is_not():
    unreached = episode((text_turn(), call("text_search", 2)))
    assert unreached.end_reason == "budget"
    assert factors.mask_agreements(unreached, labels(((1, 0),))) == []
    broken = episode((text_turn(), call("text_search", 2)), ("<reason>I", None))
    assert factors.mask_agreements(broken, labels(((1, 0),))) == [0.0]
    assert factors.r_format(unreached) == factors.r_format(broken) == 0.0


def test_format_needs_an_answer_and_no_violation():
    assert factors.r_format(one_search("1,0,1,0")) == 1.0
    assert factors.r_format(one_search("1,0,1")) == 0.0
    assert factors.r_format(one_search("1,0,1,0", queries="aa, bb")) == 0.0
    assert factors.r_format(one_search("1,0,1,0", queries="aa, aa, aa, aa, aa")) == 1.0
    third = episode(
        (text_turn(), call("text_search", 1)),
        (text_turn("1"), call("text_search", 1)),
        (text_turn("1"), None),
    )
    assert third.end_reason == "tool_limit" and third.violations == ()
    assert factors.r_format(third) == 0.0
    assert factors.r_format(episode((R + A, None), regime="direct")) == 1.0


def test_labels_of_another_episode_are_refused():
    with pytest.raises(ValueError, match="items"):
        factors.r_salign(one_search("1,1,1,1"), labels(((1, 0),)), 0.5)
    with pytest.raises(ValueError, match="queries"):
        factors.r_qalign(one_search("1,1,1,1"), labels(((1,) * 4,), ()), 0.5, "executed")
    with pytest.raises(ValueError, match="proposals"):
        factors.r_qalign(one_search("1,1,1,1"), labels(((1,) * 4,), (1,), 3), 0.5, "all")


def test_a_record_whose_turns_contradict_each_other_is_refused():
    found = one_search("1,1,1,1")
    first, last = found.turns
    broken = dataclasses.replace(found, turns=(first, dataclasses.replace(last, items_to_verify=3)))
    with pytest.raises(ValueError, match="items_to_verify"):
        factors.mask_agreements(broken, labels(((1, 0, 0, 1),)))
