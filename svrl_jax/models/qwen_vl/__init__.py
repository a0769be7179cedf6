"""Qwen2.5-VL and Qwen3-VL in flax.nnx: pictures and text to logits, Hugging Face folders."""

from svrl_jax.models.qwen_vl.attention import attend, attention_mask
from svrl_jax.models.qwen_vl.config import (
    Qwen3VisionConfig,
    QwenVLConfig,
    TextConfig,
    VisionConfig,
)
from svrl_jax.models.qwen_vl.model import QwenVL, default_image_index
from svrl_jax.models.qwen_vl.rope import mrope_positions
from svrl_jax.models.qwen_vl.text import KVCache, init_cache
from svrl_jax.models.qwen_vl.vision_plan import VisionPlan, pad_pixel_values, plan_vision

__all__ = [
    "KVCache",
    "Qwen3VisionConfig",
    "QwenVL",
    "QwenVLConfig",
    "TextConfig",
    "VisionConfig",
    "VisionPlan",
    "attend",
    "attention_mask",
    "default_image_index",
    "init_cache",
    "mrope_positions",
    "pad_pixel_values",
    "plan_vision",
]
