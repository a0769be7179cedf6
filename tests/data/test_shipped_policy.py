"""The policy that ships with the package still fits the code, its labels and transformers.

Whoever changes grammar, prompts, tool text, tokenizer or world makes it again: `make pretrain`.
"""

import json
import pathlib

import pytest

from configs import quickstart
from svrl_jax.data import world
from svrl_jax.training import assemble, task_source
from svrl_jax.training.fingerprint import of_policy_inputs
from svrl_jax.training.labels import SHIPPED_NAME, SearchFree, label_fingerprint
from tests.hf_reference import assert_transformers_agrees

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = quickstart.get_config().lock()
FOLDER = ROOT / CONFIG.model.folder


@pytest.fixture(scope="module")
def bench():
    return assemble.assemble(CONFIG)


def made():
    return json.loads((FOLDER / "made.json").read_text())


def test_it_belongs_to_this_grammar_prompts_tool_text_tokenizer_and_world():
    assert of_policy_inputs(CONFIG, FOLDER) == made()["fingerprint"]


def test_it_says_what_made_it():
    found = made()
    assert "experiments pretrain" in found["command"] and found["commit"]
    assert found["seed"] == CONFIG.pretrain.seed
    assert set(found["pretrain"]["phases"]) == set(CONFIG.pretrain.phases)
    habits = found["pretrain"]["phases"]["p4_habits"]
    assert habits["needless_search"] == CONFIG.pretrain.phases.p4_habits.needless_search > 0


def test_it_is_small():
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) < 8e6


def test_its_labels_are_its_own_and_complete(bench):
    body = json.loads((FOLDER / SHIPPED_NAME).read_text())
    assert body["fingerprint"] == label_fingerprint(bench)
    lines = []
    search_free = SearchFree(bench, None, lines.append)
    assert lines == [] and search_free.store.stale == []
    tasks = [t for split in ("test", "ood") for t in task_source.eval_tasks(CONFIG, split)]
    assert search_free.store.missing(tasks) == []
    share = sum(search_free.of(tasks)) / len(tasks)
    assert 0.1 < share < 0.9  # both kinds are there, or over-search would mean nothing


def test_transformers_gives_the_same_logits(bench):
    task = world.eval_tasks("test", 1, 84, 56)[0]
    assert_transformers_agrees(FOLDER, bench.builder.build(task, "agent"), task)
