"""Messages -> chat text and ids in Qwen2.5-VL's template; placeholders -> one image token a cell.

A turn is `<|im_start|>role`, newline, content, `<|im_end|>`, newline. A picture is
`<|vision_start|><|image_pad|><|vision_end|>` with nothing around it. Source: the template of the
Qwen2.5-VL release (huggingface/trl keeps a copy in trl/chat_templates).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from svrl_jax.processing.tokenizer import (
    IM_END,
    IM_START,
    IMAGE_PAD,
    VISION_END,
    VISION_START,
    Tokenizer,
)

DEFAULT_SYSTEM = "You are a helpful assistant."
PICTURE = VISION_START + IMAGE_PAD + VISION_END

# The same rule as `render_chat`, for folders that other tools read.
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}"
    "{{- message['content'] -}}"
    "{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] in ('image', 'image_url') -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part['type'] == 'text' -%}"
    "{{- part['text'] -}}"
    "{%- else -%}"
    "{{- raise_exception('content parts are text or image') -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

Message = Mapping[str, Any]


def render_chat(messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
    """Renders a conversation as text.

    Args:
      messages: each {"role": str, "content": str or a list of parts}; a part is
        {"type": "text", "text": str} or {"type": "image"}. Without a system message first, the
        default one is put in front.
      add_generation_prompt: end with the opening of an assistant turn.
    Returns:
      The text, one placeholder a picture. Encode it with `encode` only if every content is ours;
      else use `encode_chat`.
    Raises:
      ValueError: no message, or a part of another type.
    """
    return "".join(text for text, _ in _segments(messages, add_generation_prompt))


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True
) -> np.ndarray:
    """Renders and encodes a conversation whose contents others may have written.

    Special tokens come from the template only; their spellings inside a content are ordinary
    characters. Otherwise the ids equal those of the rendered text.

    Returns:
      int32[T], one placeholder a picture.
    """
    return np.concatenate(
        [
            tokenizer.encode(text) if is_template else tokenizer.encode_plain(text)
            for text, is_template in _segments(messages, add_generation_prompt)
        ]
    )


def expand_placeholders(
    ids: np.ndarray, image_grid_thw: np.ndarray, merge_size: int, image_token_id: int
) -> np.ndarray:
    """Repeats each picture's placeholder once a merged cell.

    Args:
      ids: int[T], one image token a picture.
      image_grid_thw: int[I, 3], patches of each picture in order.
    Returns:
      int32[T'], tokens == features.
    Raises:
      ValueError: the number of placeholders is not the number of pictures.
    """
    ids = np.asarray(ids, np.int32)
    grids = np.asarray(image_grid_thw, np.int64).reshape(-1, 3)
    is_image = ids == image_token_id
    if is_image.sum() != len(grids):
        raise ValueError(f"{int(is_image.sum())} placeholders for {len(grids)} pictures")
    repeats = np.ones(len(ids), np.int64)
    repeats[is_image] = grids.prod(axis=1) // merge_size**2
    return np.repeat(ids, repeats)


def _segments(messages: Sequence[Message], add_generation_prompt: bool) -> list[tuple[str, bool]]:
    """(text, is_template) in order; text between special tokens is one segment, as in the ids."""
    if not messages:
        raise ValueError("a chat needs at least one message")
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]
    segments: list[tuple[str, bool]] = []
    for message in messages:
        segments.append((IM_START, True))
        text = message["role"] + "\n"
        for part in _parts(message["content"]):
            if part is None:
                segments += [(text, False), (PICTURE, True)]
                text = ""
            else:
                text += part
        segments += [(text, False), (IM_END, True), ("\n", False)]
    if add_generation_prompt:
        segments += [(IM_START, True), ("assistant\n", False)]
    return segments


def _parts(content: str | Sequence[Message]) -> list[str | None]:
    """The texts of a content in order, None for a picture."""
    if isinstance(content, str):
        return [content]
    parts: list[str | None] = []
    for part in content:
        if part["type"] == "text":
            parts.append(part["text"])
        elif part["type"] in ("image", "image_url"):
            parts.append(None)
        else:
            raise ValueError(f"content part {part['type']!r} is neither text nor image")
    return parts
