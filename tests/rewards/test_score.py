"""Whole rewards, validity and groups."""

import dataclasses

import pytest

from configs.base import get_config
from svrl_jax.rewards import audit, factors, oracle, score
from svrl_jax.types import OracleLabels, SearchItem, Task, ToolCall

R, V0 = "<reason>r</reason>", "<verify> </verify>"
QUERIES = "Bhutan aa, Bhutan bb, Bhutan cc, Bhutan dd, Bhutan ee"
TASK = Task("t", "q", b"", ("Thimphu",), "test", "c", entity=("Bhutan",), evidence_ids=("0",))


def config(**changes):
    reward = get_config().reward
    reward.update(changes)
    return reward


def searched(answer="Thimphu", mask="1,0,0,0", status="ok", queries=QUERIES):
    items = () if status == "failed" else tuple(SearchItem(str(i), "x") for i in range(4))
    call = ToolCall("text_search", "Bhutan aa", items, status=status)
    mask = " " if status == "failed" else mask
    return audit.scripted_episode(
        TASK,
        [
            (f"{R}{V0}<text_search>{queries}</text_search>", call),
            (f"{R}<verify>{mask}</verify><answer>{answer}</answer>", None),
        ],
        num_queries=5,
    )


def direct(answer="Thimphu", task=TASK, prompt=""):
    text = f"{R}{V0}<answer>{answer}</answer>"
    return audit.scripted_episode(task, [(text, None)], num_queries=5, prompt=prompt)


def total(episode, reward=None, search_free=False, task=TASK):
    labels = oracle.RuleOracle().label(task, episode)
    return score.score_episode(episode, task, reward or config(), labels, search_free, 5).total


def test_the_product_by_hand():
    # Mask agrees on 3 of 4: 0.875; 3 unique of 5: 0.6.
    found = searched(mask="1,1,0,0", queries="Bhutan a, Bhutan a, Bhutan a, Bhutan b, Bhutan c")
    assert total(found) == pytest.approx(0.9 * 0.6 * 0.875 + 0.1)
    assert total(found, search_free=True) == pytest.approx(0.9 * 0.1 * 0.6 * 0.875 + 0.1)
    assert total(direct()) == pytest.approx(1.0)


def test_a_wrong_answer_earns_only_its_format():
    assert total(searched(answer="Paro")) == pytest.approx(0.1)
    assert total(searched(answer="Paro", mask="1,0")) == 0.0


def test_without_the_gate_a_wrong_answer_earns_from_its_mask():
    ungated = config(gate=False)
    assert total(searched(answer="Paro"), ungated) == pytest.approx(0.9 * 0.5 + 0.1)
    assert total(searched(), ungated) == pytest.approx(1.0)
    # Nothing to stand beside: the gate has no effect.
    bare = config(gate=False, use_qalign=False, use_salign=False)
    assert total(searched(answer="Paro"), bare) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "switch, factor",
    [("use_aware", 0.1), ("use_count", 0.6), ("use_qalign", 0.5), ("use_salign", 0.75)],
)
def test_each_factor_has_its_switch(switch, factor):
    poor = searched(mask="1,1,1,0", queries="aa, aa, aa, bb, cc")
    labels = OracleLabels(((1, 0, 0, 0),), (0,), ((0,) * 5,))
    full = score.score_episode(poor, TASK, config(), labels, True, 5)
    without = score.score_episode(poor, TASK, config(**{switch: False}), labels, True, 5)
    assert full.total - 0.1 == pytest.approx((without.total - 0.1) * factor)
    name = switch.replace("use_", "r_")
    assert getattr(without, name) == getattr(full, name) == factor  # kept, switched off or not


def test_the_flat_search_penalty_is_on_accuracy():
    flat = {f"use_{name}": False for name in ("aware", "count", "qalign", "salign")}
    assert total(searched(), config(search_penalty=0.1, **flat)) == pytest.approx(0.91)
    assert total(direct(), config(search_penalty=0.1, **flat)) == pytest.approx(1.0)
    assert total(searched(answer="Paro"), config(search_penalty=0.1, **flat)) == pytest.approx(0.1)


def test_failed_tools_and_silent_oracles_leave_the_group_by_default():
    failed = searched(status="failed")
    labels = oracle.RuleOracle().label(TASK, failed)
    scored = score.score_episode(failed, TASK, config(), labels, False, 5)
    assert (scored.valid, scored.invalid_cause) == (False, "tool_failed")
    kept = score.score_episode(failed, TASK, config(drop_flagged=False), labels, False, 5)
    assert kept.valid and kept.total == pytest.approx(1.0)

    silent = OracleLabels((), (), (), answered=False)
    scored = score.score_episode(searched(), TASK, config(), silent, False, 5)
    assert (scored.valid, scored.invalid_cause) == (False, "oracle_unanswered")
    keeping = config(drop_unanswered_oracle=False)
    kept = score.score_episode(searched(), TASK, keeping, silent, False, 5)
    assert kept.valid and kept.r_qalign == kept.r_salign == 1.0
    unused = config(use_qalign=False, use_salign=False)
    assert score.score_episode(searched(), TASK, unused, silent, False, 5).valid


def test_missing_labels_are_an_error_only_where_a_factor_needs_them():
    with pytest.raises(ValueError, match="use_qalign"):
        score.score_episode(searched(), TASK, config(), None, False, 5)
    off = config(use_qalign=False, use_salign=False)
    scored = score.score_episode(searched(mask="0,1,1,1"), TASK, off, None, False, 5)
    assert scored.total == pytest.approx(1.0) and scored.labels is None
    assert score.score_episode(direct(), TASK, config(), None, False, 5).total == pytest.approx(1.0)


