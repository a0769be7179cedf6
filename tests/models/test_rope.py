import dataclasses

import numpy as np
import pytest
import torch

from svrl_jax.models.qwen_vl.config import QWEN3, QwenVLConfig, TextConfig, VisionConfig
from svrl_jax.models.qwen_vl.rope import frequency_axes, mrope_positions, text_rope
from tests.models.conftest import IMAGE, VIDEO, row


@pytest.fixture(scope="module")
def config():
    text = TextConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, mrope_section=(2, 3, 3)
    )
    return QwenVLConfig(
        text,
        VisionConfig(hidden_size=32, num_heads=2, out_hidden_size=64),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )


def ids_of(*parts):
    """0 for text, the image token a merged cell; parts: number of text tokens or merged (h, w)."""
    ids = []
    for part in parts:
        ids += [IMAGE] * (part[0] * part[1]) if isinstance(part, tuple) else [0] * part
    grids = [(1, 2 * p[0], 2 * p[1]) for p in parts if isinstance(p, tuple)]
    return np.asarray(ids), np.asarray(grids).reshape(-1, 3)


@pytest.mark.case("A-M7")
def test_a_picture_moves_the_counter_by_its_longer_side(config):
    ids, grids = ids_of(3, (2, 3), 2)
    positions, following = mrope_positions(ids, grids, config)
    assert positions.dtype == np.int32
    assert positions.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7],
    ]
    assert following == 8


@pytest.mark.case("A-M7")
def test_text_alone_counts_up_on_all_axes(config):
    positions, following = mrope_positions(np.zeros(4, int), np.zeros((0, 3)), config)
    assert positions.tolist() == [[0, 1, 2, 3]] * 3 and following == 4


@pytest.mark.case("A-M8")
def test_touching_pictures_are_two_pictures(config):
    ids, grids = ids_of(1, (2, 2), (2, 2), 1)
    positions, following = mrope_positions(ids, grids, config)
    assert positions.tolist() == [
        [0, 1, 1, 1, 1, 3, 3, 3, 3, 5],
        [0, 1, 1, 2, 2, 3, 3, 4, 4, 5],
        [0, 1, 2, 1, 2, 3, 4, 3, 4, 5],
    ]
    assert following - len(ids) == -4


def test_two_pictures_with_their_marks(config):
    ids, grids = ids_of(4, (2, 3), 4, (1, 2), 2)
    positions, following = mrope_positions(ids, grids, config)
    assert positions.tolist() == [
        [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8, 9, 10, 11, 11, 13, 14],
        [0, 1, 2, 3, 4, 4, 4, 5, 5, 5, 7, 8, 9, 10, 11, 11, 13, 14],
        [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14],
    ]
    assert following - len(ids) == -3


def test_appending_goes_on_where_the_context_ended(config):
    ids, grids = ids_of(2, (2, 3), 3, (4, 2), 5)
    whole, following = mrope_positions(ids, grids, config)
    for cut in (1, 8, 10):  # outside the pictures' runs
        is_first = 1 if cut >= 8 else 0
        head, start = mrope_positions(ids[:cut], grids[:is_first], config)
        tail, end = mrope_positions(ids[cut:], grids[is_first:], config, start=start)
        assert np.array_equal(np.concatenate([head, tail], axis=1), whole)
        assert end == following


@pytest.mark.parametrize(
    ("ids", "grids"),
    [
        ([0, IMAGE, IMAGE], [(1, 2, 6)]),  # too few
        ([IMAGE, IMAGE], []),  # none planned
        ([IMAGE, 0, IMAGE], [(1, 2, 4)]),  # a run broken by text
    ],
)
def test_tokens_that_are_not_the_pictures_cells_are_an_error(config, ids, grids):
    with pytest.raises(ValueError, match="image tokens"):
        mrope_positions(np.asarray(ids), np.asarray(grids).reshape(-1, 3), config)


def test_positions_of_every_merged_grid_equal_the_reference(pair):
    """Merged grids 1..16 x 1..16, each between text, and three pictures in one row."""
    sides = range(2, 33, 2)
    rows = [[(1, h, w)] for h in sides for w in sides] + [[(1, 4, 6), (1, 32, 2), (1, 2, 30)]]
    ids = [row(3, *(part for grid in grids for part in (grid, 2))) for grids in rows]
    padded = np.zeros((len(ids), max(map(len, ids))), np.int64)
    mask = np.zeros_like(padded)
    for i, one in enumerate(ids):
        padded[i, : len(one)], mask[i, : len(one)] = one, 1
    expected, delta = pair.torch_model.model.get_rope_index(
        torch.tensor(padded),
        mm_token_type_ids=torch.tensor((padded == IMAGE).astype(int)),
        image_grid_thw=torch.tensor([grid for grids in rows for grid in grids]),
        attention_mask=torch.tensor(mask),
    )
    assert len(rows) == 257
    for i, (one, grids) in enumerate(zip(ids, rows, strict=True)):
        positions, following = mrope_positions(one, np.asarray(grids), pair.config)
        np.testing.assert_array_equal(positions, expected[:, i, : len(one)].numpy())
        assert following - len(one) == int(delta[i])


def test_a_video_token_is_refused(config):
    with pytest.raises(ValueError, match="only pictures"):
        mrope_positions(np.asarray([0, VIDEO]), np.zeros((0, 3)), config)


@pytest.mark.case("A-M6")
def test_frequencies_are_dealt_in_blocks_or_in_turns():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    blocks = TextConfig(**sizes, mrope_section=(4, 2, 2))
    turns = TextConfig(**sizes, mrope_section=(4, 2, 2), model_type=QWEN3)
    assert frequency_axes(blocks).tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert frequency_axes(turns).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    released = TextConfig(
        hidden_size=4096, num_attention_heads=32, mrope_section=(24, 20, 20), model_type=QWEN3
    )
    axes = frequency_axes(released)
    assert axes[:60].tolist() == [0, 1, 2] * 20 and not axes[60:].any() and len(axes) == 64


@pytest.mark.case("A-M6")
def test_angles_equal_the_reference_and_the_other_rule_does_not(pair):
    """At positions above 8,000 too, where an angle in bfloat16 would be off by whole turns."""
    grid = (1, 4, 6)
    ids = row(4, grid, 3)
    text = np.broadcast_to(np.arange(9, dtype=np.int32), (3, 9))
    picture = mrope_positions(ids, np.asarray([grid]), pair.config)[0]
    far = mrope_positions(ids, np.asarray([grid]), pair.config, start=8200)[0]
    own = pair.config.text_config
    other_type = next(t for t in ("qwen2_5_vl", QWEN3) if t != own.model_type)
    other = dataclasses.replace(own, model_type=other_type)
    for positions, tells_apart in ((text, False), (picture, True), (far, True)):
        expected = pair.torch_model.model.language_model.rotary_emb(
            torch.zeros(1), torch.tensor(positions)[:, None]
        )
        half = own.head_dim // 2
        for i in range(2):  # cosines, sines
            wanted = expected[i][..., :half].numpy()
            found = text_rope(positions[:, None], own)[i]
            np.testing.assert_allclose(found, wanted, atol=1e-6)
            wrong = np.asarray(text_rope(positions[:, None], other)[i])
            assert (np.abs(wrong - wanted).max() > 0.05) == tells_apart
