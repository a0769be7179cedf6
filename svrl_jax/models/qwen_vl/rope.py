"""Token ids and picture grids -> M-RoPE positions (host), and positions -> rotary angles (JAX).

Position rule: transformers 5.24 models/qwen2_5_vl/modeling_qwen2_5_vl.py `get_rope_index`; angles:
`Qwen2_5_VLRotaryEmbedding` (three blocks of frequencies, arXiv 2409.12191 section 2.1) and
`Qwen2_5_VLVisionRotaryEmbedding` (two axes).

Worked example, 3 text tokens, a picture of 2 x 3 merged cells, 2 text tokens:

    t  0 1 2 | 3 3 3 3 3 3 | 6 7        the picture starts at 3; the counter then moves by
    h  0 1 2 | 3 3 3 4 4 4 | 6 7        max(2, 3) = 3, not by its 6 tokens, so the next is at 6
    w  0 1 2 | 3 4 5 3 4 5 | 6 7        and the one appended after the row at 8
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from svrl_jax.models.qwen_vl.config import QwenVLConfig


def mrope_positions(
    ids: np.ndarray, image_grid_thw: np.ndarray, config: QwenVLConfig, start: int = 0
) -> tuple[np.ndarray, int]:
    """Positions of one row's tokens; the only place that knows the rule.

    Args:
      ids: int[T], placeholders already expanded: one image token a merged cell. Pictures may touch.
      image_grid_thw: int[I, 3], patches (t, h, w) of the pictures in `ids`, in order; I may be 0.
      config: gives the image token and the merge size.
      start: position of the first token; for text appended to a context, that context's
        `next_position`.
    Returns:
      (int32[3, T], next_position): positions on the axes (t, h, w), and that of the token that
      would follow.
    Raises:
      ValueError: the image tokens are not exactly the pictures' merged cells, in unbroken runs.
    """
    ids = np.asarray(ids)
    grids = np.asarray(image_grid_thw, np.int64).reshape(-1, 3)
    merge = config.vision_config.spatial_merge_size
    is_image = ids == config.image_token_id
    sizes = grids.prod(axis=1) // merge**2
    if is_image.sum() != sizes.sum():
        raise ValueError(
            f"{int(is_image.sum())} image tokens for {len(grids)} pictures that need "
            f"{sizes.tolist()}; expand each placeholder to its picture's merged cells"
        )
    positions = np.empty((3, len(ids)), np.int32)
    index, counter = 0, int(start)
    for (grid_t, grid_h, grid_w), size in zip(grids, sizes, strict=True):
        text = int(np.argmax(is_image[index:]))  # tokens before the picture; its run must be whole
        positions[:, index : index + text] = np.arange(counter, counter + text)
        index, counter = index + text, counter + text
        if not is_image[index : index + size].all():
            raise ValueError(f"the picture at token {index} needs {size} image tokens in a row")
        cells = np.indices((grid_t, grid_h // merge, grid_w // merge)).reshape(3, -1)
        positions[:, index : index + size] = counter + cells
        index, counter = index + int(size), counter + int(max(grid_h, grid_w)) // merge
    text = len(ids) - index
    positions[:, index:] = np.arange(counter, counter + text)
    return positions, counter + text


def text_rope(
    positions: jax.Array, mrope_section: tuple[int, ...], theta: float
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the text tower's rotary angles.

    Args:
      positions: int32[3, B, T].
      mrope_section: frequencies a (t, h, w) axis; the first block turns by t, the second by h, ...
      theta: base of the frequencies.
    Returns:
      (cos, sin), each float32[B, T, H/2]: float32 whatever the model's dtype, since bfloat16 holds
      no integer above 256 exactly.
    """
    half = sum(mrope_section)
    inv_freq = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    axis = np.repeat(np.arange(3), mrope_section)  # [H/2], which axis turns each frequency
    turned = jnp.moveaxis(positions.astype(jnp.float32), 0, -1)[..., axis]  # [B, T, H/2]
    angles = turned * inv_freq
    return jnp.cos(angles), jnp.sin(angles)


def vision_rope(position_hw: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the vision tower's rotary angles.

    Args:
      position_hw: int32[L, 2], row and column of each patch in its picture.
      head_dim: width of a head; a quarter of it turns by the row, a quarter by the column.
      theta: base of the frequencies.
    Returns:
      (cos, sin), each float32[L, H/2].
    """
    quarter = head_dim // 4
    inv_freq = theta ** -(jnp.arange(quarter, dtype=jnp.float32) / quarter)
    angles = position_hw.astype(jnp.float32)[:, :, None] * inv_freq  # [L, 2, H/4]
    angles = angles.reshape(-1, 2 * quarter)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (i, i + H/2) of each head by the given angles, in float32.

    Args:
      x: float[..., heads, H].
      cos, sin: float32[..., H/2], without the heads axis.
    Returns:
      Same shape and dtype as `x`.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
