"""Both local indexes on hand-made corpora and on the embedded world."""

import sys

import numpy as np
import pytest

from svrl_jax.data import facts, pictures, sources, world
from svrl_jax.data.sources import Document
from svrl_jax.search.index import PictureIndex, TextIndex

DOCUMENTS = [
    Document("Chad", "Chad", "A landlocked country in Central Africa.", ""),
    Document("Romania", "Romania", "A country in Europe; its flag looks like that of Chad.", ""),
    Document("Harp", "Harp", "A stringed instrument.", ""),
]


@pytest.fixture(scope="module")
def small():
    return TextIndex(DOCUMENTS)


def test_a_titles_words_count_more_than_a_mention(small):
    found = small.search("of Chad", 5)
    assert [d.title for d, _ in found] == ["Chad", "Romania"]
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True) and scores[-1] > 0


@pytest.mark.parametrize("query", ["zzqqxx frobnitz", "", "the of is", "?!", "ñandúzz"])
def test_nonsense_finds_nothing(small, query):
    assert small.search(query, 5) == []


def test_no_more_than_asked_for_and_no_more_than_there_are(small):
    assert len(small.search("country", 1)) == 1
    assert len(small.search("country instrument", 50)) == 3


@pytest.mark.parametrize(
    "query, title",
    [
        ("capital of Bhutan", "Bhutan"),
        ("Bhutan capital city", "Bhutan"),
        ("Colombia country", "Colombia"),
        ("Eiffel Tower", "Eiffel Tower"),
        ("photosynthesis", "Photosynthesis"),
    ],
)
def test_the_right_summary_comes_first(world_tools, query, title):
    items = world_tools.text_search(query, None)
    assert items[0].title == items[0].id == title
    assert items[0].link == sources.documents_by_title()[title].link


def test_every_wording_of_the_script_finds_the_places_summary(world_tools):
    from svrl_jax.data import script

    items = [i for i in world.split_items()["test"] if i.relation in script.TEMPLATES]
    queries = [(t.format(i.entity.title), i) for i in items for t in script.TEMPLATES[i.relation]]
    hits = [i.entity.title in {r.id for r in world_tools.text_search(q, None)} for q, i in queries]
    assert np.mean(hits) > 0.97


def test_a_text_search_of_the_world_may_find_nothing(world_tools):
    assert world_tools.text_search("zzqqxx frobnitz", None) == []


def test_image_search_is_good_but_noisy(world_tools):
    tasks = world.eval_tasks("test", 1, 84, 56)
    ranked = [[i.title for i in world_tools.image_search(t)] for t in tasks]
    top = [task.entity[0] in titles[:3] for task, titles in zip(tasks, ranked, strict=True)]
    first = [task.entity[0] == titles[0] for task, titles in zip(tasks, ranked, strict=True)]
    assert np.mean(top) >= 0.9
    assert 0.6 < np.mean(first) < 1.0
    assert all(len(titles) == 3 for titles in ranked)


def test_look_alike_flags_are_near_each_other():
    entities = {e.title: e for e in facts.entities()}
    names = ["Chad", "Romania", "Japan", "Brazil"]
    clean = [pictures.clean_picture(entities[n].code, 84, 56, is_flag=True) for n in names]
    index = PictureIndex(names, clean)
    found = index.search(pictures.to_png(clean[0]), 4)
    assert {title for title, _ in found[:2]} == {"Chad", "Romania"}
    assert found[0][1] == pytest.approx(0, abs=1e-6)
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)


def test_a_search_depends_on_its_query_alone(world_tools):
    task = world.eval_tasks("test", 1, 84, 56)[0]
    first = world_tools.text_search("capital of Chad", task)
    first.clear()  # the caller's list is its own
    assert world_tools.text_search("capital of Chad", None)
    assert world_tools.image_search(task) == world_tools.image_search(task)


@pytest.mark.parametrize("package", ["bm25s", "usearch", "resvg_py"])
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, package):
    for name in [package, f"{package}.index"]:
        monkeypatch.setitem(sys.modules, name, None)
    make = {
        "bm25s": lambda: TextIndex(DOCUMENTS),
        "usearch": lambda: PictureIndex(["a"], [np.zeros((4, 6, 3), np.uint8)]),
        "resvg_py": lambda: pictures._raster.__wrapped__("1F1E7-1F1F9"),
    }[package]
    with pytest.raises(sources.MissingDataError) as error:
        make()
    assert package in str(error.value) and "pip install -e '.[quickstart]'" in str(error.value)
