"""Names of released models -> their configs, for planning and tests without a download.

Values: the hub's config.json of each model. Loading a folder never reads this table; other sizes
(Qwen2.5-VL-32B and -72B among them) come from their own config.json.
"""

from __future__ import annotations

from svrl_jax.models.qwen_vl.config import (
    QWEN3,
    Qwen3VisionConfig,
    QwenVLConfig,
    TextConfig,
    VisionConfig,
)


def _qwen2_5(
    *, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool
) -> QwenVLConfig:
    return QwenVLConfig(
        text_config=TextConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=128_000,
            rms_norm_eps=1e-6,
        ),
        vision_config=VisionConfig(hidden_size=1280, out_hidden_size=hidden, tokens_per_second=2),
        tie_word_embeddings=tied,
    )


def _qwen3(
    *,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    tied: bool,
    vision_hidden: int,
    vision_mlp: int,
    vision_depth: int,
    deepstack: tuple[int, ...],
) -> QwenVLConfig:
    return QwenVLConfig(
        text_config=TextConfig(
            vocab_size=151_936,
            hidden_size=hidden,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            max_position_embeddings=262_144,
            rms_norm_eps=1e-6,
            rope_theta=5_000_000.0,
            mrope_section=(24, 20, 20),
            head_dim=128,
            model_type=QWEN3,
        ),
        vision_config=Qwen3VisionConfig(
            hidden_size=vision_hidden,
            out_hidden_size=hidden,
            depth=vision_depth,
            intermediate_size=vision_mlp,
            deepstack_visual_indexes=deepstack,
        ),
        tie_word_embeddings=tied,
    )


_SMALL_VISION = {
    "vision_hidden": 1024,
    "vision_mlp": 4096,
    "vision_depth": 24,
    "deepstack": (5, 11, 17),
}
RELEASED: dict[str, QwenVLConfig] = {
    "Qwen2.5-VL-3B-Instruct": _qwen2_5(
        hidden=2048, mlp=11008, layers=36, heads=16, kv_heads=2, vocab=151_936, tied=True
    ),
    "Qwen2.5-VL-7B-Instruct": _qwen2_5(
        hidden=3584, mlp=18944, layers=28, heads=28, kv_heads=4, vocab=152_064, tied=False
    ),
    "Qwen3-VL-2B-Instruct": _qwen3(
        hidden=2048, mlp=6144, layers=28, heads=16, tied=True, **_SMALL_VISION
    ),
    "Qwen3-VL-4B-Instruct": _qwen3(
        hidden=2560, mlp=9728, layers=36, heads=32, tied=True, **_SMALL_VISION
    ),
    "Qwen3-VL-8B-Instruct": _qwen3(
        hidden=4096,
        mlp=12288,
        layers=36,
        heads=32,
        tied=False,
        vision_hidden=1152,
        vision_mlp=4304,
        vision_depth=27,
        deepstack=(8, 16, 24),
    ),
}
