"""Cells of published tables, in every form that was met."""

import base64
import pathlib

import numpy as np
import pytest
from PIL import Image

from svrl_jax.data import cells
from svrl_jax.data.cells import RowError
from tests.data.published_files import picture

PNG = picture(40, 30)


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    return (tmp_path / "elsewhere", tmp_path)


@pytest.mark.case("A-D1")
@pytest.mark.parametrize(
    "cell",
    [
        {"bytes": PNG, "path": None},
        {"bytes": None, "path": "a.png"},
        PNG,
        bytearray(PNG),
        [PNG],
        [{"bytes": PNG, "path": "b.png"}],
        "a.png",
        pathlib.Path("a.png"),
        base64.b64encode(PNG).decode(),
        "data:image/png;base64," + base64.b64encode(PNG).decode(),
    ],
)
def test_every_form_gives_the_published_bytes(cell, folders):
    assert cells.picture_bytes(cell, folders) == PNG
    assert cells.picture_size(PNG) == (40, 30)


@pytest.mark.case("A-D1")
def test_a_pil_picture_decodes_alike(folders):
    data = cells.picture_bytes(Image.new("RGB", (40, 30), (200, 30, 30)), folders)
    assert cells.picture_size(data) == (40, 30)


@pytest.mark.case("A-D1")
@pytest.mark.parametrize("cell", [None, [], "", float("nan"), {"bytes": None, "path": None}])
def test_no_picture_is_no_picture(cell, folders):
    assert cells.picture_bytes(cell, folders) == b""


@pytest.mark.parametrize(
    "cell, reason",
    [
        ("missing.png", "missing.png is missing"),
        ([PNG, PNG], "2 pictures"),
        ("https://example.org/a.png", "download it"),
        (5, "a int"),
        ("data:image/png;base64,abc", "broken base64"),
    ],
)
def test_an_unreadable_picture_has_a_reason(cell, reason, folders):
    with pytest.raises(RowError, match=reason):
        cells.picture_bytes(cell, folders)


def test_a_picture_is_decoded_whole_before_it_counts():
    with pytest.raises(RowError, match="cannot be decoded"):
        cells.picture_size(PNG[:-30])
    with pytest.raises(RowError, match="too narrow"):
        cells.picture_size(picture(603, 3))


@pytest.mark.case("A-D2")
@pytest.mark.parametrize(
    "cell, found",
    [
        (np.array(["a", "b"], object), ("a", "b")),
        (np.array("a"), ("a",)),
        ('["a","b"]', ("a", "b")),
        ("plain", ("plain",)),
        ("[not JSON", ("[not JSON",)),
        ("[Untitled]", ("[Untitled]",)),
        (["a", "[b]", " a "], ("a", "[b]")),
        (1945, ("1945",)),
        (np.float32(0.5), ("0.5",)),
        (True, ("yes",)),
        ('["\\ud83c\\uddea\\ud83c\\uddf8", "ES"]', ("\U0001f1ea\U0001f1f8", "ES")),
    ],
)
def test_answers_of_every_form_are_texts(cell, found):
    assert cells.answers(cell) == found


def test_the_truth_comes_first_and_aliases_once():
    assert cells.answers("Portugal", '["PRT", "Portugal", "PT"]') == ("Portugal", "PRT", "PT")
    assert cells.answers("namus", "[]") == ("namus",)


@pytest.mark.case("A-R9")
@pytest.mark.parametrize("given", [("", "[]"), (None, None), (" ", [])])
def test_a_row_without_an_answer_is_refused(given):
    with pytest.raises(RowError, match="no answer"):
        cells.answers(*given)


@pytest.mark.parametrize(
    "cell, text",
    [
        ("What? ", "What?"),
        ([{"role": "user", "content": "<image>\nWhat?"}], "What?"),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "What?"}], "What?"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}],
         "What?"),
    ],
)  # fmt: skip
def test_questions_of_every_form(cell, text):
    assert cells.question(cell) == text


@pytest.mark.parametrize("cell", [None, "", "<image>", [], [{"role": "system", "content": "s"}]])
def test_a_row_without_a_question_is_refused(cell):
    with pytest.raises(RowError, match="no question"):
        cells.question(cell)
