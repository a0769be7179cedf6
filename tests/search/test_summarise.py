import pytest

from svrl_jax.search.summarise import window

TEXT = "Chad is big . Its capital is far . The river flows north and the capital of trade is here"


@pytest.mark.parametrize(
    "text, query, title, num_words, expected",
    [
        ("", "anything", "T", 3, ""),
        ("one two", "two", "T", 3, "one two"),
        ("one   two\nthree", "", "T", 3, "one two three"),
        # No match: the beginning.
        ("a1 b2 c3 d4 e5", "zebra", "T", 2, "a1 b2"),
        # Function words are no match.
        ("a1 b2 c3 of e5", "of the", "T", 2, "a1 b2"),
        # Centred on the match, kept inside the text at both ends.
        ("a1 b2 c3 d4 e5 f6 g7", "d4", "T", 3, "c3 d4 e5"),
        ("a1 b2 c3 d4 e5", "a1", "T", 3, "a1 b2 c3"),
        ("a1 b2 c3 d4 e5", "e5", "T", 3, "c3 d4 e5"),
        # More of the query's words win; of equals the first.
        ("x1 far x2 x3 river near x4", "far river near", "T", 3, "x3 river near"),
        ("cat x1 x2 x3 cat x4", "cat", "T", 2, "cat x1"),
        # Case and punctuation aside.
        ("a1 b2 (Capital), c3 d4", "CAPITAL?", "T", 1, "(Capital),"),
        ("a1 b2 Chad's c3 d4", "chad", "T", 1, "Chad's"),
        # A word of the title counts little, since the title is shown anyway.
        (TEXT, "Chad capital", "Chad", 4, ". Its capital is"),
    ],
)
def test_the_window_is_the_one_nearest_to_the_query(text, query, title, num_words, expected):
    found = window(text, query, title, num_words)
    assert found == expected
    assert len(found.split()) <= num_words
