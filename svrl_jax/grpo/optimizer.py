"""config.optim -> the optimiser: AdamW (arXiv:1711.05101) behind a clip of the global norm.

Frozen parameters are no part of what it sees: they have no gradient and no state.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class OptimOptions:
    """config.optim, hashable, so that it can be static under jit.

    Attributes:
      learning_rate: after the warm-up.
      warmup_steps: optimiser steps of a linear warm-up whose first step is not zero.
      weight_decay: of matrices; norms and biases do not decay.
      b1, b2: Adam's.
      clip_norm: largest global norm of the gradient; 0 turns the clip off.
      freeze: patterns of dotted parameter paths that stay as they are (`visual.*`).
      only: patterns of those that are trained; () means all. With adapters, these.
    """

    learning_rate: float
    warmup_steps: int
    weight_decay: float
    b1: float
    b2: float
    clip_norm: float
    freeze: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def trainable(self, params: Any) -> Any:
        """The parameter tree with an empty node in each frozen leaf's place.

        Raises:
          ValueError: a pattern that names no parameter, or nothing is left to train.
        """
        if not self.freeze and not self.only:
            return params
        names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        for pattern in self.freeze:
            if not fnmatch.filter(names, pattern):
                raise ValueError(
                    f"config.optim.freeze has {pattern!r}, which names no parameter; "
                    f"parameters are named like {names[0]}"
                )

        def one(path, leaf):
            name = _name(path)
            is_frozen = any(fnmatch.fnmatchcase(name, p) for p in self.freeze)
            if self.only:
                is_frozen |= not any(fnmatch.fnmatchcase(name, p) for p in self.only)
            return optax.MaskedNode() if is_frozen else leaf

        kept = jax.tree_util.tree_map_with_path(one, params)
        if not jax.tree.leaves(kept):
            raise ValueError(f"config.optim.freeze {self.freeze} leaves nothing to train")
        return kept

    def rate(self, count: jax.Array) -> jax.Array:
        """Learning rate of optimiser step `count` (0 is the first).

        Free of num_steps, so that a run can be extended without having been another run.
        """
        return self.learning_rate * jnp.minimum(1.0, (count + 1) / max(1, self.warmup_steps))

    def make(self) -> optax.GradientTransformation:
        """The optax transformation; `steps_done` reads its state."""
        clip = optax.clip_by_global_norm(self.clip_norm) if self.clip_norm > 0 else optax.identity()
        return optax.chain(
            clip,
            optax.scale_by_adam(b1=self.b1, b2=self.b2),
            optax.add_decayed_weights(self.weight_decay, mask=decays),
            optax.scale_by_learning_rate(self.rate),
        )


def with_frozen(trainable: Any, params: Any) -> Any:
    """`OptimOptions.trainable`'s tree made whole again with the frozen leaves of `params`."""
    return jax.tree.map(
        lambda new, old: old if _is_empty(new) else new, trainable, params, is_leaf=_is_empty
    )


def trained_part(like: Any, params: Any) -> Any:
    """The leaves of `params` at which `like` (gradients, say) has one too."""
    return jax.tree.map(
        lambda kept, own: kept if _is_empty(kept) else own, like, params, is_leaf=_is_empty
    )


def steps_done(opt_state: Any) -> jax.Array:
    """int32[], optimiser steps taken so far; skipped updates do not count."""
    return opt_state[1].count  # scale_by_adam is the chain's second link


def decays(params: Any) -> Any:
    """Tree of bools, False on norms and biases. By name: stacked layers hide a vector's rank."""

    def one(path, _):
        names = jax.tree_util.keystr(path).lower()
        return not any(part in names for part in ("norm", "bias", "ln_q"))

    return jax.tree_util.tree_map_with_path(one, params)


def _name(path: tuple) -> str:
    return ".".join(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey))


def _is_empty(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
