"""Two layers of the 7B at their true widths: made by transformers, loaded and saved by ours.

Each step is a process of its own, so that its peak memory is its own:

    python -m tests.models.big_folder make FOLDER         random, bfloat16, in shards
    python -m tests.models.big_folder load FOLDER COPY    loads, runs, saves; prints a line of JSON
    python -m tests.models.big_folder load FOLDER COPY 8  the same, spread over 8 devices
"""

import dataclasses
import json
import math
import os
import pathlib
import resource
import sys
import time

from svrl_jax.models.qwen_vl import QwenVLConfig
from svrl_jax.models.qwen_vl.released import RELEASED

SHARD_BYTES = 1_200_000_000


def small_7b() -> QwenVLConfig:
    whole = RELEASED["Qwen2.5-VL-7B-Instruct"]
    vision = dataclasses.replace(whole.vision_config, depth=2, fullatt_block_indexes=(1,))
    text = dataclasses.replace(whole.text_config, num_hidden_layers=2)
    return dataclasses.replace(whole, text_config=text, vision_config=vision)


def make(folder: str) -> None:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**small_7b().to_hf()))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.03, 0.03)  # quicker than normal draws
    model.save_pretrained(folder, max_shard_size=SHARD_BYTES)


def load(folder: str, copy: str, devices: int = 1) -> None:
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from svrl_jax.models.qwen_vl.weights import load_weights, save_folder

    sharding = None if devices == 1 else _sharding(devices)
    jnp.zeros(8).block_until_ready()
    before, start = _peak_bytes(), time.monotonic()
    model, _ = load_weights(folder, jnp.bfloat16, sharding)
    loaded, seconds = _peak_bytes(), time.monotonic() - start
    save_folder(model, copy, "bfloat16", max_shard_bytes=SHARD_BYTES)
    saved = _peak_bytes()
    ids = np.arange(16, dtype=np.int32)[None]
    positions = np.broadcast_to(ids, (3, 1, 16))
    hidden = model(ids, positions, np.zeros_like(ids), np.zeros_like(ids))
    values = [param[...] for _, param in nnx.to_flat_state(nnx.state(model))]
    print(
        json.dumps(
            {
                "parameter_bytes": sum(v.nbytes for v in values),
                "devices": len({d for v in values for d in v.sharding.device_set}),
                "load_seconds": round(seconds, 1),
                "load_bytes": loaded - before,
                "save_bytes": saved - loaded,
                "is_finite": bool(jnp.isfinite(model.logits(hidden)).all()),
            }
        )
    )


def _sharding(devices: int):
    import jax
    from jax.sharding import AxisType

    from svrl_jax.models.qwen_vl.sharding import sharding_of

    axes = (AxisType.Auto,) * 2
    return sharding_of(jax.make_mesh((devices // 2, 2), ("fsdp", "tensor"), axis_types=axes))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def largest(folder: str) -> tuple[int, int]:
    """(bytes of the largest shard, of the largest tensor)."""
    from safetensors import safe_open

    shards, tensors = [0], [0]
    for path in pathlib.Path(folder).glob("*.safetensors"):
        shards.append(os.path.getsize(path))
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                tensors.append(2 * math.prod(file.get_slice(key).get_shape()))
    return max(shards), max(tensors)


if __name__ == "__main__":
    _, step, *rest = sys.argv
    if step == "make":
        make(*rest)
    else:
        load(*rest[:2], *map(int, rest[2:]))
