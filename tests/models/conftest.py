"""A random tiny Qwen2.5-VL of transformers, saved to a folder, and ours loaded from it."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.models.qwen_vl.model import QwenVL
from svrl_jax.models.qwen_vl.weights import load_weights

IMAGE, VIDEO, VISION_START, VISION_END = 100, 101, 102, 103


@dataclasses.dataclass
class Pair:
    """The reference and ours, same weights, float32."""

    torch_model: Qwen2_5_VLForConditionalGeneration
    model: QwenVL
    config: QwenVLConfig
    folder: pathlib.Path


def reference_config(**changes) -> Qwen2_5_VLConfig:
    """Two text layers, four vision layers of which 1 and 3 are full; all widths differ."""
    settings = {
        "text_config": {
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
        },
        "vision_config": {
            "depth": 4,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1, 3],
        },
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    return Qwen2_5_VLConfig(**settings | changes)


def reference_model(**changes) -> Qwen2_5_VLForConditionalGeneration:
    """Every parameter random, biases and norms too: one that is left out shows."""
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(reference_config(**changes)).eval().float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            is_norm = param.ndim == 1 and name.endswith("weight")
            # Fan-in, far above the class's 0.02: with near-uniform attention a wrong mask hardly
            # shows. Twice as much and rounding alone, in both models, passes the tolerance.
            scale = 0.2 if param.ndim == 1 else param[0].numel() ** -0.5
            param.copy_(torch.randn_like(param) * scale + (1.0 if is_norm else 0.0))
    return model


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("reference")
    torch_model = reference_model()
    torch_model.save_pretrained(folder)
    model, config = load_weights(folder)
    return Pair(torch_model, model, config, folder)


def random_pixels(grids, seed=0) -> np.ndarray:
    """float32[L, 1176] for the grids."""
    count = int(np.prod(np.asarray(grids), axis=1).sum())
    return np.random.default_rng(seed).standard_normal((count, 1176)).astype(np.float32)


def row(*parts) -> np.ndarray:
    """Ids from numbers of text tokens (int) and pictures (their grid, a tuple), seeded by place."""
    rng = np.random.default_rng(len(parts))
    ids: list[int] = []
    for part in parts:
        if isinstance(part, tuple):
            ids += [VISION_START, *[IMAGE] * (int(np.prod(part)) // 4), VISION_END]
        else:
            ids += rng.integers(0, 90, part).tolist()
    return np.asarray(ids, np.int32)
