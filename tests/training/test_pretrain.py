"""Packing of demonstrations, and that the curriculum teaches."""

import itertools
import re

import jax
import numpy as np
import pytest
from flax import nnx

from svrl_jax.models.qwen_vl import QwenVL
from svrl_jax.models.qwen_vl.weights import load_weights
from svrl_jax.training import pretrain
from tests.conftest import changed


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
    found = [re.search(r"p[1-4]\w+ \d.* loss ([\d.]+)", line) for line in lines]
    losses = [float(match.group(1)) for match in found if match]
    assert losses[-1] < 0.6 * losses[0] < 0.6 * np.log(600)


def test_a_phase_run_again_alone_gives_what_the_whole_run_gives(
    builder, demo_maker, tiny_config, tmp_path
):
    first, second = "p1_look", "p4_habits"
    config = changed(tiny_config.pretrain, keep_phases=str(tmp_path), rows=2, warmup_steps=1)
    with config.unlocked():
        config.phases = {n: config.phases[n].to_dict() | {"steps": 3} for n in (first, second)}
    whole = pretrain.pretrain(QwenVL(builder.config, rngs=nnx.Rngs(0)), demo_maker, config, print)
    kept, _ = load_weights(tmp_path / first)
    alone = pretrain.pretrain(kept, demo_maker, changed(config, start_at=second), print)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (whole, alone)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_phase_that_does_not_exist_is_named(tiny_config):
    with pytest.raises(ValueError, match="'p9' is none of p0_copy, p1_look"):
        pretrain.phases_to_run(changed(tiny_config.pretrain, start_at="p9"))
