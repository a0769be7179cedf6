"""A Hugging Face `config.json` of the Qwen2.5-VL family -> QwenVLConfig, and back.

Two layouts are read: the nested one that transformers 5 writes (`text_config` with
`rope_parameters`) and the flat one of the published hub folders (text fields at the top,
`rope_theta`, `rope_scaling`). Fields carry the checkpoint's names. A field that a file leaves out
has transformers' class default (5.24, models/qwen2_5_vl/configuration_qwen2_5_vl.py), because that
is what the file means: transformers itself leaves out values that equal the default.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

MODEL_TYPE = "qwen2_5_vl"


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The vision tower. `window_size` is in pixels; `fullatt_block_indexes` are layer numbers."""

    hidden_size: int = 3584
    out_hidden_size: int = 3584
    depth: int = 32
    num_heads: int = 16
    intermediate_size: int = 3420
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    window_size: int = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    tokens_per_second: int = 4
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Numbers in one patch row, flattened C, T, ph, pw."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge_unit(self) -> int:
        """Patches that become one text token."""
        return self.spatial_merge_size**2


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The text tower. `mrope_section` counts frequencies per (t, h, w); they sum to half a head."""

    vocab_size: int = 152064
    hidden_size: int = 8192
    intermediate_size: int = 29568
    num_hidden_layers: int = 80
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    mrope_section: tuple[int, ...] = (16, 24, 24)
    initializer_range: float = 0.02
    bos_token_id: int | None = 151643
    eos_token_id: int | tuple[int, ...] | None = 151645
    pad_token_id: int | None = None

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclasses.dataclass(frozen=True)
class QwenVLConfig:
    """Everything that fixes the shapes of a model; hashable, so that it can be static under jit."""

    text_config: TextConfig
    vision_config: VisionConfig
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    tie_word_embeddings: bool = False

    def __post_init__(self):
        _check(self)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> QwenVLConfig:
        """Reads `folder/config.json`; raises FileNotFoundError or ValueError naming the file."""
        path = os.path.join(folder, "config.json")
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path} is missing: a model folder needs a config.json")
        with open(path, encoding="utf-8") as file:
            try:
                return cls.from_hf(json.load(file))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> QwenVLConfig:
        """Reads the parsed `config.json`, nested or flat.

        Raises:
          ValueError: another model type, or a feature that this port does not have (sliding windows
            in the text tower, scaled rotary positions, another activation).
        """
        found = config.get("model_type", MODEL_TYPE)
        if found != MODEL_TYPE:
            raise ValueError(f"model_type is {found!r}; this port reads {MODEL_TYPE!r}")
        text = config.get("text_config") or config
        vision = config.get("vision_config") or {}
        own = {f.name for f in dataclasses.fields(cls)} - {
            "text_config",
            "vision_config",
            "tie_word_embeddings",
        }
        # Files from before transformers 5 hold the tie inside text_config.
        tied = config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
        return cls(
            text_config=_read_text(text),
            vision_config=_read_vision(vision),
            tie_word_embeddings=bool(tied),
            **{name: int(config[name]) for name in own if name in config},
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns the nested layout, every field written out, loadable by transformers 5."""
        text = dataclasses.asdict(self.text_config)
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": text.pop("rope_theta"),
            "mrope_section": list(text.pop("mrope_section")),
        }
        if isinstance(text["eos_token_id"], tuple):
            text["eos_token_id"] = list(text["eos_token_id"])
        text |= {"model_type": "qwen2_5_vl_text", "hidden_act": "silu", "use_sliding_window": False}
        vision = dataclasses.asdict(self.vision_config)
        vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")}
        vision["fullatt_block_indexes"] = list(vision["fullatt_block_indexes"])
        vision |= {"model_type": "qwen2_5_vl_vision", "hidden_act": "silu"}
        top = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("text_config", "vision_config")
        }
        return {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": MODEL_TYPE,
            **top,
            "text_config": text,
            "vision_config": vision,
        }


def _read_text(source: Mapping[str, Any]) -> TextConfig:
    _check_activation(source, "text")
    if source.get("use_sliding_window"):
        raise ValueError("use_sliding_window is true; this port has full attention only")
    fields = _known(TextConfig, source)
    if fields.get("num_key_value_heads", 0) is None:
        fields["num_key_value_heads"] = int(source["num_attention_heads"])
    if isinstance(fields.get("eos_token_id"), list):
        fields["eos_token_id"] = tuple(fields["eos_token_id"])
    rope = source.get("rope_parameters") or source.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ValueError(f"rope type {kind!r} is not supported; use 'default' (M-RoPE, unscaled)")
    if "rope_theta" in rope:
        fields["rope_theta"] = float(rope["rope_theta"])
    if "mrope_section" in rope:
        fields["mrope_section"] = tuple(int(n) for n in rope["mrope_section"])
    return TextConfig(**fields)


def _read_vision(source: Mapping[str, Any]) -> VisionConfig:
    _check_activation(source, "vision")
    fields = _known(VisionConfig, source)
    if "in_chans" in source:  # the hub files' name
        fields["in_channels"] = int(source["in_chans"])
    if "fullatt_block_indexes" in fields:
        # A layer number kept as text compares unequal to every integer and silently turns each
        # layer into a windowed one.
        fields["fullatt_block_indexes"] = tuple(int(i) for i in fields["fullatt_block_indexes"])
    rope = source.get("rope_parameters") or {}
    if "rope_theta" in rope:
        fields["rope_theta"] = float(rope["rope_theta"])
    return VisionConfig(**fields)


def _known(kind: type, source: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: source[f.name] for f in dataclasses.fields(kind) if f.name in source}


def _check_activation(source: Mapping[str, Any], tower: str) -> None:
    found = source.get("hidden_act", "silu")
    if found != "silu":
        raise ValueError(f"{tower} hidden_act is {found!r}; this port has 'silu' only")


def _check(config: QwenVLConfig) -> None:
    text, vision = config.text_config, config.vision_config
    if text.hidden_size % text.num_attention_heads:
        raise ValueError(
            f"text hidden_size {text.hidden_size} is no multiple of "
            f"num_attention_heads {text.num_attention_heads}"
        )
    if text.num_attention_heads % text.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {text.num_attention_heads} is no multiple of "
            f"num_key_value_heads {text.num_key_value_heads}"
        )
    if len(text.mrope_section) != 3 or 2 * sum(text.mrope_section) != text.head_dim:
        raise ValueError(
            f"mrope_section {text.mrope_section} must be three counts that sum to half a head, "
            f"{text.head_dim // 2}"
        )
    if vision.hidden_size % (4 * vision.num_heads):
        raise ValueError(
            f"vision hidden_size {vision.hidden_size} must be a multiple of 4 * num_heads "
            f"({vision.num_heads}): a head's rotary angles are cut into four"
        )
    if vision.out_hidden_size != text.hidden_size:
        raise ValueError(
            f"vision out_hidden_size {vision.out_hidden_size} differs from text hidden_size "
            f"{text.hidden_size}"
        )
    if vision.window_size < vision.patch_size * vision.spatial_merge_size:
        raise ValueError(f"window_size {vision.window_size} px is smaller than one merged cell")
