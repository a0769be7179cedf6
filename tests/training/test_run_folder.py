import json

import jax.numpy as jnp
import numpy as np
import pytest

from configs.base import get_config
from svrl_jax.training.run_folder import RunFolder, RunFolderError, config_hash, read_metrics


@pytest.fixture
def config():
    return get_config()


def snapshot(folder):
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_new_folder_holds_config_and_environment(tmp_path, config):
    run = RunFolder(tmp_path / "a" / "run", config)
    saved = json.loads((run.path / "config.json").read_text())
    assert saved["grpo"]["clip_low"] == 0.2 and saved["model"]["folder"] is None
    (start,) = json.loads((run.path / "environment.json").read_text())
    assert start["packages"]["jax"] and start["device"] and "commit" in start
    assert run.is_new and run.steps() == []


def test_same_config_goes_on_and_adds_a_start(tmp_path, config):
    RunFolder(tmp_path / "run", config).write(0, {"loss": 1.0})
    run = RunFolder(tmp_path / "run", get_config())
    assert not run.is_new and run.steps() == [0]
    assert len(json.loads((run.path / "environment.json").read_text())) == 2


@pytest.mark.parametrize(
    "key", ["num_steps", "save_every", "keep_checkpoints", "eval.every", "data.workers"]
)
def test_run_can_be_extended(tmp_path, config, key):
    before = config_hash(config.to_dict())
    RunFolder(tmp_path / "run", config)
    config.update_from_flattened_dict({key: 777})
    assert config_hash(config.to_dict()) == before
    saved = json.loads((RunFolder(tmp_path / "run", config).path / "config.json").read_text())
    for part in key.split("."):
        saved = saved[part]
    assert saved == 777


def test_another_configs_run_is_refused_untouched(tmp_path, config):
    RunFolder(tmp_path / "run", config).write(0, {"loss": 1.0})
    before = snapshot(tmp_path)
    config.grpo.kl_coef = 0.5
    config.seed = 3
    config.num_steps = 1
    with pytest.raises(RunFolderError) as caught:
        RunFolder(tmp_path / "run", config)
    message = str(caught.value)
    assert str(tmp_path / "run") in message and "choose another --workdir" in message
    assert "seed" in message and "grpo.kl_coef" in message and "num_steps" not in message
    assert "\n" not in message
    assert snapshot(tmp_path) == before


def test_key_that_only_one_side_has_is_named(tmp_path, config):
    RunFolder(tmp_path / "run", config)
    config.grpo.new_key = 1
    with pytest.raises(RunFolderError, match=r"grpo\.new_key"):
        RunFolder(tmp_path / "run", config)


def test_run_without_its_config_is_refused(tmp_path, config):
    (tmp_path / "metrics.jsonl").write_text("precious")
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl but no config\.json"):
        RunFolder(tmp_path, config)
    assert snapshot(tmp_path) == {str(tmp_path / "metrics.jsonl"): b"precious"}


def test_log_file_in_a_new_folder_is_fine(tmp_path, config):
    (tmp_path / "log.txt").write_text("started")
    assert RunFolder(tmp_path, config).is_new


@pytest.mark.parametrize("name", ["config.json", "environment.json"])
def test_unreadable_file_gives_one_sentence(tmp_path, config, name):
    RunFolder(tmp_path, config)
    (tmp_path / name).write_text("{")
    before = snapshot(tmp_path)
    with pytest.raises(RunFolderError, match=f"{name} is not readable"):
        RunFolder(tmp_path, config)
    assert snapshot(tmp_path) == before


def test_workdir_that_is_a_file_is_refused(tmp_path, config):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder(tmp_path / "run", config)


def test_each_step_is_written_once_over_a_resume(tmp_path, config):
    run = RunFolder(tmp_path, config)
    run.start_at(0)
    for step in range(5):
        run.write(step, {"loss": float(step)})
    with pytest.raises(ValueError, match="start_at"):
        run.write(4, {"loss": 0.0})
    again = RunFolder(tmp_path, config)
    again.start_at(3)
    assert again.steps() == [0, 1, 2]
    again.write(3, {"loss": -3.0})
    assert [m["loss"] for m in read_metrics(again.metrics)] == [0.0, 1.0, 2.0, -3.0]


def test_line_cut_short_by_a_kill_is_dropped(tmp_path, config):
    RunFolder(tmp_path, config).write(0, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')
    run = RunFolder(tmp_path, config)
    run.write(1, {"loss": 2.0})
    assert run.steps() == [0, 1]


def test_damaged_line_in_the_middle_is_not_dropped_silently(tmp_path, config):
    run = RunFolder(tmp_path, config)
    run.metrics.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(RunFolderError, match="line 2 of"):
        RunFolder(tmp_path, config)


def test_undefined_numbers_become_null(tmp_path, config):
    run = RunFolder(tmp_path, config)
    values = {"a": float("nan"), "b": np.float32("inf"), "c": jnp.float32(0.5), "d": None}
    run.write(0, values | {"e": np.int32(3), "f": {"g": np.array([1.0, np.nan])}})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 0,
        "a": None,
        "b": None,
        "c": 0.5,
        "d": None,
        "e": 3,
        "f": {"g": [1.0, None]},
    }


def test_episodes_of_a_step_are_written_beside(tmp_path, config):
    run = RunFolder(tmp_path, config)
    run.write(12, {}, records=[])
    assert (run.episodes / "step_000012.jsonl").is_file()
