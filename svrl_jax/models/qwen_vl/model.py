"""Ids, positions and pictures -> hidden states and logits: both towers joined, either family.

Source: transformers 5.24 models/qwen2_5_vl/modeling_qwen2_5_vl.py and models/qwen3_vl/
modeling_qwen3_vl.py. The module splits into a static graph and a parameter tree
(`nnx.split(model)`), which is what jitted functions take.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from svrl_jax.models.qwen_vl.config import QwenVLConfig, VisionConfig
from svrl_jax.models.qwen_vl.execution import Execution
from svrl_jax.models.qwen_vl.layers import Linear
from svrl_jax.models.qwen_vl.text import Deepstack, KVCache, TextTower
from svrl_jax.models.qwen_vl.vision import VisionTower
from svrl_jax.models.qwen_vl.vision_plan import VisionPlan
from svrl_jax.models.qwen_vl.vision_qwen3 import Qwen3VisionTower


class QwenVL(nnx.Module):
    """visual, language_model, and lm_head where the head is not tied to the embeddings."""

    def __init__(self, config: QwenVLConfig, *, rngs: nnx.Rngs, param_dtype: Any = jnp.float32):
        text, vision = config.text_config, config.vision_config
        tower = VisionTower if isinstance(vision, VisionConfig) else Qwen3VisionTower
        self.config = config
        self.execution = Execution()
        self.visual = tower(vision, rngs=rngs, param_dtype=param_dtype)
        self.language_model = TextTower(text, rngs=rngs, param_dtype=param_dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(
                text.hidden_size,
                text.vocab_size,
                bias=False,
                std=text.initializer_range,
                rngs=rngs,
                param_dtype=param_dtype,
            )
        )

    def set_execution(self, execution: Execution) -> None:
        """Chooses how the model computes from now on."""
        self.execution = execution
        self.visual.execution = execution
        self.language_model.execution = execution

    def encode_images(
        self, pixel_values: jax.Array, plan: VisionPlan, *, remat: str = "none"
    ) -> jax.Array:
        """Maps float32[L, C] to float[M, F], one row a merged cell in reading order.

        F is `config.image_feature_size`: D in Qwen2.5-VL; in Qwen3-VL D for the embedding and D for
        each of the first text layers, which `model` and `extend` take apart again.
        """
        return self.visual(pixel_values, plan, remat=remat)

    def __call__(
        self,
        ids: jax.Array,
        positions: jax.Array,
        group_id: jax.Array,
        branch_id: jax.Array,
        image_embeds: jax.Array | None = None,
        image_index: jax.Array | None = None,
        *,
        remat: str = "none",
    ) -> jax.Array:
        """One pass over whole rows.

        Args:
          ids: int32[B, T].
          positions: int32[3, B, T].
          group_id, branch_id: int32[B, T]; group -1 is padding. See attention.attention_mask.
          image_embeds: float[M, F] from encode_images, or None for text alone.
          image_index: int32[B, T], row of image_embeds at image tokens, -1 elsewhere. Needed with
            image_embeds (`default_image_index` makes it).
          remat: what layers keep for the backward pass, see `layers.scan_layers`.
        Returns:
          float[B, T, D] after the final norm, in the dtype of `execution`. Meaningless on padding.
        """
        embeds, deepstack = self.embed(ids, image_embeds, image_index)
        return self.language_model(embeds, positions, group_id, branch_id, deepstack, remat=remat)

    def extend(
        self,
        ids: jax.Array,
        positions: jax.Array,
        k: jax.Array,
        v: jax.Array,
        starts: jax.Array,
        image_embeds: jax.Array | None = None,
        image_index: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Appends T tokens a row to a cache; T = 1 is a decode step.

        Args:
          ids: int32[B, T].
          positions: int32[3, B, T].
          k, v: float[layers, B, S, K, H].
          starts: int32[B], cache index of each row's first new token; starts + T <= S is the
            caller's care. Entries behind a row's real length are overwritten by later calls.
          image_embeds, image_index: as in a call.
        Returns:
          (hidden float[B, T, D], k, v). Token i of a row saw the keys at index <= starts + i.
        """
        embeds, deepstack = self.embed(ids, image_embeds, image_index)
        hidden, cache = self.language_model.extend(
            embeds, positions, KVCache(k, v), starts, deepstack
        )
        return hidden, cache.k, cache.v

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps float[..., D] to float32[..., V], raw; unused rows of V included."""
        weight = self.head_weight().astype(hidden.dtype)
        return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)

    def head_weight(self) -> jax.Array:
        """float[V, D] of the vocabulary head: its own, or the embeddings it is tied to."""
        head = self.language_model.embed_tokens if self.lm_head is None else self.lm_head
        return head.weight[...]

    def embed(
        self, ids: jax.Array, image_embeds: jax.Array | None, image_index: jax.Array | None
    ) -> tuple[jax.Array, Deepstack | None]:
        """Embeddings float[B, T, D] with the pictures in their places, and what is added later."""
        if (image_embeds is None) != (image_index is None):
            raise ValueError("image_embeds and image_index come together or not at all")
        embeds = self.language_model.embed(ids)
        if image_embeds is None:
            return embeds, None
        size, levels = embeds.shape[-1], len(self.config.vision_config.deepstack_visual_indexes)
        if image_embeds.shape[-1] != (1 + levels) * size:
            raise ValueError(
                f"image_embeds have width {image_embeds.shape[-1]}, not "
                f"{self.config.image_feature_size} as encode_images returns them"
            )
        first, later = image_embeds[:, :size], image_embeds[:, size:]
        features = jnp.take(first, jnp.maximum(image_index, 0), axis=0, mode="clip")
        embeds = jnp.where((image_index >= 0)[..., None], features.astype(embeds.dtype), embeds)
        if not levels:
            return embeds, None
        return embeds, Deepstack(later.reshape(-1, levels, size), image_index)


def default_image_index(ids: np.ndarray, image_token_id: int) -> np.ndarray:
    """Feature row of each image token when pictures are in reading order, row by row.

    Args:
      ids: int[B, T] (or [T]).
    Returns:
      int32, same shape: 0, 1, 2, ... over the image tokens, -1 elsewhere.
    """
    ids = np.asarray(ids)
    is_image = ids == image_token_id
    count = np.cumsum(is_image.reshape(-1)).reshape(ids.shape) - 1
    return np.where(is_image, count, -1).astype(np.int32)
