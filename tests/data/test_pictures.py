import io

import numpy as np
import pytest
from PIL import Image

from svrl_jax.data import facts, pictures

ENTITIES = {e.title: e for e in facts.entities()}
FLAG, OBJECT = ENTITIES["Bhutan"], ENTITIES["Accordion"]


def draw(entity, seed):
    rng = np.random.default_rng(seed)
    return pictures.draw(entity.code, rng, 84, 56, is_flag=entity.is_flag)


@pytest.mark.parametrize("entity", [FLAG, OBJECT], ids=["flag", "object"])
def test_draws_differ_and_can_be_made_again(entity):
    first, again, other = draw(entity, 0), draw(entity, 0), draw(entity, 1)
    assert first.shape == (56, 84, 3) and first.dtype == np.uint8
    np.testing.assert_array_equal(first, again)
    assert np.abs(first.astype(int) - other).mean() > 2


def test_changes_are_small_beside_the_difference_of_two_flags():
    clean = pictures.clean_picture(FLAG.code, 84, 56, is_flag=True).astype(float)
    other = pictures.clean_picture(ENTITIES["Chad"].code, 84, 56, is_flag=True)
    own = [np.abs(draw(FLAG, seed) - clean).mean() for seed in range(5)]
    assert 2 < np.mean(own) < np.abs(other - clean).mean()


def test_a_flag_fills_the_canvas_and_an_object_stands_on_white():
    flag = pictures.clean_picture(ENTITIES["Chad"].code, 84, 56, is_flag=True)
    thing = pictures.clean_picture(OBJECT.code, 84, 56, is_flag=False)
    assert (flag[28, [4, 79]] < 250).any(axis=-1).all()
    assert (thing[:, :10] == 255).all() and (thing[:, -10:] == 255).all()
    assert (thing < 200).any()


def test_png_keeps_every_value():
    picture = draw(FLAG, 3)
    read = np.asarray(Image.open(io.BytesIO(pictures.to_png(picture))))
    np.testing.assert_array_equal(read, picture)
