"""A served policy on loopback through the same episode code: messages, pictures, faults."""

import base64
import io
import json

import pytest
from PIL import Image
from rollout_toys import (
    ANSWER,
    CONFIG,
    IMAGE_SEARCH,
    REASON,
    TEXT_SEARCH,
    TOKENIZER,
    VERIFY,
    make_prompt,
    make_task,
    rollout_config,
    search_config,
)
from test_information import PROCESSOR, PictureTools, png
from werkzeug import Response

from configs.base import get_config
from svrl_jax.rollout.episodes import run_episodes
from svrl_jax.rollout.remote import KEY, PolicyStopped, RemotePolicy
from svrl_jax.types import Task

TEXTS = {"agent": "the rules", "direct": "answer only"}
SECRET = "sk-very-secret"


def reply(text, **choice):
    message = {"role": "assistant", "content": text, **choice.pop("message", {})}
    body = {
        "choices": [{"message": message, "finish_reason": "stop"} | choice],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }
    return Response(json.dumps(body), content_type="application/json")


class Server:
    """Gives replies in the order of an episode's turns; keeps what it was asked."""

    def __init__(self, httpserver, *replies):
        self.replies, self.asked, self.failures = replies, [], []
        httpserver.expect_request("/v1/chat/completions").respond_with_handler(self.answer)
        self.url = httpserver.url_for("/v1")

    def answer(self, request):
        if self.failures:
            return self.failures.pop(0)
        body = request.get_json()
        self.asked.append((dict(request.headers), body))
        turn = sum(m["role"] == "assistant" for m in body["messages"])
        answer = self.replies[turn]
        return answer if isinstance(answer, Response) else reply(answer)


def make_policy(server, *, rollout=None, **changes):
    config = get_config()
    config.remote.update({"endpoint": server.url, "model": "m", "timeout_s": 5.0} | changes)
    config.remote.max_wait_s = 0.05
    config.rollout.update(rollout or {})
    return RemotePolicy(config, TEXTS, TOKENIZER)


def play(policy, *, group_size=1, picture=b"", tools=None, **changes):
    task = Task(
        id="task-0", question="Whose flag?", picture=picture, golds=("yes",), source="toy",
        category="c",
    )  # fmt: skip
    config = rollout_config(**{"budget": 900, "max_turn_tokens": 200} | changes)
    (group,) = run_episodes(
        [task], [make_prompt(make_task(0))], policy, tools or PictureTools(png(8, 8), None),
        TOKENIZER, CONFIG, config, search_config(), seed=0, step=0, group_size=group_size,
        regime="agent", temperature=0.7, query_choice="first", policy_name="served",
        processor=PROCESSOR,
    )  # fmt: skip
    return group


def test_an_episode_is_played_with_pictures_both_ways(httpserver, monkeypatch):
    monkeypatch.setenv(KEY, SECRET)
    first = REASON + VERIFY + IMAGE_SEARCH
    second = REASON + "<verify>1,0</verify>" + ANSWER
    server = Server(httpserver, first, second)
    policy = make_policy(server)
    group = play(policy, group_size=3, picture=png(30, 20))
    for episode in group:
        assert (episode.end_reason, episode.answer) == ("answered", "yes")
        assert [t.text for t in episode.turns] == [first, second] and episode.violations == ()
        assert not episode.sampler_logps.any() and len(episode.image_grid_thw) == 2
    asked = [body for _, body in server.asked if len(body["messages"]) == 4]
    system, user, assistant, information = asked[0]["messages"]
    assert system == {"role": "system", "content": "the rules"}
    assert user["content"][1] == {"type": "text", "text": "Whose flag?"}
    address = user["content"][0]["image_url"]["url"]
    sent = Image.open(io.BytesIO(base64.b64decode(address.partition("base64,")[2])))
    assert sent.size == (30, 20)
    assert assistant == {"role": "assistant", "content": first}
    kinds = [part["type"] for part in information["content"]]
    assert kinds == ["text", "image_url", "text"]
    assert information["content"][0]["text"] == "<information>"
    assert information["content"][2]["text"] == "#1 t0: w\n#2 t1: w\n</information>"
    assert asked[0]["temperature"] == 0.7 and asked[0]["max_tokens"] == 200
    assert len({body["seed"] for body in asked}) == 3  # each sample draws its own
    assert all(h["Authorization"] == f"Bearer {SECRET}" for h, _ in server.asked)
    assert policy.counts["calls"] == 6 and policy.counts["completion_tokens"] == 18


