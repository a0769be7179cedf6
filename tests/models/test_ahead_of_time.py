"""The 7B's forward pass compiles for TPUs that are not here."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from svrl_jax.models.qwen_vl.released import RELEASED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology", "tensor"), [("Qwen2.5-VL-7B-Instruct", "v5p:2x2x2", 1)]
)
def test_the_forward_pass_compiles_with_fsdp(name, topology, tensor):
    """A row of 8,192 tokens and a picture of 48 x 48 patches a chip, parameters in bfloat16."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the plan extra: pip install -e '.[plan]'")
    found = subprocess.run(
        [
            *(sys.executable, "-m", "tests.models.aot_program", name, topology),
            *("8", "8192", "48", str(tensor)),
        ],
        env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    report = json.loads(found.stdout.splitlines()[-1])
    print(report)
    assert report["parameters"] > 8e9 and name in RELEASED
    # bfloat16 over eight chips, and room for norms that are whole on each.
    assert report["argument_bytes"] < 1.1 * 2 * report["parameters"] / 8
    assert report["temp_bytes"] + report["argument_bytes"] < 95 * 2**30  # of a v5p chip
