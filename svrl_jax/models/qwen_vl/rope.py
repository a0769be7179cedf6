"""Token ids and picture grids -> M-RoPE positions (host), and positions -> rotary angles (JAX).

Position rule, one for both families: transformers 5.24 models/qwen2_5_vl/modeling_qwen2_5_vl.py
`get_rope_index`; angles: `Qwen2_5_VLRotaryEmbedding` (three blocks of frequencies, arXiv 2409.12191
section 2.1), `Qwen3VLTextRotaryEmbedding` (t, h and w take turns) and
`Qwen2_5_VLVisionRotaryEmbedding` (two axes, both families).

Worked example, 3 text tokens, a picture of 2 x 3 merged cells, 2 text tokens:

    t  0 1 2 | 3 3 3 3 3 3 | 6 7        the picture starts at 3; the counter then moves by
    h  0 1 2 | 3 3 3 4 4 4 | 6 7        max(2, 3) = 3, not by its 6 tokens, so the next is at 6
    w  0 1 2 | 3 4 5 3 4 5 | 6 7        and the one appended after the row at 8
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from svrl_jax.models.qwen_vl.config import QwenVLConfig, TextConfig


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
      ValueError: the image tokens are not exactly the pictures' merged cells, in unbroken runs; or
        a video token, for which this port has no rule.
    """
    ids = np.asarray(ids)
    if (ids == config.video_token_id).any():
        raise ValueError("a video token among the ids; only pictures are supported")
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


def frequency_axes(config: TextConfig) -> np.ndarray:
    """int[H/2]: which of (t, h, w) turns each frequency.

    For sections (4, 2, 2): blocks are 0 0 0 0 1 1 2 2; interleaved is 0 1 2 0 1 2 0 0.
    """
    if not config.has_interleaved_mrope:
        return np.repeat(np.arange(3), config.mrope_section)
    axes = np.zeros(config.head_dim // 2, np.int64)
    for axis in (1, 2):
        axes[axis : 3 * config.mrope_section[axis] : 3] = axis
    return axes


def text_rope(positions: jax.Array, config: TextConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the text tower's rotary angles.

    Args:
      positions: int32[3, B, T].
    Returns:
      (cos, sin), each float32[B, T, H/2]: float32 whatever the model's dtype, since bfloat16 holds
      no integer above 256 exactly.
    """
    turned = jnp.moveaxis(positions.astype(jnp.float32), 0, -1)  # [B, T, 3]
    angles = turned[..., frequency_axes(config)] * _inverse_frequencies(
        config.head_dim // 2, config.rope_theta
    )
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
    angles = position_hw.astype(jnp.float32)[:, :, None] * _inverse_frequencies(quarter, theta)
    angles = angles.reshape(-1, 2 * quarter)  # from [L, 2, H/4]
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


def _inverse_frequencies(count: int, theta: float) -> np.ndarray:
    """float32[count], theta^(-i / count), rounded where the reference rounds (the exponent, the
    power, its inverse): at position 8,000 one last bit more is half a thousandth of a radian."""
    exponent = np.arange(0, 2 * count, 2, dtype=np.float32) / np.float32(2 * count)
    power = np.power(float(theta), exponent.astype(np.float64)).astype(np.float32)
    return np.float32(1.0) / power
