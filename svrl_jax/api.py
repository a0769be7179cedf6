"""A folder or hub id -> model, inputs, logits, text: the four calls of the package.

The prompt is prefilled in one program and the answer decoded in another, both compiled once a
shape. Training samples with `svrl_jax.rollout`, which keeps many episodes going; this is for trying
a model out and for comparing it with others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub import errors as hub_errors

from svrl_jax.models.qwen_vl import QwenVL, default_image_index, init_cache, plan_vision
from svrl_jax.models.qwen_vl.sharding import mesh_of_params, on_mesh, sharding_of
from svrl_jax.models.qwen_vl.weights import load_weights
from svrl_jax.processing.chat import Message
from svrl_jax.processing.processor import Inputs, Picture, Processor, is_one_conversation
from svrl_jax.rng import turn_keys
from svrl_jax.rollout.sampling import draw_tokens
from svrl_jax.rollout.scheduler import banned_ids

FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")  # of a hub repository
# Prompts are filled up to a multiple, so that few shapes are compiled, and prefilled in pieces of
# so many tokens, so that scores are never prompt x prompt.
ROUND_TO = 64
PREFILL_TOKENS = 512


class ModelNotFoundError(RuntimeError):
    """No folder and no reachable hub repository; the message says which and what to do."""


def load(
    folder_or_hub_id: str | os.PathLike,
    dtype: str = "float32",
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[QwenVL, Processor]:
    """Loads a model of the Qwen2.5-VL or Qwen3-VL family.

    Args:
      folder_or_hub_id: a Hugging Face folder, or an id such as `Qwen/Qwen2.5-VL-3B-Instruct`, which
        huggingface_hub fetches (or finds in its cache).
      dtype: of the parameters, whatever the files hold.
      mesh: devices to spread the parameters over (`svrl_jax.training.mesh.make_mesh`); None puts
        them on the default device.
    Returns:
      (model, processor).
    Raises:
      ModelNotFoundError: neither folder nor repository, no network, or no permission.
      FileNotFoundError, ValueError: files that are missing or do not fit; the message names them.
    """
    folder = os.fspath(folder_or_hub_id)
    if not os.path.isdir(folder):
        folder = fetch(folder)
    processor = Processor.from_folder(folder)  # first: it is quick, and finds other faults
    sharding = None if mesh is None else sharding_of(mesh)
    model, _ = load_weights(folder, dtype=jnp.dtype(dtype), sharding=sharding)
    return model, processor


def fetch(repo_id: str, endpoint: str | None = None) -> str:
    """The local folder of a hub repository, downloaded if need be.

    Args:
      endpoint: the hub's address; None is huggingface_hub's own default.
    Raises:
      ModelNotFoundError: see `load`.
    """
    try:
        return huggingface_hub.snapshot_download(
            repo_id, endpoint=endpoint, allow_patterns=list(FILES)
        )
    except hub_errors.HFValidationError as error:
        raise ModelNotFoundError(
            f"{repo_id!r} is no folder on this machine, and no hub id of the form owner/name"
        ) from error
    except hub_errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{repo_id!r} is gated: accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{repo_id!r} is neither a folder on this machine nor a hub repository that you may "
            "read; check the spelling, or log in with `hf auth login`"
        ) from error
    except (hub_errors.LocalEntryNotFoundError, ConnectionError, OSError) as error:
        raise ModelNotFoundError(
            f"{repo_id!r} is no folder on this machine, and the hub cannot be reached: connect to "
            "the network, or fetch the repository elsewhere and name its folder"
        ) from error


def logits(model: QwenVL, inputs: Inputs) -> jax.Array:
    """Next-token logits of every token of a batch.

    Args:
      inputs: from a `Processor`.
    Returns:
      float32[B, T, V], raw; unused rows of the vocabulary included. Meaningless on padding.
    """
    graphdef, params = nnx.split(model)
    ids = np.asarray(inputs.prompt_ids)
    index = default_image_index(_real_ids(inputs), model.config.image_token_id)
    with on_mesh(mesh_of_params(params)):
        return _logits(
            graphdef,
            params,
            ids,
            np.asarray(inputs.positions),
            np.where(_is_real(inputs), 0, -1).astype(np.int32),
            index,
            np.asarray(inputs.pixel_values),
            _plan(model, inputs),
        )


def generate(
    model: QwenVL,
    processor: Processor,
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    images: Sequence[Picture] | Sequence[Sequence[Picture]] = (),
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
) -> str | list[str]:
    """Writes the assistant's next turn.

    Picture tokens and unused rows of the vocabulary are never drawn.

    Args:
      messages, images: one conversation or a list of them, see `Processor`.
      max_new_tokens: limit of the turn.
      temperature: 0 takes the likeliest token each time.
      seed: of the draws; a row's draws depend on the seed and its place in the list alone.
    Returns:
      The turn's text without its end token; a list of them for a list of conversations.
    Raises:
      ValueError: max_new_tokens below 1, or a negative temperature; and as `Processor`.
    """
    if max_new_tokens < 1 or temperature < 0:
        raise ValueError(
            f"max_new_tokens must be at least 1 and temperature at least 0; got {max_new_tokens} "
            f"and {temperature}"
        )
    inputs = processor(messages, images)
    ids = generate_ids(
        model,
        inputs,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        eos_ids=processor.tokenizer.eos_ids,
        banned=banned_ids(model.config, len(processor.tokenizer)),
    )
    texts = [processor.tokenizer.decode(row, skip_special=True) for row in ids]
    return texts[0] if is_one_conversation(messages) else texts


def generate_ids(
    model: QwenVL,
    inputs: Inputs,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    eos_ids: Sequence[int],
    banned: Sequence[int],
    prefill_tokens: int = PREFILL_TOKENS,
) -> list[np.ndarray]:
    """As `generate`, of ids: for each row int32[n], its end token included if it came to one.

    Args:
      eos_ids: ids that end a row.
      banned: ids that are never drawn.
      prefill_tokens: tokens of a row that are prefilled at a time.
    """
    graphdef, params = nnx.split(model)
    rows, length = np.asarray(inputs.prompt_ids).shape
    multiple = ROUND_TO if length <= prefill_tokens else prefill_tokens
    padding = ((0, 0), (0, -length % multiple))
    index = default_image_index(_real_ids(inputs), model.config.image_token_id)
    is_banned = np.zeros(model.config.text_config.vocab_size, bool)
    is_banned[list(banned)] = True
    lengths = np.asarray(inputs.lengths)
    last = np.asarray(inputs.positions).max(axis=0)  # the largest axis counts on
    first_position = 1 + np.where(_is_real(inputs), last, -1).max(axis=1)
    with on_mesh(mesh_of_params(params)):
        drawn = _generate(
            graphdef,
            max_new_tokens,
            prefill_tokens,
            params,
            np.pad(np.asarray(inputs.prompt_ids), padding),
            np.pad(np.asarray(inputs.positions), ((0, 0), *padding)),
            lengths,
            first_position.astype(np.int32),
            np.pad(index, padding, constant_values=-1),
            np.asarray(inputs.pixel_values),
            _plan(model, inputs),
            turn_keys([(seed, 0, 0, row, 0, 0) for row in range(rows)]),
            np.float32(temperature),
            is_banned,
            np.asarray(eos_ids, np.int32),
        )
    found = []
    for row in np.asarray(drawn):
        ends = np.flatnonzero(np.isin(row, eos_ids))
        found.append(row[: ends[0] + 1] if len(ends) else row)
    return found


def _is_real(inputs: Inputs) -> np.ndarray:
    """bool[B, T], False on padding."""
    return np.arange(np.shape(inputs.prompt_ids)[1]) < np.asarray(inputs.lengths)[:, None]


def _real_ids(inputs: Inputs) -> np.ndarray:
    return np.where(_is_real(inputs), np.asarray(inputs.prompt_ids), -1)


def _plan(model: QwenVL, inputs: Inputs) -> Any:
    if not len(inputs.image_grid_thw):
        return None
    return plan_vision(np.asarray(inputs.image_grid_thw), model.config.vision_config)


def _features(model: QwenVL, pixel_values, plan, image_index) -> tuple[Any, Any]:
    """(image_embeds, image_index) of a call, both None without pictures."""
    if plan is None:
        return None, None
    return model.encode_images(pixel_values, plan), image_index


@partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, ids, positions, group_id, image_index, pixel_values, plan):
    model = nnx.merge(graphdef, params)
    features = _features(model, pixel_values, plan, image_index)
    hidden = model(ids, positions, group_id, jnp.zeros_like(group_id), *features)
    return model.logits(hidden)


def _prefill(model, cache, prefill_tokens, ids, positions, lengths, image_embeds, image_index):
    """Final hidden state float[B, D] of each row's last token, and the filled cache."""
    rows, length = ids.shape
    piece = min(length, prefill_tokens)

    def step(carry, i):
        k, v, last = carry

        def cut(x):
            return jax.lax.dynamic_slice_in_dim(x, i * piece, piece, axis=-1)

        index = None if image_index is None else cut(image_index)
        starts = jnp.full(rows, i * piece)
        hidden, k, v = model.extend(cut(ids), cut(positions), k, v, starts, image_embeds, index)
        place = lengths - 1 - i * piece  # of the row's last token in this piece
        found = jnp.take_along_axis(hidden, jnp.clip(place, 0, piece - 1)[:, None, None], 1)[:, 0]
        is_here = (place >= 0) & (place < piece)
        return (k, v, jnp.where(is_here[:, None], found, last)), None

    dtype = model.execution.dtype_of(cache.k.dtype)
    last = jnp.zeros((rows, model.config.text_config.hidden_size), dtype)
    (k, v, last), _ = jax.lax.scan(step, (cache.k, cache.v, last), jnp.arange(length // piece))
    return last, k, v


@partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(
    graphdef, max_new_tokens: int, prefill_tokens: int, params, ids, positions, lengths,
    first_position, image_index, pixel_values, plan, keys, temperature, banned, eos_ids,
):  # fmt: skip
    """int32[B, max_new_tokens]; behind a row's end token whatever came out."""
    model = nnx.merge(graphdef, params)
    rows, length = ids.shape
    dtype = jax.tree.leaves(params)[0].dtype
    cache = init_cache(model.config, rows, length + max_new_tokens, dtype)
    features = _features(model, pixel_values, plan, image_index)
    hidden, k, v = _prefill(model, cache, prefill_tokens, ids, positions, lengths, *features)
    temperatures = jnp.full(rows, temperature)

    def goes_on(state):
        i, _, _, _, _, is_done = state
        return (i < max_new_tokens) & ~is_done.all()

    def step(state):
        i, hidden, k, v, drawn, is_done = state
        new, _ = draw_tokens(model.logits(hidden), keys, lengths + i, temperatures, banned)
        place = jnp.broadcast_to(first_position + i, (3, rows))[:, :, None]
        hidden, k, v = model.extend(new[:, None], place, k, v, lengths + i)
        drawn = drawn.at[:, i].set(new)
        return i + 1, hidden[:, 0], k, v, drawn, is_done | jnp.isin(new, eos_ids)

    drawn = jnp.zeros((rows, max_new_tokens), jnp.int32)
    state = (jnp.int32(0), hidden, k, v, drawn, jnp.zeros(rows, bool))
    return jax.lax.while_loop(goes_on, step, state)[4]
