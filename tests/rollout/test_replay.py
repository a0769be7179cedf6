"""Real questions of FVQA replayed through the whole episode code with their real search results.

A random tiny Qwen2.5-VL is forced to write what MMSearch-R1-7B wrote: prompts, pictures, turns and
results all pass through its cache. The tokenizer is Qwen's own; the searches come from a record
made of the traces, and nothing may reach the network.
"""

import collections
import dataclasses
import re
import socket

import numpy as np
import pytest
from flax import nnx

from configs.base import get_config
from svrl_jax.data.traces import read_traces
from svrl_jax.models.qwen_vl import QwenVL
from svrl_jax.models.qwen_vl.config import QwenVLConfig, TextConfig, VisionConfig
from svrl_jax.processing.images import ImageProcessor
from svrl_jax.processing.tokenizer import Tokenizer
from svrl_jax.protocol.prompts import PromptBuilder, read_prompts
from svrl_jax.rollout.engine import Append, Engine
from svrl_jax.rollout.episodes import run_episodes
from svrl_jax.rollout.policy import SampledTurn
from svrl_jax.search import imported
from svrl_jax.search.build import live_tools, record_settings
from svrl_jax.search.record import SearchRecord
from tests.data.published_files import PUBLISHED

SAMPLE, TRACES = PUBLISHED / "fvqa_sample_30.parquet", PUBLISHED / "fvqa_traces_30.jsonl"
UNANSWERED = "<reason>x</reason><answer>none</answer>"  # behind traces that end on a search
NO_PIXELS = np.zeros((0, 0), np.float32), np.zeros((0, 3), np.int32)


class ForcedPolicy:
    """A model that writes given turns: their ids go through its cache as sampled ones would.

    Args:
      model: any.
      script: view of an episode -> text of the turn.
    """

    def __init__(self, model, script, tokenizer, rollout):
        banned = np.zeros(model.config.text_config.vocab_size, bool)
        self.engine = Engine(
            model, banned=banned, slots=rollout.slots, lanes=rollout.lanes,
            capacity=rollout.budget, decode_chunk=1, cache_dtype=rollout.cache_dtype,
        )  # fmt: skip
        self._script, self._tokenizer = script, tokenizer
        self._queue, self.num_appended, self.counts = [], 0, collections.Counter()

    def submit(self, request):
        self._queue.append(request)

    def discard(self):
        self._queue = []

    def collect(self):
        queue, self._queue = self._queue, []
        return [self._force(request) for request in queue]

    def _force(self, one):
        if one.is_new:
            self.engine.clear(one.slot)
        self._append(one.slot, one.ids, one.positions, one.pixel_values, one.image_grid_thw)
        ids = self._tokenizer.encode_plain(self._script(one.view)).tolist()
        count, ended = one.keep(ids, 0)
        positions = np.tile(one.next_position + np.arange(count, dtype=np.int32), (3, 1))
        self._append(one.slot, np.asarray(ids[:count], np.int32), positions, *NO_PIXELS)
        return SampledTurn(
            slot=one.slot,
            ids=np.asarray(ids[:count], np.int32),
            logps=np.zeros(count, np.float32),
            ended=ended,
        )

    def _append(self, slot, ids, positions, pixel_values, grids):
        self.engine.append([Append(slot, ids, positions, pixel_values, grids)])
        self.num_appended += len(ids)


class Unquoted:
    """The tools, asked without the quotes that protect a query's commas in the protocol."""

    def __init__(self, tools):
        self._tools = tools
        self.image_search = tools.image_search

    def text_search(self, query, task):
        return self._tools.text_search(query.strip('"'), task)


def quoted(text):
    """A recorded turn whose query our grammar executes whole, whatever commas it has."""
    return re.sub(
        r"<text_search>(.*?)</text_search>",
        lambda m: '<text_search>"' + m[1].replace('"', "") + '"</text_search>',
        text,
        flags=re.DOTALL,
    )


