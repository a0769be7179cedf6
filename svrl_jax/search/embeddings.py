"""Names of picture embeddings -> functions uint8[H, W, 3] -> float32[D]."""

from __future__ import annotations

import importlib
import math
import pathlib
from collections.abc import Callable

import numpy as np

from svrl_jax.search.errors import SearchSetupError

Embedding = Callable[[np.ndarray], np.ndarray]

TOWER = "tower:"
_TOWER_PIXELS = 224 * 224  # every picture is brought to this square, so one program embeds all


def colours(picture: np.ndarray) -> np.ndarray:
    """uint8[H, W, 3] -> float32[48]: mean colours of a 4 x 4 grid, in [0, 1]. Needs no model."""
    from PIL import Image

    small = Image.fromarray(picture).resize((4, 4), Image.Resampling.BOX)
    return np.asarray(small, np.float32).ravel() / 255.0


def embedding_of(name: str) -> Embedding:
    """The embedding of a name.

    Args:
      name: `colours`; `tower:FOLDER`, the vision tower of a policy in the Hugging Face layout; or
        `module:function`.
    Raises:
      SearchSetupError: a folder that does not load, or a function that cannot be imported.
    """
    if name == "colours":
        return colours
    if name.startswith(TOWER):
        return _tower(pathlib.Path(name.removeprefix(TOWER)))
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SearchSetupError(
            f"the picture embedding {name!r} cannot be imported ({error}): name 'colours', "
            "tower:FOLDER or module:function"
        ) from error


def _tower(folder: pathlib.Path) -> Embedding:
    """Mean of the tower's features over the picture's cells, of length 1; float32.

    The whole policy is read, and all but its tower let go.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from PIL import Image

    from svrl_jax.models.qwen_vl.vision_plan import plan_vision
    from svrl_jax.models.qwen_vl.weights import load_weights
    from svrl_jax.processing.images import ImageProcessor

    try:
        processor = ImageProcessor.from_folder(folder)
        model, _ = load_weights(folder, jnp.float32)
    except (OSError, ValueError) as error:
        raise SearchSetupError(
            f"the picture embedding {TOWER}{folder} cannot be loaded ({error}): name a policy's "
            "folder"
        ) from error
    graphdef, params = nnx.split(model.visual)
    width = model.config.text_config.hidden_size
    vision_config = model.config.vision_config
    side = math.isqrt(min(max(_TOWER_PIXELS, processor.min_pixels), processor.max_pixels))

    @jax.jit
    def features(params, pixel_values, plan):
        cells = nnx.merge(graphdef, params)(pixel_values, plan)  # [M, F]
        mean = cells[:, :width].astype(jnp.float32).mean(axis=0)
        return mean / jnp.maximum(jnp.linalg.norm(mean), 1e-12)

    def embed(picture: np.ndarray) -> np.ndarray:
        square = Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC)
        pixel_values, grids = processor([square])
        return np.asarray(features(params, pixel_values, plan_vision(grids, vision_config)))

    return embed
