"""Items and their answers: every gold scores full, near misses score as the table says."""

import dataclasses

import pytest

from svrl_jax.data import facts, sources
from svrl_jax.rewards.answers import score_answer


def item(item_id):
    return next(i for i in facts.items() if i.id == item_id)


def test_at_least_900_distinct_items_over_several_relations():
    items = facts.items()
    assert len({(i.entity.title, i.relation) for i in items}) == len(items) >= 900
    assert len({i.id for i in items}) == len(items)
    assert {i.relation for i in items} == set(facts.QUESTIONS)
    assert len(facts.QUESTIONS) >= 8


def test_every_gold_scores_full_under_em():
    wrong = [
        (i.id, gold)
        for i in facts.items()
        for gold in i.golds
        if score_answer(gold, i.golds, "em") != 1.0
    ]
    assert wrong == []


def test_the_evidence_of_every_item_holds_its_answer():
    documents = sources.documents_by_title()
    for i in facts.items():
        facts.check_item(i)
        if i.relation in facts.VISUAL:
            assert i.evidence_ids == ()
            continue
        texts = [f"{documents[e].title} {documents[e].text}".lower() for e in i.evidence_ids]
        assert any(gold.lower() in text for gold in i.golds for text in texts), i.id


def test_an_item_that_its_evidence_cannot_answer_is_refused():
    good = item("Colombia/capital")
    for bad in (
        dataclasses.replace(good, golds=("Paris",)),
        dataclasses.replace(good, evidence_ids=("Bhutan",)),
        dataclasses.replace(good, golds=()),
        dataclasses.replace(good, golds=(" ",)),
        dataclasses.replace(item("Indonesia/top"), golds=("green",)),
    ):
        with pytest.raises(ValueError, match=bad.id):
            facts.check_item(bad)


@pytest.mark.parametrize(
    "item_id, answer, score",
    [
        ("Colombia/capital", "Bogotá", 1),
        ("Colombia/capital", "bogota.", 1),
        ("Colombia/capital", "The Bogota", 1),
        ("Colombia/capital", "Bogata", 0),
        ("Colombia/capital", "Bogotá or Lima", 0),
        ("Colombia/capital", "Bogotá, Colombia", 0),
        ("Colombia/capital", "Colombia", 0),
        ("Colombia/capital", "", 0),
        ("Colombia/south", "Peru", 1),
        ("Colombia/south", "Ecuador and Peru", 0),
        ("Chad/capital", "N'Djamena", 1),
        ("Chad/capital", "N’Djamena", 1),
        ("Chad/capital", "Djamena", 0),
        ("Chad/top", "orange", 1),
        ("Chad/top", "yellow", 1),
        ("Bhutan/region", "South Asia", 1),
        ("Bhutan/region", "Asia", 0),
        ("Bhutan/region", "East Asia", 0),
        ("Indonesia/top", "red", 1),
        ("Indonesia/top", "white", 0),
        ("Indonesia/bottom", "white", 1),
        ("Indonesia/name", "Indonesia", 1),
        ("Indonesia/name", "Monaco", 0),
        ("Chad/name", "Romania", 0),
    ],
)
def test_near_misses_score_as_the_table_says(item_id, answer, score):
    assert score_answer(answer, item(item_id).golds, "em") == score


@pytest.mark.parametrize(
    "text, direction, names",
    [
        ("It borders Mali to the north.", "north", ("Mali",)),
        ("bordered by Iran, Oman and Yemen to the south", "south", ("Yemen", "Oman")),
        ("Mali to the north, and Chad to the north", "north", ()),  # said twice: ambiguous
        ("Mali to the east", "north", ()),
        ("", "north", ()),
    ],
)
def test_neighbours_are_read_where_the_text_is_plain(text, direction, names):
    assert facts._neighbours(text, direction) == names


def test_spellings_without_accents_stand_behind_the_real_ones():
    golds = item("Brazil/capital").golds
    assert golds[0] == "Brasília" and "Brasilia" in golds
