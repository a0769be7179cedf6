"""A task and a prompt file -> the ids, positions and patches that the model first sees."""

from __future__ import annotations

import dataclasses
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
from svrl_jax.protocol.parse import grammar_of
from svrl_jax.types import Prompt, Task

_PACKAGE_ROOT = pathlib.Path(__file__).resolve().parents[2]
# `rag` and `agent_verifier` are regimes of evaluation and use the agent's message.
REGIMES = ("agent", "direct", "rag", "agent_verifier")

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


def message_of(texts: dict[str, str], regime: str) -> str:
    """The system message of a regime: its own where there is one, else that of its grammar.

    Raises:
      ValueError: unknown regime.
    """
    if regime not in REGIMES:
        raise ValueError(f"regime {regime!r} has no prompt; known: {sorted(REGIMES)}")
    return texts[regime if regime in texts else grammar_of(regime)]


def prompt_hash(text: str) -> str:
    """The first 12 hex digits of the prompt text's sha256; every results table names it."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class PromptSize:
    """What a prompt will take, known before its picture is decoded.

    Attributes:
      num_tokens: of the whole prompt, every picture token counted.
      max_pixels: bound of the picture's area under which it has that size.
      is_shrunk: the bound had to be lowered for `max_tokens`.
      fits: num_tokens is at most `max_tokens`.
    """

    num_tokens: int
    max_pixels: int
    is_shrunk: bool
    fits: bool


class PromptBuilder:
    """Renders tasks in Qwen2.5-VL's chat template: system message, then picture and question."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        processor: ImageProcessor,
        config: QwenVLConfig,
        texts: dict[str, str],
        *,
        max_picture_pixels: int | None = None,
        max_tokens: int | None = None,
    ):
        """See the class.

        Args:
          texts: regime -> system message; both regimes are needed.
          max_picture_pixels: bound of a question picture's area where the processor's is larger.
          max_tokens: pictures are made smaller where a prompt would be longer.
        """
        self.tokenizer, self.processor, self.config, self.texts = (
            tokenizer, processor, config, texts,
        )  # fmt: skip
        self.max_pixels = min(processor.max_pixels, max_picture_pixels or processor.max_pixels)
        self.max_tokens = max_tokens
        self._frame_lengths: dict[tuple[str, bool], int] = {}

    def measure(self, question: str, size_px: tuple[int, int], regime: str) -> PromptSize:
        """The size of the prompt that `build` makes of a question and a picture.

        Args:
          question: text.
          size_px: (width, height) of the upright picture; (0, 0) without one.
        """
        width, height = (int(side) for side in size_px)
        has_picture = bool(width and height)
        num_text = self._frame_length(regime, has_picture)
        num_text += len(self.tokenizer.encode_plain(question))
        bound = self.max_pixels
        num_tokens = num_text + (self._cells(height, width, bound) if has_picture else 0)
        limit = self.max_tokens or num_tokens
        if not has_picture or num_tokens <= limit:
            return PromptSize(num_tokens, bound, False, num_tokens <= limit)
        cell = (self.processor.patch_size * self.processor.merge_size) ** 2
        bound = max(limit - num_text, 1) * cell
        num_tokens = num_text + self._cells(height, width, bound)
        return PromptSize(num_tokens, bound, True, num_tokens <= limit)

    def build(self, task: Task, regime: str) -> Prompt:
        """One prompt.

        The system message and the question are encoded as plain characters, so that a special token
        spelt inside them stays text; the template around them is encoded with its special tokens.

        Raises:
          ValueError: unknown regime.
          PictureError: the task's picture cannot be read; names the task.
        """
        message = message_of(self.texts, regime)
        pictures = [load_picture(task.picture, name=task.id)] if task.picture else []
        size = self.measure(task.question, pictures[0].size if pictures else (0, 0), regime)
        pixel_values, grids = self._bounded(size.max_pixels)(pictures)
        parts = [_SYSTEM, message, _USER + _PICTURE * len(pictures), task.question]
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

    def _frame_length(self, regime: str, has_picture: bool) -> int:
        """Tokens of a prompt around its question, the picture's own left out."""
        key = regime, has_picture
        if key not in self._frame_lengths:
            template = _SYSTEM, _USER + _PICTURE * has_picture, _ASSISTANT
            count = sum(len(self.tokenizer.encode(text)) for text in template) - has_picture
            message = message_of(self.texts, regime)
            self._frame_lengths[key] = count + len(self.tokenizer.encode_plain(message))
        return self._frame_lengths[key]

    def _cells(self, height: int, width: int, max_pixels: int) -> int:
        frames, tall, wide = self._bounded(max_pixels).grid_thw(height, width)
        return frames * tall * wide // self.processor.merge_size**2

    def _bounded(self, max_pixels: int) -> ImageProcessor:
        return dataclasses.replace(self.processor, max_pixels=max_pixels)
