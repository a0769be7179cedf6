"""Random tiny models of transformers, one a family, saved to folders, and ours loaded from them."""

import copy
import dataclasses
import pathlib

import jax
import numpy as np
import pytest
import torch
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.models.qwen_vl.model import QwenVL
from svrl_jax.models.qwen_vl.weights import load_weights
from tests.conftest import compiler

IMAGE, VIDEO, VISION_START, VISION_END = 100, 101, 102, 103
CLASSES = {
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
}
FAMILIES = tuple(CLASSES)

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
# All widths differ, so that a swapped pair shows. Qwen2.5-VL: vision layers 1 and 3 are full.
# Qwen3-VL: heads wider together than the model (as in the 4B), fewer levels than text layers, a
# position table coarser than some pictures and finer than others.
SETTINGS = {
    "qwen2_5_vl": {
        "text_config": TEXT
        | {
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
        **TOKENS,
    },
    "qwen3_vl": {
        "text_config": TEXT
        | {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [5, 4, 3],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 4,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
        },
        **TOKENS,
    },
}


@dataclasses.dataclass
class Pair:
    """The reference and ours, same weights, float32."""

    torch_model: PreTrainedModel
    model: QwenVL
    config: QwenVLConfig
    folder: pathlib.Path

    @property
    def family(self) -> str:
        return self.config.model_type

    def pixels(self, grids, seed=0) -> np.ndarray:
        """float32[L, C] for the grids."""
        return random_pixels(grids, self.config.vision_config.patch_dim, seed)


def reference_config(family="qwen2_5_vl", **changes):
    """The family's settings; a change to `text_config` or `vision_config` is merged into it."""
    settings = copy.deepcopy(SETTINGS[family])
    for name, value in changes.items():
        settings[name] = settings[name] | value if isinstance(value, dict) else value
    return CLASSES[family][0](**settings)


def reference_model(family="qwen2_5_vl", **changes) -> PreTrainedModel:
    """Every parameter random, biases and norms too: one that is left out shows."""
    torch.manual_seed(0)
    model = CLASSES[family][1](reference_config(family, **changes)).eval().float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            is_norm = param.ndim == 1 and name.endswith("weight")
            # Fan-in, far above the class's 0.02: with near-uniform attention a wrong mask hardly
            # shows. Twice as much and rounding alone, in both models, passes the tolerance.
            scale = 0.2 if param.ndim == 1 else param[0].numel() ** -0.5
            if "pos_embed" in name:
                scale = 1.0  # as large as what it is added to
            param.copy_(torch.randn_like(param) * scale + (1.0 if is_norm else 0.0))
    return model


def make_pair(folder: pathlib.Path, family: str, **changes) -> Pair:
    torch_model = reference_model(family, **changes)
    torch_model.save_pretrained(folder)
    model, config = load_weights(folder)
    return Pair(torch_model, model, config, folder)


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"), compiler(is_quick=True):
        yield


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> dict[str, Pair]:
    return {family: make_pair(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="session", params=FAMILIES)
def pair(request, pairs) -> Pair:
    """Each family in turn."""
    return pairs[request.param]


@pytest.fixture(scope="session")
def pair25(pairs) -> Pair:
    return pairs["qwen2_5_vl"]


@pytest.fixture(scope="session")
def pair3(pairs) -> Pair:
    return pairs["qwen3_vl"]


def close(name: str, found, expected, atol: float = 1e-4) -> None:
    """Within `atol` everywhere; prints the largest difference (`pytest -s` shows it)."""
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    print(f"{name}: differs by at most {np.abs(found - expected).max():.1e}")
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


def random_pixels(grids, patch_dim=1176, seed=0) -> np.ndarray:
    """float32[L, C] for the grids."""
    count = int(np.prod(np.asarray(grids), axis=1).sum())
    return np.random.default_rng(seed).standard_normal((count, patch_dim)).astype(np.float32)


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
