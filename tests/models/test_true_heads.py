"""The 7B's true head layout: 28 query heads, 4 key heads, 128 wide, in two layers; vision heads of
the true width, 80 (Qwen2.5-VL) and 72 (Qwen3-VL)."""

import numpy as np
import pytest
import torch
from flax import nnx

from svrl_jax.models.qwen_vl import default_image_index, mrope_positions, plan_vision
from tests.models.conftest import FAMILIES, IMAGE, close, make_pair, row

TEXT = {
    "qwen2_5_vl": {
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    },
    "qwen3_vl": {
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
}
VISION = {
    "qwen2_5_vl": {"hidden_size": 160, "out_hidden_size": 3584},
    "qwen3_vl": {"hidden_size": 144},
}
GRIDS = [(1, 6, 10), (1, 14, 4)]


@pytest.mark.parametrize("family", FAMILIES)
def test_true_heads_equal_the_reference(family, tmp_path):
    pair = make_pair(tmp_path, family, text_config=TEXT[family], vision_config=VISION[family])
    ids = row(5, GRIDS[0], 3, GRIDS[1], 7)[None]
    pixels = pair.pixels(GRIDS)
    with torch.no_grad():
        expected = pair.torch_model(
            input_ids=torch.tensor(ids, dtype=torch.long),
            mm_token_type_ids=torch.tensor(ids == IMAGE, dtype=torch.long),
            pixel_values=torch.tensor(pixels),
            image_grid_thw=torch.tensor(GRIDS),
        ).logits.numpy()
    positions, _ = mrope_positions(ids[0], np.asarray(GRIDS), pair.config)
    plan = plan_vision(np.asarray(GRIDS), pair.config.vision_config)

    @nnx.jit
    def logits(model, pixels, plan):
        embeds = model.encode_images(pixels, plan)
        index = default_image_index(ids, IMAGE)
        zeros = np.zeros_like(ids)
        return model.logits(model(ids, positions[:, None], zeros, zeros, embeds, index))

    found = logits(pair.model, pixels, plan)
    assert pair.config.text_config.head_dim == 128 and expected.std() > 0.5
    close(f"{family} true heads", found, expected)
