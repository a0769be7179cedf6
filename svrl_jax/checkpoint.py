"""Training state <-> checkpoint folders: parameters, optimiser, data position and config together.

Layout: `FOLDER/STEP/arrays` (orbax, one entry a leaf, named by its path in the state) and
`FOLDER/STEP/host` (JSON). Both are committed as one: orbax writes into a temporary folder, marks it
and renames it. A step without its marks is unfinished and is never restored from.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import shutil
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

ITEMS = ("arrays", "host")
# Written by orbax (0.12 and later) when an item, and at last the whole step, is complete.
COMMIT_MARK = "commit_success.txt"

_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the folder and the remedy."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What one checkpoint holds.

    Attributes:
      step: steps that were done when it was written.
      state: pytree of arrays, shaped as the abstract state it was restored onto.
      data_position: JSON value, where the data stream stood.
      config: JSON value, the resolved config.
      host: JSON value, whatever else the host side keeps.
    """

    step: int
    state: Any
    data_position: Any
    config: Any
    host: Any


class Checkpoints:
    """The checkpoints of one run. Saving goes on in the background; `close` (also run at exit)
    waits for it, so the last save is never lost. Usable as a context manager."""

    def __init__(self, folder: str | os.PathLike, keep: int = 2):
        """Args:
        folder: made if missing.
        keep: number of finished steps to keep, the newest; at least 1.
        """
        if keep < 1:
            raise ValueError(f"keep_checkpoints must be at least 1, got {keep}")
        self.folder = pathlib.Path(folder).absolute()
        self.keep = keep
        self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(*ITEMS))
        self._closed = False
        # Not atexit: by then thread pools take no more work and the writer cannot finish. This
        # hook, which concurrent.futures uses itself, runs before they are shut, the latest first.
        threading._register_atexit(_close_if_alive, weakref.ref(self))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Finished steps, oldest first. Unfinished ones are skipped with a warning."""
        finished = []
        for step in sorted(self._folders()):
            missing = _missing(self.folder / str(step))
            if missing:
                _log.warning(
                    "checkpoint %s is unfinished (no %s) and is ignored",
                    self.folder / str(step),
                    missing[0],
                )
            else:
                finished.append(step)
        return finished

    def latest(self) -> int | None:
        """The newest finished step, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, *, data_position: Any, config: Any, host: Any) -> None:
        """Starts writing a checkpoint; arrays are copied before it returns, so `state` may be
        donated.

        Args:
          step: steps done.
          state: pytree of arrays (typed random keys included).
          data_position, config, host: JSON values.
        Raises:
          CheckpointError: the step has a finished checkpoint already. An unfinished one is
            replaced.
        """
        self.wait()
        target = self.folder / str(step)
        if target.exists():
            if not _missing(target):
                raise CheckpointError(
                    f"checkpoint {target} exists already and is not overwritten: "
                    "remove it, or choose another workdir"
                )
            _log.warning("unfinished checkpoint %s is replaced", target)
            shutil.rmtree(target)
        self.folder.mkdir(parents=True, exist_ok=True)
        notes = {"step": step, "data_position": data_position, "config": config, "host": host}
        self._writer.save(
            target,
            ocp.args.Composite(
                arrays=ocp.args.StandardSave(_to_named(state)), host=ocp.args.JsonSave(notes)
            ),
        )

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored | None:
        """Reads a checkpoint onto the shapes, dtypes and shardings of `abstract_state`.

        Args:
          abstract_state: pytree of arrays or jax.ShapeDtypeStruct.
          step: which; None is the newest finished one.
        Returns:
          None if `step` is None and there is no finished checkpoint.
        Raises:
          CheckpointError: the named step is missing or unfinished, or its files cannot be read.
        """
        self.wait()
        if step is None:
            step = self.latest()
            if step is None:
                return None
        target = self.folder / str(step)
        missing = _missing(target)
        if missing:
            finished = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"checkpoint {target} is unfinished or missing (no {missing[0]}): "
                f"choose a finished step ({finished})"
            )
        try:
            read = self._writer.restore(
                target,
                ocp.args.Composite(
                    arrays=ocp.args.StandardRestore(_to_named(abstract_state, abstract=True)),
                    host=ocp.args.JsonRestore(),
                ),
            )
            state, notes = _from_named(read["arrays"], abstract_state), read["host"]
            return Restored(step, state, notes["data_position"], notes["config"], notes["host"])
        except Exception as error:  # orbax and tensorstore raise many kinds
            cause = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"checkpoint {target} cannot be read ({type(error).__name__}: {cause}): move that "
                "folder away to go on from the step before it, or start in another workdir"
            ) from error

    def wait(self) -> None:
        """Waits for a save in progress, then deletes all but the newest `keep` finished steps."""
        if self._closed:
            raise CheckpointError(f"checkpoints of {self.folder} are closed: open them again")
        self._writer.wait_until_finished()
        if jax.process_index() == 0:
            finished = [s for s in sorted(self._folders()) if not _missing(self.folder / str(s))]
            for step in finished[: -self.keep]:
                shutil.rmtree(self.folder / str(step))

    def close(self) -> None:
        """Waits for a save in progress and ends the writer. A second call does nothing."""
        if self._closed:
            return
        self.wait()
        self._closed = True
        self._writer.close()

    def _folders(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return [int(p.name) for p in self.folder.iterdir() if p.name.isdecimal() and p.is_dir()]


def _close_if_alive(reference: weakref.ref[Checkpoints]) -> None:
    checkpoints = reference()
    if checkpoints is not None:
        checkpoints.close()


def _missing(target: pathlib.Path) -> list[str]:
    """Names of the marks that a finished checkpoint has and this folder lacks."""
    marks = [COMMIT_MARK, *(f"{item}/{COMMIT_MARK}" for item in ITEMS)]
    return [mark for mark in marks if not (target / mark).is_file()]


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_named(state: Any, *, abstract: bool = False) -> dict[str, Any]:
    """Leaves by path, `params.language_model.norm.weight.value`: a change of model shows as a name.

    Typed random keys are stored as their integers, since array stores do not know their dtype.
    """
    named = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if abstract:
            shaped = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
            sharding = None if _is_key(leaf) else getattr(leaf, "sharding", None)
            leaf = jax.ShapeDtypeStruct(shaped.shape, shaped.dtype, sharding=sharding)
        elif _is_key(leaf):
            leaf = jax.random.key_data(leaf)
        named[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
    return named


def _from_named(named: dict[str, Any], abstract_state: Any) -> Any:
    """The inverse of `_to_named`, shaped as `abstract_state`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract_state)
    restored = []
    for path, like in leaves:
        leaf = named[jax.tree_util.keystr(path, simple=True, separator=".")]
        if _is_key(like):
            impl = jax.random.key_impl(jnp.empty((), like.dtype))  # `like` may be a shape only
            leaf = jax.random.wrap_key_data(leaf, impl=impl)
        restored.append(leaf)
    return jax.tree_util.tree_unflatten(structure, restored)
