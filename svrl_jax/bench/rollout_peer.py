"""The peer of the rollout benchmark: transformers' `generate`, the whole history sent every turn.

Needs the extra [bench]; torch is imported inside functions only.
"""

from __future__ import annotations

import os
import time

import numpy as np


class MissingPeerError(RuntimeError):
    """The peer's packages are not installed; names the remedy."""


def seconds(
    folder: str | os.PathLike,
    *,
    prompt_ids: np.ndarray,
    pixel_values: np.ndarray,
    grid: tuple[int, int, int],
    tool_ids: np.ndarray,
    turn_tokens: int,
    banned: tuple[int, ...],
) -> float:
    """Seconds that the peer takes for all turns of all rows, loading left out.

    Args:
      folder: Hugging Face folder of the model.
      prompt_ids: int32[B, T], with each row's picture expanded.
      pixel_values: float32[B, L, C].
      grid: patches (t, h, w) of every picture.
      tool_ids: int32[turns - 1, B, n], put between the turns.
      turn_tokens: sampled tokens of a turn.
      banned: ids that are not drawn.
    Raises:
      MissingPeerError: torch or transformers' model is not there.
    """
    torch, model = load_peer(folder)
    rows = len(prompt_ids)
    history = torch.from_numpy(prompt_ids.astype(np.int64))
    pictures = {
        "pixel_values": torch.from_numpy(pixel_values).flatten(0, 1),
        "image_grid_thw": torch.tensor([grid] * rows),
    }
    torch.manual_seed(0)
    start = time.perf_counter()
    with torch.inference_mode():
        for turn in range(len(tool_ids) + 1):
            history = model.generate(
                input_ids=history,
                attention_mask=torch.ones_like(history),
                mm_token_type_ids=(history == model.config.image_token_id).int(),
                **pictures,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                min_new_tokens=turn_tokens,
                max_new_tokens=turn_tokens,
                suppress_tokens=list(banned),
                pad_token_id=0,
            )
            if turn < len(tool_ids):
                tool = torch.from_numpy(tool_ids[turn].astype(np.int64))
                history = torch.cat([history, tool], dim=1)
    return time.perf_counter() - start


def load_peer(folder):
    """(torch, transformers' float32 model of a folder); MissingPeerError without the packages."""
    try:
        import torch
        import transformers

        kind = transformers.Qwen2_5_VLForConditionalGeneration
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    except ImportError as error:
        raise MissingPeerError(
            f"the peer needs torch and transformers ({error}): install the extra [bench], or leave "
            "the peer out with --nopeer"
        ) from error
    return torch, model
