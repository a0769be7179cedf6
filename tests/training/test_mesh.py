"""config.mesh, the table of shardings, and one device against eight."""

import json
import math
import os
import subprocess
import sys

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from configs.base import get_config
from svrl_jax.models.qwen_vl import QwenVL
from svrl_jax.models.qwen_vl.sharding import constrain, logical_axes, path_name, spec_of
from svrl_jax.training.mesh import MeshError, axis_sizes, make_mesh
from tests.grpo import tiny

MESHES = [[1, 8, 1], [2, 2, 2]]


def mesh_config(data=1, fsdp=-1, tensor=1):
    return ConfigDict({"data": data, "fsdp": fsdp, "tensor": tensor})


def test_one_axis_takes_the_rest():
    assert axis_sizes(mesh_config(), 8) == (1, 8, 1)
    assert axis_sizes(mesh_config(2, 2, -1), 16) == (2, 2, 4)
    assert axis_sizes(mesh_config(2, 2, 1), 4) == (2, 2, 1)
    assert axis_sizes(get_config().mesh, 1) == (1, 1, 1)


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ((-1, -1, 1), "at most one may be -1"),
        ((0, 1, 1), "1 or more"),
        ((1, 3, -1), r"config\.mesh\.fsdp=3.* 8 devices"),
        ((2, 2, 1), "their product must be that number"),
    ],
)
def test_a_mesh_that_cannot_be_is_named(sizes, match):
    with pytest.raises(MeshError, match=match):
        axis_sizes(mesh_config(*sizes), 8)


def test_the_mesh_of_this_machine():
    mesh = make_mesh(mesh_config())
    assert mesh.axis_names == ("data", "fsdp", "tensor") and mesh.size == len(jax.devices())


def test_every_parameter_has_a_rule():
    model = nnx.eval_shape(lambda: QwenVL(tiny.CONFIG, rngs=nnx.Rngs(0)))
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    split = whole = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.split(model)[1]):
        axes = logical_axes(path_name(path))
        spec = spec_of(axes, leaf.shape, sizes)
        assert len(axes) == len(leaf.shape)
        if any(spec):
            split += math.prod(leaf.shape)
        else:
            whole += math.prod(leaf.shape)
    assert whole < 0.02 * split  # norms and a few biases
    with pytest.raises(ValueError, match="no sharding rule for the parameter visual.magic"):
        logical_axes("visual.magic.weight")


def test_dimensions_that_do_not_divide_stay_whole():
    sizes = {"data": 2, "fsdp": 4, "tensor": 1}
    assert spec_of(("vocab", "embed"), (64, 32), sizes) == P(None, "fsdp")
    assert spec_of(("vocab", "embed"), (64, 30), sizes) == P(None, None)
    assert spec_of(("batch", None), (8, 5), sizes) == P(("data", "fsdp"), None)
    assert spec_of(("batch", None), (4, 5), sizes) == P(None, None)
    with pytest.raises(ValueError, match="2 logical axes"):
        spec_of(("batch", None), (4,), sizes)


def test_without_a_mesh_nothing_is_constrained():
    x = jax.numpy.ones((4, 4))
    assert constrain(x, "batch", None) is x


@pytest.fixture(scope="module")
def report():
    """The program's findings, a dictionary a mesh."""
    flags = "--xla_force_host_platform_device_count=8"
    found = subprocess.run(
        [sys.executable, "-m", "tests.training.mesh_program", json.dumps(MESHES)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize("mesh", ["1x8x1", "2x2x2"])
def test_a_mesh_changes_nothing(mesh, report):
    found = report[mesh]
    for part in ("logits", "params", "moments", "logps"):
        assert found[part] < 1e-5, part
    for name, (one, many) in found["metrics"].items():
        assert many == pytest.approx(one, rel=1e-4, abs=1e-6), name
    assert found["metrics"]["grad_norm"][0] > 1e-3


def test_parameters_and_their_moments_are_spread_and_stay_so(report):
    assert report["1x8x1"]["spec"] == str(P(None, None, "fsdp"))
    assert report["1x8x1"]["shard"] == [2, 48, 4]
    assert report["2x2x2"]["spec"] == str(P(None, "tensor", "fsdp"))
    assert report["2x2x2"]["shard"] == [2, 24, 16]
    for found in report.values():
        assert found["moment_spec"] == found["spec"]
        assert found["restored"] and found["gathered"]


@pytest.mark.slow
def test_the_command_trains_on_a_mesh(tiny_folder, tmp_path):
    """One step of the smallest config on four virtual devices, split by rows and by heads."""
    flags = "--xla_force_host_platform_device_count=4"
    command = [
        sys.executable, "-m", "experiments", "train", "--config=configs/tiny.py",
        f"--workdir={tmp_path}", f"--config.model.folder={tiny_folder}", "--config.num_steps=1",
        "--config.eval.num_items=1", "--config.mesh.fsdp=2", "--config.mesh.tensor=-1",
        "--config.model.remat=layer", "--config.optim.freeze=('visual.*',)",
    ]  # fmt: skip
    found = subprocess.run(
        command,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=550,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert line["trained_rows"] > 0 and line["logp_gap_max"] < 1e-3
    assert (tmp_path / "summary.json").is_file()
