"""Windows, positions and learned positions against transformers, over many grids."""

import numpy as np
import pytest
import torch
from transformers import vision_utils

from svrl_jax.models.qwen_vl.config import Qwen3VisionConfig, VisionConfig
from svrl_jax.models.qwen_vl.vision_plan import few_sizes, plan_vision

WINDOWED = VisionConfig(hidden_size=32, num_heads=2, out_hidden_size=64)
LEARNED = Qwen3VisionConfig(hidden_size=32, num_heads=2, out_hidden_size=64)
# Merged grids 1..16 x 1..16.
SWEEP = np.asarray([(1, h, w) for h in range(2, 33, 2) for w in range(2, 33, 2)])


def boundaries(segments):
    return [0, *np.cumsum(np.asarray(segments.valid).sum(axis=1)).tolist()]


def order_in_cells(segments):
    patch, valid = np.asarray(segments.patch), np.asarray(segments.valid)
    return (patch[valid][::4] // 4).tolist()


@pytest.mark.parametrize(
    ("grids", "windows", "frames"),
    [
        ([(1, 4, 6)], [0, 24], [0, 24]),
        pytest.param([(1, 8, 8)], [0, 64], [0, 64], marks=pytest.mark.case("A-M2")),
        pytest.param(
            [(1, 12, 12)], [0, 64, 96, 128, 144], [0, 144], marks=pytest.mark.case("A-M2")
        ),
        ([(1, 10, 12)], [0, 64, 96, 112, 120], [0, 120]),
        (
            [(1, 36, 28)],
            [*range(0, 193, 64), 224, 288, 352, 416, 448, 512, 576, 640, 672, 736, 800, 864]
            + [896, 928, 960, 992, 1008],
            [0, 1008],
        ),
        ([(1, 4, 6), (1, 10, 12)], [0, 24, 88, 120, 136, 144], [0, 24, 144]),
    ],
)
def test_segments_are_the_references(grids, windows, frames):
    plan = plan_vision(np.asarray(grids), WINDOWED)
    assert boundaries(plan.windows) == windows
    assert boundaries(plan.frames) == frames


def test_windows_take_cells_window_by_window():
    plan = plan_vision(np.asarray([(1, 10, 12)]), WINDOWED)
    expected = [0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 18, 19, 20, 21]
    expected += [4, 5, 10, 11, 16, 17, 22, 23, *range(24, 30)]
    assert order_in_cells(plan.windows) == expected


def test_patch_positions_come_in_merge_blocks():
    plan = plan_vision(np.asarray([(1, 4, 6)]), WINDOWED)
    expected = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert plan.position_hw[:8].tolist() == expected


@pytest.mark.case("A-M2")
def test_windows_of_every_merged_grid_equal_the_reference():
    plan = plan_vision(SWEEP, WINDOWED)
    index, ends = vision_utils.get_vision_window_index(torch.tensor(SWEEP), 2, 112, 14)
    assert boundaries(plan.windows) == ends.tolist()
    assert order_in_cells(plan.windows) == index.tolist()
    assert boundaries(plan.frames) == [0, *np.cumsum(SWEEP.prod(axis=1)).tolist()]
    assert plan.windows.valid.any(axis=1).all()  # no empty window


@pytest.mark.parametrize("config", [WINDOWED, LEARNED])
def test_patch_positions_of_every_merged_grid_equal_the_reference(config):
    plan = plan_vision(SWEEP, config)
    expected = vision_utils.get_vision_position_ids(torch.tensor(SWEEP), 2)
    np.testing.assert_array_equal(plan.position_hw, expected.numpy())


def test_learned_positions_mix_the_four_rows_around():
    """A 4 x 6 grid on a 48 x 48 table: patch (1, 1) stands at row 47 / 3, column 47 / 5."""
    plan = plan_vision(np.asarray([(1, 4, 6)]), LEARNED)
    assert plan.windows is None and plan.same_segments
    assert plan.taps.row[3].tolist() == [15 * 48 + 9, 15 * 48 + 10, 16 * 48 + 9, 16 * 48 + 10]
    shares = [1 / 3 * 0.6, 1 / 3 * 0.4, 2 / 3 * 0.6, 2 / 3 * 0.4]
    np.testing.assert_allclose(plan.taps.weight[3], shares, atol=1e-5)
    np.testing.assert_array_equal(plan.taps.row[[0, -1]][:, 0], [0, 48 * 48 - 1])  # the corners


def test_learned_positions_of_every_merged_grid_equal_the_reference():
    plan = plan_vision(SWEEP, LEARNED)
    rows, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor(SWEEP), 48, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    np.testing.assert_array_equal(plan.taps.row, rows.numpy())
    np.testing.assert_allclose(plan.taps.weight, weights.numpy(), atol=1e-6)
    np.testing.assert_allclose(plan.taps.weight.sum(axis=1), 1.0, atol=1e-6)


@pytest.mark.parametrize("config", [WINDOWED, LEARNED])
@pytest.mark.parametrize(
    ("grids", "pad", "message"),
    [
        (np.zeros((0, 3)), None, "no picture"),
        ([(1, 3, 4)], None, "multiples of 2"),
        ([(1, 8, 8)], 32, "at least the 64"),
        ([(1, 8, 8)], 102, "multiple of"),
    ],
)
def test_grids_that_cannot_be_planned_are_an_error(config, grids, pad, message):
    with pytest.raises(ValueError, match=message):
        plan_vision(np.asarray(grids), config, pad)


def test_few_sizes_hold_their_number_and_are_few():
    sizes = [few_sizes(n) for n in range(1, 25)]
    assert sizes == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16, 16, 16, 16] + [24] * 8
