"""Hugging Face safetensors -> QwenVL parameters, and back.

Three key layouts are read, each by either family; a folder is written in its family's own:

    Qwen2.5-VL, published  visual.*        model.layers.*                 lm_head.*
    Qwen3-VL, published;   model.visual.*  model.language_model.layers.*  lm_head.*
      either, in memory
    wrapped text tower     visual.*        language_model.model.layers.*  language_model.lm_head.*

Every tensor must find its parameter and every parameter its tensor; nothing is left at random.
Tensors pass through host memory one at a time, in both directions: a stack of layers is allocated
where it will live and filled layer by layer, a shard is written as it is gathered.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from flax import nnx

from svrl_jax.models.qwen_vl.config import QWEN3, QwenVLConfig
from svrl_jax.models.qwen_vl.model import QwenVL

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Leading part of a key as found -> as in our parameter tree. First match counts.
PREFIXES = (
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model."),
    ("language_model.model.", "language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.", "language_model."),
)
# Tables that old files carry though they follow from the config.
DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")
# Stacks of layers: on disk the layer's number stands behind these.
STACKS = ("language_model.layers.", "visual.blocks.", "visual.deepstack_merger_list.")
DTYPES_ON_DISK = ("BF16", "F16", "F32")
DTYPES_BY_NAME = {  # as config.json spells them -> as safetensors does, and NumPy's
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float16": ("F16", np.dtype(np.float16)),
    "float32": ("F32", np.dtype(np.float32)),
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

# (dotted name of a parameter, its shape) -> where it lives. The name is that of our tree, without
# layer numbers: `language_model.layers.mlp.up_proj.weight`, whose first axis is the layer.
ShardingOf = Callable[[str, tuple[int, ...]], jax.sharding.NamedSharding]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor of the files belongs.

    Attributes:
      path: of the parameter in the flat state.
      layer: index on the parameter's first axis, None where it is no stack.
      shape: on disk.
    """

    path: tuple
    layer: int | None
    shape: tuple[int, ...]


def load_weights(
    folder: str | os.PathLike, dtype: Any = jnp.float32, sharding: ShardingOf | None = None
) -> tuple[QwenVL, QwenVLConfig]:
    """Reads a Hugging Face folder.

    Host memory beside the parameters themselves: at most one weight file and one tensor.

    Args:
      folder: holds config.json and either model.safetensors or shards with their index. Tensors are
        bfloat16, float16 or float32.
      dtype: of the parameters, whatever the files hold.
      sharding: where each parameter lives; every process reads only its own part. None: all on the
        default device.
    Returns:
      (model, config).
    Raises:
      FileNotFoundError: no config, no weights, or a shard that the index names is missing.
      ValueError: keys or shapes that do not match the config (all are listed), or a broken file.
    """
    config = QwenVLConfig.from_folder(folder)
    blank = nnx.eval_shape(lambda: QwenVL(config, rngs=nnx.Rngs(0), param_dtype=dtype))
    graphdef, state = nnx.split(blank)
    flat = dict(nnx.to_flat_state(state))
    places = {name: place for name, place in _places(flat, config)}
    files = _Files(folder)
    _check_names(files, places, config)
    values: dict[tuple, jax.Array] = {}
    for name, tensor in files.read_all():
        if name not in places:  # the head of a tied model
            continue
        place = places[name]
        shape = flat[place.path].shape
        target = None if sharding is None else sharding(".".join(map(str, place.path)), shape)
        tensor = tensor.reshape(shape if place.layer is None else shape[1:])
        values[place.path] = _put(values.get(place.path), tensor, place.layer, shape, dtype, target)
    if config.tie_word_embeddings:
        _check_tied(files)
    flat = {path: param.replace(values[path]) for path, param in flat.items()}
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
      model: its parameters may be sharded over this process's devices.
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
    flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    places = sorted(_places(flat, model.config), key=lambda item: _natural(item[0]))
    itemsize = DTYPES_BY_NAME[dtype][1].itemsize
    shards: list[dict[str, Place]] = [{}]
    size = 0
    for name, place in places:
        num_bytes = int(np.prod(place.shape)) * itemsize
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][_published(name, model.config)] = place
        size += num_bytes
    _write_shards(folder, shards, flat, dtype)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump({**model.config.to_hf(), "dtype": dtype}, file, indent=2)
        file.write("\n")


