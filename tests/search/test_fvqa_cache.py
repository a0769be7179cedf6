"""FVQA's cache: what it holds comes over once, and no pickle runs anything."""

import io
import os
import pickle

import pytest
from PIL import Image

from configs.base import get_config
from experiments.__main__ import main
from svrl_jax.search import imported
from svrl_jax.search.build import live_tools
from svrl_jax.search.fvqa_cache import CacheError, read_cache
from svrl_jax.types import Task
from tests.data.published_files import PUBLISHED
from tests.search.test_record_command import CONFIG

SAMPLE = PUBLISHED / "fvqa_sample.parquet"
LIMITS = {"max_pixels": 10_000, "thumbnail_px": 16}


def opened(mode="RGB", form="PNG", size=(40, 20)):
    """A picture as Pillow opens it from a file."""
    buffer = io.BytesIO()
    Image.new(mode, size, 1).save(buffer, form)
    return Image.open(buffer)


def entry(*pairs):
    return {
        "tool_returned_web_title_list": [title for title, _ in pairs],
        "tool_returned_images_urls": [picture for _, picture in pairs],
    }


def read(tmp_path, content, protocol=4):
    path = tmp_path / "cache.pkl"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol))
    return dict(read_cache(path, **LIMITS))


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_titles_addresses_and_pictures_come_over(tmp_path, protocol):
    pictures = [opened(), opened("L", "JPEG"), opened("P"), opened("CMYK", "JPEG"), opened("RGBA")]
    content = {"a": entry(("T", "https://t/1"), *(("P", p) for p in pictures)), "b": entry()}
    found = read(tmp_path, content, protocol)
    assert found["b"] == [] and found["a"][0].picture == "https://t/1"
    for result, source in zip(found["a"][1:], pictures, strict=True):
        image = Image.open(io.BytesIO(result.picture))
        assert (image.mode, image.size) == ("RGB", (16, 8))
        assert image.getpixel((3, 3)) == source.convert("RGB").getpixel((3, 3))


class Runs:
    """What a hostile pickle does: it calls a function when it is loaded."""

    def __init__(self, *call):
        self.call = call  # function, arguments, state

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "function, arguments",
    [(os.system, ("touch {}",)), (eval, ("open('{}', 'w')",)), (open, ("{}", "w")),
     (Image.open, ("{}",)), (getattr, (Image, "open"))],
)  # fmt: skip
def test_no_function_is_called(tmp_path, function, arguments):
    mark = tmp_path / "mark"
    filled = tuple(a.format(mark) if isinstance(a, str) else a.__name__ for a in arguments)
    with pytest.raises(CacheError, match="which is no picture"):
        read(tmp_path, {"a": Runs(function, filled)})
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.", b"(S'true'\nios\nsystem\n.",
        b"cPIL.Image\nImage\n(S'x'\ntR.", b"cPIL.Image\nImage.open\n.",
        b"\x80\x04\x8c\x09PIL.Image\x8c\x0aImage.open\x93.", b"\x80\x02\x82\x01.",
        b"Ppersistent\n.", b"\x80\x04]\x94\x68\x00\x61",
        b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b"x", b"", b"no pickle", b"\x80\x63.",
        pickle.dumps([1]), pickle.dumps(io.BytesIO),
    ],
)  # fmt: skip
def test_hostile_and_damaged_pickles_are_one_error(tmp_path, content):
    with pytest.raises(CacheError):
        read(tmp_path, content)


@pytest.mark.parametrize(
    "content",
    [{1: entry()}, {"a": []}, {"a": {}}, {"a": entry((1, "u"))}, {"a": entry(("T", 7))},
     {"a": entry(("T", "u")) | {"tool_returned_web_title_list": []}}],
)  # fmt: skip
def test_another_form_is_named(tmp_path, content):
    with pytest.raises(CacheError, match="two lists"):
        read(tmp_path, content)


def test_pixels_that_lie_are_no_picture(tmp_path):
    lies = [
        [{}, "RGB", (4, 4), None, b"short"],
        [{}, "RGB", (10**9, 10**9), None, b""],
        [{}, "RGB", (200, 200), None, bytes(120_000)],  # over max_pixels
        [{}, "RGB", (-4, 4), None, b""],
        [{}, "odd", (4, 4), None, b""],
        [{}, "P", (1, 1), None, b"\x00"],
        [{}, "RGB", 4, None, b""],
        "no state",
        {},
    ]
    entries = entry(*(("T", Runs(Image.Image, (), lie)) for lie in lies))
    assert [r.picture for r in read(tmp_path, {"a": entries})["a"]] == [""] * len(lies)


def test_the_command_imports_and_a_replay_shows_the_pictures(tmp_path, capsys):
    pictures = imported.pictures_by_id(SAMPLE)
    one, other = list(pictures)[:2]
    cache, file = tmp_path / "cache.pkl", tmp_path / "r.sqlite"
    content = {
        one: entry(("A", opened()), ("B", "https://t.org/gone")),
        other: entry(),
        "fvqa_test_0": entry(("C", "u")),
    }
    cache.write_bytes(pickle.dumps(content, 4))
    arguments = [f"--fvqa_cache={cache}", f"--pictures={SAMPLE}", f"--config={CONFIG}"]
    assert main(["experiments", "record", "import", str(file), *arguments]) == 0
    assert "image_search 2, thumbnail 1, no_picture 1" in capsys.readouterr().out
    config = get_config().search
    config.update(
        {
            "record_mode": "replay",
            "record_file": str(file),
            "image_items": "titles",
            "thumbnails": True,
        }
    )
    tools = live_tools(config, timeout_s=10)
    first, second = tools.image_search(Task(one, "q", pictures[one], ("x",), "s", "c"))
    assert (first.title, second.title) == ("A", "B")
    assert Image.open(io.BytesIO(first.picture)).size[0] <= config.thumbnail_px
    assert second.picture is None and tools.unread == {("thumbnail", "not_recorded"): 1}
    assert tools.image_search(Task(other, "q", pictures[other], ("x",), "s", "c")) == []


def test_a_refused_cache_leaves_no_record(tmp_path, capsys):
    cache, file = tmp_path / "cache.pkl", tmp_path / "r.sqlite"
    cache.write_bytes(pickle.dumps({"a": Runs(os.system, ("true",))}))
    arguments = [f"--fvqa_cache={cache}", f"--pictures={SAMPLE}", f"--config={CONFIG}"]
    assert main(["experiments", "record", "import", str(file), *arguments]) == 2
    assert "which is no picture" in capsys.readouterr().err and not file.exists()


def test_a_cache_that_is_missing_is_named(tmp_path):
    with pytest.raises(CacheError, match="does not exist"):
        list(read_cache(tmp_path / "none", **LIMITS))
