"""A judge that fails leaves answers unscored; rescore judges them later from the records alone."""

import json

import pytest
from werkzeug import Response

from svrl_jax.evals.cases import read_run
from svrl_jax.training.assemble import Bench
from tests.experiments.conftest import CONFIG


def reply(text):
    return Response(
        json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}),
        content_type="application/json",
    )


@pytest.fixture
def judged(cli, policy_flag, tmp_path, httpserver):
    """(run folder, flags, switch): a run whose judge rambles until `switch` says otherwise."""
    switch = {"text": "I cannot say.", "calls": 0}

    def answer(request):
        switch["calls"] += 1
        return reply(switch["text"])

    httpserver.expect_request("/v1/chat/completions").respond_with_handler(answer)
    folder = tmp_path / "run"
    code, out, _ = cli(
        "eval", CONFIG, policy_flag, f"--workdir={folder}", "--config.eval.num_items=4",
        "--config.eval.splits=('test',)", "--config.eval.modes=('greedy',)",
        "--config.eval.scorers=('judge','em')", "--config.eval.judge.max_retries=0",
        f"--config.eval.judge.endpoint={httpserver.url_for('/v1')}",
    )  # fmt: skip
    assert code == 0
    return folder, switch, out


def test_unscored_answers_are_counted_and_judged_later(cli, judged, monkeypatch):
    folder, switch, out = judged
    (group,) = read_run(folder)
    asked = [c for c in group.cases if c.episode.answer]
    assert asked and all(c.is_right is None for c in asked)  # not wrong: unscored
    assert {c.verdicts["judge"].cause for c in asked} == {"unreadable"}
    assert group.about["n_unscored"] == len(asked) and f"n_unscored {len(asked)}" in out
    assert all(c.verdicts["em"].value is not None for c in group.cases)

    monkeypatch.setattr(Bench, "run", lambda *_, **__: pytest.fail("a rollout was made"))
    switch["text"] = "verdict: correct"
    code, out, _ = cli("rescore", folder)
    assert code == 0 and "unscored 0" in out
    (group,) = read_run(folder)
    assert {c.is_right for c in group.cases if c.episode.answer} == {True}
    calls = switch["calls"]
    assert cli("rescore", folder)[0] == 0 and switch["calls"] == calls  # kept verdicts


def test_rescore_wants_an_evaluated_run(cli, tmp_path):
    code, _, err = cli("rescore", tmp_path)
    assert code == 2 and "run `eval` first" in err
    code, _, err = cli("rescore")
    assert code == 2 and "name one run folder" in err
