"""The rule oracle's labels."""

import pytest

from svrl_jax.rewards import audit, oracle
from svrl_jax.types import SearchItem, Task, ToolCall

R, V0 = "<reason>r</reason>", "<verify> </verify>"


def make_task(golds=("Thimphu",), entity=("Bhutan",), evidence=()):
    return Task("t", "q", b"", golds, "test", "c", entity=entity, evidence_ids=evidence)


def item(text="", title="page", id="p"):
    return SearchItem(id, title, text=text)


@pytest.mark.parametrize(
    "golds, text, is_useful",
    [
        (("Thimphu",), "Its capital is thimphu.", True),
        (("Thimphu",), "(Thimphu's) market", True),
        (("Thimphu",), "Thimphuville", False),
        (("no",), "there is no answer", False),  # shorter than three characters
        (("UAE",), "The UAE is", True),
        (("500",), "1,500 people", False),
        (("14 km",), "3.14 km", False),
        (("1,500",), "of 1500 metres", True),
        (("3.14",), "about 3.14, roughly", True),
        (("Addis Ababa",), "in Addis\nAbaba, the", True),
        (("x", "Thimbu"), "Thimbu", True),
        (("!!!",), "what !!! now", False),
    ],
)
def test_an_item_is_useful_if_it_holds_a_gold_at_word_borders(golds, text, is_useful):
    judge = oracle.RuleOracle(min_alias=3)
    assert judge.is_useful(make_task(golds), item(text)) is is_useful
    assert judge.is_useful(make_task(golds), item(title=text)) is is_useful


def test_an_evidence_document_is_useful_whatever_it_says():
    judge = oracle.RuleOracle()
    task = make_task(evidence=("bridge",))
    assert judge.is_useful(task, item("nothing", id="bridge"))
    assert not judge.is_useful(task, item("nothing", id="bridge 2"))


def text_episode(task, queries, executed, items, answers_turn=True):
    call = ToolCall("text_search", executed, tuple(items))
    turns = [(f"{R}{V0}<text_search>{', '.join(queries)}</text_search>", call)]
    mask = ",".join("0" for _ in items)
    turns.append((f"{R}<verify>{mask}</verify><answer>x</answer>", None))
    return audit.scripted_episode(task, turns, num_queries=len(queries))


def test_a_query_is_good_if_it_names_the_entity():
    task = make_task(entity=("Bhutan", "Druk Yul"))
    queries = ["capital of BHUTAN", "Bhutanese capital", "druk yul", "Nepal"]
    episode = text_episode(task, queries, queries[0], [item("Thimphu"), item("x")])
    labels = oracle.RuleOracle().label(task, episode)
    assert labels.items == ((1, 0),)
    assert labels.queries == (1,)
    assert labels.proposals == ((1, 0, 1, 0),)
    assert labels.answered


@pytest.mark.parametrize("text, good", [("Thimphu", 1), ("nothing", 0)])
def test_without_an_entity_a_query_is_good_if_it_brought_something_useful(text, good):
    task = make_task(entity=())
    episode = text_episode(task, ["Bhutan", "other"], "Bhutan", [item(text)])
    labels = oracle.RuleOracle().label(task, episode)
    assert labels.queries == (good,)
    assert labels.proposals == ((good, good),)


def test_image_searches_are_labelled_and_failed_calls_have_no_items():
    task = make_task(evidence=("Bhutan",))
    image = ToolCall("image_search", "", (item(id="Bhutan"), item(id="Wales")))
    failed = ToolCall("text_search", "Bhutan", (), status="failed")
    episode = audit.scripted_episode(
        task,
        [
            (f"{R}<search><img></search>", image),
            (f"{R}<verify>1,0</verify><text_search>Bhutan, bb</text_search>", failed),
            (f"{R}{V0}<answer>x</answer>", None),
        ],
        num_queries=2,
    )
    labels = oracle.RuleOracle().label(task, episode)
    assert labels.items == ((1, 0), ())
    assert labels.queries == (1,)


def test_an_episode_of_another_task_is_refused():
    episode = text_episode(make_task(), ["aa", "bb"], "aa", [])
    with pytest.raises(ValueError, match="'t'"):
        oracle.RuleOracle().label(audit.KINDS[0].task, episode)
