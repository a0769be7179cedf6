"""How a model computes, beside what it is: attention backend and dtype of activations.

Static: part of a model's graph (`nnx.split(model)[0]`), so a change compiles anew.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from svrl_jax.models.qwen_vl.attention_backends import BACKENDS


@dataclasses.dataclass(frozen=True)
class Execution:
    """Choices of one model.

    Attributes:
      attention: backend of whole rows and whole pictures, one of `attention_backends.BACKENDS`.
        Appending to a cache is always dense: its queries are few.
      compute_dtype: of activations and matrix products, `float32` or `bfloat16`; parameters are
        cast where they are used. None computes in the parameters' own dtype. Norms, angles, softmax
        and logits are float32 in any case.
    """

    attention: str = "auto"
    compute_dtype: str | None = None

    def __post_init__(self):
        if self.attention not in BACKENDS:
            raise ValueError(
                f"attention backend {self.attention!r} is none of {', '.join(BACKENDS)}"
            )

    def dtype_of(self, params_dtype: Any) -> Any:
        """Dtype of activations where parameters have the given one."""
        return params_dtype if self.compute_dtype is None else jnp.dtype(self.compute_dtype)
