"""Packing of demonstrations, and that the curriculum teaches."""

import itertools
import re

import numpy as np

from svrl_jax.training import pretrain


def batches(builder, demo_maker, config, count=3):
    phase = config.pretrain.phases.p1_look
    made = pretrain.packed_batches(demo_maker, "p1_look", phase, config.pretrain, builder.config)
    return list(itertools.islice(made, count))


def test_packed_rows_hold_whole_demonstrations_once(builder, demo_maker, tiny_config):
    phase = tiny_config.pretrain.phases.p1_look
    packed = []
    for batch in batches(builder, demo_maker, tiny_config):
        for row, group in zip(batch["ids"], batch["group_id"], strict=True):
            packed += [tuple(row[group == g]) for g in range(group.max() + 1)]
    count = len(packed)
    drawn = [tuple(demo_maker.draw("p1_look", phase, i).ids) for i in range(count + 12)]
    assert set(packed) <= set(drawn)
    # In whichever row there was room; three that fit into none are left out, and the next is kept.
    assert len(set(drawn[:count]) - set(packed)) <= 3 * 3


def test_targets_are_the_policy_tokens(builder, demo_maker, tiny_config):
    (batch,) = batches(builder, demo_maker, tiny_config, 1)
    labels = batch["ids"][:, 1:].reshape(-1)[batch["targets_at"]]
    weights = batch["target_weights"]
    groups = batch["group_id"][:, 1:].reshape(-1)[batch["targets_at"]]
    before = batch["group_id"][:, :-1].reshape(-1)[batch["targets_at"]]
    real = weights > 0
    assert (groups[real] >= 0).all() and (groups[real] == before[real]).all()
    special = builder.tokenizer.special_ids
    assert not np.isin(labels[real], special).any()
    text = builder.tokenizer.decode(labels[real])
    assert text.startswith("<reason>") and "<|" not in text


def test_picture_features_are_counted_over_the_batch(builder, demo_maker, tiny_config):
    (batch,) = batches(builder, demo_maker, tiny_config, 1)
    is_image = batch["ids"] == builder.config.image_token_id
    index = batch["image_index"][is_image & (batch["group_id"] >= 0)]
    np.testing.assert_array_equal(index, np.arange(len(index)))
    assert (batch["image_index"][~is_image] == -1).all()
    assert batch["pixel_values"].shape[0] % (32 * 24) == 0  # few shapes are compiled


def test_the_curriculum_teaches(pretraining):
    _, lines = pretraining
    losses = [float(re.search(r"loss ([\d.]+)", line).group(1)) for line in lines]
    assert losses[-1] < 0.6 * losses[0] < 0.6 * np.log(600)
