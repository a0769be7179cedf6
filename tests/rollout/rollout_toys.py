"""A toy vocabulary, model, tools and prompts for the tests of rollout/.

Some tokens of the vocabulary are whole phrases of the protocol. A random model that may draw only
those plays real episodes: it searches, reads results and answers, all by chance.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers

from configs.base import get_config
from svrl_jax.models.qwen_vl.config import QwenVLConfig, TextConfig, VisionConfig
from svrl_jax.models.qwen_vl.model import QwenVL, default_image_index
from svrl_jax.models.qwen_vl.rope import mrope_positions
from svrl_jax.models.qwen_vl.vision_plan import plan_vision
from svrl_jax.processing.tokenizer import Tokenizer
from svrl_jax.search.errors import ToolError
from svrl_jax.types import Prompt, SearchItem, Task

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
REASON = "<reason>I look.</reason>"
VERIFY = "<verify> </verify>"
IMAGE_SEARCH = "<search><img></search>"
TEXT_SEARCH = "<text_search>alpha 1, beta 2, gamma 3, delta 4, kappa 5</text_search>"
ANSWER = "<answer>yes</answer>"
PHRASES = (REASON, VERIFY, IMAGE_SEARCH, TEXT_SEARCH, ANSWER, " well")
MERGES = [("h", "e"), ("l", "o"), ("l", "lo"), ("he", "llo"), (">", "Ċ")]
VOCAB = 320  # rows of the head; fewer are in use


def make_tokenizer() -> Tokenizer:
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in MERGES]
    bpe = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([tokenizers.AddedToken(p, special=False) for p in PHRASES])
    return Tokenizer(tokenizer)


def make_config(tokenizer: Tokenizer) -> QwenVLConfig:
    return QwenVLConfig(
        text_config=TextConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            mrope_section=(1, 1, 2),
            initializer_range=0.2,
        ),
        vision_config=VisionConfig(
            hidden_size=16,
            out_hidden_size=32,
            depth=2,
            num_heads=2,
            intermediate_size=24,
            patch_size=4,
            window_size=16,
            fullatt_block_indexes=(1,),
            initializer_range=0.2,
        ),
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.token_id("<|video_pad|>"),
        vision_start_token_id=tokenizer.vision_start_id,
        vision_end_token_id=tokenizer.vision_end_id,
        tie_word_embeddings=True,
    )


TOKENIZER = make_tokenizer()
CONFIG = make_config(TOKENIZER)
MODEL = QwenVL(CONFIG, rngs=nnx.Rngs(0))
PHRASE_IDS = tuple(TOKENIZER.token_id(p) for p in PHRASES)
ALL_BUT_PHRASES = tuple(i for i in range(VOCAB) if i not in PHRASE_IDS)


def rollout_config(**changes):
    config = get_config().rollout
    config.update({"budget": 256, "max_turn_tokens": 40, "answer_reserve": 16} | changes)
    config.update({k: v for k, v in {"slots": 8, "lanes": 4}.items() if k not in changes})
    return config


def search_config():
    return get_config().search


def make_task(number: int = 0) -> Task:
    return Task(
        id=f"task-{number}", question="?", picture=b"", golds=("yes",), source="toy", category="c"
    )


def make_prompt(task: Task, *, grids=((1, 4, 4),), before=5, after=3, regime="agent") -> Prompt:
    """`before` text tokens, the pictures, `after` text tokens; all by the task's number."""
    rng = np.random.default_rng(int(task.id.split("-")[1]))
    grids = np.asarray(grids, np.int32).reshape(-1, 3)
    pictures = [[CONFIG.image_token_id] * int(g.prod() // 4) for g in grids]
    ids = np.concatenate([rng.integers(0, 250, before), *pictures, rng.integers(0, 250, after)])
    ids = ids.astype(np.int32)
    positions, _ = mrope_positions(ids, grids, CONFIG)
    patch_dim = CONFIG.vision_config.patch_dim
    return Prompt(
        task_id=task.id,
        regime=regime,
        text="",
        ids=ids,
        positions=positions,
        pixel_values=rng.normal(size=(int(grids.prod(1).sum()), patch_dim)).astype(np.float32),
        image_grid_thw=grids,
    )


class ToyTools:
    """Two searches over nothing: items spelt from the query. Calls are counted.

    Args:
      items: number of items of each result.
      words: words of each item's text.
      fail: tools that raise ToolError.
      hang: an event that every call waits for.
    """

    def __init__(self, items=2, words=2, fail=(), hang: threading.Event | None = None):
        self.items, self.words, self.fail, self.hang = items, words, fail, hang
        self.calls: list[tuple[str, str, str]] = []

    def image_search(self, task):
        return self._answer("image_search", task.id, task)

    def text_search(self, query, task):
        return self._answer("text_search", query, task)

    def _answer(self, tool, query, task):
        self.calls.append((tool, query, task.id))
        if self.hang is not None:
            self.hang.wait()
        if tool in self.fail:
            raise ToolError("refused")
        return [
            SearchItem(id=f"{i}", title=f"{query} {i}", text=" ".join(["word"] * self.words))
            for i in range(self.items)
        ]


@jax.jit
def _full_logits(params, ids, positions, group_id, features, image_index):
    model = nnx.merge(nnx.graphdef(MODEL), params)
    hidden = model(ids, positions, group_id, jnp.zeros_like(ids), features, image_index)
    return model.logits(hidden)[0]


@jax.jit
def _encode(params, pixel_values, plan):
    return nnx.merge(nnx.graphdef(MODEL), params).encode_images(pixel_values, plan)


def full_logps(ids, positions, pixel_values, grids, *, temperature, banned):
    """float32[T]: log-prob of each token given those before it, by one pass without a cache."""
    length = len(ids)
    size = -(-length // 256) * 256  # few compiled shapes
    features = np.zeros((1024, CONFIG.image_feature_size), np.float32)
    if len(grids):
        plan = plan_vision(np.asarray(grids), CONFIG.vision_config)
        found = np.asarray(_encode(nnx.state(MODEL), pixel_values, plan))
        features[: len(found)] = found
    padded = np.pad(ids, (0, size - length))[None]
    positions = np.pad(positions, ((0, 0), (0, size - length)))[:, None]
    group = np.where(np.arange(size) < length, 0, -1)[None].astype(np.int32)
    index = default_image_index(padded, CONFIG.image_token_id)
    logits = _full_logits(nnx.state(MODEL), padded, positions, group, features, index)
    logits = np.asarray(logits)[:length].astype(np.float64)
    logits[:, list(banned)] = -np.inf
    scaled = logits / temperature
    scaled -= scaled.max(-1, keepdims=True)
    logps = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    return np.concatenate([[0.0], logps[np.arange(length - 1), ids[1:]]])
