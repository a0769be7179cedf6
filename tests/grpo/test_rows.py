"""Layouts of rows: what stands where, and that the loss knows nothing of it."""

import dataclasses

import jax
import numpy as np
import pytest

from svrl_jax.grpo.rows import plan_rows, row_length
from svrl_jax.grpo.update import init_state, update
from svrl_jax.models.qwen_vl.flops import attended_pairs
from tests.grpo import tiny
from tests.grpo.test_batch import VALID, batch_of
from tests.grpo.test_update import assert_same_gradient, gradient_of, params_of, spec_of


def text_episode(sample, lengths=(3, 2)):
    return tiny.make_episode("task", sample, sample, (), tiny.NO_PICTURE, (lengths,))


def test_worked_example_of_a_shared_row(config):
    """Prompt 1 2 3, two continuations, and another question of one episode."""
    group = [text_episode(0, (2, 0)), text_episode(1, (3, 0))]
    alone = [dataclasses.replace(text_episode(s, (1, 0)), task_id="b") for s in (2, 3)]
    config.grpo.layout, config.grpo.row_tokens, config.grpo.microbatch_rows = "shared", 16, 4
    valid = np.array([[True, True], [True, False]])
    batch = batch_of([group, alone], np.array([[0.5, -0.5], [0.25, 0]]), config, valid)
    (micro,) = batch.microbatches
    first, second = group
    expected = [*second.ids, *first.ids[3:], *alone[0].ids]
    np.testing.assert_array_equal(micro.ids[0, :12], expected)
    assert micro.group_id[0].tolist() == [0] * 8 + [1] * 4 + [-1] * 4
    assert micro.branch_id[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2] + [0] * 8
    assert micro.positions[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 0, 1, 2, 3] + [0] * 4
    # The first token of each continuation is predicted by the prompt's last.
    assert micro.target_index[0, :6].tolist() == [3, 4, 5, 6, 7, 11]
    assert micro.predictor_index[0, :6].tolist() == [2, 3, 4, 2, 6, 10]
    assert micro.episode_index[0, :6].tolist() == [0, 0, 0, 1, 1, 2]
    assert micro.advantages.tolist() == [-0.5, 0.5, 0.25, 0.0]
    assert batch.minibatches[0].origins[0].tolist() == [1, 0, 2, -1]
    assert (batch.num_slots, batch.num_real, batch.num_saved) == (16, 12, 3)
    # 8 tokens of a shared group: 3 * 4 / 2 + (3 * 3 + 3 * 4 / 2) + (2 * 3 + 2 * 3 / 2); and 4.
    assert attended_pairs(micro.group_id, micro.branch_id) == 6 + 15 + 9 + 10


def test_rows_hold_whole_episodes_and_fill_up():
    episodes = [text_episode(s, (n, 0)) for s, n in enumerate((5, 4, 3, 2, 1, 1))]  # prompt 3
    packed = plan_rows([range(6)], episodes, "packed", 12)
    assert sorted(n for row in packed for piece in row for n in piece) == list(range(6))
    assert [row_length(row, episodes) for row in packed] == [12, 12, 10]
    (row,) = plan_rows([range(6)], episodes, "shared", 19)
    assert row == ((0, 1, 2, 3, 4, 5),) and row_length(row, episodes) == 19
    cut = plan_rows([range(6)], episodes, "shared", 12)  # the prompt once in each of two rows
    assert [row_length(row, episodes) for row in cut] == [12, 10]
    with pytest.raises(ValueError, match=r"8 tokens .*grpo\.row_tokens=7"):
        plan_rows([range(6)], episodes, "packed", 7)
    with pytest.raises(ValueError, match=r"grpo\.layout 'dense'"):
        plan_rows([range(6)], episodes, "dense", 7)


def test_a_prompt_that_differs_is_not_shared():
    pair = [text_episode(0), text_episode(1)]
    ids = pair[1].ids.copy()
    ids[1] = 9
    pair[1] = dataclasses.replace(pair[1], ids=ids)
    with pytest.raises(ValueError, match=r"0 and 1 of task 'task' .*grpo\.layout to 'packed'"):
        plan_rows([(0, 1)], pair, "shared", 64)


@pytest.fixture(scope="module")
def unpacked(model, episodes, advantages):
    """Gradient and loss of an episode a row, for each objective."""
    from configs.base import get_config

    found = {}
    for objective in ("dr_grpo", "grpo", "gspo"):
        config = get_config()
        config.grpo.layout, config.grpo.length_buckets = "single", (40,)
        config.grpo.microbatch_rows, config.grpo.kl_coef = 12, 0.05
        config.grpo.objective = objective
        found[objective] = gradient_of(model, batch_of(episodes, advantages, config), config)
    return found


@pytest.mark.case("A-G8")
@pytest.mark.parametrize(
    ("objective", "layout", "row_tokens", "rows"),
    [
        ("dr_grpo", "packed", 64, 8),
        ("dr_grpo", "shared", 96, 2),
        ("grpo", "shared", 48, 1),
        ("gspo", "shared", 96, 8),
    ],
)
def test_layout_changes_neither_loss_nor_gradient(
    model, episodes, advantages, config, unpacked, objective, layout, row_tokens, rows
):
    """Pictures in the prompt and in a tool result, groups cut over rows, several microbatches."""
    config.grpo.layout, config.grpo.row_tokens = layout, row_tokens
    config.grpo.microbatch_rows, config.grpo.objective = rows, objective
    batch = batch_of(episodes, advantages, config)
    assert batch.num_saved > 0 or layout == "packed"
    assert any((m.group_id > 0).any() for m in batch.microbatches)
    assert_same_gradient(gradient_of(model, batch, config), unpacked[objective])
    assert np.abs(unpacked[objective][0]).max() > 1e-3


def test_the_trainers_log_probs_come_back_by_episode(model, sampled, config):
    """Of shared rows, against one plain row each."""
    config.grpo.layout, config.grpo.row_tokens = "shared", 64
    spec, params = spec_of(model, config), params_of(model)
    advantages = np.array([[0.5, -0.5], [0.3, -0.4], [0.0, 0.0]], np.float32)
    batch = batch_of(sampled, advantages, config, np.ones((3, 2), bool))
    _, metrics, logps = update(init_state(params, spec), params, batch, spec)
    for group, found in zip(sampled, logps, strict=True):
        for episode, values in zip(group, found, strict=True):
            np.testing.assert_allclose(values, episode.sampler_logps, atol=2e-5)
    assert metrics["shared_tokens"] > 0 and 0 < metrics["row_waste"] < 1


def test_rows_are_the_same_every_time(episodes, advantages, config):
    config.grpo.layout, config.grpo.row_tokens = "shared", 64
    one, two = (batch_of(episodes, advantages, config, VALID) for _ in range(2))
    for a, b in zip(jax.tree.leaves(one.microbatches), jax.tree.leaves(two.microbatches)):
        np.testing.assert_array_equal(a, b)


def test_rows_are_a_multiple_of_the_devices(episodes, advantages, config):
    from svrl_jax.grpo.batch import make_batches

    config.grpo.layout, config.grpo.row_tokens, config.grpo.microbatch_rows = "shared", 96, 12
    batch = make_batches(
        episodes, advantages, VALID, config.grpo,
        merge_size=2, image_token_id=tiny.IMAGE, pad_id=tiny.PAD, min_rows=3,
    )  # fmt: skip
    assert all(len(m.ids) % 3 == 0 for m in batch.microbatches)
