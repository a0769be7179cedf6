"""Scorers of a final answer, as tables of strings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svrl_jax.rewards import answers, published


def em(answer, *golds):
    return answers.score_answer(answer, golds, "em")


@pytest.mark.case("A-R3")
@pytest.mark.parametrize("scorer", answers.SCORERS)
@pytest.mark.parametrize("answer", ["", " \n", None])
def test_an_empty_answer_scores_nothing(scorer, answer):
    assert answers.score_answer(answer, ["Siberian Husky"], scorer) == 0.0
    assert answers.score_answer(answer, ["A"], scorer) == 0.0
    assert answers.score_answer("a Siberian Husky!", ["Siberian Husky"], scorer) > 0.7


@pytest.mark.case("A-R4")
def test_listing_every_choice_is_wrong():
    assert em("A or B or C", "B") == 0.0
    assert em("B", "B") == 1.0


@pytest.mark.case("A-R5")
@pytest.mark.parametrize(
    "answer, gold, score",
    [("A", "A", 1), ("B", "A", 0), ("", "A", 0), ("who", "The Who", 1), ("the", "a", 0)],
)
def test_golds_that_are_articles(answer, gold, score):
    assert em(answer, gold) == score
    assert answers.score_answer(answer, [gold], "em_published") == score


@pytest.mark.case("A-R5")
@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(min_size=1), st.text(alphabet="aAnthe .,-!'\"$5", min_size=1)))
def test_normalising_never_empties_a_text(text):
    if text.strip():
        assert answers.normalise(text)
        assert published.normalise_published(text)
        assert em(text, text) == 1.0


@pytest.mark.case("A-R6")
@pytest.mark.parametrize(
    "answer, gold, ours, published",
    [
        ("3.14", "314", 0, 1),  # the search-QA normaliser loses the point
        ("1.0", "10", 0, 1),
        ("1.0", "1", 1, 0),
        ("(3.14)", "3.14", 1, 1),
        ("3,000", "3000", 1, 1),
    ],
)
def test_decimals_are_kept(answer, gold, ours, published):
    assert em(answer, gold) == ours
    assert answers.score_answer(answer, [gold], "em_published") == published


@pytest.mark.case("A-R7")
@pytest.mark.parametrize(
    "gold, answer, score",
    [
        ("1", "21", 0),
        ("23", "16723", 0),
        ("no", "I know", 0),
        ("Mark Twain", "not Mark Twain", 0),
        ("0", "$10.00", 0),
        ("0", "$0.00", 1),
    ],
)
def test_a_gold_inside_another_word_or_number_is_not_there(gold, answer, score):
    assert em(answer, gold) == score
    if gold != "Mark Twain":  # a denial does contain it; `sub_em` cannot know
        assert answers.score_answer(answer, [gold], "sub_em") == score


@pytest.mark.case("A-R8")
def test_a_checkers_firm_wrong_stands_and_a_broken_one_is_counted():
    def says_wrong(answer, golds):
        return False

    def breaks(answer, golds):
        raise TimeoutError("no verdict")

    assert answers.score_by_checker(says_wrong, "Paris", ["Paris"]) == (0.0, False)
    assert answers.score_by_checker(breaks, "Paris", ["Paris"]) == (1.0, True)
    assert answers.score_by_checker(breaks, "Rome", ["Paris"]) == (0.0, True)
    assert answers.score_by_checker(lambda a, g: True, "Rome", ["Paris"]) == (1.0, False)


@pytest.mark.case("A-R9")
@pytest.mark.parametrize("golds", [[], [""], [" ", "\n"]])
def test_a_blank_gold_is_refused_not_scored(golds):
    with pytest.raises(answers.UnreadableGold):
        answers.score_answer("anything", golds, "em")
    assert em("x", "", "x") == 1.0  # blank aliases beside a readable one are passed over


@pytest.mark.parametrize(
    "answer, gold, score",
    [
        # units: asked for where the gold has one, allowed where only the answer has
        ("828 m", "828", 1),
        ("828", "828 m", 0),
        ("828 metres", "828 m", 1),
        ("828m", "828 meters", 1),
        ("828 km", "828 m", 0),
        ("5 percent", "5%", 1),
        ("5", "5%", 0),
        ("30 sq. km", "30 km²", 1),
        ("50 stars", "50", 1),
        ("5 furlongs", "5 furlongs", 1),
        ("21 Jump Street", "21", 0),
        ("2 or 3", "2", 0),
        ("1990s", "1990", 0),
        # currencies: a bare sign asks for nothing, another currency is wrong
        ("100", "$100", 1),
        ("$100", "100", 1),
        ("100 US dollars", "$100", 1),
        ("100", "100 dollars", 0),
        ("€100", "$100", 0),
        ("$5m", "5", 0),
        # by value
        ("3 million", "3,000,000", 1),
        ("3 million", "3", 0),
        ("$3 million", "3 million dollars", 1),
        ("12 345", "12345", 1),
        (".50", "0.5", 1),
        ("+5", "5", 1),
        ("-5", "5", 0),
        ("\u22125", "-5", 1),
        ("10²", "102", 0),
        ("9" * 40 + "1", "9" * 40 + "2", 0),
        ("1,2", "12", 0),
        # words
        ("**Paris**.", "paris", 1),
        ("Washington D.C.", "Washington, D.C.", 1),
        ("Yes.", "yes", 1),
        ("yes, it is", "yes", 0),
        ("1939-1945", "1939–1945", 1),
        ("C", "C#", 0),
        ("vitamin", "Vitamin A", 0),
        ("Ｐａｒｉｓ", "Paris", 1),
        ("!!!", "!!!", 1),
        ("??", "!!!", 0),
    ],
)
def test_em_as_ours(answer, gold, score):
    assert em(answer, gold) == score


def test_the_best_alias_counts():
    assert em("Holland", "The Netherlands", "Holland") == 1.0
    assert answers.score_answer("the red dragon", ["red", "red dragon"], "f1") == 1.0


def test_sub_em_and_f1_read_words():
    assert answers.score_answer("It is Mount Everest.", ["mount everest"], "sub_em") == 1.0
    assert answers.score_answer("It is 3,000.0 m", ["3000"], "sub_em") == 1.0
    assert answers.score_answer("Everest", ["Mount Everest"], "sub_em") == 0.0
    assert answers.score_answer("red green", ["red blue"], "f1") == pytest.approx(0.5)
    assert answers.score_answer("red red", ["red"], "f1") == pytest.approx(2 / 3)


def test_an_unknown_scorer_is_an_error():
    with pytest.raises(ValueError, match="em_published"):
        answers.score_answer("x", ["x"], "exact")
