"""eval against an OpenAI-compatible server on loopback, in every regime, with its faults."""

import json
import re

import pytest
from werkzeug import Response

from svrl_jax.evals import evaluate
from svrl_jax.evals.cases import read_run
from svrl_jax.evals.store import Chunk
from tests.experiments.conftest import CONFIG

R, V = "<reason>I look.</reason>", "<verify> </verify>"


def reply(text, reason="stop", **message):
    body = {
        "choices": [{"message": {"role": "assistant", "content": text} | message,
                     "finish_reason": reason}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10},
    }  # fmt: skip
    return Response(json.dumps(body), content_type="application/json")


def text_of(message):
    content = message["content"]
    return content if isinstance(content, str) else "".join(p.get("text", "") for p in content)


def agent(body):
    """Searches text once, marks what came back, answers; where it is made to search, it does."""
    messages = body["messages"]
    last = text_of(messages[-1])
    if "<text_search>" in last and messages[-1]["role"] == "assistant":
        return reply("alpha 1, beta 2</text_search>")
    if "There is no search" in text_of(messages[0]) or "Answer at once" in text_of(messages[0]):
        return reply(f"{R}<answer>France</answer>")
    found = [m for m in messages if "<information>" in text_of(m)]
    if not found:
        return reply(f"{R}{V}<text_search>a b, c d, e f, g h, i j</text_search>")
    mask = ",".join("1" * len(re.findall(r"#\d", text_of(found[-1])))) or " "
    return reply(f"{R}<verify>{mask}</verify><answer>France</answer>")


@pytest.fixture
def server(httpserver):
    """(address, list of request bodies, dict whose `answer` says how it answers)."""
    bodies, how = [], {"answer": agent}

    def answer(request):
        bodies.append(request.get_json())
        return how["answer"](bodies[-1])

    httpserver.expect_request("/v1/chat/completions").respond_with_handler(answer)
    return httpserver.url_for("/v1"), bodies, how


@pytest.fixture
def run_eval(cli, untrained_folder, tmp_path, server):
    def run(*more, folder=tmp_path / "run"):
        return cli(
            "eval", CONFIG, f"--config.model.folder={untrained_folder}", f"--workdir={folder}",
            f"--policy={server[0]}", "--config.remote.model=toy-1", "--config.eval.num_items=3",
            "--config.eval.splits=('test',)", "--config.eval.modes=('greedy',)",
            "--config.remote.max_retries=0", "--config.rollout.budget=4000",
            "--config.rollout.max_turn_tokens=400", "--config.eval.filter=words", *more,
        )  # fmt: skip

    return run


def test_every_regime_works_through_a_server(run_eval, server, tmp_path, monkeypatch):
    monkeypatch.setenv("POLICY_API_KEY", "secret-key")
    code, out, err = run_eval(
        "--regime=direct,rag,agent,agent_verifier", "--config.search.kind=local"
    )
    assert code == 0, err
    groups = {g.about["regime"]: g for g in read_run(tmp_path / "run")}
    assert set(groups) == set(evaluate.REGIMES)
    for group in groups.values():
        assert len(group.cases) == 3 and group.about["policy"] == "toy-1"
        assert all(c.episode.end_reason == "answered" for c in group.cases), group.name
        assert all(c.episode.answer == "France" for c in group.cases)
        assert not any(c.episode.sampler_logps.any() for c in group.cases)
    tools = {r: [c.tool for c in groups[r].cases[0].episode.calls] for r in groups}
    assert tools == {
        "direct": [], "rag": ["image_search", "text_search"],
        "agent": ["text_search"], "agent_verifier": ["text_search"],
    }  # fmt: skip
    picture = server[1][0]["messages"][1]["content"][0]["image_url"]["url"]
    assert picture.startswith("data:image/")
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"secret-key" not in path.read_bytes(), path


def test_labels_that_nobody_can_make_are_unknown(run_eval, tmp_path):
    assert run_eval()[0] == 0
    (group,) = read_run(tmp_path / "run")
    assert {c.search_free for c in group.cases} == {None}


@pytest.mark.parametrize(
    "answer",
    [
        lambda body: Response("{}", status=503),
        lambda body: Response("<html>", content_type="text/html"),
        lambda body: Response('{"choices": []}', content_type="application/json"),
        lambda body: Response('{"error": {"message": "no"}}', status=401),
    ],
    ids=["server error", "no JSON", "no choices", "dead key"],
)
def test_a_server_that_does_not_answer_is_no_wrong_answer(run_eval, server, tmp_path, answer):
    """The run ends with the cause; what was finished is kept, and the next start does the rest."""
    good, count = server[2]["answer"], [0]

    def fails_later(body):
        count[0] += 1
        return good(body) if count[0] <= 3 else answer(body)

    server[2]["answer"] = fails_later
    code, _, err = run_eval("--config.rollout.slots=1", "--config.rollout.lanes=1")
    assert code == 2 and err.count("\n") == 1 and "start" in err
    server[2]["answer"] = good
    added = []
    add = Chunk.add
    try:
        Chunk.add = lambda chunk, episode: (added.append(episode.task_id), add(chunk, episode))
        code, out, err = run_eval("--config.rollout.slots=1", "--config.rollout.lanes=1")
    finally:
        Chunk.add = add
    assert code == 0 and "n 3" in out, err
    assert len(added) == 2  # the first question was finished before: two calls of three


def test_refusals_and_cut_answers_are_the_policys_own(run_eval, server, tmp_path):
    replies = iter([
        reply(None, refusal="I cannot help with that."),
        reply("<reason>so long", reason="length"),
        reply(f"{R}{V}<answer>France</answer>"),
    ])  # fmt: skip
    server[2]["answer"] = lambda body: next(replies)
    code, out, err = run_eval("--config.rollout.slots=1", "--config.rollout.lanes=1")
    assert code == 0, err
    (group,) = read_run(tmp_path / "run")
    ends = [c.episode.end_reason for c in group.cases]
    assert ends == ["malformed", "budget", "answered"]
    assert group.about["n_unscored"] == 0 and [c.episode.answer for c in group.cases][:2] == [
        None, None,
    ]  # fmt: skip


def test_a_server_needs_the_models_name(cli, untrained_folder, tmp_path):
    code, _, err = cli(
        "eval", CONFIG, f"--config.model.folder={untrained_folder}",
        f"--workdir={tmp_path / 'run'}", "--policy=http://127.0.0.1:1/v1",
    )  # fmt: skip
    assert code == 2 and "config.remote.model" in err and not (tmp_path / "run").exists()
