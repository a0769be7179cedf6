"""Published rows -> prepare -> label -> train -> eval, with the true Qwen tokenizer."""

import json
import shutil

import pytest
from flax import nnx

from svrl_jax.models.qwen_vl import QwenVL
from svrl_jax.models.qwen_vl.weights import save_folder
from svrl_jax.processing.images import ImageProcessor
from svrl_jax.records import read_records
from svrl_jax.training import tiny_policy
from svrl_jax.training.run_folder import read_metrics
from tests.data.published_files import PUBLISHED
from tests.experiments.conftest import CONFIG

TOKENS = {"<|image_pad|>": 151655, "<|video_pad|>": 151656, "<|vision_start|>": 151652,
          "<|vision_end|>": 151653, "<|im_end|>": 151645, "<|endoftext|>": 151643}  # fmt: skip


@pytest.fixture(scope="module")
def policy(qwen_folders, tiny_config, tmp_path_factory):
    """A random tiny Qwen2.5-VL behind the true tokenizer, with the release's vocabulary rows."""
    folder = tmp_path_factory.mktemp("policy") / "qwen"
    shutil.copytree(qwen_folders["qwen2_5_vl"], folder)
    ImageProcessor(max_pixels=8 * 28 * 28).save(folder)
    config = tiny_policy.model_config(tiny_config.pretrain, TOKENS, 151_936)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    generation = {"eos_token_id": [151645, 151643], "pad_token_id": 151643}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_folder(QwenVL(config, rngs=nnx.Rngs(0)), folder)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """FVQA rows as train, InfoSeek rows beside them."""
    from experiments.__main__ import main

    out = tmp_path_factory.mktemp("prepared")
    for dataset, source, split in (
        ("fvqa", "fvqa_sample.parquet", "train"),
        ("infoseek", "fvqa_mini.parquet", "test"),
    ):
        command = ["prepare", f"--dataset={dataset}", f"--source={PUBLISHED / source}"]
        assert main(["svrl", *command, f"--split={split}", f"--out={out}"]) == 0
    return out


@pytest.fixture
def flags(policy, prepared):
    return (
        CONFIG,
        f"--config.model.folder={policy}",
        f"--config.data.source={prepared / 'fvqa'}",
        "--config.rollout.max_turn_tokens=12",
        "--config.rollout.budget=192",
        "--config.grpo.length_buckets=(192,)",
        "--config.eval.modes=('greedy',)",
    )


def test_two_steps_on_real_rows(cli, flags, prepared, tmp_path):
    workdir = tmp_path / "run"
    command = (
        "train", *flags, f"--workdir={workdir}", "--config.num_steps=2",
        "--config.reward.search_free_source=category",
    )  # fmt: skip
    status, out, err = cli(*command)
    assert status == 0, err
    lines = read_metrics(workdir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1] and all(line["data_s"] >= 0 for line in lines)
    assert "fvqa/train: 8 rows" in out and "has no split to evaluate on" in out
    assert "labelling" not in out  # the category says it all
    tasks = [
        r.task for step in (0, 1) for r in read_records(workdir / f"episodes/step_{step:06d}.jsonl")
    ]
    assert len(tasks) == 2 * 2 * 2 and len({t.id for t in tasks}) == 4
    assert all(t.id.startswith("fvqa_train_") and t.picture[:2] == b"\xff\xd8" for t in tasks)
    summary = json.loads((workdir / "summary.json").read_text())
    assert "category" in summary["labels"]["search_free"]

    whole = (*command, "--config.num_steps=3", "--config.eval.splits=('infoseek/test',)")
    status, out, err = cli(*whole, "--config.eval.num_items=2")
    assert status == 0 and "going on from step 2" in out, err
    third = read_records(workdir / "episodes/step_000002.jsonl")
    assert {r.task.id for r in third}.isdisjoint({t.id for t in tasks})  # the epoch goes on
    found = json.loads((workdir / "summary.json").read_text())["trained"]["infoseek/test"]
    assert found["greedy"]["n"] == 2


def test_evaluation_and_labels_of_prepared_splits(cli, flags, tmp_path):
    splits = "--config.eval.splits=('infoseek/test','train')"
    workdir = tmp_path / "eval"
    status, out, err = cli(
        "eval", *flags, splits, "--config.eval.num_items=5", f"--workdir={workdir}", "--name=p"
    )
    assert status == 0 and "infoseek/test, greedy: acc" in out, err
    group = workdir / "episodes" / "eval_p_agent_infoseek-test_greedy"
    # Four slots: four at a time.
    sets = [read_records(f"{group}_{number}.jsonl") for number in ("0000", "0001")]
    assert [len(records) for records in sets] == [4, 1]
    figures = json.loads((workdir / "eval.json").read_text())
    assert figures["agent"]["infoseek/test"]["greedy"]["n"] == 5
    labels = tmp_path / "labels.json"
    command = ("label", *flags, f"--out={labels}", "--config.reward.search_free_samples=1")
    status, out, err = cli(*command)
    assert status == 0 and "train: labelling 8 tasks" in out, err
    assert "greedy and category agree on" in out and "of 8" in out
    assert len(json.loads(labels.read_text())["labels"]) == 8
    status, again, _ = cli(*command)
    assert status == 0 and "labelling" not in again
    body = json.loads(labels.read_text())
    labels.write_text(json.dumps(body | {"fingerprint": body["fingerprint"] | {"data": "other"}}))
    status, again, _ = cli(*command, "--splits=train", "--config.reward.search_free_samples=0")
    assert status == 0 and "is not used" in again and "labelling 8" in again


def test_a_split_that_is_not_there_is_a_sentence_before_anything_is_loaded(cli, flags, tmp_path):
    wrong = "--config.eval.splits=('test',)"
    status, _, err = cli("train", *flags, wrong, f"--workdir={tmp_path / 'run'}")
    assert status == 2 and "has no split 'test'; it has train" in err
    assert not (tmp_path / "run").exists()
