"""A tiny random model and a step of episodes, made once for all tests of grpo/."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from configs.base import get_config
from svrl_jax.models.qwen_vl import QwenVL
from tests.grpo import tiny

GRIDS = [((1, 4, 4),), ((1, 2, 6), (1, 4, 2)), ()]
SPANS = [((3, 4), (5, 1)), ((4, 2),), ((2, 5), (1, 3), (6, 0)), ((5, 0),)]


@pytest.fixture(scope="session", autouse=True)
def quick_compiles():
    """These programs run for milliseconds and compile for seconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def model(quick_compiles):
    return QwenVL(tiny.CONFIG, rngs=nnx.Rngs(0))


def make_group(p, spans):
    """One question's episodes, which share its pictures."""
    pictures = [tiny.picture(g, 100 * p + i) for i, g in enumerate(GRIDS[p])]
    pictures = np.concatenate(pictures) if pictures else tiny.NO_PICTURE
    return [
        tiny.make_episode(f"task{p}", g, 7 * p + g, GRIDS[p], pictures, s)
        for g, s in enumerate(spans)
    ]


@pytest.fixture(scope="session")
def episodes():
    """[3][4]: questions with one picture, with one more in a tool result, and without any.

    Sampler log-probs are random.
    """
    rng = np.random.default_rng(5)
    groups = [make_group(p, [SPANS[(p + g) % 4] for g in range(4)]) for p in range(3)]
    return [
        [
            dataclasses.replace(
                e, sampler_logps=np.float32(e.loss_mask * -rng.exponential(2, len(e.ids)))
            )
            for e in group
        ]
        for group in groups
    ]


@pytest.fixture(scope="session")
def sampled(model):
    """[3][2]: the same questions, with the log-probs that `model` gives by the plainest path."""
    groups = [make_group(p, [SPANS[p]] * 2) for p in range(3)]
    return [[tiny.with_sampler(model, e) for e in group] for group in groups]


@pytest.fixture(scope="session")
def advantages():
    """float32[3, 4], the last group without spread."""
    return np.array([[0.5, -0.5, 0.25, -0.25], [0.3, 0.1, -0.4, 0.0], [0, 0, 0, 0]], np.float32)


@pytest.fixture
def config():
    c = get_config()
    c.grpo.layout = "single"
    c.grpo.length_buckets = (16, 40)
    c.grpo.microbatch_rows = 8
    c.grpo.kl_coef = 0.05
    c.optim.learning_rate = 1e-2
    c.optim.clip_norm = 0.0
    return c
