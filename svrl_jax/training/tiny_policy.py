"""The embedded world's texts -> a small tokenizer and a random Qwen2.5-VL in the Hugging Face
layout.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
from ml_collections import ConfigDict

from svrl_jax.data import facts, script, sources, world
from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.processing.chat import CHAT_TEMPLATES
from svrl_jax.search import summarise
from svrl_jax.types import Task

# Qwen2's pre-tokenising pattern (transformers models/qwen2/tokenization_qwen2.py).
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
MAX_PIXELS = 4704  # 84 x 56: six merged cells
MIN_PIXELS = 3136


def write_folder(folder: pathlib.Path, config: ConfigDict, prompts: Iterable[str]) -> None:
    """Writes tokenizer, processor, chat template and config.json; the weights come later.

    Args:
      folder: made if missing.
      config: `config.pretrain`.
      prompts: system messages, which the tokenizer is trained on too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(config.vocab_size, prompts)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {t: tokenizer.token_to_id(t) for t in SPECIAL_TOKENS}
    _dump(folder / "tokenizer_config.json", _tokenizer_config())
    _dump(folder / "preprocessor_config.json", _preprocessor_config())
    _dump(folder / "config.json", model_config(config, ids, tokenizer.get_vocab_size()).to_hf())
    _dump(
        folder / "generation_config.json",
        {
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
            "do_sample": True,
            "temperature": 1.0,
        },
    )


def model_config(config: ConfigDict, ids: dict[str, int], vocab_size: int) -> QwenVLConfig:
    """The small model's config, by Hugging Face names."""
    half = config.hidden_size // config.num_heads // 2
    section = [half // 4, (half - half // 4) // 2, half - half // 4 - (half - half // 4) // 2]
    return QwenVLConfig.from_hf(
        {
            "model_type": "qwen2_5_vl",
            "tie_word_embeddings": True,
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "text_config": {
                "vocab_size": vocab_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.mlp_size,
                "num_hidden_layers": config.num_layers,
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": config.num_kv_heads,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": section,
                },
                "bos_token_id": None,
                "eos_token_id": ids["<|im_end|>"],
                "pad_token_id": ids["<|endoftext|>"],
            },
            "vision_config": {
                "depth": config.vision_depth,
                "hidden_size": config.vision_hidden_size,
                "intermediate_size": config.vision_mlp_size,
                "num_heads": config.vision_heads,
                "out_hidden_size": config.hidden_size,
                "fullatt_block_indexes": [config.vision_depth - 1],
            },
        }
    )


def train_tokenizer(vocab_size: int, prompts: Iterable[str]):
    """A byte-level BPE with Qwen's special tokens first and Qwen's pre-tokenising pattern."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(prompts), trainer)
    return tokenizer


def _texts(prompts: Iterable[str]) -> Iterator[str]:
    """What the policy will read and write; names many times over, so that most are one token."""
    for text in prompts:
        yield from [text] * 500
    documents = sources.documents_by_title()
    for item in world.split_items()["train"] + world.split_items()["test"]:
        yield from [f" {item.golds[0]}"] * 60
        yield from [f" {item.entity.title}"] * 60
        if item.relation in script.TEMPLATES:
            document = documents[item.entity.title]
            for template in script.TEMPLATES[item.relation]:
                query = template.format(item.entity.title)
                yield f" {query},"
                yield ": " + summarise.window(document.text, query, document.title, 13)
        task = Task("", "", b"", item.golds, "", item.relation, item.entity.names)
        for regime in ("agent", "direct"):
            for known in (True, False):
                yield from [
                    script.write_turn(
                        task, (), script.Habits(), np.random.default_rng(0),
                        regime=regime, known=known, guess=item.golds[0],
                    )
                ] * 4  # fmt: skip
    for questions in facts.QUESTIONS.values():
        for question in questions:
            yield from [question] * 300
    for number in range(1, 6):
        yield from [f"#{number} help #{number} none help all help only read 1,0,0,1\n"] * 300
        yield from [", ask one way, ask two ways, ask five ways</reason><verify>"] * 100
    for document in list(documents.values())[::6]:
        yield " " + document.title
        yield " ".join(document.text.split()[:13])


def _tokenizer_config() -> dict:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATES["qwen2_5_vl"],
    }


def _preprocessor_config() -> dict:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
    }


def _dump(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
