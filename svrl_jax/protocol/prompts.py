"""A task and a prompt file -> the ids, positions and patches that the model first sees."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.models.qwen_vl.rope import mrope_positions
from svrl_jax.processing.chat import expand_placeholders
from svrl_jax.processing.images import ImageProcessor, load_picture
from svrl_jax.processing.tokenizer import Tokenizer
from svrl_jax.types import Prompt, Task

_PACKAGE_ROOT = pathlib.Path(__file__).resolve().parents[2]
REGIMES = ("agent", "direct")

_SYSTEM = "<|im_start|>system\n"
_USER = "<|im_end|>\n<|im_start|>user\n"
_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
_ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"


def read_prompt(path: str) -> str:
    """A prompt file's text, byte for byte.

    Args:
      path: absolute, relative to the working directory, or relative to the checkout.
    Raises:
      FileNotFoundError: names the path and the config keys.
    """
    for candidate in (pathlib.Path(path), _PACKAGE_ROOT / path):
        if candidate.is_file():
            return candidate.read_bytes().decode("utf-8")
    raise FileNotFoundError(
        f"the prompt file {path!r} does not exist; set config.prompt.agent_file and direct_file"
    )


def read_prompts(config: ConfigDict) -> dict[str, str]:
    """Regime -> system message, from the files that `config.prompt` names; see `read_prompt`."""
    return {"agent": read_prompt(config.agent_file), "direct": read_prompt(config.direct_file)}


def prompt_hash(text: str) -> str:
    """The first 12 hex digits of the prompt text's sha256; every results table names it."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


class PromptBuilder:
    """Renders tasks in Qwen2.5-VL's chat template: system message, then picture and question."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        processor: ImageProcessor,
        config: QwenVLConfig,
        texts: dict[str, str],
    ):
        """Args: texts: regime -> system message; both regimes are needed."""
        self.tokenizer, self.processor, self.config, self.texts = (
            tokenizer, processor, config, texts,
        )  # fmt: skip

    def build(self, task: Task, regime: str) -> Prompt:
        """One prompt.

        The system message and the question are encoded as plain characters, so that a special token
        spelt inside them stays text; the template around them is encoded with its special tokens.

        Raises:
          ValueError: unknown regime.
          PictureError: the task's picture cannot be read; names the task.
        """
        if regime not in self.texts:
            raise ValueError(f"regime {regime!r} has no prompt; known: {sorted(self.texts)}")
        pictures = [load_picture(task.picture)] if task.picture else []
        pixel_values, grids = self.processor(pictures)
        parts = [_SYSTEM, self.texts[regime], _USER + _PICTURE * len(pictures), task.question]
        encode = (self.tokenizer.encode, self.tokenizer.encode_plain)
        pieces = [encode[i % 2](p) for i, p in enumerate(parts)]
        pieces.append(self.tokenizer.encode(_ASSISTANT))
        ids = expand_placeholders(
            np.concatenate(pieces).astype(np.int32),
            grids,
            self.processor.merge_size,
            self.tokenizer.image_token_id,
        )
        positions, _ = mrope_positions(ids, grids, self.config)
        return Prompt(
            task_id=task.id,
            regime=regime,
            text="".join([*parts, _ASSISTANT]),
            ids=ids,
            positions=positions,
            pixel_values=pixel_values,
            image_grid_thw=grids,
        )

    def build_all(self, tasks: Sequence[Task], regime: str) -> list[Prompt]:
        """One prompt a task, in order."""
        return [self.build(t, regime) for t in tasks]
