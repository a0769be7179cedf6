"""Hugging Face safetensors -> QwenVL parameters, and back.

Three key layouts are read; the published one is written:

    published, written    visual.*        model.layers.*                 lm_head.weight
    in memory since 4.52  model.visual.*  model.language_model.layers.*  lm_head.weight
    wrapped text tower    visual.*        language_model.model.layers.*  language_model.lm_head.*

Every tensor must find its parameter and every parameter its tensor; nothing is left at random.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from flax import nnx
from safetensors.numpy import save_file

from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.models.qwen_vl.model import QwenVL

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Leading part of a key as found -> as published. First match counts.
PREFIXES = (
    ("model.visual.", "visual."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# Tables that old files carry though they follow from the config.
DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")
# Stacks of layers: our prefix -> the published one.
STACKS = (("language_model.layers.", "model.layers."), ("visual.blocks.", "visual.blocks."))
DTYPES_ON_DISK = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
}
DTYPES_BY_NAME = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
# What stands beside the weights in a published folder.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
)


def load_weights(
    folder: str | os.PathLike, dtype: Any = jnp.float32
) -> tuple[QwenVL, QwenVLConfig]:
    """Reads a Hugging Face folder.

    Args:
      folder: holds config.json and either model.safetensors or shards with their index. Tensors are
        bfloat16, float16 or float32.
      dtype: of the parameters, whatever the files hold.
    Returns:
      (model, config).
    Raises:
      FileNotFoundError: no config, no weights, or a shard that the index names is missing.
      ValueError: keys or shapes that do not match the config (all are listed), or a broken file.
    """
    config = QwenVLConfig.from_folder(folder)
    tensors = _Tensors(folder)
    blank = nnx.eval_shape(lambda: QwenVL(config, rngs=nnx.Rngs(0), param_dtype=dtype))
    graphdef, state = nnx.split(blank)
    flat = dict(nnx.to_flat_state(state))
    _check_names(folder, tensors, flat, config)
    for path, param in flat.items():
        value = np.empty(param.shape, jnp.dtype(dtype))
        for name, index in _names(path, param.shape):
            value[index] = tensors.read(name).reshape(value[index].shape)
        flat[path] = param.replace(jnp.asarray(value))
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        _check_tied(folder, tensors)
    return nnx.merge(graphdef, nnx.from_flat_state(flat)), config


def save_folder(
    model: QwenVL,
    folder: str | os.PathLike,
    dtype: str = "bfloat16",
    extra_files_from: str | os.PathLike | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and the weights in the published layout, loadable by transformers.

    Args:
      folder: made if missing; files of these names are replaced.
      dtype: of the tensors on disk: `bfloat16`, `float16` or `float32`.
      extra_files_from: a model folder whose tokenizer, processor and generation files are copied.
      max_shard_bytes: larger models are cut into several files with an index.
    Raises:
      ValueError: another dtype.
      FileNotFoundError: `extra_files_from` holds none of those files.
    """
    if dtype not in DTYPES_BY_NAME:
        raise ValueError(f"dtype {dtype!r} is none of {sorted(DTYPES_BY_NAME)}")
    os.makedirs(folder, exist_ok=True)
    if extra_files_from is not None:
        _copy_companions(extra_files_from, folder)
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, tensor in _published(model, DTYPES_BY_NAME[dtype]):
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    _write_shards(folder, shards)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump({**model.config.to_hf(), "dtype": dtype}, file, indent=2)
        file.write("\n")


class _Tensors:
    """The tensors of a folder by published name; read one at a time, never all at once."""

    def __init__(self, folder: str | os.PathLike):
        self._where: dict[str, tuple[Any, str]] = {}
        for path in _weight_files(folder):
            try:
                file = safetensors.safe_open(path, framework="numpy")
            except Exception as error:  # safetensors raises its own and the system's errors
                raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                if key.endswith(DERIVED_SUFFIXES):
                    continue
                name = _published_name(key)
                if name in self._where:
                    raise ValueError(f"{path}: {key} and another tensor both mean {name}")
                found = file.get_slice(key).get_dtype()
                if found not in DTYPES_ON_DISK:
                    raise ValueError(
                        f"{path}: {key} is {found}; this loader reads {', '.join(DTYPES_ON_DISK)}"
                    )
                self._where[name] = (file, key)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        file, key = self._where[name]
        return tuple(file.get_slice(key).get_shape())

    def read(self, name: str) -> np.ndarray:
        file, key = self._where[name]
        return file.get_tensor(key)


