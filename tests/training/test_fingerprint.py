"""Each part of the fingerprint moves with its own cause and with nothing else."""

import json
import shutil

import pytest

from svrl_jax.data import facts, pictures, script
from svrl_jax.protocol import parse, render
from svrl_jax.training.fingerprint import of_policy_inputs
from tests.conftest import changed


@pytest.fixture(scope="module")
def first(tiny_config, untrained_folder):
    return of_policy_inputs(tiny_config, untrained_folder)


def moved(before, after):
    assert before.keys() == after.keys()
    return {part for part in before if before[part] != after[part]}


def test_it_can_be_made_again(first, tiny_config, untrained_folder):
    assert of_policy_inputs(tiny_config, untrained_folder) == first
    assert set(first) == {"grammar", "prompts", "tool_text", "tokenizer", "world"}
    assert all(len(digest) == 12 for digest in first.values())


def test_what_the_policy_never_saw_moves_nothing(first, tiny_config, untrained_folder):
    config = changed(
        tiny_config,
        **{"num_steps": 9, "grpo.kl_coef": 0.5, "rollout.temperature": 0.7, "eval.num_items": 1},
    )
    assert of_policy_inputs(config, untrained_folder) == first


def test_prompts(first, tiny_config, untrained_folder, tmp_path):
    (tmp_path / "mine.txt").write_text("Answer.")
    config = changed(tiny_config, **{"prompt.direct_file": str(tmp_path / "mine.txt")})
    assert moved(first, of_policy_inputs(config, untrained_folder)) == {"prompts"}


@pytest.mark.parametrize(
    "key, value",
    [("search.text_top_k", 5), ("search.show_links", True), ("search.image_items", "full")],
)
def test_the_form_of_tool_text(first, tiny_config, untrained_folder, key, value):
    config = changed(tiny_config, **{key: value})
    assert moved(first, of_policy_inputs(config, untrained_folder)) == {"tool_text"}


@pytest.mark.parametrize("file", ["tokenizer.json", "preprocessor_config.json"])
def test_the_tokenizer_and_the_processor(first, tiny_config, untrained_folder, tmp_path, file):
    shutil.copytree(untrained_folder, tmp_path / "other")
    path = tmp_path / "other" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"changed": True}))
    assert moved(first, of_policy_inputs(tiny_config, tmp_path / "other")) == {"tokenizer"}


def test_words_of_the_code(first, tiny_config, untrained_folder, monkeypatch):
    def now():
        return moved(first, of_policy_inputs(tiny_config, untrained_folder))

    with monkeypatch.context() as patch:
        patch.setattr(render, "NOTHING", "Nothing.")
        assert now() == {"tool_text"}
    with monkeypatch.context() as patch:
        patch.setitem(facts.QUESTIONS, "top", ("What is on top?",))
        assert now() == {"world"}
    with monkeypatch.context() as patch:
        patch.setitem(script.TEMPLATES, "region", ("region of {}",))
        assert now() == {"world"}
    with monkeypatch.context() as patch:
        drawn = pictures.clean_picture
        patch.setattr(pictures, "clean_picture", lambda *a, **k: 255 - drawn(*a, **k))
        assert "world" in now()
    with monkeypatch.context() as patch:
        read = parse.parse_turn
        patch.setattr(
            parse, "parse_turn", lambda text, **k: read(text.replace("reason", "think"), **k)
        )
        assert now() == {"grammar"}
    assert now() == set()