@pytest.mark.case("A-R1")
def test_an_example_in_the_prompt_is_never_scored():
    prompt = "For example: <answer> Beijing </answer>"
    beijing = dataclasses.replace(TASK, golds=("Beijing",))
    assert total(direct("Thimphu", prompt=prompt)) == pytest.approx(1.0)
    assert total(direct("Thimphu", prompt=prompt), task=beijing) == pytest.approx(0.1)
    silent = audit.scripted_episode(beijing, [(R, None)], num_queries=5, prompt=prompt)
    assert silent.answer is None and total(silent, task=beijing) == 0.0


@pytest.mark.case("A-R2")
@pytest.mark.parametrize(
    "text",
    [
        f"{R * 3}{V0}<answer>Thimphu</answer>",
        f"{R}{V0}<answer>Thimphu</answer> indeed",
        f"{R}</verify>{V0}<answer>Thimphu</answer>",
    ],
)
def test_many_tags_earn_no_format_reward(text):
    episode = audit.scripted_episode(TASK, [(text, None)], num_queries=5)
    assert factors.r_format(episode) == 0.0
    assert total(episode) == pytest.approx(0.9)


@pytest.mark.case("A-R9")
def test_a_row_with_a_blank_gold_is_excluded_and_counted():
    blank = dataclasses.replace(TASK, golds=(" ",))
    scores = score.score_groups(
        [[direct(""), direct("x")], [direct(), direct("Paro")]],
        [blank, TASK],
        config(),
        None,
        [False, False],
        5,
    )
    assert [s.valid for s in scores[0]] == [False, False]
    assert [s.r_acc for s in scores[0]] == [0.0, 0.0]
    assert [s.valid for s in scores[1]] == [True, True]
    assert score.count_invalid(scores) == {
        "gold_unreadable": 2,
        "tool_failed": 0,
        "oracle_unanswered": 0,
    }


@pytest.mark.case("A-R13")
def test_turns_that_touch_are_still_two():
    call = ToolCall("text_search", "Bhutan aa", (), status="empty")
    episode = audit.scripted_episode(
        TASK,
        [
            (f"{R}{V0}<text_search>Bhutan, Bhutan, Bhutan, Bhutan, Bhutan</text_search>", call),
            (f"{R}{V0}<answer>Thimphu</answer>", None),
        ],
        num_queries=5,
    )
    first, second = episode.turns
    assert first.end == second.start == first.stop  # the tool returned nothing at all
    assert episode.loss_mask[first.start :].all()
    assert total(episode) == pytest.approx(0.9 * 0.2 + 0.1)


@pytest.mark.case("A-R14")
def test_four_turns_and_missing_knowledge_are_scored_by_rule():
    task = dataclasses.replace(TASK, entity=(), evidence_ids=(), picture_url=None)
    items = (SearchItem("0", "Thimphu"), SearchItem("1", "Paro"))
    queries = "<text_search>aa, bb, cc, dd, ee</text_search>"
    episode = audit.scripted_episode(
        task,
        [
            (f"{R}<search><img></search>", ToolCall("image_search", "", items)),
            (f"{R}<verify>1,0</verify>{queries}", ToolCall("text_search", "aa", items)),
            (f"{R}<verify>1,0</verify>{queries}", ToolCall("text_search", "aa", items)),
            (f"{R}<verify>1,0</verify><answer>Thimphu</answer>", None),
        ],
        num_queries=5,
    )
    labels = oracle.RuleOracle().label(task, episode)
    scored = score.score_episode(episode, task, config(), labels, None, 5)
    assert len(episode.turns) == 4 and scored.valid
    assert scored.total == pytest.approx(1.0) and scored.search_free is None


@pytest.mark.case("A-G9")
def test_lists_of_the_wrong_length_are_refused_by_name():
    group = [direct(), direct(), direct()]
    cases = [
        ([group], [TASK, TASK], None, [False], "tasks holds 2, expected 1"),
        ([group], [TASK], None, [False, True], "search_free holds 2, expected 1"),
        ([group], [TASK], None, True, "search_free holds a bool"),
        ([group], [TASK], [[None, None]], [False], r"labels\[0\] holds 2, expected 3"),
        ([group], [TASK], [], [False], "labels holds 0, expected 1"),
        ([group, group[:2]], [TASK, TASK], None, [False] * 2, r"episodes\[1\] holds 2, expected 3"),
    ]
    for episodes, tasks, labels, search_free, message in cases:
        with pytest.raises(ValueError, match=message):
            score.score_groups(episodes, tasks, config(), labels, search_free, 5)


@pytest.mark.case("A-G10")
def test_an_unscorable_episode_keeps_its_place_and_says_why():
    silent = OracleLabels((), (), (), answered=False)
    right = OracleLabels(((1, 0, 0, 0),), (1,), ((1,) * 5,))
    group = [searched(), searched(), searched(answer="Paro"), searched()]
    scores = score.score_groups(
        [group], [TASK], config(), [[right, silent, right, right]], [False], 5
    )
    assert [s.valid for s in scores[0]] == [True, False, True, True]
    assert score.count_invalid(scores)["oracle_unanswered"] == 1
    assert [s.total for s in scores[0] if s.valid] == pytest.approx([1.0, 0.1, 1.0])


def test_groups_are_by_task_and_labelled():
    other = dataclasses.replace(TASK, id="other")
    with pytest.raises(ValueError, match="'t'.*'other'"):
        score.score_groups([[direct()]], [other], config(), None, [False], 5)
    with pytest.raises(ValueError, match="1 of 1 tasks have no search_free label"):
        score.score_groups([[direct()]], [TASK], config(), None, [None], 5)
    unaware = config(use_aware=False)
    scores = score.score_groups([[direct()]], [TASK], unaware, None, [None], 5)
    assert scores[0][0].total == pytest.approx(1.0)
