"""Index folders: built whole or not at all, searched from disk."""

import dataclasses
import io
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from configs.base import get_config
from svrl_jax.data import facts, pictures, world
from svrl_jax.search import stored
from svrl_jax.search.errors import SearchSetupError, ToolError
from svrl_jax.training import assemble
from svrl_jax.types import Task
from tests.data.published_files import picture, write_jsonl

DOCUMENTS = [
    {"id": "chad", "title": "Chad", "text": "A landlocked country in Central Africa.", "link": "u"},
    {"title": "Romania", "text": "A country in Europe; its flag looks like that of Chad."},
    {"title": None, "text": "A stringed instrument with a frame."},
]
RED, BLUE = picture(colour=(200, 0, 0)), picture(colour=(0, 0, 200))
PICTURES = [(RED, {"title": "red", "text": "A red flag."}), (BLUE, {"title": "blue"})]
TASK = Task("t", "What flag is it?", RED, ("x",), "s", "c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("index") / "made"
    about = stored.build(out, DOCUMENTS, PICTURES)
    assert (about["num_documents"], about["num_pictures"]) == (3, 2)
    return out


def tools(folder, **changes):
    config = get_config().search
    config.update({"kind": "index", "index_folder": str(folder)} | changes)
    return stored.IndexTools(config)


def test_text_search(folder):
    found = tools(folder).text_search("Chad country", TASK)
    assert [i.title for i in found] == ["Chad", "Romania"]
    assert (found[0].id, found[0].link, found[0].provider) == ("chad", "u", "index")
    assert found[0].score > found[1].score > 0 and "landlocked" in found[0].text
    assert len(tools(folder, text_top_k=1).text_search("country", TASK)) == 1
    for nothing in ("zzqq", "", "the of"):
        assert tools(folder).text_search(nothing, TASK) == []
    assert tools(folder).text_search("instrument", TASK)[0].id == "2"


def test_image_search(folder):
    found = tools(folder).image_search(TASK)
    assert [i.title for i in found] == ["red", "blue"]
    assert found[0].score == pytest.approx(0, abs=1e-5) and found[0].text == "A red flag."
    blue = dataclasses.replace(TASK, picture=BLUE)
    assert tools(folder, image_top_k=1).image_search(blue)[0].title == "blue"
    with pytest.raises(ToolError):
        tools(folder).image_search(dataclasses.replace(TASK, picture=b""))


def mean_colour(pixels: np.ndarray) -> np.ndarray:
    return pixels.reshape(-1, 3).mean(0)


def test_an_embedding_of_ones_own(tmp_path):
    stored.build(tmp_path / "i", [], PICTURES, embedding="test_stored:mean_colour")
    assert tools(tmp_path / "i").image_search(TASK)[0].title == "red"
    with pytest.raises(ToolError, match="no documents"):
        tools(tmp_path / "i").text_search("a", TASK)
    with pytest.raises(SearchSetupError, match="nowhere"):
        stored.build(tmp_path / "j", DOCUMENTS, embedding="nowhere:f")
    assert not (tmp_path / "j").exists()


def test_the_policys_own_tower_finds_changed_pictures(tmp_path):
    """Flags drawn clean are indexed; turned, tinted and cropped drawings find them."""
    tower = f"tower:{assemble.policy_folder('svrl_jax/data/quickstart')}"
    tasks = {t.entity[0]: t for t in world.eval_tasks("test", 1, 84, 56)}
    entities = [e for e in facts.entities() if e.title in tasks][:12]
    pages = []
    for entity in entities:
        drawn = pictures.clean_picture(entity.code, 84, 56, is_flag=entity.is_flag)
        file = io.BytesIO()
        Image.fromarray(drawn).save(file, "PNG")
        pages.append((file.getvalue(), {"title": entity.title}))
    stored.build(tmp_path / "i", [], pages, embedding=tower)
    found = tools(tmp_path / "i")
    first = [found.image_search(tasks[e.title])[0].title == e.title for e in entities]
    assert sum(first) >= 8, first  # by chance: one
    with pytest.raises(SearchSetupError, match="policy's folder"):
        stored.build(tmp_path / "j", [], pages, embedding=f"tower:{tmp_path}")


def test_a_folder_that_is_not_whole_never_loads(folder, tmp_path):
    files = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file()]
    assert len(files) > 6
    for number, name in enumerate(files):
        for cut in (True, False):
            copy = tmp_path / f"{number}{cut}"
            shutil.copytree(folder, copy)
            if cut:
                os.truncate(copy / name, (copy / name).stat().st_size - 1)
            else:
                (copy / name).unlink()
            with pytest.raises(SearchSetupError):
                tools(copy)
    with pytest.raises(SearchSetupError, match="holds no index"):
        tools(tmp_path / "none")


@pytest.mark.parametrize(
    "documents, pictures, reason",
    [
        ([*DOCUMENTS, {"title": "x"}], [], "document 3 has no text"),
        (DOCUMENTS, [(RED, {"text": "t"})], "picture 0 has no title"),
        (DOCUMENTS, [(b"no picture", {"title": "bad"})], "bad"),
        ([], [], "no document"),
    ],
)
def test_a_broken_build_leaves_nothing(tmp_path, documents, pictures, reason):
    with pytest.raises(stored.IndexBuildError, match=reason):
        stored.build(tmp_path / "i", documents, pictures)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_never_overwritten(folder):
    with pytest.raises(stored.IndexBuildError, match="exists"):
        stored.build(folder, DOCUMENTS)


def test_the_command(tmp_path, capsys):
    from experiments.__main__ import main

    write_jsonl(tmp_path / "d.jsonl", DOCUMENTS)
    write_jsonl(tmp_path / "p" / "metadata.jsonl", [{"file": "a.png", "title": "red"}])
    (tmp_path / "p" / "a.png").write_bytes(RED)
    command = ["experiments", "index", f"--source={tmp_path}/d.jsonl", f"--pictures={tmp_path}/p"]
    assert main([*command, f"--out={tmp_path}/i"]) == 0
    assert "3 documents, 1 pictures" in capsys.readouterr().out
    assert len(tools(tmp_path / "i").image_search(TASK)) == 1
    assert main([*command, f"--out={tmp_path}/i"]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["experiments", "index"]) == 2
