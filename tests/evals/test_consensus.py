"""Many answers to one."""

import numpy as np
import pytest

from svrl_jax.evals.consensus import EmbeddingError, aggregate, by_letters, embedding_of


def never(texts):
    raise AssertionError("a majority asks no embedding")


@pytest.mark.parametrize(
    "answers, expected",
    [
        (["Paris"], ("Paris", "majority")),
        (["The Paris", "paris.", "Rome"], ("The Paris", "majority")),  # as first written
        ([None, "Rome", " "], ("Rome", "majority")),  # those without an answer do not vote
        ([None, "", None], (None, "none")),
        ([], (None, "none")),
    ],
)
def test_exact_majority_of_normalised_answers(answers, expected):
    assert aggregate(answers, never) == expected


def test_without_a_majority_the_answer_nearest_to_all_others_wins():
    points = {"a": [0.0, 1.0], "b": [0.6, 0.8], "c": [1.0, 0.1], "d": [-1.0, 0.0]}
    embed = lambda texts: np.array([points[t] for t in texts])  # noqa: E731
    assert aggregate(["a", "b", "c"], embed) == ("b", "consensus")
    # One far from all moves it: the sums are a .90, b .88, c -.23, d -1.6.
    assert aggregate(["d", "c", "b", "a"], embed) == ("a", "consensus")
    # Half is no majority: sums are c 1.78, a 1.00, b 2.15.
    assert aggregate(["c", "a", "c", "b"], embed) == ("b", "consensus")
    assert aggregate(["a", "c"], embed) == ("a", "consensus")  # equally near: the first


def test_the_light_default_is_near_in_spelling():
    vectors = by_letters(["1,500 metres", "1500 metres", "Atlantic Ocean", "x", ""])
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    near = unit @ unit.T
    assert near[0, 1] > 0.7 > near[0, 2] and np.isfinite(near).all()
    np.testing.assert_array_equal(vectors, by_letters(["1,500 metres", "1500 metres",
                                                       "Atlantic Ocean", "x", ""]))  # fmt: skip
    assert aggregate(["Gulf of Spain", "Gulf of Spam", "Chad"], by_letters)[0].startswith("Gulf")


def test_another_embedding_is_named():
    assert embedding_of("") is by_letters
    assert embedding_of("svrl_jax.evals.consensus:by_letters") is by_letters
    with pytest.raises(EmbeddingError, match="module:function"):
        embedding_of("svrl_jax.evals.consensus:nothing")
    with pytest.raises(EmbeddingError, match="embeddings"):
        embedding_of("sentence-transformers/none")
