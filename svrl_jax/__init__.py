"""RL for multimodal search agents that check their own evidence, in JAX.

Four calls take a released model from its folder to text:

    model, processor = svrl_jax.load(folder_or_hub_id)
    inputs = processor(messages, images)
    logits = svrl_jax.logits(model, inputs)
    text = svrl_jax.generate(model, processor, messages, images)

They live in `svrl_jax.api`, which is imported on their first use: importing the package is light.
`svrl_jax.viewer.show(episode)` draws a recorded episode in a notebook.
"""

import importlib

__all__ = ["generate", "load", "logits"]


def __getattr__(name: str):
    if name in __all__:
        return getattr(importlib.import_module("svrl_jax.api"), name)
    if name == "viewer":
        return importlib.import_module("svrl_jax.viewer")
    raise AttributeError(f"module 'svrl_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
