import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from svrl_jax.grpo.advantages import equal_groups, group_advantages, stack_totals
from svrl_jax.types import Score

ALL = np.ones


def score(total, valid=True):
    return Score(total, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, valid=valid)


@pytest.mark.case("A-G4")
def test_sample_deviation_not_population():
    rewards = np.array([[1, 0, 0, 0]], np.float32)
    got = group_advantages(rewards, ALL((1, 4), bool), objective="grpo", eps=1e-4)
    np.testing.assert_allclose(got, [[1.49970, -0.49990, -0.49990, -0.49990]], atol=5e-6)
    assert abs(got[0, 0] - 1.73165) > 0.2  # the population deviation's value


@pytest.mark.case("A-G4")
def test_groups_are_rows_and_a_missing_member_shifts_nobody():
    rewards = np.array([[1, 0, 1, 9], [0, 0, 1, 1]], np.float32)
    valid = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    got = group_advantages(rewards, valid)  # means 2/3 and 1/2
    np.testing.assert_allclose(got[0], [1 / 3, -2 / 3, 1 / 3, 0], atol=1e-6)
    np.testing.assert_allclose(got[1], [-0.5, -0.5, 0.5, 0.5], atol=1e-6)


@pytest.mark.case("A-G1")
@pytest.mark.parametrize("objective", ["dr_grpo", "grpo", "dapo"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.9])
def test_equal_rewards_give_exact_zeros(objective, reward):
    # The mean of three 0.9 is not 0.9 in binary; a scaled remainder would be a full-size advantage.
    rewards = np.full((1, 3), reward, np.float32)
    got = group_advantages(rewards, ALL((1, 3), bool), objective=objective)
    assert (got == 0.0).all()
    assert equal_groups(rewards, ALL((1, 3), bool)).all()


def test_rewards_within_the_tolerance_are_equal():
    rewards = np.array([[0.5, 0.5 + 5e-7], [0.5, 0.5 + 5e-5]], np.float32)
    assert equal_groups(rewards, ALL((2, 2), bool), 1e-6).tolist() == [True, False]


@pytest.mark.case("A-G10")
def test_missing_rewards_leave_the_statistics():
    nan = np.nan
    rewards = np.array([[1, nan, 0, 1], [nan, nan, nan, 1], [nan] * 4], np.float32)
    valid = np.isfinite(rewards)
    got = group_advantages(rewards, valid, objective="grpo")
    std = np.std([1, 0, 1], ddof=1) + 1e-6
    np.testing.assert_allclose(got[0], np.array([1 / 3, 0, -2 / 3, 1 / 3]) / std, rtol=1e-5)
    assert (got[1:] == 0.0).all()
    assert equal_groups(rewards, valid).tolist() == [False, True, True]


@pytest.mark.case("A-G10")
def test_scores_without_a_number_are_missing():
    scores = [[score(0.5), None, score(float("nan")), score(1.0, valid=False)]]
    rewards, valid = stack_totals(scores, 1, 4)
    assert valid.tolist() == [[True, False, False, False]]
    assert rewards.tolist() == [[0.5, 0.0, 0.0, 0.0]]


@pytest.mark.case("A-G9")
@pytest.mark.parametrize("found", [1, 2, 4])
def test_wrong_number_of_scores_names_the_counts(found):
    with pytest.raises(ValueError, match=f"{found} scores for the 3 episodes"):
        stack_totals([[score(1.0)] * found], 1, 3)


def test_wrong_number_of_groups_names_the_counts():
    with pytest.raises(ValueError, match="1 groups of scores for 2 prompts"):
        stack_totals([[score(1.0)] * 3], 2, 3)


@pytest.mark.parametrize(
    ("rewards", "valid", "objective", "message"),
    [
        (np.zeros((2, 3)), ALL((2, 2)), "dr_grpo", "must both be"),
        (np.zeros((2, 1)), ALL((2, 1)), "dr_grpo", "group_size >= 2"),
        (np.zeros(4), ALL(4), "dr_grpo", "must both be"),
        (np.array([[0.0, np.nan]]), ALL((1, 2)), "dr_grpo", "not finite"),
        (np.zeros((1, 2)), ALL((1, 2)), "ppo", "unknown objective"),
    ],
)
def test_what_has_no_statistics_is_refused(rewards, valid, objective, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, valid, objective=objective)


@given(
    hnp.arrays(np.float32, (3, 5), elements=st.floats(0, 1, width=32)),
    hnp.arrays(bool, (3, 5)),
    st.sampled_from(["dr_grpo", "grpo"]),
)
def test_valid_advantages_sum_to_zero_and_keep_the_order(rewards, valid, objective):
    got = group_advantages(rewards, valid, objective=objective)
    assert (got[~valid] == 0.0).all()
    np.testing.assert_allclose(got.sum(axis=1), 0.0, atol=1e-4)
    for row, keep, values in zip(rewards, valid, got):
        order = np.argsort(row[keep], kind="stable")
        assert (np.diff(values[keep][order]) >= 0).all()
