import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from svrl_jax.grpo.batch import length_bucket, make_batches, row_bucket, target_bucket
from svrl_jax.grpo.update import _padded_pictures
from tests.grpo import tiny

VALID = np.ones((3, 4), bool)


def batch_of(episodes, advantages, config, valid=VALID):
    return make_batches(
        episodes,
        advantages,
        valid,
        config.grpo,
        merge_size=2,
        image_token_id=tiny.IMAGE,
        pad_id=tiny.PAD,
    )


def rows_of(batch):
    """(flat episode number, microbatch, row) of each row of a single episode."""
    for mini in batch.minibatches:
        for micro, origin in zip(mini.microbatches, mini.origins):
            for row, number in enumerate(origin):
                if number >= 0:
                    yield int(number), micro, row


def test_each_episode_is_one_row_exactly_as_it_was(episodes, advantages, config):
    batch = batch_of(episodes, advantages, config)
    flat = [e for group in episodes for e in group]
    seen = []
    for number, micro, row in rows_of(batch):
        episode, length = flat[number], len(flat[number].ids)
        np.testing.assert_array_equal(micro.ids[row, :length], episode.ids)
        np.testing.assert_array_equal(micro.positions[:, row, :length], episode.positions)
        trained = np.flatnonzero(episode.loss_mask)
        is_real = micro.loss_mask[row] > 0
        np.testing.assert_array_equal(micro.target_index[row, is_real], trained)
        np.testing.assert_array_equal(micro.predictor_index[row, is_real], trained - 1)
        old = micro.old_per_token_logps[row, is_real]
        np.testing.assert_array_equal(old, episode.sampler_logps[trained])
        assert (micro.episode_index[row, is_real] == row).all()
        assert micro.advantages[row] == advantages.reshape(-1)[number]
        assert (micro.group_id[row, :length] == 0).all()
        assert (micro.group_id[row, length:] == -1).all()
        seen.append(number)
    assert sorted(seen) == list(range(12))
    assert (batch.num_episodes, batch.num_invalid, batch.num_equal_groups) == (12, 0, 1)
    assert batch.num_tokens == sum(int(e.loss_mask.sum()) for e in flat)


def test_zero_weight_rows_fill_up_to_a_power_of_two(episodes, advantages, config):
    batch = batch_of(episodes, advantages, config)
    assert [m.ids.shape for m in batch.microbatches] == [(8, 40), (8, 16)]
    last, origin = batch.microbatches[-1], batch.minibatches[-1].origins[-1]
    assert (origin >= 0).sum() == 4 and len(last.advantages) == 8
    assert (last.group_id[4:] == -1).all() and not last.loss_mask[4:].any()


@pytest.mark.parametrize(
    ("rows", "most", "want"),
    [(1, 32, 8), (8, 32, 8), (9, 32, 16), (20, 32, 32), (3, 4, 4), (1, 1, 1)],
)
def test_row_buckets(rows, most, want):
    assert row_bucket(rows, most) == want


def test_pictures_are_held_once_and_rows_point_at_their_cells(episodes, advantages, config):
    config.grpo.microbatch_rows = 16
    (micro,) = batch_of(episodes, advantages, config).microbatches
    assert sorted(micro.image_grid_thw) == [(1, 2, 6), (1, 4, 2), (1, 4, 4)]
    starts = np.cumsum([0, *(np.prod(g) for g in micro.image_grid_thw)])
    flat = [e for group in episodes for e in group]
    for number, micro, row in rows_of(batch_of(episodes, advantages, config)):
        episode = flat[number]
        wanted = micro.image_index[row][micro.image_index[row] >= 0]
        assert len(wanted) == (episode.ids == tiny.IMAGE).sum()
        assert (micro.ids[row][micro.image_index[row] >= 0] == tiny.IMAGE).all()
        # The cells a row points at hold its own patches, in reading order.
        patches = [micro.pixel_values[4 * cell : 4 * cell + 4] for cell in wanted]
        if patches:
            np.testing.assert_array_equal(np.concatenate(patches), episode.pixel_values)
    assert starts[-1] == len(micro.pixel_values)


def test_same_pixels_on_another_grid_are_another_picture(config):
    patches = tiny.picture((1, 4, 4), 0)
    pair = [
        tiny.make_episode("a", i, i, (grid,), patches.copy(), ((3, 4),))
        for i, grid in enumerate([(1, 4, 4), (1, 2, 8)])
    ]
    batch = make_batches(
        [pair],
        np.array([[0.5, -0.5]]),
        np.ones((1, 2), bool),
        config.grpo,
        merge_size=2,
        image_token_id=tiny.IMAGE,
        pad_id=tiny.PAD,
    )
    assert len(batch.microbatches[0].image_grid_thw) == 2


