"""The repository as a whole: it imports, its configs build, its arrows point one way."""

import ast
import functools
import importlib
import pathlib
import re

import pytest
from ml_collections import ConfigDict

from configs import base
from svrl_jax import config as config_lib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("svrl_jax", "configs", "experiments")
# Data goes one way: a stage imports none that stands behind it.
STAGES = ("data", "protocol", "rollout", "rewards", "grpo", "training")
# What stages are made of knows no stage.
PARTS = ("models", "processing")


def name_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(p): p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))}


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(SOURCES[name].read_text("utf-8"))


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Every module that a module names in an import, inside functions too."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@functools.cache
def own_imports(name: str) -> frozenset[str]:
    """Modules of ours, with the packages that importing them runs."""
    ours = {m for m in imports(name) if m in SOURCES}
    for module in tuple(ours):
        parts = module.split(".")
        ours |= {".".join(parts[:i]) for i in range(1, len(parts))} & SOURCES.keys()
    return frozenset(ours)


def reachable(name: str) -> set[str]:
    found, waiting = set(), [name]
    while waiting:
        for module in own_imports(waiting.pop()) - found:
            found.add(module)
            waiting.append(module)
    return found


def stage_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if parts[0] == "svrl_jax" and len(parts) > 1 else ""


def modules_in(folder: str) -> list[str]:
    return [n for n in SOURCES if stage_of(n) == folder]


@pytest.mark.parametrize("name", SOURCES)
def test_every_module_imports(name):
    importlib.import_module(name)


@pytest.mark.parametrize("name", SOURCES)
def test_every_module_says_what_it_is(name):
    if SOURCES[name].name != "__init__.py":
        assert ast.get_docstring(tree(name))
    assert SOURCES[name].read_text("utf-8").count("\n") < 500


@pytest.mark.parametrize("name", [n for n in SOURCES if re.match(r"configs\.\w", n)])
def test_every_config_builds_and_can_run(name):
    module = importlib.import_module(name)
    config = module.get_config().lock()
    config_lib.check(config, training=True)
    assert set(flatten(config)) == set(flatten(base.get_config()))  # base has every key
    with pytest.raises(ValueError):
        module.get_config("nonsense")


@pytest.mark.parametrize("name", [n for n in SOURCES if stage_of(n) in STAGES])
def test_a_stage_imports_no_later_stage(name):
    later = STAGES[STAGES.index(stage_of(name)) + 1 :]
    assert [m for m in imports(name) if stage_of(m) in later] == []


@pytest.mark.parametrize("name", [n for n in SOURCES if stage_of(n) in PARTS])
def test_models_and_processing_know_no_stage(name):
    assert [m for m in imports(name) if stage_of(m) in (*STAGES, "search", "evals")] == []


@pytest.mark.parametrize("name", [n for n in SOURCES if n.startswith("svrl_jax")])
def test_the_package_imports_neither_configs_nor_modes(name):
    assert [m for m in imports(name) if m.split(".")[0] in ("configs", "experiments")] == []


NO_ORACLE = (*map(modules_in, ("rollout", "evals", "analysis")), ["svrl_jax.rewards.judge"])
NO_ORACLE += ([f"experiments.{m}" for m in ("eval", "rescore", "analyse", "import_traces")],)


@pytest.mark.parametrize("name", sum(NO_ORACLE, []))
def test_rollout_and_evaluation_never_reach_the_oracle(name):
    assert "svrl_jax.rewards.oracle" not in reachable(name)


def test_the_oracle_is_reached_where_it_should_be():
    """The search above would notice it."""
    assert "svrl_jax.rewards.oracle" in reachable("svrl_jax.training.loop")
    assert "svrl_jax.rewards.oracle" not in reachable("experiments.eval") - {"experiments"}


def test_the_engine_knows_tokens_and_no_text():
    seen = reachable("svrl_jax.rollout.engine")
    assert [m for m in seen if stage_of(m) in ("protocol", "processing", "search", "data")] == []


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_imports_torch_tensorflow_or_pickle(name):
    roots = {m.split(".")[0] for m in imports(name)}
    if re.fullmatch(r"svrl_jax\.bench\.\w+_peer", name):  # what we are measured against
        roots.discard("torch")
    if name == "svrl_jax.search.fvqa_cache":  # its unpickler resolves no name but pictures'
        roots.discard("pickle")
    assert roots.isdisjoint({"torch", "tensorflow", "pickle", "cloudpickle", "dill", "joblib"})


@pytest.mark.parametrize("name", [n for n in SOURCES if stage_of(n) not in PARTS])
def test_no_key_of_a_config_is_read_with_a_default(name):
    """A misspelt `.get` would be silent. (Files of Hugging Face may lack keys.)"""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "get":
                assert "config" not in ast.unparse(node.func.value), ast.unparse(node)


def flatten(config: ConfigDict, prefix: str = ""):
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def keys_read() -> set[tuple[str, str]]:
    """(what it is read from, key) of every attribute, and fields that `**stage` fills."""
    found = set()
    for name in SOURCES:
        if name.startswith("configs") or name == "svrl_jax.config":  # checking is not reading
            continue
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                value = node.value
                owner = value.id if isinstance(value, ast.Name) else value.attr
                found.add((owner, node.attr))
            elif isinstance(node, ast.ClassDef) and node.name.endswith("Options"):
                stage = node.name.removesuffix("Options").lower()
                fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
                found |= {(stage, field.target.id) for field in fields}
    return found


def test_every_key_is_read_somewhere():
    read = keys_read()
    dead = []
    for key in flatten(base.get_config()):
        *stages, leaf = key.split(".")
        owners = {"config", "search_config", "rollout_config", *stages[-1:]}
        if stages[:2] == ["pretrain", "phases"]:
            owners = {"phase", "p"}
        if stages == ["alarms", *stages[1:2]] and len(stages) == 2:
            owners = {"alarm"}
        if not any((owner, leaf) in read for owner in owners):
            dead.append(key)
    assert dead == []


@pytest.mark.parametrize("name", sorted(p.name for p in ROOT.glob("*.md")))
def test_links_resolve(name):
    text = (ROOT / name).read_text("utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    broken = [
        link
        for link in links
        if not re.match(r"https?://|#", link) and not (ROOT / link.split("#")[0]).exists()
    ]
    assert broken == []
    if name == "README.md":
        assert len(links) >= 5


def test_paths_that_the_readme_names_exist():
    text = (ROOT / "README.md").read_text("utf-8")
    named = set(re.findall(r"(?:configs|svrl_jax|tests|experiments)/[\w/]+\.(?:py|txt)", text))
    assert named and [n for n in sorted(named) if not (ROOT / n).is_file()] == []


def test_the_readme_lists_every_mode():
    from experiments.__main__ import MODES

    text = (ROOT / "README.md").read_text("utf-8")
    assert [m for m in MODES if not re.search(rf"\| `{m}\b", text)] == []
    assert {m.replace("-", "_") for m in MODES} | {"command_line", "__main__"} >= {
        n.split(".")[1] for n in SOURCES if re.match(r"experiments\.\w", n)
    }
