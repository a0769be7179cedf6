"""What --policy names -> who is evaluated.

A Hugging Face folder, a run folder (its newest checkpoint), one checkpoint
(`RUN/checkpoints/STEP`), or the address of an OpenAI-compatible server.
"""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any

import jax
import numpy as np

from svrl_jax import checkpoint, grpo
from svrl_jax.evals.evaluate import Actor
from svrl_jax.rollout.remote import RemotePolicy
from svrl_jax.training import assemble
from svrl_jax.training.assemble import Bench, PolicyFolderError
from svrl_jax.training.run_folder import CHECKPOINTS


def is_served(policy: str | None) -> bool:
    """True if the policy is a server's address: no weights are needed then."""
    return policy is not None and policy.startswith(("http://", "https://"))


def load(bench: Bench, policy: str | None, name: str | None = None) -> Actor:
    """The policy that a command names.

    Args:
      policy: None takes the bench's initial policy. An address takes the place of
        `config.remote.endpoint`; the bench may then be without weights.
      name: for records; default: the folder's, with its step for a checkpoint.
    Raises:
      FileNotFoundError, PolicyFolderError, CheckpointError: there is none, or it does not fit.
      PolicyStopped: a served policy that cannot be asked.
    """
    if policy is None:
        return Actor(
            name or bench.folder.name, digest_of(bench.folder), bench.sampler, bench.initial_params
        )
    if is_served(policy):
        remote = bench.config.remote
        remote.endpoint = policy
        sampler = RemotePolicy(bench.config, bench.builder.texts, bench.tokenizer)
        return Actor(name or remote.model, f"{remote.model} at {policy}", sampler)
    path = pathlib.Path(policy)
    found = _checkpoint_of(path)
    if found is not None:
        folder, step = found
        params, step = _checkpoint_params(bench, folder, step)
        default = f"{folder.absolute().parent.name}-{step}"
        return Actor(name or default, digest_of_params(params), bench.sampler, params)
    folder = assemble.policy_folder(policy)
    params = assemble.policy_params(bench, folder)
    return Actor(name or folder.name, digest_of(folder), bench.sampler, params)


def digest_of(folder: pathlib.Path) -> str:
    """Sixteen hex digits of a folder's weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()[:16]


def digest_of_params(params: Any) -> str:
    """Sixteen hex digits of parameters in memory."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def _checkpoint_of(path: pathlib.Path) -> tuple[pathlib.Path, int | None] | None:
    """(folder of checkpoints, step or None for the newest) if the path names one."""
    if (path / CHECKPOINTS).is_dir() and any((path / CHECKPOINTS).iterdir()):
        return path / CHECKPOINTS, None
    if path.name.isdecimal() and path.parent.name == CHECKPOINTS:
        return path.parent, int(path.name)
    return None


def _checkpoint_params(bench: Bench, folder: pathlib.Path, step: int | None) -> tuple[Any, int]:
    config = bench.config
    spec = grpo.make_spec(
        bench.model,
        config.grpo,
        config.optim,
        temperature=config.rollout.temperature or 1.0,
        budget=config.rollout.budget,
        banned_ids=bench.banned,
        remat=config.model.remat,
        mesh=bench.mesh,
    )
    with checkpoint.Checkpoints(folder, keep=2**31) as checkpoints:
        found = checkpoints.restore(grpo.init_state(bench.initial_params, spec), step)
    if found is None:
        raise PolicyFolderError(f"{folder} holds no finished checkpoint: name a policy folder")
    return found.state.params, found.step
