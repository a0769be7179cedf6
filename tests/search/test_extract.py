"""The page's own best sentences."""

import pytest

from svrl_jax.search.extract import best_sentences

PAGE = """Home
Menu
The bridge crosses the river Thames near the Tower. It was built between 1886 and 1894.
Its architect was Sir Horace Jones, who died in 1887. Tickets are sold at the north gate.
"""


@pytest.mark.parametrize(
    "question, num_words, expected",
    [
        ("Who was the architect?", 10, "Its architect was Sir Horace Jones, who died in 1887."),
        ("When was it built?", 8, "It was built between 1886 and 1894."),
        ("architect built", 18, "It was built between 1886 and 1894. Its architect was Sir Horace "
         "Jones, who died in 1887."),
        ("architect", 4, "Its architect was Sir"),
        ("zebra", 4, "Home Menu The bridge"),
        ("", 3, "Home Menu The"),
    ],
)  # fmt: skip
def test_the_sentences_nearest_to_the_question(question, num_words, expected):
    found = best_sentences(PAGE, question, num_words)
    assert found == expected


def test_an_empty_page_gives_nothing_and_repeats_count_once():
    assert best_sentences("", "a question", 5) == ""
    assert best_sentences("One fish here.\n" * 9, "fish", 50) == "One fish here."
