import numpy as np
import pytest
import torch

from svrl_jax.models.qwen_vl.config import QwenVLConfig, TextConfig, VisionConfig
from svrl_jax.models.qwen_vl.rope import mrope_positions
from tests.models.conftest import IMAGE, row


@pytest.fixture(scope="module")
def config():
    text = TextConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, mrope_section=(2, 3, 3)
    )
    return QwenVLConfig(
        text, VisionConfig(hidden_size=32, num_heads=2, out_hidden_size=64), image_token_id=IMAGE
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


def test_positions_equal_the_reference(pair):
    grids = [(1, 4, 6), (1, 12, 8), (1, 2, 4)]
    ids = row(3, grids[0], 5, grids[1], 1, grids[2], 2)
    expected, delta = pair.torch_model.model.get_rope_index(
        torch.tensor(ids)[None],
        mm_token_type_ids=torch.tensor((ids == IMAGE).astype(int))[None],
        image_grid_thw=torch.tensor(grids),
    )
    positions, following = mrope_positions(ids, np.asarray(grids), pair.config)
    assert np.array_equal(positions, expected[:, 0].numpy())
    assert following - len(ids) == int(delta)