def test_text_behind_the_first_action_is_cut_and_recorded(httpserver):
    server = Server(httpserver, REASON + VERIFY + ANSWER + " and more <answer>no</answer>")
    (episode,) = play(make_policy(server))
    assert episode.answer == "yes" and "text_after_action" in episode.violations
    assert "and more" not in TOKENIZER.decode(episode.ids)


def test_passing_faults_are_retried(httpserver):
    server = Server(httpserver, REASON + VERIFY + ANSWER)
    server.failures = [
        Response("{}", 429, headers={"Retry-After": "0"}), Response("busy", 503),
    ]  # fmt: skip
    (episode,) = play(make_policy(server))
    assert episode.answer == "yes"


@pytest.mark.parametrize(
    "refusal",
    [
        reply(None, message={"refusal": "I cannot help with that."}),
        reply("", finish_reason="content_filter"),
        Response(
            json.dumps({"error": {"code": "content_filter", "message": "filtered"}}), 400,
            content_type="application/json",
        ),
    ],
)  # fmt: skip
def test_a_refusal_is_a_turn_without_an_action(httpserver, refusal):
    policy = make_policy(Server(httpserver, refusal))
    (episode,) = play(policy)
    assert episode.end_reason == "malformed" and policy.counts["refusals"] == 1


def test_a_text_that_the_server_cut_ends_by_length(httpserver):
    policy = make_policy(Server(httpserver, reply("<reason>so", finish_reason="length")))
    (episode,) = play(policy)
    assert episode.end_reason == "budget" and policy.counts["cut"] == 1


@pytest.mark.parametrize(
    "fault, message",
    [
        (Response(json.dumps({"error": {"message": f"bad key {SECRET}"}}), 401), "auth"),
        (Response("down", 500), "unreachable"),
        (Response("<html>", 200), "bad_response"),
        (Response("{}", 200, content_type="application/json"), "bad_response"),
        (Response(json.dumps({"error": {"code": "insufficient_quota"}}), 429), "quota"),
        (Response(json.dumps({"error": {"message": "context too long"}}), 400), "bad_response"),
    ],
)
def test_a_server_that_does_not_answer_ends_the_run(httpserver, monkeypatch, fault, message):
    monkeypatch.setenv(KEY, SECRET)
    server = Server(httpserver, fault)
    policy = make_policy(server, max_retries=1)
    with pytest.raises(PolicyStopped, match=message) as error:
        play(policy, group_size=2)
    assert SECRET not in str(error.value)
    server.replies = (REASON + VERIFY + ANSWER,)
    (episode,) = play(policy)  # nothing is left over of the failed run
    assert episode.answer == "yes"


def test_what_such_a_server_cannot_do_is_refused(httpserver):
    server = Server(httpserver)
    with pytest.raises(PolicyStopped, match=r"remote\.model"):
        make_policy(server, model="")
    with pytest.raises(PolicyStopped, match="top_k"):
        make_policy(server, rollout={"top_k": 5})


def test_text_searches_go_the_same_way(httpserver):
    second = REASON + "<verify>1,1</verify>" + ANSWER
    server = Server(httpserver, REASON + VERIFY + TEXT_SEARCH, second)
    (episode,) = play(make_policy(server))
    assert episode.calls[0].query == "alpha 1" and episode.answer == "yes"
    assert episode.loss_mask.sum() == sum(t.stop - t.start for t in episode.turns)
