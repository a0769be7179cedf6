"""Foreign traces as episodes of ours: readable, writable, never trainable."""

import dataclasses

import numpy as np
import pytest

from svrl_jax.data.traces import read_traces
from svrl_jax.records import Record, read_records, write_records
from svrl_jax.rewards import factors
from svrl_jax.rewards.oracle import RuleOracle
from svrl_jax.rollout.imported import episode_of_trace
from tests.data.published_files import PUBLISHED, picture


@pytest.fixture(scope="module")
def imported(builder, tiny_config):
    """task id -> (trace, episode); each task is given a picture."""
    out = {}
    for trace in read_traces(PUBLISHED / "fvqa_sample_traces.jsonl"):
        task = dataclasses.replace(trace.task, picture=picture(84, 56))
        trace = dataclasses.replace(trace, task=task)
        episode = episode_of_trace(
            trace, builder.build(task, "agent"), builder.tokenizer, builder.config,
            tiny_config.rollout, tiny_config.search, policy_name="MMSearch-R1-7B",
        )  # fmt: skip
        out[task.id] = trace, episode
    return out


def test_turns_are_the_policys_tokens(imported, builder):
    for trace, episode in imported.values():
        assert [t.text for t in episode.turns] == [text for text, _ in trace.turns]
        mask = np.zeros(len(episode.ids), int)
        for turn in episode.turns:
            assert builder.tokenizer.decode(episode.ids[turn.start : turn.stop]) == turn.text
            mask[turn.start : turn.stop] = 1
        np.testing.assert_array_equal(episode.loss_mask, mask)
        assert not episode.sampler_logps.any() and len(episode.image_grid_thw) == 1
        assert episode.positions.shape == (3, len(episode.ids))


def test_ends_calls_and_violations_are_by_our_rules(imported):
    ends = {task_id: e.end_reason for task_id, (_, e) in imported.items()}
    assert {i for i, end in ends.items() if end == "budget"} == {
        "fvqa_train_4724", "fvqa_train_4207",
    }  # fmt: skip
    trace, episode = imported["fvqa_train_4216"]
    assert episode.end_reason == "answered" and episode.answer == trace.answer == "No"
    assert [c.tool for c in episode.calls] == ["image_search", "text_search"]
    assert "mask_missing" in episode.violations and "query_count" in episode.violations
    assert factors.r_acc(episode, trace.task.golds, "em") == 1.0
    broken = imported["fvqa_train_4724"][1]
    assert broken.tool_failures == 1 and broken.answer is None


def test_the_sources_verdict_is_against_the_truth_alone(imported):
    trace, episode = imported["fvqa_train_3112"]  # 2003 9 26, given as September 26, 2003
    assert trace.exact_match is False
    assert factors.r_acc(episode, trace.task.golds, "em_published") == 1.0


def test_an_oracle_may_label_them_and_records_keep_them(imported, tmp_path):
    records = [Record(episode, trace.task) for trace, episode in imported.values()]
    path = write_records(tmp_path, "imported", records)
    back = read_records(path)
    assert [r.episode.turns for r in back] == [r.episode.turns for r in records]
    trace, episode = imported["fvqa_train_1007"]
    labels = RuleOracle(3).label(trace.task, episode)
    assert len(labels.items) == 1 and len(labels.items[0]) == 5 and any(labels.items[0])
