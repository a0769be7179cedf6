"""The true tokenizers of both families, in folders as the releases have them."""

import json

import pytest

from svrl_jax.processing.chat import CHAT_TEMPLATES, FAMILIES
from svrl_jax.processing.images import QWEN3_VL, ImageProcessor
from tests.processing import qwen_tokenizer

RELEASE = {"qwen2_5_vl": ImageProcessor(), "qwen3_vl": QWEN3_VL}


@pytest.fixture(scope="session")
def qwen_vocabulary():
    """(vocab, merges), equal to the published files."""
    path = qwen_tokenizer.rank_file()
    if path is None:
        pytest.skip("needs the dashscope wheel's data: pip install --no-deps dashscope")
    return qwen_tokenizer.vocab_and_merges(qwen_tokenizer.read_ranks(path))


@pytest.fixture(scope="session")
def qwen_folders(qwen_vocabulary, tmp_path_factory):
    """family -> folder with tokenizer and processor files."""
    folders = {}
    for family in FAMILIES:
        folder = folders[family] = tmp_path_factory.mktemp(family)
        built = qwen_tokenizer.make_tokenizer(*qwen_vocabulary, family)
        built.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "chat_template": CHAT_TEMPLATES[family],
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        RELEASE[family].save(folder, family)
    return folders