def _weight_files(folder: str | os.PathLike) -> list[str]:
    index = os.path.join(folder, INDEX_FILE)
    present = {name for name in os.listdir(folder) if name.endswith(".safetensors")}
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            listed = set(json.load(file)["weight_map"].values())
        missing = sorted(listed - present)
        if missing:
            raise FileNotFoundError(
                f"{index} names files that are missing: {', '.join(missing)}; fetch them again"
            )
        if present - listed:
            warnings.warn(
                f"{folder}: not in the index, so not read: {', '.join(sorted(present - listed))}",
                stacklevel=2,
            )
        return [os.path.join(folder, name) for name in sorted(listed)]
    if SINGLE_FILE in present:
        return [os.path.join(folder, SINGLE_FILE)]
    raise FileNotFoundError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _published_name(key: str) -> str:
    for found, published in PREFIXES:
        if key.startswith(found):
            return published + key[len(found) :]
    return key


def _names(path: tuple, shape: tuple[int, ...]) -> list[tuple[str, Any]]:
    """Published names of one parameter, each with its index: one a layer, or a single one."""
    own = ".".join(str(part) for part in path)
    for prefix, published in STACKS:
        if own.startswith(prefix):
            rest = own[len(prefix) :]
            return [(f"{published}{layer}.{rest}", layer) for layer in range(shape[0])]
    if own.startswith("language_model."):
        own = "model." + own[len("language_model.") :]
    return [(own, ...)]


def _disk_shape(name: str, shape: tuple[int, ...], config: QwenVLConfig) -> tuple[int, ...]:
    """The patch embedding is a Conv3d weight on disk; its kernel flattens in our rows' order."""
    if name != "visual.patch_embed.proj.weight":
        return shape
    vision = config.vision_config
    kernel = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    return (shape[0], vision.in_channels, *kernel)


def _check_names(
    folder: str | os.PathLike, tensors: _Tensors, flat: dict, config: QwenVLConfig
) -> None:
    wanted = {
        name: _disk_shape(name, param.shape if index is ... else param.shape[1:], config)
        for path, param in flat.items()
        for name, index in _names(path, param.shape)
    }
    found = tensors.names()
    if config.tie_word_embeddings:
        found.discard("lm_head.weight")  # some tools write it all the same; compared later
    problems = []
    if missing := sorted(set(wanted) - found):
        problems.append(f"missing from the files: {', '.join(missing)}")
    if unknown := sorted(found - set(wanted)):
        problems.append(f"unknown to the model: {', '.join(unknown)}")
    shapes = [
        f"{name} is {list(tensors.shape(name))}, the config says {list(wanted[name])}"
        for name in sorted(set(wanted) & found)
        if tensors.shape(name) != wanted[name]
    ]
    problems += shapes
    if problems:
        raise ValueError(f"{folder}: the weights do not fit config.json: " + "; ".join(problems))


def _check_tied(folder: str | os.PathLike, tensors: _Tensors) -> None:
    head, embeddings = tensors.read("lm_head.weight"), tensors.read("model.embed_tokens.weight")
    if not np.array_equal(head, embeddings):
        raise ValueError(
            f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from "
            "model.embed_tokens.weight; set tie_word_embeddings to false to use the head"
        )


def _published(model: QwenVL, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = np.asarray(param[...])
        for name, index in _names(path, value.shape):
            tensor = np.ascontiguousarray(value[index].astype(dtype))
            yield name, tensor.reshape(_disk_shape(name, tensor.shape, model.config))


def _write_shards(folder: str | os.PathLike, shards: list[dict[str, np.ndarray]]) -> None:
    """Writes under other names first: a kill leaves no half-written file of a right name."""
    files = (
        [SINGLE_FILE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, os.path.join(folder, file + ".part"), metadata={"format": "pt"})
    for stale in os.listdir(folder):
        if stale.endswith(".safetensors") or stale == INDEX_FILE:
            os.remove(os.path.join(folder, stale))
    for file in files:
        os.replace(os.path.join(folder, file + ".part"), os.path.join(folder, file))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for s in shards for t in s.values())},
            "weight_map": {name: f for f, shard in zip(files, shards) for name in shard},
        }
        with open(os.path.join(folder, INDEX_FILE), "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2)


def _copy_companions(source: str | os.PathLike, folder: str | os.PathLike) -> None:
    found = [name for name in COMPANIONS if os.path.isfile(os.path.join(source, name))]
    if not found:
        raise FileNotFoundError(f"{source} holds no tokenizer or processor files to copy")
    if os.path.realpath(source) == os.path.realpath(folder):
        return
    for name in found:
        shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
