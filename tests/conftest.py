"""The embedded world, a tiny policy folder and the true tokenizers, made once for all tests."""

import contextlib
import json
import pathlib

import jax
import pytest
from flax import nnx

from configs import tiny
from svrl_jax.models.qwen_vl import QwenVL, QwenVLConfig
from svrl_jax.models.qwen_vl.weights import save_folder
from svrl_jax.processing.chat import CHAT_TEMPLATES, FAMILIES
from svrl_jax.processing.images import QWEN3_VL, ImageProcessor
from svrl_jax.processing.tokenizer import Tokenizer
from svrl_jax.protocol.prompts import PromptBuilder, read_prompt
from svrl_jax.search.local import LocalTools
from svrl_jax.training import assemble, pretrain, tiny_policy
from svrl_jax.training.demos import DemoMaker
from tests.processing import qwen_tokenizer

RELEASE = {"qwen2_5_vl": ImageProcessor(), "qwen3_vl": QWEN3_VL}


@pytest.fixture(scope="session")
def tiny_config():
    """Locked; copy before a change: `changed(config, **{"grpo.kl_coef": 0.1})`."""
    return tiny.get_config().lock()


def changed(config, **changes):
    """A copy of a config with dotted keys changed."""
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.update_from_flattened_dict(changes)
    return config


@pytest.fixture(scope="session")
def world_tools(tiny_config):
    data = tiny_config.data
    return LocalTools(tiny_config.search, data.picture_width_px, data.picture_height_px)


@pytest.fixture(scope="session")
def untrained_folder(tmp_path_factory, tiny_config) -> pathlib.Path:
    """Tokenizer, processor and config of the tiny policy, without weights."""
    folder = tmp_path_factory.mktemp("untrained")
    tiny_policy.write_folder(folder, tiny_config.pretrain, prompt_texts(tiny_config).values())
    return folder


def prompt_texts(config) -> dict[str, str]:
    return {
        "agent": read_prompt(config.prompt.agent_file),
        "direct": read_prompt(config.prompt.direct_file),
    }


@pytest.fixture(scope="session")
def builder(untrained_folder, tiny_config) -> PromptBuilder:
    return PromptBuilder(
        Tokenizer.from_folder(untrained_folder),
        ImageProcessor.from_folder(untrained_folder),
        QwenVLConfig.from_folder(untrained_folder),
        prompt_texts(tiny_config),
    )


@pytest.fixture(scope="session")
def demo_maker(builder, world_tools, tiny_config) -> DemoMaker:
    return DemoMaker(builder, world_tools, tiny_config, seed=0)


@pytest.fixture(scope="session")
def pretraining(untrained_folder, builder, demo_maker, tiny_config):
    """(folder of the tiny policy, lines that its pretraining logged)."""
    lines: list[str] = []
    with compiler(is_quick=False):  # a hundred steps are worth it
        model = QwenVL(builder.config, rngs=nnx.Rngs(0))
        model = pretrain.pretrain(model, demo_maker, tiny_config.pretrain, lines.append)
    save_folder(model, untrained_folder)
    return untrained_folder, lines


@pytest.fixture(scope="session")
def tiny_folder(pretraining) -> pathlib.Path:
    """A Hugging Face folder of a policy that knows the protocol a little."""
    return pretraining[0]


@pytest.fixture(scope="session")
def bench(tiny_folder, tiny_config) -> assemble.Bench:
    """Everything a run works with; runs share its compiled programs."""
    return assemble.assemble(changed(tiny_config, **{"model.folder": str(tiny_folder)}))


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


@contextlib.contextmanager
def compiler(*, is_quick: bool):
    """Quick where programs run for milliseconds and compile for seconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", is_quick)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
