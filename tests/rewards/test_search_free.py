"""search_free labels: made from tool-free episodes, kept by fingerprint."""

import dataclasses
import json

import pytest

from configs.base import get_config
from svrl_jax.rewards.audit import scripted_episode
from svrl_jax.rewards.search_free import (
    Label,
    LabelStore,
    agreement,
    make_labels,
    needs_policy,
)
from svrl_jax.types import Task

PRINT = {"policy": "abc", "prompt": "def", "scorer": "em"}
TASKS = [Task(f"t{i}", "q", b"", ("red",), "s", "c") for i in range(3)]


def store(own=None, shipped=None, fingerprint=PRINT):
    return LabelStore(shipped, own, fingerprint)


def reward(**changes):
    config = get_config().reward
    config.update(changes)
    return config


def episode(task, answer):
    turns = [(f"<reason>r</reason><answer>{answer}</answer>", None)]
    return scripted_episode(task, turns, num_queries=5, regime="direct")


def test_one_greedy_pass_and_a_rate_over_samples():
    asked = []

    def run_direct(tasks, group_size, temperature):
        asked.append((group_size, temperature))
        rights = {"t0": 3, "t1": 0, "t2": 1}
        if temperature == 0.0:
            return [[episode(t, "red" if t.id == "t0" else "blue")] for t in tasks]
        return [
            [episode(t, "red" if g < rights[t.id] else "blue") for g in range(4)] for t in tasks
        ]

    labels = make_labels(TASKS, run_direct, "em", 4)
    assert asked == [(1, 0.0), (4, 1.0)]
    assert labels == {
        "t0": Label(True, 0.75, 4), "t1": Label(False, 0.0, 4), "t2": Label(False, 0.25, 4),
    }  # fmt: skip


def test_without_samples_there_is_no_rate():
    labels = make_labels(TASKS[:1], lambda t, g, temp: [[episode(t[0], "red")]], "em", 0)
    assert labels == {"t0": Label(True, None, 0)}


def test_labels_are_kept_and_read_again(tmp_path):
    own = tmp_path / "new" / "labels.json"
    one = store(own)
    assert one.missing(TASKS) == TASKS
    one.add({"t0": Label(True, 0.5, 4)})
    one.add({"t1": Label(False)})
    again = store(own)
    assert len(again) == 2 and again.missing(TASKS) == TASKS[2:]
    assert again.get(TASKS[0]) == Label(True, 0.5, 4) and again.get(TASKS[1]) == Label(False)
    assert again.stale == []


@pytest.mark.parametrize("part", sorted(PRINT))
def test_labels_of_another_policy_prompt_or_scorer_are_not_used(tmp_path, part):
    own = tmp_path / "labels.json"
    store(own).add({"t0": Label(True)})
    other = store(own, fingerprint=PRINT | {part: "other"})
    assert len(other) == 0 and other.stale == [own]


def test_shipped_labels_are_read_only(tmp_path):
    shipped, own = tmp_path / "shipped.json", tmp_path / "own.json"
    store(shipped).add({"t0": Label(True)})
    before = shipped.read_bytes()
    both = store(own, shipped)
    both.add({"t1": Label(False)})
    assert shipped.read_bytes() == before
    assert set(json.loads(own.read_text())["labels"]) == {"t0", "t1"}


def test_without_a_file_labels_stay_in_memory(tmp_path):
    one = store(shipped=tmp_path / "missing.json")
    one.add({"t0": Label(True)})
    assert len(one) == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "label, source, threshold, expected",
    [
        (Label(True, 0.0, 4), "greedy", 0.5, True),
        (Label(False, 1.0, 4), "greedy", 0.5, False),
        (Label(True, 0.0, 4), "rate", 0.5, False),
        (Label(False, 0.5, 4), "rate", 0.5, True),
        (Label(False, 0.25, 4), "rate", 0.5, False),
    ],
)
def test_which_label_the_reward_uses(label, source, threshold, expected):
    one = store()
    one.add({"t0": label})
    config = reward(search_free_source=source, search_free_rate=threshold)
    assert one.is_free(TASKS[0], config) is expected


def test_what_is_not_known_is_an_error():
    one = store()
    with pytest.raises(KeyError, match="t0"):
        one.is_free(TASKS[0], reward())
    one.add({"t0": Label(True)})
    with pytest.raises(ValueError, match="search_free_samples"):
        one.is_free(TASKS[0], reward(search_free_source="rate"))
    with pytest.raises(ValueError, match="'oracle'"):
        one.is_free(TASKS[0], reward(search_free_source="oracle"))


@pytest.mark.parametrize(
    "category, free, asks_the_policy",
    [("search_free", True, False), ("search_required", False, False), ("capital", True, True)],
)
def test_the_data_sets_category_counts_where_there_is_one(category, free, asks_the_policy):
    task = dataclasses.replace(TASKS[0], category=category)
    config = reward(search_free_source="category")
    one = store()
    assert needs_policy(task, config) == asks_the_policy
    assert needs_policy(task, reward())
    if asks_the_policy:
        one.add({"t0": Label(True)})
    assert one.is_free(task, config) is free


def test_agreement_of_two_sources():
    one = {"a": True, "b": True, "c": False, "d": False, "only here": True}
    other = {"a": True, "b": False, "c": False, "d": False}
    found = agreement(one, other)
    assert found["n"] == 4 and found["share"] == 0.75
    assert (found["both_free"], found["both_required"]) == (1, 2)
    assert (found["only_first_free"], found["only_second_free"]) == (1, 0)
    assert found["kappa"] == pytest.approx((0.75 - 0.5) / 0.5)
    assert agreement(one, dict.fromkeys(one, True))["kappa"] is None
    assert agreement(one, {})["share"] is None
