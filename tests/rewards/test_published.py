"""The benchmarks' own scorers, as tables; shipped reference answers score full."""

import pytest

from svrl_jax.data import prepare
from svrl_jax.data.prepared import Prepared
from svrl_jax.rewards import answers, published
from tests.data import published_files as files

RANGE = ("828.0", "[745.2, 910.8]")


def score(answer, golds, scorer):
    return answers.score_answer(answer, golds, scorer)


@pytest.mark.parametrize(
    "answer, golds, right",
    [
        # a number inside the accepted range
        ("828", RANGE, 1),
        ("about 800 metres", RANGE, 1),
        ("745.2", RANGE, 1),
        ("745.1", RANGE, 0),
        ("8280", RANGE, 0),  # as text it would equal "828.0"
        ("-828", RANGE, 0),
        ("8.28e2", RANGE, 1),
        ("1,000", ("1000.0", "[900.0, 1100.0]"), 1),
        ("1,000.5.", ("1000.0", "[900.0, 1100.0]"), 1),
        (".5", ("0.5", "[0.45, 0.55]"), 0),  # officially read as 5
        ("0.5", ("0.5", "[0.45, 0.55]"), 1),
        ("-3 degrees", ("-3.0", "[-3.3, -2.7]"), 1),
        # two numbers that rise are a range: inside, or half of the union shared
        ("9-10", ("9.5", "[8.0, 11.0]"), 1),
        ("between 8 and 12", ("9.5", "[8.0, 11.0]"), 1),
        ("between 6 and 9", ("9.5", "[8.0, 11.0]"), 0),
        ("0 to 1000", RANGE, 0),
        ("10 or 9", ("10.0", "[9.5, 10.5]"), 1),  # falling: only the first counts
        ("9 or 10", ("10.0", "[9.5, 10.5]"), 0),  # a range too wide
        # no number counts as zero
        ("tall", RANGE, 0),
        ("tall", ("0.0", "[0.0, 0.0]"), 1),
        # names and times are exact matches over what is accepted
        ("the A. Lee!", ("Ann Lee", "A. Lee"), 1),
        ("Ann", ("Ann Lee",), 0),
        ("1931", ("1930", "1929", "1931"), 1),
        ("1932", ("1930", "1929", "1931"), 0),
        ("[1930", ("[1930",), 1),
    ],
)
def test_infoseek_by_its_official_rules(answer, golds, right):
    assert score(answer, golds, "infoseek") == right


def test_infoseeks_final_figure_is_the_harmonic_mean():
    assert published.infoseek_final(0.2, 0.3) == pytest.approx(0.24)
    assert published.infoseek_final(0.0, 0.5) == pytest.approx(0.0, abs=1e-9)
    found = published.infoseek_figures(
        {"val_unseen_question": [1, 0, 0, 0, 0], "val_unseen_entity": [0.5, 0.1]}
    )
    assert found["final"] == pytest.approx(0.24) and found["unseen_entity"] == pytest.approx(0.3)
    assert published.infoseek_figures({"val_unseen_question": [1]})["final"] is None


@pytest.mark.parametrize(
    "answer, golds, f1",
    [
        ("The Scream", ("Scream",), 1),
        ("The Scream by Munch", ("The Scream",), 0.5),
        ("Coco Gauff", ("Gauff", "Coco Gauff"), 1),
        ("yes", ("yes it is",), 0),
        ("no", ("yes",), 0),
        ("Yes.", ("yes",), 1),
        ("red red", ("red",), 2 / 3),
        ("blue", ("red",), 0),
    ],
)
def test_mmsearch_by_token_f1(answer, golds, f1):
    assert score(answer, golds, "mmsearch_f1") == pytest.approx(f1)


@pytest.mark.parametrize(
    "answer, grade",
    [
        ("Grey Heron", "correct"),
        ("a stork", "incorrect"),
        (None, "not_attempted"),
        (" ", "not_attempted"),
        ("I don't know.", "not_attempted"),
        ("Unknown", "not_attempted"),
        ("It cannot be determined from the image", "not_attempted"),
        ("I do not know, but " + "perhaps it is a stork " * 5, "incorrect"),
        ("The Unknown Soldier memorial of Paris, an arch over a flame", "not_attempted"),
    ],
)
def test_three_grades_by_rule(answer, grade):
    assert answers.grade_answer(answer, ["grey heron"]) == grade
    for scorer in ("simplevqa", "livevqa"):
        assert score(answer, ["grey heron"], scorer) == (grade == "correct")


def test_a_right_answer_is_no_refusal():
    assert answers.grade_answer("Unknown", ["unknown"]) == "correct"


@pytest.mark.parametrize(
    "reply, grade",
    [
        ("A", "correct"),
        ("**B**", "incorrect"),
        ("C.", "not_attempted"),
        ("CORRECT", "correct"),
        ("Grade: NOT ATTEMPTED", "not_attempted"),
        ("错误", "incorrect"),
        ("**未尝试**", "not_attempted"),
        ("A or B", None),
        ("", None),
        ("I would say that a human might call it correct", None),
    ],
)
def test_a_judges_grade_is_read_or_it_is_none(reply, grade):
    assert published.read_grade(reply) == grade


def test_simplevqas_figures():
    found = published.grade_figures(["correct"] * 3 + ["incorrect"] * 3 + ["not_attempted"] * 4)
    assert (found["n"], found["correct"], found["not_attempted"]) == (10, 0.3, 0.4)
    assert found["correct_given_attempted"] == 0.5
    assert found["f1"] == pytest.approx(2 * 0.5 * 0.3 / 0.8)
    assert published.grade_figures(["not_attempted"])["correct_given_attempted"] is None
    assert published.grade_figures(["incorrect"])["f1"] == 0.0
    assert published.grade_figures([])["f1"] is None


def sources(folder):
    yield "fvqa", str(files.PUBLISHED / "fvqa_sample.parquet"), "train"
    yield "infoseek", str(files.PUBLISHED / "fvqa_mini.parquet"), None
    yield "infoseek_original", str(files.infoseek_original(folder / "io")), None
    yield "mmsearch", str(files.mmsearch(folder / "mm")), "end2end"
    yield "livevqa", str(files.livevqa(folder / "lv")), None
    yield "simplevqa", str(files.simplevqa(folder / "sv")), None


def test_every_reference_answer_scores_full_under_its_data_sets_scorer(tmp_path):
    scored = 0
    for dataset, source, split in sources(tmp_path):
        made = prepare.prepare(dataset, source, tmp_path / "out", split=split, say=str)
        data = Prepared(tmp_path / "out" / dataset)
        for name in data.splits:
            for task in data.split(name):
                for gold in task.golds:
                    if published.read_range(gold) is None:
                        assert score(gold, task.golds, made["scorer"]) == 1.0, (task.id, gold)
                        assert score(gold, task.golds, "em") == 1.0
                        assert score(gold + " nowhere", task.golds, "em") == 0.0
                        scored += 1
    assert scored > 80
