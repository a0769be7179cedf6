"""Where a run's tasks come from, and runs of tasks without a picture."""

import dataclasses

import numpy as np
import pytest

from svrl_jax.config import ConfigError
from svrl_jax.data import prepare
from svrl_jax.data.prepared import PreparedError
from svrl_jax.protocol.prompts import PromptBuilder
from svrl_jax.training import task_source
from tests.conftest import changed
from tests.data.published_files import PUBLISHED


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared")
    sample, mini = PUBLISHED / "fvqa_sample.parquet", PUBLISHED / "fvqa_mini.parquet"
    prepare.prepare("fvqa", str(sample), out, split="train", say=str)
    prepare.prepare("infoseek", str(mini), out, say=str)
    return out


@pytest.fixture
def config(tiny_config, prepared):
    return changed(tiny_config, **{"data.source": str(prepared / "fvqa"), "eval.num_items": 0})


def limited(builder, max_tokens):
    parts = builder.tokenizer, builder.processor, builder.config, builder.texts
    return PromptBuilder(*parts, max_tokens=max_tokens)


def test_splits_of_the_source_and_of_sets_beside_it(config):
    assert task_source.eval_splits(config) == ()  # the sample has but training rows
    config = changed(config, **{"eval.splits": ("infoseek/test", "train")})
    assert task_source.eval_splits(config) == ("infoseek/test", "train")
    tasks = task_source.eval_tasks(config, "infoseek/test")
    assert [t.source for t in tasks] == ["infoseek/test"] * 5
    chunks = list(task_source.eval_chunks(config, "infoseek/test"))
    assert [len(chunk) for chunk in chunks] == [4, 1] and sum(chunks, []) == tasks
    for split in ("test", "nowhere/test"):
        with pytest.raises(PreparedError):
            task_source.eval_splits(changed(config, **{"eval.splits": (split,)}))


def test_the_worlds_splits_are_as_before(tiny_config):
    assert task_source.eval_splits(tiny_config) == ("test", "ood")
    assert task_source.eval_splits(changed(tiny_config, **{"eval.splits": ("ood",)})) == ("ood",)


def test_the_stream_says_what_it_shrinks_and_leaves_out(config, builder):
    said = []
    stream = task_source.train_stream(config, builder, 3, said.append)
    tasks, prompts = next(stream)
    assert stream.position == 5 and [t.id for t in tasks] == [p.task_id for p in prompts]
    assert "8 rows" in said[0] and len(said) == 1
    stream.close()
    tasks = task_source.eval_tasks(config, "train")
    limit = max(len(builder.build(t, "agent").ids) for t in tasks) - 8
    task_source.train_stream(config, limited(builder, limit), 0, said.append).close()
    assert "left out" in said[-1] and f"at most {limit} tokens" in said[-1]
    with pytest.raises(ConfigError, match="max_prompt_tokens"):
        task_source.train_stream(config, limited(builder, 3))


def test_a_prompt_leaves_room_for_one_turn(tiny_config):
    assert task_source.max_prompt_tokens(tiny_config) == 224 - 48
    longer = changed(tiny_config, **{"rollout.budget": 8124})
    assert task_source.max_prompt_tokens(longer) == 4096


@pytest.mark.case("A-D3")
def test_tasks_without_a_picture_run_beside_others_as_they_do_alone(bench, tiny_config):
    with_picture = task_source.eval_tasks(tiny_config, "test")[0]
    text = dataclasses.replace(with_picture, id="text", picture=b"", question="Which is it?")
    bench.sampler.set_params(bench.initial_params)

    def run(*tasks):
        groups = bench.run(tasks, bench.sampler, step=0, group_size=1, temperature=0.0)
        return [g[0] for g in groups]

    mixed = run(text, with_picture)
    alone = [*run(text), *run(with_picture)]
    for one, other in zip(mixed, alone, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.sampler_logps, other.sampler_logps, atol=1e-4)
    assert mixed[0].pixel_values.shape[0] == 0 and mixed[1].pixel_values.shape[0] > 0
