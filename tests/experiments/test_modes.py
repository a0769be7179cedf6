"""Each mode does what it says, with the tiny config."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from werkzeug.wrappers import Response

from svrl_jax.data import world
from svrl_jax.evals import stats
from svrl_jax.models.qwen_vl.weights import load_weights
from svrl_jax.records import Record, read_records, record_files, write_records
from svrl_jax.rewards import audit
from svrl_jax.training.run_folder import read_metrics
from svrl_jax.types import SearchItem, ToolCall
from tests.experiments.conftest import CONFIG, hashes
from tests.hf_reference import assert_transformers_agrees


@pytest.fixture(scope="module")
def summary(trained):
    return json.loads((trained / "summary.json").read_text())


def test_train_writes_its_folder(trained):
    assert [m["step"] for m in read_metrics(trained / "metrics.jsonl")] == [0, 1]
    assert {p.name for p in (trained / "checkpoints").iterdir()} == {"1", "2"}
    assert np.asarray(Image.open(trained / "figures" / "training.png")).std() > 5
    assert len(read_records(trained / "episodes" / "step_000001.jsonl")) == 4
    assert json.loads((trained / "config.json").read_text())["num_steps"] == 2
    (start,) = json.loads((trained / "environment.json").read_text())
    assert start["packages"]["jax"]


def test_the_summary_holds_every_figure(summary):
    for policy in ("initial", "trained"):
        for split in ("test", "ood"):
            for mode in ("sampled", "greedy"):
                found = summary[policy][split][mode]
                assert set(stats.FIGURES) <= found.keys() and found["n"] == 2
                assert 0.0 <= found["acc"] <= 1.0
                assert summary["difference"][split][mode]["acc"].keys() == {
                    "difference", "low", "high",
                }  # fmt: skip
    assert set(summary["marks"]) == {"scripted", "always_search", "never_search", "all_ones"}
    assert summary["marks"]["never_search"]["ood"]["sr"] == 0.0
    assert summary["labels"]["scorer"] == "em" and len(summary["labels"]["prompt"]) == 12


def test_the_table_says_the_same(trained, summary):
    text = (trained / "summary.md").read_text()
    assert f"prompt {summary['labels']['prompt']}" in text
    assert f"{summary['marks']['scripted']['test']['acc']:.3f}" in text


def test_the_export_is_the_trained_policy(trained, tiny_folder):
    exported = params(trained / "export")
    started = params(tiny_folder)
    assert exported.keys() == started.keys()
    assert any((exported[k] != started[k]).any() for k in exported)
    for name in ("tokenizer.json", "preprocessor_config.json", "generation_config.json"):
        assert (trained / "export" / name).read_bytes() == (tiny_folder / name).read_bytes()


def params(folder):
    state = nnx.state(load_weights(folder)[0])
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree.leaves_with_path(state)}


def test_transformers_loads_the_export_and_gives_the_same_logits(trained, builder):
    task = world.eval_tasks("test", 1, 84, 56)[0]
    assert_transformers_agrees(trained / "export", builder.build(task, "agent"), task)


def test_train_goes_on_with_the_same_command(cli, trained, policy_flag, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    code, out, _ = cli(
        "train", CONFIG, policy_flag, f"--workdir={run}", "--config.num_steps=3",
        "--config.eval.num_items=1", "--config.eval.splits=('test',)",
        "--config.eval.modes=('greedy',)",
    )  # fmt: skip
    assert code == 0
    assert "going on from step 2 of 3" in out and "step 3/3" in out and "step 2/3" not in out
    old, new = (read_metrics(r / "metrics.jsonl") for r in (trained, run))
    assert new[:2] == old and len(new) == 3
    assert "test, greedy" in out and "scripted marks" in out
    assert len(json.loads((run / "environment.json").read_text())) == 2


def test_eval_writes_records_and_figures(cli, trained, policy_flag, tmp_path):
    code, out, _ = cli(
        "eval", CONFIG, policy_flag, f"--workdir={tmp_path / 'eval'}",
        f"--policy={trained / 'export'}",
    )  # fmt: skip
    assert code == 0 and out.count("acc") == 4
    found = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert found["policy"] == str(trained / "export")
    figures = found["agent"]["test"]["greedy"]
    assert figures["n"] == 2
    assert figures["mask_agreement"] is None  # annotate says that, later
    assert found["labels"]["scorers"] == ["em"] and len(found["labels"]["prompt"]["agent"]) == 12
    name = "eval_export_agent_ood_sampled_0000.jsonl"
    records = read_records(tmp_path / "eval" / "episodes" / name)
    assert [r.task.source for r in records] == ["world/ood"] * 2
    assert all(r.score is None for r in records)


def test_annotate_writes_labels_beside_the_records(cli, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    before = hashes(run)
    code, out, _ = cli("annotate", run)
    assert code == 0 and "step_000000: 4 episodes" in out and "step_000001: 4 episodes" in out
    after = hashes(run)
    added = {k for k in after if k not in before}
    names = {k.rsplit("/", 1)[1] for k in added}
    assert names == {f"{p.stem}.labels.jsonl" for p in record_files(run / "episodes")}
    assert {"step_000001.labels.jsonl", "eval_trained_agent_ood_greedy_0000.labels.jsonl"} <= names
    assert {k: after[k] for k in before} == before
    records = read_records(run / "episodes" / "step_000001.jsonl")
    lines = (run / "episodes" / "step_000001.labels.jsonl").read_text().splitlines()
    for record, line in zip(records, map(json.loads, lines), strict=True):
        assert (line["task_id"], line["sample"]) == (record.task.id, record.episode.sample)
        assert line["items"] == [list(i) for i in record.score.labels.items]
        assert line["queries"] == list(record.score.labels.queries)
    # A second time replaces them.
    assert cli("annotate", run)[0] == 0 and hashes(run) == after


@pytest.fixture
def searched(tmp_path):
    """A run folder with one episode that looked the picture up and asked two queries."""
    kind = audit.KINDS[0]
    items = tuple(SearchItem(name, name, text=f"about {name}") for name in "abc")
    turns = [
        ("<reason>r</reason><search><img></search>", ToolCall("image_search", "", items)),
        (
            "<reason>r</reason><verify>1,0,0</verify><text_search>aa, bb</text_search>",
            ToolCall("text_search", "bb", items[:2]),
        ),
        ("<reason>r</reason><verify>1,0</verify><answer>x</answer>", None),
    ]
    episode = audit.scripted_episode(kind.task, turns, num_queries=2)
    record = Record(episode=episode, task=kind.task, score=None, advantage=0.0)
    write_records(tmp_path / "run" / "episodes", "step_000000", [record])
    return tmp_path / "run"


def test_annotate_asks_models_and_keeps_what_they_say(cli, searched, httpserver):
    def answer(request):
        system, user = (m["content"] for m in request.json["messages"])
        asked = json.loads(user.split("\n\nYour last")[0])
        seen.append(asked)
        mark = "1" if "items" in system else "0"  # the judge of queries thinks otherwise
        counts = ((k, len(asked[k])) for k in ("queries", "items") if k in asked)
        text = "\n".join(f"{name}: {','.join(mark * count)}" for name, count in counts)
        body = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
        return Response(json.dumps(body), content_type="application/json")

    seen = []
    httpserver.expect_request("/chat/completions").respond_with_handler(answer)
    endpoint = f"--config.reward.oracle_chat.endpoint={httpserver.url_for('').rstrip('/')}"
    command = ("annotate", searched, CONFIG, endpoint)
    code, out, _ = cli(*command, "--oracle=model")
    assert code == 0 and "5 items verified" in out and len(seen) == 2
    code, out, _ = cli(*command, "--labels=query_judge")
    assert code == 0 and "queries judged good 0.000" in out and seen[2]["queries"] == ["bb"]
    (line,) = (searched / "episodes" / "step_000000.labels.jsonl").read_text().splitlines()
    line = json.loads(line)
    assert line["items"] == [[1, 1, 1], [1, 1]] and line["queries"] == [1]
    assert line["proposals"] == [[1, 1]] and line["answered"] and line["query_judge"] == [0]
    assert "Qwen" in line["oracle"] and "Qwen" in line["query_judge_name"]
    # A second time nobody is asked: the run's folder holds the replies.
    assert cli(*command, "--oracle=model", "--labels=oracle,query_judge")[0] == 0
    assert len(seen) == 3


def test_annotate_refuses_what_it_does_not_know(cli, searched):
    assert "known are oracle, query_judge" in cli("annotate", searched, "--labels=x")[2]
    assert "name a config" in cli("annotate", searched, "--oracle=model")[2]


@pytest.mark.parametrize("regime", ["agent", "direct"])
def test_ask_prints_an_episode(cli, policy_flag, tmp_path, regime):
    picture = tmp_path / "flag.png"
    picture.write_bytes(world.eval_tasks("test", 1, 84, 56)[0].picture)
    code, out, _ = cli(
        "ask", CONFIG, policy_flag, f"--picture={picture}", "--question=Whose flag is this?",
        f"--regime={regime}",
    )  # fmt: skip
    assert code == 0
    assert out.startswith("--- turn 1, policy (") and "\nanswer: " in out
    assert out.splitlines()[-2].endswith("tool calls")
    if regime == "direct":
        assert "0 tool calls" in out


def test_audit_finds_no_cheat_that_pays(cli):
    code, out, _ = cli("audit", CONFIG)
    assert code == 0 and "cheats that beat the honest script: none" in out


def test_label_stops_and_goes_on(cli, policy_flag, tmp_path, monkeypatch):
    monkeypatch.setattr(
        world,
        "eval_tasks",
        lambda split, draws, *size, real=world.eval_tasks: real(split, draws, *size)[:2],
    )
    out_file = tmp_path / "labels.json"
    command = ("label", CONFIG, policy_flag, f"--out={out_file}", "--train_draws=1")
    code, out, _ = cli(*command)
    assert code == 0 and out.count("labelling 2 tasks") == 3
    body = json.loads(out_file.read_text())
    assert len(body["labels"]) == 6 and body["fingerprint"]["scorer"] == "em"
    code, out, _ = cli(*command)
    assert code == 0 and "labelling" not in out and json.loads(out_file.read_text()) == body
