"""A Hugging Face `config.json` of the Qwen2.5-VL or Qwen3-VL family -> QwenVLConfig, and back.

Two layouts are read: the nested one that transformers 5 writes (`text_config` with
`rope_parameters`) and those of the published hub folders (2.5: text fields at the top; 3: nested,
both with `rope_theta` and `rope_scaling`). Fields carry the checkpoint's names. A field that a file
leaves out has transformers' class default (5.24, models/qwen2_5_vl/configuration_qwen2_5_vl.py and
models/qwen3_vl/configuration_qwen3_vl.py), because that is what the file means: transformers itself
leaves out values that equal the default.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any, ClassVar

QWEN2_5, QWEN3 = "qwen2_5_vl", "qwen3_vl"  # model_type in config.json
ARCHITECTURES = {
    QWEN2_5: "Qwen2_5_VLForConditionalGeneration",
    QWEN3: "Qwen3VLForConditionalGeneration",
}


class _PatchSizes:
    """What follows from a vision tower's fields, for both families."""

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
class VisionConfig(_PatchSizes):
    """Qwen2.5-VL's tower. `window_size` is in pixels; `fullatt_block_indexes` are layer numbers."""

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

    model_type: ClassVar[str] = QWEN2_5
    hidden_act: ClassVar[str] = "silu"
    deepstack_visual_indexes: ClassVar[tuple[int, ...]] = ()

    @property
    def pad_unit(self) -> int:
        """Patches that a padded number of them is a multiple of: those of a whole window."""
        side = self.window_size // self.patch_size // self.spatial_merge_size
        return side * side * self.merge_unit


@dataclasses.dataclass(frozen=True)
class Qwen3VisionConfig(_PatchSizes):
    """Qwen3-VL's tower. `deepstack_visual_indexes` are the layers behind which features are taken
    for the text tower's first layers; `num_position_embeddings` is a square number."""

    hidden_size: int = 1152
    out_hidden_size: int = 3584
    depth: int = 27
    num_heads: int = 16
    intermediate_size: int = 4304
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    model_type: ClassVar[str] = QWEN3
    hidden_act: ClassVar[str] = "gelu_pytorch_tanh"

    @property
    def pad_unit(self) -> int:
        """Patches that a padded number of them is a multiple of: those of a merged cell."""
        return self.merge_unit

    @property
    def positions_per_side(self) -> int:
        """Rows, and columns, of the square table of learned positions."""
        return math.isqrt(self.num_position_embeddings)


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The text tower of either family, which `model_type` names: they differ in three properties.

    `mrope_section` counts frequencies per (t, h, w); they sum to half a head. `head_dim` None is
    hidden_size // num_attention_heads, as it always is in Qwen2.5-VL.
    """

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
    head_dim: int | None = None
    model_type: str = QWEN2_5

    def __post_init__(self):
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return self.model_type == QWEN2_5

    @property
    def has_qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised before they turn."""
        return self.model_type == QWEN3

    @property
    def has_interleaved_mrope(self) -> bool:
        """Whether t, h and w take turns over the frequencies, instead of three blocks."""
        return self.model_type == QWEN3


# transformers' class defaults of Qwen3-VL's text tower, where they differ from the fields above.
QWEN3_TEXT_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "mrope_section": (24, 20, 20),
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 128,
}


