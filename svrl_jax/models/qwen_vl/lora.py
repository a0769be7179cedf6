"""A model -> the same model with low-rank adapters in its linear maps, merged ones, and PEFT files.

LoRA (arXiv:2106.09685): y = W x + (alpha / r) B A x, with W frozen, A random and B zero at first,
so that a fresh adapter changes nothing and the policy with B = 0 is the reference policy. Adapters
lie inside `layers.Linear`, in stacks of layers with the leading layer axis.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from svrl_jax.models.qwen_vl.layers import Linear
from svrl_jax.models.qwen_vl.model import QwenVL
from svrl_jax.models.qwen_vl.sharding import STACKED

# What an optimiser trains where there are adapters: see `optimizer.OptimOptions.only`.
ADAPTERS = ("*.lora_a", "*.lora_b")


def add_lora(
    model: QwenVL, rank: int, alpha: float, targets: Sequence[str], seed: int = 0
) -> QwenVL:
    """Puts fresh adapters into the linear maps that `targets` name; the model's output stays.

    Args:
      model: changed in place, and returned.
      rank: r, at least 1.
      alpha: the update is scaled by alpha / r.
      targets: patterns of dotted module names without layer numbers, such as
        `language_model.layers.*` or `visual.blocks.*.qkv`.
      seed: of the random A.
    Raises:
      ValueError: a pattern that names no linear map, or a rank below 1.
    """
    if rank < 1:
        raise ValueError(f"config.lora.rank is {rank}; adapters need at least 1")
    linears = dict(_linears(model))
    for pattern in targets:
        if not fnmatch.filter(linears, pattern):
            raise ValueError(
                f"config.lora.targets has {pattern!r}, which names no linear map; they are named "
                f"like {next(iter(linears))}"
            )
    for number, (name, linear) in enumerate(linears.items()):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in targets):
            key = jax.random.fold_in(jax.random.key(seed), number)
            linear.add_lora(rank, alpha / rank, key)
    return model


def has_lora(model: QwenVL) -> bool:
    """Whether any linear map has an adapter."""
    return any(linear.lora_a is not None for _, linear in _linears(model))


def merge_lora(model: QwenVL) -> QwenVL:
    """A model without adapters whose weights are W + (alpha / r) B A; the given one if it has
    none."""
    if not has_lora(model):
        return model
    merged = nnx.clone(model)
    for _, linear in _linears(merged):
        if linear.lora_a is not None:
            weight = linear.weight[...]
            change = jnp.einsum(
                "...or,...ri->...oi",
                linear.lora_b[...].astype(jnp.float32),
                linear.lora_a[...].astype(jnp.float32),
                precision="highest",
            )
            weight = weight.astype(jnp.float32) + linear.lora_scale * change
            linear.weight[...] = weight.astype(linear.weight.dtype)
            linear.lora_a = linear.lora_b = None
    return merged


def save_adapter(model: QwenVL, folder: str | os.PathLike, base_model: str = "") -> None:
    """Writes the adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

    Args:
      model: has adapters of one rank and scale.
      folder: made if missing.
      base_model: name or folder of the model they belong to, written into the config.
    Raises:
      ValueError: there are no adapters.
    """
    tensors: dict[str, np.ndarray] = {}
    rank = scale = None
    for name, linear in _linears(model):
        if linear.lora_a is None:
            continue
        a, b = (np.asarray(x[...], np.float32) for x in (linear.lora_a, linear.lora_b))
        rank, scale = a.shape[-2], linear.lora_scale
        for key, part_a, part_b in _per_layer(name, a, b):
            tensors[f"base_model.model.{key}.lora_A.weight"] = np.ascontiguousarray(part_a)
            tensors[f"base_model.model.{key}.lora_B.weight"] = np.ascontiguousarray(part_b)
    if rank is None:
        raise ValueError("the model has no adapters to save; set config.lora.rank")
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"), {"format": "pt"})
    modules = sorted({key.split(".lora_")[0].removeprefix("base_model.model.") for key in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        # Whole names: `q_proj` alone would also name maps that have no adapter.
        "target_modules": modules,
    }
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
        file.write("\n")


def _linears(model: QwenVL) -> Iterator[tuple[str, Linear]]:
    """(dotted name, linear map), in the order of the names; the head is left out."""
    found = {
        ".".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, Linear) and path[0] != "lm_head"
    }
    yield from sorted(found.items())


def _per_layer(name: str, a: np.ndarray, b: np.ndarray):
    """(module name as transformers has it in memory, A [r, in], B [out, r]) of each layer."""
    match = STACKED.match(name + ".")
    if match is None:
        yield f"model.{name}", a, b
        return
    stack, rest = match.group(1), name[match.end() :]
    for layer in range(a.shape[0]):
        yield f"model.{stack}.{layer}.{rest}", a[layer], b[layer]
