"""Messages and pictures -> Inputs, the arrays that a model takes; by a model folder's files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from PIL import Image

from svrl_jax.models.qwen_vl.config import QwenVLConfig
from svrl_jax.models.qwen_vl.rope import mrope_positions
from svrl_jax.processing.chat import FAMILIES, Message, encode_chat, expand_placeholders
from svrl_jax.processing.images import ImageProcessor, load_picture
from svrl_jax.processing.tokenizer import Tokenizer

Picture = bytes | str | os.PathLike | Image.Image


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """A batch of rows as the model takes them; a pytree.

    Attributes:
      prompt_ids: int32[B, T], right-padded, every picture's placeholder expanded.
      lengths: int32[B], real tokens of each row.
      positions: int32[3, B, T], M-RoPE (t, h, w); 0 on padding.
      pixel_values: float32[L, C], patches of all pictures in reading order, row by row.
      image_grid_thw: int32[I, 3], their grids in patches.
    """

    prompt_ids: Any
    lengths: Any
    positions: Any
    pixel_values: Any
    image_grid_thw: Any


class Processor:
    """Chat template, tokenizer and picture settings of one model folder.

    Attributes:
      tokenizer, image_processor: the parts.
      config: the model's config; its family decides the chat template.
    """

    def __init__(self, tokenizer: Tokenizer, image_processor: ImageProcessor, config: QwenVLConfig):
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.config = config
        self.family = config.to_hf()["model_type"]
        if self.family not in FAMILIES:
            raise ValueError(f"{self.family!r} has no chat template; known: {', '.join(FAMILIES)}")
        if image_processor.patch_dim != config.vision_config.patch_dim:
            raise ValueError(
                f"preprocessor_config.json cuts patches of {image_processor.patch_dim} numbers, "
                f"config.json wants {config.vision_config.patch_dim}: files of two models"
            )

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> Processor:
        """Reads tokenizer.json, preprocessor_config.json and config.json of a folder.

        Raises:
          FileNotFoundError, ValueError: a file is missing or broken; the message names it.
        """
        config = QwenVLConfig.from_folder(folder)
        return cls(Tokenizer.from_folder(folder), ImageProcessor.from_folder(folder), config)

    def __call__(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        images: Sequence[Picture] | Sequence[Sequence[Picture]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> Inputs:
        """Renders, encodes and pads.

        Special tokens come from the template alone: their spellings inside a content are ordinary
        characters.

        Args:
          messages: one conversation (see `chat.render_chat`), or a list of them.
          images: its pictures in reading order, one a part {"type": "image"}: encoded bytes, paths
            or PIL pictures. For a list of conversations a list of such lists.
          add_generation_prompt: end with the opening of an assistant turn.
        Returns:
          Inputs of B conversations, of NumPy arrays.
        Raises:
          ValueError: pictures and their parts differ in number, or see `render_chat`.
          PictureError: a picture cannot be used.
        """
        conversations, pictures = as_batch(messages, images)
        rows, positions, pixels, grids = [], [], [], []
        for i, (conversation, found) in enumerate(zip(conversations, pictures, strict=True)):
            loaded = [load_picture(picture) for picture in found]
            row_pixels, row_grids = self.image_processor(loaded)
            ids = encode_chat(
                self.tokenizer,
                conversation,
                family=self.family,
                add_generation_prompt=add_generation_prompt,
            )
            try:
                ids = expand_placeholders(
                    ids,
                    row_grids,
                    self.image_processor.merge_size,
                    self.tokenizer.image_token_id,
                )
            except ValueError as error:
                raise ValueError(f"conversation {i}: {error}") from error
            rows.append(ids)
            positions.append(mrope_positions(ids, row_grids, self.config)[0])
            pixels.append(row_pixels)
            grids.append(row_grids)
        lengths = np.asarray([len(row) for row in rows], np.int32)
        longest = int(lengths.max())
        prompt_ids = np.full((len(rows), longest), self.tokenizer.pad_id, np.int32)
        places = np.zeros((3, len(rows), longest), np.int32)
        for i, (row, place) in enumerate(zip(rows, positions, strict=True)):
            prompt_ids[i, : len(row)], places[:, i, : len(row)] = row, place
        return Inputs(prompt_ids, lengths, places, np.concatenate(pixels), np.concatenate(grids))


def is_one_conversation(messages: Sequence) -> bool:
    """False for a list of conversations; ValueError for an empty list, which says nothing."""
    if not len(messages):
        raise ValueError("there is no message; a conversation needs at least one")
    return isinstance(messages[0], Mapping)


def as_batch(
    messages: Sequence, images: Sequence
) -> tuple[Sequence[Sequence[Message]], Sequence[Sequence[Picture]]]:
    """Conversations and each one's pictures, whether one was given or a list.

    Raises:
      ValueError: the lists differ in length, or a part holds a picture of its own, which would be
        overlooked.
    """
    if is_one_conversation(messages):
        messages, images = [messages], [images]
    elif not len(images):
        images = [()] * len(messages)
    if len(messages) != len(images):
        raise ValueError(
            f"{len(messages)} conversations and {len(images)} lists of pictures: give one list a "
            "conversation"
        )
    for i, found in enumerate(images):
        if isinstance(found, str | bytes | os.PathLike | Image.Image):
            raise ValueError(f"conversation {i}: pictures come as a list, even a single one")
    for i, message in ((i, m) for i, conversation in enumerate(messages) for m in conversation):
        parts = message["content"] if not isinstance(message["content"], str) else ()
        if any({"image", "image_url", "url", "path", "base64"} & set(part) for part in parts):
            raise ValueError(
                f'conversation {i}: write a picture\'s part as {{"type": "image"}} and give the '
                "picture itself in `images`"
            )
    return messages, images
