import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen2_5_VLForConditionalGeneration

from tests.models import big_folder


def run(*words, devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.big_folder", *map(str, words)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("big")
    run("make", folder)
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_true_7b_widths_go_there_and_back_bit_for_bit(folder, tmp_path, devices):
    """transformers writes shards; ours loads them within one shard and one tensor beside the
    parameters, runs, and saves within one tensor; transformers reads equal bits."""
    figures = json.loads(run("load", folder, tmp_path, devices, devices=devices))
    print(figures)
    shard, tensor = big_folder.largest(folder)
    slack = 150_000_000  # compiled programs
    assert figures["is_finite"] and figures["devices"] == devices
    assert figures["load_bytes"] < figures["parameter_bytes"] + shard + tensor + slack
    assert figures["save_bytes"] < tensor + slack
    again = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    state, count = again.state_dict(), 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                read, made = state[in_memory(key)], file.get_tensor(key)
                assert torch.equal(read.view(torch.int16), made.view(torch.int16)), key
                count += 1
    assert count == len(state) and figures["parameter_bytes"] == 2 * again.num_parameters()


def in_memory(key):
    if key.startswith("model."):
        return "model.language_model." + key.removeprefix("model.")
    return "model." + key if key.startswith("visual.") else key
