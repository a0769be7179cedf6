"""search_free labels during a run: shipped, the run's own, or made by the initial policy."""

import dataclasses
import json

import pytest

from svrl_jax.rewards.answers import score_answer
from svrl_jax.training import labels
from tests.conftest import changed


@pytest.fixture
def tasks(tiny_config):
    from svrl_jax.training.task_source import eval_tasks

    return eval_tasks(changed(tiny_config, **{"eval.num_items": 3}), "ood")


def test_missing_labels_are_made_once_and_kept(bench, tasks, tmp_path):
    said = []
    own = tmp_path / "search_free.json"
    first = labels.SearchFree(bench, own, said.append)
    found = first.of(tasks[:2])
    assert said == ["labelling 2 tasks with the initial policy (no tools)"]
    assert first.ensure(tasks) == 1  # the third alone
    again = labels.SearchFree(bench, own, said.append)
    assert again.ensure(tasks) == 0 and again.of(tasks[:2]) == found


def test_a_label_is_the_initial_policys_greedy_answer_without_tools(bench, tasks):
    free = labels.SearchFree(bench, None, lambda _: None).of(tasks)
    bench.sampler.set_params(bench.initial_params)
    groups = bench.run(
        tasks, bench.sampler, step=labels.LABEL_STEP, group_size=1, regime="direct",
        temperature=0.0,
    )  # fmt: skip
    rights = [score_answer(g[0].answer, t.golds, "em") >= 1 for g, t in zip(groups, tasks)]
    assert free == rights


def test_a_rate_is_kept_where_samples_are_asked_for(bench, tasks):
    config = changed(bench.config, **{"reward.search_free_samples": 2})
    store = labels.SearchFree(dataclasses.replace(bench, config=config), None, lambda _: None)
    store.of(tasks[:1])
    label = store.store.get(tasks[0])
    assert label.samples == 2 and label.rate in (0.0, 0.5, 1.0)


def test_labels_of_another_scorer_are_said_to_be_stale(bench, tasks, tmp_path):
    own, said = tmp_path / "search_free.json", []
    labels.SearchFree(bench, own, said.append).of(tasks[:1])
    config = changed(bench.config, **{"reward.scorer": "sub_em"})
    other = labels.SearchFree(dataclasses.replace(bench, config=config), own, said.append)
    assert str(own) in said[-1] and "not used" in said[-1]
    assert other.store.missing(tasks[:1]) == tasks[:1]


def test_the_fingerprint_is_of_weights_direct_prompt_and_scorer(bench, tmp_path):
    found = labels.label_fingerprint(bench)
    assert set(found) == {"policy", "prompt", "scorer"}
    builder = bench.builder
    texts = builder.texts | {"agent": "other"}
    try:
        before, builder.texts = builder.texts, texts
        assert labels.label_fingerprint(bench) == found  # the agent's prompt has no part in it
    finally:
        builder.texts = before
    for path in bench.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    other = labels.label_fingerprint(dataclasses.replace(bench, folder=tmp_path))
    assert {k for k in found if found[k] != other[k]} == {"policy"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
