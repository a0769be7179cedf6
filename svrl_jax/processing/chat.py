"""Messages -> chat text and ids in the family's template; placeholders -> one image token a cell.

A turn is `<|im_start|>role`, newline, content, `<|im_end|>`, newline. A picture is
`<|vision_start|><|image_pad|><|vision_end|>` with nothing around it. What differs:

    qwen2_5_vl   a default system turn where none is given; any role is shown as it is
    qwen3_vl     no default system turn; neighbouring messages of role `tool` share one user turn,
                 each wrapped in <tool_response> lines

Source: the templates of the releases (huggingface/trl keeps copies in trl/chat_templates). The
tool-signature block of Qwen3-VL is not rendered: this project's protocol calls tools in plain text.
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

FAMILIES = ("qwen2_5_vl", "qwen3_vl")  # `model_type` of config.json
DEFAULT_SYSTEM = "You are a helpful assistant."
PICTURE = VISION_START + IMAGE_PAD + VISION_END
TOOL_OPEN, TOOL_CLOSE = "<tool_response>", "</tool_response>"

_CONTENT = (
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
)
_OPEN_ANSWER = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
# The same rules as `render_chat`, for folders that other tools read.
CHAT_TEMPLATES = {
    "qwen2_5_vl": (
        "{%- if messages[0]['role'] != 'system' -%}"
        "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}"
        "{%- endif -%}"
        "{%- for message in messages -%}"
        "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
        f"{_CONTENT}"
        "{{- '<|im_end|>\\n' -}}"
        "{%- endfor -%}"
        f"{_OPEN_ANSWER}"
    ),
    "qwen3_vl": (
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'tool' -%}"
        "{%- if loop.first or loop.previtem['role'] != 'tool' -%}"
        "{{- '<|im_start|>user' -}}"
        "{%- endif -%}"
        "{{- '\\n<tool_response>\\n' -}}"
        f"{_CONTENT}"
        "{{- '\\n</tool_response>' -}}"
        "{%- if loop.last or loop.nextitem['role'] != 'tool' -%}"
        "{{- '<|im_end|>\\n' -}}"
        "{%- endif -%}"
        "{%- else -%}"
        "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
        f"{_CONTENT}"
        "{{- '<|im_end|>\\n' -}}"
        "{%- endif -%}"
        "{%- endfor -%}"
        f"{_OPEN_ANSWER}"
    ),
}

Message = Mapping[str, Any]


def render_chat(
    messages: Sequence[Message],
    *,
    family: str = "qwen2_5_vl",
    add_generation_prompt: bool = True,
) -> str:
    """Renders a conversation as text.

    Args:
      messages: each {"role": str, "content": str or a list of parts}; a part is
        {"type": "text", "text": str} or {"type": "image"}.
      family: one of FAMILIES.
      add_generation_prompt: end with the opening of an assistant turn.
    Returns:
      The text, one placeholder a picture. Encode it with `encode` only if every content is ours;
      else use `encode_chat`.
    Raises:
      ValueError: no message, a part of another type, tool calls as a field of their own, another
        family, or (Qwen3-VL, whose template would drop them) a system turn that is not the first,
        another role, or a picture of the system or the assistant.
    """
    segments = _segments(messages, family, add_generation_prompt)
    return "".join(text for text, _ in segments)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    family: str = "qwen2_5_vl",
    add_generation_prompt: bool = True,
) -> np.ndarray:
    """Renders and encodes a conversation whose contents others may have written.

    Added tokens come from the template only; their spellings inside a content are ordinary
    characters. Otherwise the ids equal those of the rendered text.

    Returns:
      int32[T], one placeholder a picture.
    """
    return np.concatenate(
        [
            tokenizer.encode(text) if is_template else tokenizer.encode_plain(text)
            for text, is_template in _segments(messages, family, add_generation_prompt)
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


def _segments(
    messages: Sequence[Message], family: str, add_generation_prompt: bool
) -> list[tuple[str, bool]]:
    """(text, is_template) in order; text between added tokens is one segment, as in the ids."""
    _check(messages, family)
    if family == "qwen2_5_vl" and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]
    segments: list[tuple[str, bool]] = []
    roles = [message["role"] for message in messages]
    for i, message in enumerate(messages):
        if family == "qwen3_vl" and roles[i] == "tool":
            if i == 0 or roles[i - 1] != "tool":
                segments += [(IM_START, True), ("user", False)]
            segments += [("\n", False), (TOOL_OPEN, True), *_content(message, "\n", "\n")]
            segments.append((TOOL_CLOSE, True))
            if roles[i + 1 : i + 2] == ["tool"]:
                continue
        else:
            segments += [(IM_START, True), *_content(message, roles[i] + "\n", "")]
        segments += [(IM_END, True), ("\n", False)]
    if add_generation_prompt:
        segments += [(IM_START, True), ("assistant\n", False)]
    return _joined(segments)


def _check(messages: Sequence[Message], family: str) -> None:
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} has no chat template; known: {', '.join(FAMILIES)}")
    if not messages:
        raise ValueError("a chat needs at least one message")
    for i, message in enumerate(messages):
        role = message["role"]
        if message.get("tool_calls"):
            raise ValueError(f"message {i} has tool_calls; write tool calls as text in its content")
        if family != "qwen3_vl":
            continue
        if role not in ("system", "user", "assistant", "tool") or (role == "system" and i):
            raise ValueError(
                f"message {i} has role {role!r}; Qwen3-VL knows system (first only), user, "
                "assistant and tool"
            )
        if role in ("system", "assistant") and None in _parts(message["content"]):
            raise ValueError(
                f"message {i} shows a picture as {role}; in Qwen3-VL pictures belong to user or "
                "tool messages"
            )


def _content(message: Message, before: str, behind: str) -> list[tuple[str, bool]]:
    """A content with template text around it, cut at its pictures."""
    segments: list[tuple[str, bool]] = []
    text = before
    for part in _parts(message["content"]):
        if part is None:
            segments += [(text, False), (PICTURE, True)]
            text = ""
        else:
            text += part
    return [*segments, (text + behind, False)]


def _joined(segments: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Neighbours that are no added tokens become one text: merges cross such borders."""
    out: list[tuple[str, bool]] = []
    for text, is_template in segments:
        if out and not is_template and not out[-1][1]:
            out[-1] = (out[-1][0] + text, False)
        else:
            out.append((text, is_template))
    return out


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