@dataclasses.dataclass(frozen=True)
class QwenVLConfig:
    """Everything that fixes the shapes of a model; hashable, so that it can be static under jit."""

    text_config: TextConfig
    vision_config: VisionConfig | Qwen3VisionConfig
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    tie_word_embeddings: bool = False

    def __post_init__(self):
        _check(self)

    @property
    def model_type(self) -> str:
        """`qwen2_5_vl` or `qwen3_vl`."""
        return self.text_config.model_type

    @property
    def image_feature_size(self) -> int:
        """Width of a merged cell's row from `encode_images`: its embedding, then what the first
        text layers add to it, one after another (Qwen3-VL)."""
        levels = 1 + len(self.vision_config.deepstack_visual_indexes)
        return levels * self.text_config.hidden_size

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
        family = config.get("model_type", QWEN2_5)
        if family not in ARCHITECTURES:
            raise ValueError(f"model_type is {family!r}; this port reads {list(ARCHITECTURES)}")
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
            text_config=_read_text(text, family),
            vision_config=_read_vision(vision, family),
            tie_word_embeddings=bool(tied),
            **{name: int(config[name]) for name in own if name in config},
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns the nested layout, every field written out, loadable by transformers 5."""
        family = self.model_type
        text = dataclasses.asdict(self.text_config)
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": text.pop("rope_theta"),
            "mrope_section": list(text.pop("mrope_section")),
        }
        if isinstance(text["eos_token_id"], tuple):
            text["eos_token_id"] = list(text["eos_token_id"])
        text |= {"model_type": f"{family}_text", "hidden_act": "silu"}
        if family == QWEN2_5:
            del text["head_dim"]  # follows from the other fields
            text["use_sliding_window"] = False
        else:
            text["attention_bias"] = False
            text["rope_parameters"]["mrope_interleaved"] = True
        vision = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self.vision_config).items()
        }
        vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": vision.pop("rope_theta")}
        vision |= {
            "model_type": f"{family}_vision",
            "hidden_act": self.vision_config.hidden_act,
        }
        top = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("text_config", "vision_config")
        }
        return {
            "architectures": [ARCHITECTURES[family]],
            "model_type": family,
            **top,
            "text_config": text,
            "vision_config": vision,
        }


def _read_text(source: Mapping[str, Any], family: str) -> TextConfig:
    _check_activation(source, "text", "silu")
    if source.get("use_sliding_window"):
        raise ValueError("use_sliding_window is true; this port has full attention only")
    fields = _known(TextConfig, source) | {"model_type": family}
    if family == QWEN3:
        fields = QWEN3_TEXT_DEFAULTS | fields
        if source.get("attention_bias"):
            raise ValueError("attention_bias is true; this port's Qwen3-VL has none")
    if fields.get("num_key_value_heads", 0) is None:
        fields["num_key_value_heads"] = int(source["num_attention_heads"])
    if isinstance(fields.get("eos_token_id"), list):
        fields["eos_token_id"] = tuple(fields["eos_token_id"])
    rope = source.get("rope_parameters") or source.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ValueError(f"rope type {kind!r} is not supported; use 'default' (M-RoPE, unscaled)")
    is_interleaved = family == QWEN3
    if rope.get("mrope_interleaved", is_interleaved) != is_interleaved:
        raise ValueError(
            f"mrope_interleaved is {rope['mrope_interleaved']}; in {family} it is {is_interleaved}"
        )
    if "rope_theta" in rope:
        fields["rope_theta"] = float(rope["rope_theta"])
    if "mrope_section" in rope:
        fields["mrope_section"] = tuple(int(n) for n in rope["mrope_section"])
    return TextConfig(**fields)


def _read_vision(source: Mapping[str, Any], family: str) -> VisionConfig | Qwen3VisionConfig:
    kind = VisionConfig if family == QWEN2_5 else Qwen3VisionConfig
    _check_activation(source, "vision", kind.hidden_act)
    fields = _known(kind, source)
    if "in_chans" in source:  # the hub files' name
        fields["in_channels"] = int(source["in_chans"])
    for name in ("fullatt_block_indexes", "deepstack_visual_indexes"):
        if name in fields:
            # A layer number kept as text compares unequal to every integer, so that the layer
            # silently becomes an ordinary one.
            fields[name] = tuple(int(i) for i in fields[name])
    rope = source.get("rope_parameters") or {}
    if "rope_theta" in rope:
        fields["rope_theta"] = float(rope["rope_theta"])
    return kind(**fields)


def _known(kind: type, source: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: source[f.name] for f in dataclasses.fields(kind) if f.name in source}


def _check_activation(source: Mapping[str, Any], tower: str, wanted: str) -> None:
    found = source.get("hidden_act", wanted)
    if found != wanted:
        raise ValueError(f"{tower} hidden_act is {found!r}; this port has {wanted!r} only")


def _check(config: QwenVLConfig) -> None:
    text, vision = config.text_config, config.vision_config
    if text.model_type != vision.model_type:
        raise ValueError(f"a text tower of {text.model_type}, a vision tower of another family")
    _check_heads(text)
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
    if isinstance(vision, VisionConfig):
        if vision.window_size < vision.patch_size * vision.spatial_merge_size:
            raise ValueError(f"window_size {vision.window_size} px is smaller than a merged cell")
    else:
        _check_qwen3_vision(vision, text.num_hidden_layers)


def _check_heads(text: TextConfig) -> None:
    if not text.has_qk_norm and text.head_dim * text.num_attention_heads != text.hidden_size:
        raise ValueError(
            f"text hidden_size {text.hidden_size} is no multiple of "
            f"num_attention_heads {text.num_attention_heads} by head_dim {text.head_dim}"
        )
    if text.num_attention_heads % text.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {text.num_attention_heads} is no multiple of "
            f"num_key_value_heads {text.num_key_value_heads}"
        )
    section, half = text.mrope_section, text.head_dim // 2
    if len(section) != 3 or 2 * sum(section) != text.head_dim:
        raise ValueError(
            f"mrope_section {section} must be three counts that sum to half a head, {half}"
        )
    if text.has_interleaved_mrope and not (3 * section[1] <= half + 1 and 3 * section[2] <= half):
        raise ValueError(f"mrope_section {section}: h and w do not fit into every third place")


def _check_qwen3_vision(vision: Qwen3VisionConfig, text_layers: int) -> None:
    if vision.positions_per_side**2 != vision.num_position_embeddings:
        raise ValueError(
            f"num_position_embeddings {vision.num_position_embeddings} is no square number"
        )
    taken = vision.deepstack_visual_indexes
    if list(taken) != sorted(set(taken)) or not all(0 <= i < vision.depth for i in taken):
        raise ValueError(
            f"deepstack_visual_indexes {list(taken)} must be rising layer numbers below the depth, "
            f"{vision.depth}"
        )
    if not 0 < len(taken) <= text_layers:
        raise ValueError(f"{len(taken)} deepstack levels for {text_layers} text layers")
