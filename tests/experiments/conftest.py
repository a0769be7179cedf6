"""The command line in this process, and one run of each kind for all tests."""

import hashlib
import pathlib

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from experiments.__main__ import main
from tests.conftest import compiler

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = f"--config={ROOT / 'configs' / 'tiny.py'}"


@pytest.fixture(scope="package", autouse=True)
def quick(tmp_path_factory):
    """Each command compiles the same few programs: they are kept from one to the next."""
    kept = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.2,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in kept}
    for name, value in kept.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    with compiler(is_quick=True):
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def hashes(*folders: pathlib.Path) -> dict[str, str]:
    """Every file below the folders and its digest; folders too, so that a new one shows."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for folder in folders
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def cli(capsys):
    """Runs a command; returns (exit status, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["experiments", *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture(scope="session")
def policy_flag(tiny_folder):
    return f"--config.model.folder={tiny_folder}"


@pytest.fixture(scope="package")
def trained(policy_flag, tmp_path_factory) -> pathlib.Path:
    """The folder of a finished run of two steps. Read only: copy before a change."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    arguments = ["train", CONFIG, policy_flag, f"--workdir={folder}", "--config.num_steps=2"]
    assert main(["experiments", *arguments]) == 0
    return folder
