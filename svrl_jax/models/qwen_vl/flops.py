"""Config and lengths -> floating-point operations of a forward pass, counted from the model.

Two operations a multiply-add, matrix products only. (XLA's own count takes a scanned layer once.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from svrl_jax.models.qwen_vl.config import QwenVLConfig, VisionConfig

# Peak of one chip in bfloat16, operations a second, by what jax calls the device. Vendors' sheets,
# dense.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def forward_flops(
    config: QwenVLConfig,
    lengths: Sequence[int] | int,
    image_grid_thw: np.ndarray,
    head_tokens: int,
    pairs: float | None = None,
) -> float:
    """Operations of one pass over rows and their pictures.

    Args:
      lengths: real tokens of each row, or of all of them where `pairs` is given.
      image_grid_thw: int[I, 3] of all pictures.
      head_tokens: tokens that the vocabulary head is applied to.
      pairs: of query and key that attention meets, as `attended_pairs`; None: rows are causal.
    """
    text = config.text_config
    queries = text.num_attention_heads * text.head_dim
    keys = text.num_key_value_heads * text.head_dim
    size = text.hidden_size
    a_token = 2 * size * (2 * queries + 2 * keys) + 2 * 3 * size * text.intermediate_size
    lengths = np.atleast_1d(np.asarray(lengths, np.float64))
    attended = (lengths * (lengths + 1) / 2).sum() if pairs is None else pairs
    layers = text.num_hidden_layers * (lengths.sum() * a_token + 4 * queries * attended)
    head = 2.0 * head_tokens * size * text.vocab_size
    vision = _vision_flops(config, np.asarray(image_grid_thw, np.int64).reshape(-1, 3))
    return float(layers + head + vision)


def attended_pairs(group_id: np.ndarray, branch_id: np.ndarray) -> float:
    """Pairs of query and key that `attention.attention_mask` allows in packed rows.

    Args:
      group_id, branch_id: int[B, T]; a group's prompt (branch 0) stands before its branches.
    """
    pairs = 0.0
    for groups, branches in zip(np.asarray(group_id), np.asarray(branch_id), strict=True):
        for group in np.unique(groups[groups >= 0]):
            own, counts = np.unique(branches[groups == group], return_counts=True)
            counts = counts.astype(np.float64)
            prompt = counts[own == 0].sum()
            pairs += (counts * (counts + 1) / 2).sum() + prompt * counts[own != 0].sum()
    return pairs


def _vision_flops(config: QwenVLConfig, grids: np.ndarray) -> float:
    vision = config.vision_config
    size, patches = vision.hidden_size, float(grids.prod(axis=1).sum())
    is_windowed = isinstance(vision, VisionConfig)
    products = 3 if is_windowed else 2  # a gated MLP has one more
    a_patch = 2 * 4 * size * size + 2 * products * size * vision.intermediate_size
    frames = float((grids[:, 0] * (grids[:, 1] * grids[:, 2]) ** 2).sum())
    pairs = frames * vision.depth
    if is_windowed:
        full = len(vision.fullatt_block_indexes)
        window = (vision.window_size // vision.patch_size) ** 2
        pairs = frames * full + patches * window * (vision.depth - full)
    joined = size * vision.merge_unit
    mergers = 1 + len(vision.deepstack_visual_indexes)
    merging = patches / vision.merge_unit * 2 * joined * (joined + vision.out_hidden_size)
    return (
        patches * (2 * vision.patch_dim * size + vision.depth * a_patch)
        + 4 * size * pairs
        + mergers * merging
    )
