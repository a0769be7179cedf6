"""The oracles that a config names: an endpoint on loopback, and the frozen initial policy."""

import copy
import json
import pathlib

import jax
import numpy as np
import pytest
from werkzeug.wrappers import Response

import svrl_jax
from configs import quickstart
from svrl_jax.protocol.prompts import read_prompt
from svrl_jax.rewards import audit, model_oracle
from svrl_jax.rewards.oracle import RuleOracle
from svrl_jax.rollout.writer import Writer
from svrl_jax.search.errors import SearchStopped, ToolError
from svrl_jax.training import assemble, oracles
from svrl_jax.types import SearchItem, ToolCall
from tests.conftest import changed

KEY = "sk-test-ORACLE-0123456789"
KIND = audit.KINDS[0]
ITEMS = tuple(SearchItem(name, name, text=f"about {name}") for name in "abc")


@pytest.fixture
def reply(httpserver, monkeypatch):
    """Sets what the endpoint answers; gives its address."""
    monkeypatch.setenv(model_oracle.KEY, KEY)

    def serve(status, body):
        httpserver.clear()
        httpserver.expect_request("/v1/chat/completions", method="POST").respond_with_handler(
            lambda request: Response(json.dumps(body), status, content_type="application/json")
        )
        return httpserver.url_for("/v1")

    return serve


def wrote(text):
    return {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}


@pytest.fixture(scope="module")
def episode():
    turns = [
        ("<reason>r</reason><search><img></search>", ToolCall("image_search", "", ITEMS)),
        ("<reason>r</reason><verify>1,0,0</verify><answer>x</answer>", None),
    ]
    return audit.scripted_episode(KIND.task, turns, num_queries=5)


def endpoint(tiny_config, url, **changes):
    keys = {"oracle": "model", "oracle_chat.endpoint": url, "oracle_chat.max_retries": 0} | changes
    return changed(tiny_config, **{f"reward.{k}": v for k, v in keys.items()}).reward


def test_an_endpoint_labels_and_is_asked_once(reply, httpserver, tiny_config, episode, tmp_path):
    reward = endpoint(tiny_config, reply(200, wrote("<think>hm</think>items: 1,0,1")))
    for _ in range(2):  # the second time from the record
        oracle = oracles.endpoint_oracle(reward, tmp_path)
        assert oracle.label(KIND.task, episode).items == ((1, 0, 1),)
    ((request, _),) = httpserver.log
    assert request.headers["Authorization"] == f"Bearer {KEY}"
    assert request.json["messages"][0]["content"] == model_oracle.INSTRUCTIONS
    assert (
        oracle.name == oracles.describe_oracle(reward) and reward.oracle_chat.model in oracle.name
    )
    written = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert b"items: 1,0,1" in written and KEY.encode() not in written


def test_an_endpoint_that_fails_leaves_the_episode_unanswered(
    reply, tiny_config, episode, tmp_path
):
    oracle = oracles.endpoint_oracle(endpoint(tiny_config, reply(503, {})), tmp_path)
    assert not oracle.label(KIND.task, episode).answered
    assert oracle.unanswered == {"unreachable": 1}


def test_a_dead_key_stops_and_is_not_said(reply, tiny_config, episode, tmp_path):
    url = reply(401, {"error": {"message": f"wrong key {KEY}"}})
    oracle = oracles.endpoint_oracle(endpoint(tiny_config, url), tmp_path)
    with pytest.raises(SearchStopped, match="the key is not accepted") as caught:
        oracle.label(KIND.task, episode)
    assert KEY not in str(caught.value)


@pytest.fixture(scope="module")
def quickstart_bench():
    return assemble.assemble(changed(quickstart.get_config(), **{"reward.oracle": "policy"}))


class EndsAtAnswer:
    """A tokenizer under which a reply ends where an answer begins (this policy ends none)."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.eos_ids = (int(tokenizer.encode_plain("<answer>")[-1]),)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def test_the_writer_writes_what_generate_does(quickstart_bench):
    one = quickstart_bench
    system = read_prompt(one.config.prompt.direct_file)
    questions = ["What is this?", "Which capital does Chad have?", "What colour is at the top?"]
    builder = copy.copy(one.builder)
    builder.tokenizer = EndsAtAnswer(one.tokenizer)
    writer = Writer(one.sampler, builder, slots=2, capacity=448, max_new_tokens=80)
    one.sampler.set_params(one.initial_params)
    found = writer([(system, q) for q in questions])
    model, processor = svrl_jax.load(str(pathlib.Path(one.folder)))
    for question, text in zip(questions, found, strict=True):
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": [{"type": "text", "text": question}]},
        ]
        expected = svrl_jax.generate(model, processor, messages, [], max_new_tokens=80)
        assert len(text) > len("<reason>") and expected.startswith(f"{text}>")


def test_a_writer_without_room_or_end_says_so(quickstart_bench):
    one = quickstart_bench
    tight = Writer(one.sampler, one.builder, slots=2, capacity=40, max_new_tokens=8)
    short = Writer(one.sampler, one.builder, slots=2, capacity=448, max_new_tokens=2)
    for writer, message in ((tight, "no room"), (short, "no end")):
        (error,) = writer([("s" * 40, "What is this?")])
        assert isinstance(error, ToolError) and message in str(error)


def test_the_initial_policy_labels_and_the_sampler_is_given_back(quickstart_bench, episode):
    one = quickstart_bench
    other = jax.tree.map(lambda x: x * 0.5, one.initial_params)
    one.sampler.set_params(other)
    oracle = oracles.make_oracle(one, None)
    labels = oracle.label(KIND.task, episode)
    # A policy of this size knows no other form than its own: no verdict, and nothing made up.
    assert not labels.answered and sum(oracle.unanswered.values()) == 1
    for a, b in zip(
        jax.tree.leaves(one.sampler.engine.params), jax.tree.leaves(other), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_the_rule_is_the_default(bench):
    assert isinstance(oracles.make_oracle(bench, None), RuleOracle)
