import copy
import json

import pytest
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig

from svrl_jax.models.qwen_vl.config import Qwen3VisionConfig, QwenVLConfig
from svrl_jax.models.qwen_vl.released import RELEASED

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
# The layout of the published Qwen3-VL-8B folder.
NESTED = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": False,
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
BOTH = [
    (FLAT, Qwen2_5_VLConfig, "Qwen2.5-VL-7B-Instruct"),
    (NESTED, Qwen3VLConfig, "Qwen3-VL-8B-Instruct"),
]


@pytest.mark.parametrize(("published", "kind", "name"), BOTH)
def test_the_published_layout_and_transformers_own_mean_the_same(published, kind, name, tmp_path):
    ours = QwenVLConfig.from_hf(published)
    assert ours == RELEASED[name]
    reference = kind(**copy.deepcopy(published))
    assert QwenVLConfig.from_hf(reference.to_dict()) == ours
    reference.save_pretrained(tmp_path)
    assert QwenVLConfig.from_folder(tmp_path) == ours
    assert ours.text_config.head_dim == 128 and ours.text_config.rms_norm_eps == 1e-6


@pytest.mark.parametrize(("published", "kind", "name"), BOTH)
def test_transformers_reads_our_config(published, kind, name):
    ours = RELEASED[name]
    again = kind(**ours.to_hf())
    assert QwenVLConfig.from_hf(again.to_dict()) == ours
    assert QwenVLConfig.from_hf(json.loads(json.dumps(ours.to_hf()))) == ours


@pytest.mark.parametrize(("kind", "width"), [(Qwen2_5_VLConfig, 8192), (Qwen3VLConfig, 4096)])
def test_fields_left_out_have_transformers_defaults(kind, width):
    vision = {"out_hidden_size": width}  # the default does not fit the text tower's
    written = kind(vision_config=vision).to_dict()
    bare = {"model_type": kind.model_type, "vision_config": vision}
    assert QwenVLConfig.from_hf(bare) == QwenVLConfig.from_hf(written)


def test_a_tie_inside_the_text_config_counts():
    nested = QwenVLConfig.from_hf(FLAT).to_hf()
    del nested["tie_word_embeddings"]
    nested["text_config"]["tie_word_embeddings"] = True
    assert QwenVLConfig.from_hf(nested).tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": {"attention_bias": True}}, "attention_bias"),
        ({"text_config": {"rope_scaling": {"mrope_interleaved": False}}}, "mrope_interleaved"),
        ({"text_config": {"rope_scaling": {"mrope_section": [16, 24, 24]}}}, "every third place"),
        ({"vision_config": {"hidden_act": "silu"}}, "gelu_pytorch_tanh"),
        ({"vision_config": {"deepstack_visual_indexes": [8, 8]}}, "rising"),
        ({"vision_config": {"deepstack_visual_indexes": [8, 27]}}, "below the depth, 27"),
        ({"vision_config": {"deepstack_visual_indexes": []}}, "0 deepstack levels"),
        ({"vision_config": {"num_position_embeddings": 2300}}, "no square"),
    ],
)
def test_what_the_port_of_qwen3_vl_does_not_have_is_refused(changes, message):
    changed = {name: NESTED[name] | change for name, change in changes.items()}
    with pytest.raises(ValueError, match=message):
        QwenVLConfig.from_hf(NESTED | changed)


def test_towers_of_two_families_are_refused():
    with pytest.raises(ValueError, match="another family"):
        QwenVLConfig(
            RELEASED["Qwen2.5-VL-7B-Instruct"].text_config, Qwen3VisionConfig(out_hidden_size=3584)
        )


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
