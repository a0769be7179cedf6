import numpy as np
import pytest
from PIL import Image

from svrl_jax.analysis import figures


def line(step, **values):
    names = [name for _, panel in figures._PANELS for name in panel]
    return {"step": step} | dict.fromkeys(names, 0.1 * step) | values


def test_curves_are_written(tmp_path):
    path = tmp_path / "new" / "training.png"
    figures.training_curves([line(s) for s in range(8)], path)
    picture = np.asarray(Image.open(path).convert("RGB"))
    assert picture.shape[1] > 1000 and picture.std() > 5


@pytest.mark.parametrize("lines", [[], [line(0)], [line(0, kl=None), {"step": 1, "reward": 0.5}]])
def test_no_steps_one_step_and_gaps_are_no_error(tmp_path, lines):
    figures.training_curves(lines, tmp_path / "training.png")
    assert (tmp_path / "training.png").stat().st_size > 1000


def test_the_running_mean_looks_back_only():
    values = np.array([5.0, 1.0, 0.0, 2.0, 2.0, 10.0])
    expected = [5, 3, 2, 2, 2, 3]
    np.testing.assert_allclose(figures._running_mean(values, 5), expected)
    np.testing.assert_array_equal(figures._running_mean(values, 1), values)