def test_invalid_episodes_are_in_neither_rows_nor_denominators(episodes, advantages, config):
    valid = VALID.copy()
    valid[0, 1] = valid[2, 3] = False
    batch = batch_of(episodes, np.where(valid, advantages, np.nan), config, valid)
    kept = sorted(number for number, _, _ in rows_of(batch))
    assert kept == [i for i in range(12) if i not in (1, 11)]
    assert batch.num_episodes == 10 and batch.num_invalid == 2
    assert batch.num_tokens == sum(
        int(episodes[p][g].loss_mask.sum()) for p, g in np.argwhere(valid)
    )


def test_equal_groups_can_be_left_out_but_still_count_in_the_denominator(
    episodes, advantages, config
):
    config.grpo.drop_equal_groups = True
    batch = batch_of(episodes, advantages, config)
    assert sorted(number for number, _, _ in rows_of(batch)) == list(range(8))
    assert batch.num_episodes == 12
    nothing = batch_of(episodes, np.zeros((3, 4)), config)
    assert nothing.microbatches == () and nothing.num_equal_groups == 3


def test_there_is_room_for_every_trained_token():
    # Shares of a long row; at least 128 places; never more than the row has.
    assert [target_bucket(n, 2048) for n in (0, 256, 257, 512, 513, 1024, 1025, 2048)] == [
        256, 256, 512, 512, 1024, 1024, 2048, 2048,
    ]  # fmt: skip
    assert [target_bucket(n, 448) for n in (0, 128, 129, 224, 225)] == [128, 128, 224, 224, 448]
    assert [target_bucket(n, 40) for n in (0, 1, 40)] == [40, 40, 40]


@pytest.mark.case("A-J4")
def test_pictures_of_one_size_have_one_plan_however_many_there_are():
    """Groups share pictures, so microbatches of as many rows hold different numbers of them."""
    config = tiny.CONFIG.vision_config
    shapes = set()
    for count in range(1, 9):
        grids = ((1, 4, 4),) * count
        patches = np.ones((16 * count, config.patch_dim), np.float32)
        ids = np.zeros((8, 40), np.int32)
        batch = SimpleNamespace(ids=ids, image_grid_thw=grids, pixel_values=patches)
        pixels, plan = _padded_pictures(batch, config)
        shapes.add((pixels.shape, str(jax.tree.map(np.shape, plan))))
        assert (pixels[: len(patches)] == 1).all() and not pixels[len(patches) :].any()
    assert len(shapes) == 1


def test_padding_pictures_fits_beside_sizes_that_differ():
    config = tiny.CONFIG.vision_config
    for sizes in ([(1, 8, 8)] + [(1, 2, 2)] * 8, [(1, 8, 8)] * 9, [(1, 2, 4)] * 3, [(1, 2, 2)]):
        patches = np.ones((int(np.prod(sizes, axis=1).sum()), config.patch_dim), np.float32)
        batch = SimpleNamespace(
            ids=np.zeros((2, 40), np.int32), image_grid_thw=tuple(sizes), pixel_values=patches
        )
        pixels, plan = _padded_pictures(batch, config)
        assert len(pixels) == plan.num_patches >= len(patches)


def test_too_long_episode_names_the_keys():
    assert length_bucket(16, (40, 16)) == 16 and length_bucket(17, (40, 16)) == 40
    with pytest.raises(ValueError, match=r"41 tokens .*grpo\.length_buckets.*rollout\.budget"):
        length_bucket(41, (40, 16))


def test_group_that_mixes_tasks_is_refused(episodes, advantages, config):
    mixed = [list(group) for group in episodes]
    mixed[0][1], mixed[1][1] = mixed[1][1], mixed[0][1]
    with pytest.raises(ValueError, match=r"group 0: 4 episodes of tasks \['task0', 'task1'\]"):
        batch_of(mixed, advantages, config)


def test_shapes_must_agree(episodes, advantages, config):
    with pytest.raises(ValueError, match="must agree"):
        batch_of(episodes[:2], advantages, config)
    with pytest.raises(ValueError, match="group 1"):
        batch_of([episodes[0], episodes[1][:3], episodes[2]], advantages, config)


def test_non_finite_advantage_of_a_valid_episode_is_refused(episodes, advantages, config):
    with pytest.raises(ValueError, match="not finite"):
        batch_of(episodes, np.full((3, 4), np.nan), config)


@pytest.mark.case("A-S17")
def test_picture_tokens_must_match_picture_cells(episodes, advantages, config):
    cut = [list(group) for group in episodes]
    ids = np.where(np.arange(len(cut[0][0].ids)) == 1, 5, cut[0][0].ids)
    cut[0][0] = dataclasses.replace(cut[0][0], ids=ids.astype(np.int32))
    with pytest.raises(ValueError, match="3 picture tokens for 4 picture cells"):
        batch_of(cut, advantages, config)
    cut[0][0] = dataclasses.replace(
        episodes[0][0], pixel_values=episodes[0][0].pixel_values[:-1].copy()
    )
    with pytest.raises(ValueError, match="15 patches, its grids say 16"):
        batch_of(cut, advantages, config)
