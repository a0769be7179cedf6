"""Keys: any draw of a run can be made again alone, from (seed, step, task, sample, turn, position).

A task counts by the hash of its id, never by its place in a batch, so that the same episode is
drawn with any batch size, host count, or after a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def task_hash(task_id: str) -> int:
    """The task's number in a key: the first four bytes of its id's sha256, in [0, 2**32)."""
    return int.from_bytes(hashlib.sha256(task_id.encode("utf-8")).digest()[:4], "big")


def host_rng(*parts: int | str) -> np.random.Generator:
    """A NumPy generator for host-side draws (which query to run, how a picture is drawn).

    Args:
      *parts: integers or strings that name the draw; equal parts give equal streams on any host.
    """
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


@jax.jit
def _turn_keys(parts: jax.Array) -> jax.Array:
    def one(row):
        key = jax.random.key(row[0])
        for i in range(1, 6):
            key = jax.random.fold_in(key, row[i])
        return jax.random.key_data(key)

    return jax.vmap(one)(parts)


def turn_keys(rows: Sequence[tuple[int, int, int, int, int, int]]) -> np.ndarray:
    """Key data of turns, all at once.

    Args:
      rows: (seed, step, task hash, sample, turn, resample attempt) a turn, each in [0, 2**32).
    Returns:
      uint32[len(rows), 2]. The draw at `position` (the token's index in the episode) uses
      `jax.random.fold_in(key, position)`.
    """
    count = len(rows)
    padded = max(1, 1 << (count - 1).bit_length()) if count else 1  # few compiled shapes
    parts = np.zeros((padded, 6), np.uint32)
    if count:
        parts[:count] = np.asarray(rows, np.uint64).astype(np.uint32)
    return np.asarray(_turn_keys(jnp.asarray(parts)))[:count]


def key_for(
    seed: int, step: int, task_id: str, sample: int, turn: int, position: int, attempt: int = 0
) -> jax.Array:
    """The key of one token's draw (the same value that the sampler folds on the device)."""
    data = turn_keys([(seed, step, task_hash(task_id), sample, turn, attempt)])[0]
    return jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(data)), position)