class _Files:
    """The tensors of a folder by the names of our tree."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._keys: dict[str, dict[str, str]] = {}  # file -> our name -> its key
        self._file_of: dict[str, str] = {}
        for path in _weight_files(folder):
            self._keys[path] = {}
            file = _open(path)
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                if key.endswith(DERIVED_SUFFIXES):
                    continue
                name = _own_name(key)
                if name in self.shapes:
                    raise ValueError(f"{path}: {key} and another tensor both mean {name}")
                found = file.get_slice(key)
                if found.get_dtype() not in DTYPES_ON_DISK:
                    raise ValueError(
                        f"{path}: {key} is {found.get_dtype()}; this loader reads "
                        f"{', '.join(DTYPES_ON_DISK)}"
                    )
                self.shapes[name] = tuple(found.get_shape())
                self._keys[path][name] = key
                self._file_of[name] = path

    def read_all(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor, file by file; a file is let go of before the next is opened."""
        for path, keys in self._keys.items():
            file = _open(path)
            for name, key in keys.items():
                yield name, file.get_tensor(key)

    def read_rows(self, name: str, rows: slice) -> np.ndarray:
        """Some rows of one tensor."""
        path = self._file_of[name]
        return _open(path).get_slice(self._keys[path][name])[rows]


def _open(path: str) -> Any:
    try:
        return safetensors.safe_open(path, framework="numpy")
    except Exception as error:  # safetensors raises its own and the system's errors
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def _put(
    value: jax.Array | None,
    tensor: np.ndarray,
    layer: int | None,
    shape: tuple[int, ...],
    dtype: Any,
    sharding: jax.sharding.NamedSharding | None,
) -> jax.Array:
    """A parameter with one more tensor in it; `value` None: the first. Waits for the device, so
    that host copies do not pile up."""
    if layer is None:
        return _to_device(tensor, sharding).astype(dtype).block_until_ready()
    if value is None:
        value = _blank(shape, jnp.dtype(dtype), sharding)
    if sharding is None:
        part = _to_device(tensor, None)
    else:
        inner = jax.sharding.PartitionSpec(*sharding.spec[1:])
        part = _to_device(tensor, jax.sharding.NamedSharding(sharding.mesh, inner))
    return _fill(value, part, np.int32(layer), sharding).block_until_ready()


