"""Pictures of some appends -> their features, in vision calls of few shapes."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import numpy as np

from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.models.qwen_vl.vision_plan import VisionPlan, plan_vision

PICTURES_PER_CALL = 16  # vision batch of small pictures, ...
PATCHES_PER_CALL = 1024  # ... which together have at most so many patches


class PictureEncoder:
    """Batches pictures for the vision tower.

    Args:
      config: of the model.
      encode: (float32[L, C], plan) -> float[M, F] on the device.
      counts: `patches` and `patch_places` (what the programs had room for) are added to it.
    """

    def __init__(
        self,
        config: QwenVLConfig,
        encode: Callable[[np.ndarray, VisionPlan], np.ndarray],
        counts: collections.Counter,
    ):
        self._config = config
        self._encode = encode
        self._counts = counts

    def features(
        self, contexts: Sequence[tuple[int, np.ndarray, np.ndarray, np.ndarray]], dtype
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Features of all pictures, float[M, F], and each context's row of them per token or -1.

        Args:
          contexts: (slot, ids, pixel_values, image_grid_thw) each; the slot for the message.
        Raises:
          ValueError: picture tokens and patches differ in number.
        """
        parts = [np.zeros((0, self._config.image_feature_size), dtype)]
        merge = self._config.vision_config.merge_unit
        indices, total = [], 0
        pictures: list[tuple[np.ndarray, np.ndarray]] = []  # (patches, grid) of each
        for slot, ids, pixel_values, grids in contexts:
            is_image = ids == self._config.image_token_id
            sizes = grids.prod(axis=-1, dtype=np.int64)
            if is_image.sum() * merge != sizes.sum() or sizes.sum() != len(pixel_values):
                raise ValueError(
                    f"slot {slot}: {is_image.sum()} picture tokens and "
                    f"{len(pixel_values)} patches for grids {grids.tolist()}"
                )
            indices.append(np.where(is_image, total + np.cumsum(is_image) - 1, -1))
            total += int(is_image.sum())
            patches = np.split(pixel_values, np.cumsum(sizes)[:-1]) if len(sizes) else []
            pictures += zip(patches, grids, strict=True)
        while pictures:
            batch, pictures = _take_pictures(pictures)
            parts.append(self._encode_batch(batch))
        return np.concatenate(parts), indices

    def _encode_batch(self, batch) -> np.ndarray:
        """Features of some pictures, without padding. Small ones always fill a whole batch."""
        wanted = sum(len(patches) for patches, _ in batch)
        padded = list(batch)
        while len(padded) < PICTURES_PER_CALL and (
            sum(len(patches) for patches, _ in padded) + len(batch[0][0]) <= PATCHES_PER_CALL
        ):
            padded.append(batch[0])  # so that the plan's shape is that of a full batch
        num_patches = sum(len(patches) for patches, _ in padded)
        rows = max(PATCHES_PER_CALL, 1 << (num_patches - 1).bit_length())
        plan = plan_vision(
            np.stack([grid for _, grid in padded]), self._config.vision_config, pad_patches_to=rows
        )
        pixels = np.zeros((rows, batch[0][0].shape[1]), np.float32)
        pixels[:num_patches] = np.concatenate([patches for patches, _ in padded])
        self._counts["patches"] += wanted
        self._counts["patch_places"] += rows
        features = np.asarray(self._encode(pixels, plan))
        return features[: wanted // self._config.vision_config.merge_unit]


def _take_pictures(pictures: list) -> tuple[list, list]:
    """Splits off the pictures of the next vision call: at least one, few enough patches."""
    count, patches = 1, len(pictures[0][0])
    while (
        count < min(len(pictures), PICTURES_PER_CALL)
        and patches + len(pictures[count][0]) <= PATCHES_PER_CALL
    ):
        patches += len(pictures[count][0])
        count += 1
    return pictures[:count], pictures[count:]
