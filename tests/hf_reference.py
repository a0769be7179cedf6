"""A policy folder loaded by transformers and by ours, on one prompt."""

import pathlib

import jax
import numpy as np
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from svrl_jax.models.qwen_vl import default_image_index, plan_vision
from svrl_jax.models.qwen_vl.weights import load_weights
from svrl_jax.processing.images import load_picture
from svrl_jax.types import Prompt, Task


def our_logits(folder: pathlib.Path, prompt: Prompt) -> np.ndarray:
    """float32[T, V], at highest precision."""
    model, config = load_weights(folder)
    ids = prompt.ids[None]
    with jax.default_matmul_precision("highest"):
        plan = plan_vision(prompt.image_grid_thw, config.vision_config)
        embeds = model.encode_images(prompt.pixel_values, plan)
        zeros = np.zeros_like(ids)
        index = default_image_index(ids, config.image_token_id)
        hidden = model(ids, prompt.positions[:, None], zeros, zeros, embeds, index)
        return np.asarray(model.logits(hidden))[0]


def their_logits(folder: pathlib.Path, prompt: Prompt) -> np.ndarray:
    """float32[T, V], of the same ids and patches."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(prompt.ids[None], dtype=torch.long)
    with torch.no_grad():
        return (
            model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == model.config.image_token_id).long(),
                pixel_values=torch.tensor(prompt.pixel_values),
                image_grid_thw=torch.tensor(prompt.image_grid_thw, dtype=torch.long),
            )
            .logits[0]
            .numpy()
        )


def assert_transformers_agrees(folder: pathlib.Path, prompt: Prompt, task: Task) -> None:
    """Tokenizer, processor and logits, at 1e-4 in float32."""
    theirs = their_logits(folder, prompt)
    assert theirs.std() > 0.1  # not a blank model
    np.testing.assert_allclose(our_logits(folder, prompt), theirs, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    is_later = np.zeros(len(prompt.ids), bool)
    is_later[1:] = (prompt.ids[1:] == image_id) & (prompt.ids[:-1] == image_id)
    np.testing.assert_array_equal(prompt.ids[~is_later], ids)
    messages = [
        {"role": "system", "content": prompt.text.split("system\n")[1].split("<|im_end|>")[0]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": task.question}]},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == prompt.text
    found = Qwen2VLImageProcessorPil.from_pretrained(folder)(
        load_picture(task.picture), return_tensors="np"
    )
    np.testing.assert_array_equal(found["image_grid_thw"], prompt.image_grid_thw)
    np.testing.assert_allclose(found["pixel_values"], prompt.pixel_values, atol=1e-5)
