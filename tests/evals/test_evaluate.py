import pytest

from svrl_jax.evals import stats
from svrl_jax.evals.evaluate import Scoring, make_rows
from svrl_jax.records import Record
from svrl_jax.rewards.audit import scripted_episode
from svrl_jax.types import OracleLabels, SearchItem, Task, ToolCall

R = "<reason>r</reason>"
TASKS = [
    Task(f"t{i}", "q", b"", ("Thimphu",), "world/test", "capital", item=item)
    for i, item in enumerate(["Bhutan/capital", ""])
]
CALL = ToolCall("image_search", "", (SearchItem("0", "Bhutan"), SearchItem("1", "Chad")))


def episodes():
    return [
        scripted_episode(
            TASKS[0],
            [
                (f"{R}<search><img></search>", CALL),
                (f"{R}<verify>1,0</verify><answer>thimphu</answer>", None),
            ],
            num_queries=5,
        ),
        scripted_episode(TASKS[1], [(f"{R}<verify> </verify><answer>Paro", None)], num_queries=5),
    ]


def rows(tasks=TASKS, **how):
    records = [Record(e, t) for e, t in zip(episodes(), tasks, strict=True)]
    return make_rows(records, Scoring(("em",))(records), **how)


def test_rows_carry_score_format_and_labels():
    free = {"t0": True, "t1": False}
    first, second = rows(search_free=free)
    assert first.item == "Bhutan/capital" and second.item == "t1"  # without an item, the task
    assert first.is_right and first.r_format == 1.0 and first.search_free and first.has_searched
    assert not second.is_right and second.r_format == 0.0 and not second.has_searched
    assert first.mask == ()  # no labels were given


def test_labels_come_from_outside():
    label = lambda task, episode: OracleLabels(((0, 0),) if episode.calls else (), (), ())  # noqa: E731
    free = dict.fromkeys(("t0", "t1"), False)
    first, _ = rows(search_free=free, label=label)
    assert first.mask == (1, 0) and first.truth == (0, 0) and first.agreement == (0.5,)


def test_a_task_without_a_label_is_unknown_and_in_no_denominator():
    first, second = rows(search_free={"t0": True})
    assert first.search_free is True and second.search_free is None
    found = stats.figures([first, second])
    assert found["n_search_free"] == 1 and found["n_search_needed"] == 0
    assert found["under_search"] is None


def test_every_episode_needs_its_task():
    with pytest.raises(ValueError):
        rows(TASKS[:1], search_free={"t0": True})
