import copy
import json

import pytest
from transformers import Qwen2_5_VLConfig

from svrl_jax.models.qwen_vl.config import QwenVLConfig

# The layout of the published 7B folder.
FLAT = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "hidden_size": 1280,
        "in_chans": 3,
        "model_type": "qwen2_5_vl",
        "out_hidden_size": 3584,
        "spatial_patch_size": 14,
        "tokens_per_second": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}


def test_the_published_layout_and_transformers_own_mean_the_same(tmp_path):
    flat = QwenVLConfig.from_hf(FLAT)
    reference = Qwen2_5_VLConfig(**copy.deepcopy(FLAT))
    nested = QwenVLConfig.from_hf(reference.to_dict())
    assert flat == nested
    reference.save_pretrained(tmp_path)
    assert QwenVLConfig.from_folder(tmp_path) == flat
    assert flat.text_config.head_dim == 128 and flat.vision_config.head_dim == 80
    assert flat.text_config.rms_norm_eps == 1e-6 and flat.vision_config.depth == 32


def test_transformers_reads_our_config():
    ours = QwenVLConfig.from_hf(FLAT)
    again = Qwen2_5_VLConfig(**ours.to_hf())
    assert QwenVLConfig.from_hf(again.to_dict()) == ours
    assert QwenVLConfig.from_hf(json.loads(json.dumps(ours.to_hf()))) == ours


def test_a_tie_inside_the_text_config_counts():
    nested = QwenVLConfig.from_hf(FLAT).to_hf()
    del nested["tie_word_embeddings"]
    nested["text_config"]["tie_word_embeddings"] = True
    assert QwenVLConfig.from_hf(nested).tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2_vl"}, "qwen2_vl"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 20]}}, "half a head, 64"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ({"hidden_size": 3600}, "no multiple"),
    ],
)
def test_what_the_port_does_not_have_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        QwenVLConfig.from_hf(FLAT | change)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        QwenVLConfig.from_folder(tmp_path)