def _to_device(tensor: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return jnp.asarray(tensor)
    return jax.make_array_from_callback(tensor.shape, sharding, lambda index: tensor[index])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _blank(shape: tuple[int, ...], dtype: np.dtype, sharding: Any) -> jax.Array:
    return _constrained(jnp.zeros(shape, dtype), sharding)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _fill(stack: jax.Array, part: jax.Array, layer: jax.Array, sharding: Any) -> jax.Array:
    filled = jax.lax.dynamic_update_index_in_dim(stack, part.astype(stack.dtype), layer, 0)
    return _constrained(filled, sharding)


def _constrained(x: jax.Array, sharding: jax.sharding.Sharding | None) -> jax.Array:
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


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


def _own_name(key: str) -> str:
    for found, own in PREFIXES:
        if key.startswith(found):
            return own + key[len(found) :]
    return key


def _published(name: str, config: QwenVLConfig) -> str:
    if config.model_type == QWEN3:
        return name if name.startswith("lm_head.") else "model." + name
    return name.replace("language_model.", "model.", 1)


def _natural(name: str) -> list[str]:
    """Sorts layer 2 before layer 10."""
    return [part.zfill(6) if part.isdigit() else part for part in name.split(".")]


def _places(flat: dict, config: QwenVLConfig) -> Iterator[tuple[str, Place]]:
    """Every tensor that the parameters are made of, by the names of our tree."""
    for path, param in flat.items():
        own, shape = ".".join(map(str, path)), tuple(param.shape)
        prefix = next((p for p in STACKS if own.startswith(p)), None)
        if prefix is None:
            yield own, Place(path, None, _disk_shape(own, shape, config))
            continue
        for layer in range(shape[0]):
            yield f"{prefix}{layer}.{own[len(prefix) :]}", Place(path, layer, shape[1:])


def _disk_shape(name: str, shape: tuple[int, ...], config: QwenVLConfig) -> tuple[int, ...]:
    """The patch embedding is a Conv3d weight on disk; its kernel flattens in our rows' order."""
    if name != "visual.patch_embed.proj.weight":
        return shape
    vision = config.vision_config
    kernel = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    return (shape[0], vision.in_channels, *kernel)


def _check_names(files: _Files, places: dict[str, Place], config: QwenVLConfig) -> None:
    found = set(files.shapes)
    if config.tie_word_embeddings:
        found.discard("lm_head.weight")  # some tools write it all the same; compared later

    def listed(names: set[str]) -> str:
        return ", ".join(_published(name, config) for name in sorted(names, key=_natural))

    problems = []
    if missing := set(places) - found:
        problems.append(f"missing from the files: {listed(missing)}")
    if unknown := found - set(places):
        problems.append(f"unknown to the model: {listed(unknown)}")
    problems += [
        f"{_published(name, config)} is {list(files.shapes[name])}, "
        f"the config says {list(place.shape)}"
        for name, place in places.items()
        if name in found and files.shapes[name] != place.shape
    ]
    if problems:
        raise ValueError(
            f"{files.folder}: the weights do not fit config.json: " + "; ".join(problems)
        )


def _check_tied(files: _Files, rows: int = 8192) -> None:
    if "lm_head.weight" not in files.shapes:
        return
    names = ("lm_head.weight", "language_model.embed_tokens.weight")
    total = files.shapes[names[0]][0]
    for start in range(0, total, rows):
        part = slice(start, min(start + rows, total))
        head, embeddings = (files.read_rows(name, part) for name in names)
        if not np.array_equal(head, embeddings):
            raise ValueError(
                f"{files.folder}: tie_word_embeddings is true, but lm_head.weight differs from "
                "the embeddings; set tie_word_embeddings to false to use the head"
            )


def _write_shards(
    folder: str | os.PathLike, shards: list[dict[str, Place]], flat: dict, dtype: str
) -> None:
    """Writes under other names first: a kill leaves no half-written file of a right name."""
    files = (
        [SINGLE_FILE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    total = 0
    for file, shard in zip(files, shards, strict=True):
        total += _write_file(os.path.join(folder, file + ".part"), shard, flat, dtype)
    for stale in os.listdir(folder):
        if stale.endswith(".safetensors") or stale == INDEX_FILE:
            os.remove(os.path.join(folder, stale))
    for file in files:
        os.replace(os.path.join(folder, file + ".part"), os.path.join(folder, file))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: f for f, shard in zip(files, shards) for name in shard},
        }
        with open(os.path.join(folder, INDEX_FILE), "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2)


def _write_file(path: str, shard: dict[str, Place], flat: dict, dtype: str) -> int:
    """Writes one safetensors file and returns its tensors' bytes.

    The format: the header's length (uint64), the header as JSON, the tensors end to end. Written
    here because safetensors' own function wants the whole shard in memory, twice.
    """
    name_on_disk, kind = DTYPES_BY_NAME[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, place in shard.items():
        start, end = end, end + int(np.prod(place.shape)) * kind.itemsize
        header[name] = {
            "dtype": name_on_disk,
            "shape": list(place.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for place in shard.values():
            value = flat[place.path][...]
            value = value if place.layer is None else value[place.layer]
            # As bytes, because NumPy lends no buffer of bfloat16.
            file.write(np.ascontiguousarray(value.astype(kind)).reshape(-1).view(np.uint8))
    return end


def _copy_companions(source: str | os.PathLike, folder: str | os.PathLike) -> None:
    found = [name for name in COMPANIONS if os.path.isfile(os.path.join(source, name))]
    if not found:
        raise FileNotFoundError(f"{source} holds no tokenizer or processor files to copy")
    if os.path.realpath(source) == os.path.realpath(folder):
        return
    for name in found:
        shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
