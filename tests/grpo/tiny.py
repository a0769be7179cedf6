"""The shape of a tiny Qwen2.5-VL and hand-made episodes, for the tests of grpo/."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from svrl_jax.models.qwen_vl import (
    QwenVLConfig,
    TextConfig,
    VisionConfig,
    default_image_index,
    mrope_positions,
    plan_vision,
)
from svrl_jax.types import Episode

IMAGE, VISION_START, VISION_END, PAD = 60, 61, 62, 63
BANNED = (59, IMAGE)
TEMPERATURE = 0.7
BUDGET = 64

CONFIG = QwenVLConfig(
    text_config=TextConfig(
        vocab_size=64,
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
    image_token_id=IMAGE,
    video_token_id=59,
    vision_start_token_id=VISION_START,
    vision_end_token_id=VISION_END,
    tie_word_embeddings=True,
)


def picture(grid, seed):
    """float32[t * h * w, C], random patches."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(int(np.prod(grid)), CONFIG.vision_config.patch_dim)).astype(np.float32)


NO_PICTURE = np.zeros((0, CONFIG.vision_config.patch_dim), np.float32)


def make_episode(task_id, sample, seed, grids, pixel_values, spans):
    """A prompt with the first picture, then pairs of (policy tokens, tool tokens).

    A second picture stands in the first tool result. Sampler log-probs are zero.
    """
    rng = np.random.default_rng(seed)
    runs = [[VISION_START, *[IMAGE] * (int(np.prod(g)) // 4), VISION_END] for g in grids]
    ids, mask = [*(runs[0] if runs else []), 1, 2, 3], []
    mask = [0] * len(ids)
    prompt_length = len(ids)
    for i, (policy, tool) in enumerate(spans):
        ids += rng.integers(4, 50, policy).tolist()
        mask += [1] * policy
        if i == 0 and len(runs) > 1:
            ids, mask = ids + runs[1], mask + [0] * len(runs[1])
        ids += rng.integers(4, 50, tool).tolist()
        mask += [0] * tool
    ids = np.array(ids, np.int32)
    grid = np.array(grids, np.int32).reshape(-1, 3)
    return Episode(
        task_id=task_id,
        step=0,
        sample=sample,
        seed=0,
        policy="tiny",
        regime="agent",
        ids=ids,
        loss_mask=np.array(mask, np.int32),
        positions=mrope_positions(ids, grid, CONFIG)[0],
        sampler_logps=np.zeros(len(ids), np.float32),
        pixel_values=pixel_values,
        image_grid_thw=grid,
        prompt_length=prompt_length,
        turns=(),
        end_reason="answered",
        answer="x",
        temperature=TEMPERATURE,
    )


def naive_logps(model, episode):
    """float32[T] by the plainest path: one row, no padding, all logits, kept ids only."""
    ids = episode.ids[None]
    embeds = index = None
    if len(episode.image_grid_thw):
        plan = plan_vision(episode.image_grid_thw, CONFIG.vision_config)
        embeds = model.encode_images(episode.pixel_values, plan)
        index = default_image_index(ids, IMAGE)
    zeros = np.zeros_like(ids)
    hidden = model(ids, episode.positions[:, None], zeros, zeros, embeds, index)
    kept = np.setdiff1d(np.arange(CONFIG.text_config.vocab_size), BANNED)
    logits = model.logits(hidden)[0] / TEMPERATURE  # [T, V]
    norm = jax.nn.logsumexp(logits[:, kept], axis=-1)
    logps = logits[np.arange(len(ids[0]) - 1), ids[0, 1:]] - norm[:-1]
    return jnp.where(episode.loss_mask > 0, jnp.pad(logps, (1, 0)), 0.0)


def with_sampler(model, episode):
    logps = jax.jit(lambda: naive_logps(model, episode))()
    return dataclasses.replace(episode, sampler_logps=np.array(logps))


def flat(tree):
    """All leaves as one float64 vector."""
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])