@pytest.fixture(scope="module")
def setting(tmp_path_factory, qwen_folders):
    """(config, tools, tasks, scripts, traces, builder)."""
    config = get_config()
    path = tmp_path_factory.mktemp("record") / "r.sqlite"
    config.search.update({"record_mode": "replay", "record_file": str(path)})
    config.search.update({"image_items": "titles", "unread_pages": "drop"})
    pictures = imported.pictures_by_id(SAMPLE)
    traces = {t.task.id: t for t in read_traces(TRACES) if t.task.id in pictures}
    record = SearchRecord(path, "record")
    keys = imported.picture_keys_by_id(SAMPLE)
    imported.import_traces(record, traces.values(), keys, record_settings(config.search))
    tasks = [dataclasses.replace(t.task, picture=pictures[i]) for i, t in traces.items()]
    scripts = {i: [quoted(text) for text, _ in t.turns] for i, t in traces.items()}
    folder = qwen_folders["qwen2_5_vl"]
    tokenizer = Tokenizer.from_folder(folder)
    model_config = QwenVLConfig(
        text_config=TextConfig(vocab_size=151_936, hidden_size=32, intermediate_size=32,
                               num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                               mrope_section=(2, 3, 3)),
        vision_config=VisionConfig(hidden_size=16, out_hidden_size=32, depth=1, num_heads=2,
                                   intermediate_size=16, patch_size=14),
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.token_id("<|video_pad|>"),
        vision_start_token_id=tokenizer.vision_start_id,
        vision_end_token_id=tokenizer.vision_end_id,
    )  # fmt: skip
    builder = PromptBuilder(
        tokenizer, ImageProcessor.from_folder(folder), model_config, read_prompts(config.prompt),
        max_picture_pixels=config.data.max_picture_pixels,
    )  # fmt: skip
    tools = Unquoted(live_tools(config.search, timeout_s=30))
    config.rollout.update({"slots": 4, "lanes": 4})
    policy = ForcedPolicy(
        QwenVL(model_config, rngs=nnx.Rngs(0)),
        lambda view: [*scripts[view.task.id], UNANSWERED][len(view.turns)],
        tokenizer,
        config.rollout,
    )
    return config, tools, tasks, policy, traces, builder


def play(setting):
    config, tools, tasks, policy, _, builder = setting
    groups = run_episodes(
        tasks, builder.build_all(tasks, "agent"), policy, tools, builder.tokenizer,
        builder.config, config.rollout, config.search, seed=0, step=0, group_size=1,
        regime="agent", temperature=1.0, query_choice="first", policy_name="MMSearch-R1-7B",
    )  # fmt: skip
    return {g[0].task_id: g[0] for g in groups}


@pytest.fixture(scope="module")
def played(setting):
    def refuse(*_, **__):
        raise AssertionError("a replay reached for the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket, "create_connection", refuse)
        return play(setting)


def test_every_token_went_through_the_model_once(setting, played):
    # The last turn of an episode has nothing behind it; its turn end is never read.
    tails = sum(len(e.ids) - e.turns[-1].stop for e in played.values())
    assert setting[3].num_appended == sum(len(e.ids) for e in played.values()) - tails


def test_every_search_gives_what_it_gave(setting, played):
    _, _, _, _, traces, _ = setting
    num_calls = 0
    for task_id, episode in played.items():
        searched = [c for _, c in traces[task_id].turns if c is not None]
        assert [c.tool for c in episode.calls] == [c.call.tool for c in searched]
        for call, one in zip(episode.calls, searched, strict=True):
            assert call.query.strip('"') == one.call.query.replace('"', "")
            expected = [
                (i.title, i.text) for i in one.found if i.text or call.tool == "image_search"
            ]
            assert [(i.title, i.text) for i in call.items] == expected
            assert call.status == "ok" and call.failure == ""
            num_calls += 1
    assert len(played) == 30 and num_calls == 47


def test_prompts_grids_and_tool_texts_are_as_specified(setting, played):
    config, _, _, _, traces, builder = setting
    pad = builder.config.image_token_id
    for task_id, episode in played.items():
        ((t, h, w),) = episode.image_grid_thw
        assert t == 1 and h * w * 14 * 14 <= config.data.max_picture_pixels
        assert (episode.ids == pad).sum() == h * w // 4
        text = builder.tokenizer.decode(episode.ids)
        assert traces[task_id].task.question in text and len(episode.ids) <= config.rollout.budget
        body = builder.tokenizer.decode(episode.ids[episode.prompt_length :])
        assert body.count("<information>") == len(episode.calls)
        shown = builder.tokenizer.decode(episode.ids[episode.loss_mask == 0])
        for call in episode.calls:
            for number, item in enumerate(call.items, 1):
                assert f"#{number} {' '.join(item.title.split())}" in shown


def test_answers_are_the_recorded_ones(setting, played):
    for task_id, episode in played.items():
        trace = setting[4][task_id]
        if trace.answer is not None:
            assert (episode.end_reason, episode.answer) == ("answered", trace.answer)


def test_a_second_replay_is_the_same(setting, played):
    for task_id, again in play(setting).items():
        np.testing.assert_array_equal(again.ids, played[task_id].ids)
        strip = [dataclasses.replace(c, seconds=0.0) for c in again.calls]
        assert strip == [dataclasses.replace(c, seconds=0.0) for c in played[task_id].calls]
