"""Sampler and trainer see the same model, in either family, with pictures in later turns."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from rollout_toys import rollout_config

from configs.base import get_config
from svrl_jax import rng
from svrl_jax.grpo.batch import make_batches
from svrl_jax.grpo.logps import per_token_logps
from svrl_jax.models.qwen_vl import (
    Qwen3VisionConfig,
    QwenVL,
    QwenVLConfig,
    TextConfig,
    mrope_positions,
    plan_vision,
)
from svrl_jax.models.qwen_vl.config import QWEN3
from svrl_jax.rollout.policy import Request
from svrl_jax.rollout.scheduler import EnginePolicy
from tests.conftest import compiler
from tests.grpo import tiny

CONFIGS = {
    "qwen2_5_vl": tiny.CONFIG,
    "qwen3_vl": QwenVLConfig(
        text_config=TextConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            mrope_section=(3, 2, 1),
            initializer_range=0.2,
            model_type=QWEN3,
        ),
        vision_config=Qwen3VisionConfig(
            hidden_size=16,
            out_hidden_size=32,
            depth=3,
            num_heads=2,
            intermediate_size=24,
            patch_size=4,
            num_position_embeddings=25,
            deepstack_visual_indexes=(0, 1),
            initializer_range=0.2,
        ),
        image_token_id=tiny.IMAGE,
        video_token_id=59,
        vision_start_token_id=tiny.VISION_START,
        vision_end_token_id=tiny.VISION_END,
        tie_word_embeddings=True,
    ),
}
# 56 x 56, 84 x 112 and 56 x 84 pixels at 14 a patch.
SMALL, LARGE, TOOL = (1, 4, 4), (1, 6, 8), (1, 4, 6)


def words(seed, count, grid=None):
    """`count` text tokens, with a picture's run in the middle if a grid is given."""
    ids = np.random.default_rng(seed).integers(4, 50, count).tolist()
    if grid is not None:
        ids[2:2] = [tiny.VISION_START, *[tiny.IMAGE] * (int(np.prod(grid)) // 4), tiny.VISION_END]
    return np.asarray(ids, np.int32)


class Context:
    """One slot: what it holds so far, and which of it was sampled."""

    def __init__(self, slot, config):
        self.slot, self.config = slot, config
        self.ids = np.zeros(0, np.int32)
        self.is_sampled, self.logps = np.zeros((2, 0), np.float32)
        self.grids, self.pixels, self.following = [], [], 0

    def request(self, ids, grid, count):
        """Appends `ids` (with a picture if `grid` is given) and asks for `count` tokens."""
        grids = [] if grid is None else [grid]
        pixels = tiny.picture(grid, len(self.ids)) if grids else tiny.NO_PICTURE
        grid_array = np.asarray(grids, np.int32).reshape(-1, 3)
        is_new = not len(self.ids)
        positions, following = mrope_positions(ids, grid_array, self.config, self.following)
        self._add(ids, np.zeros(len(ids)), False)
        self.grids += grids
        self.pixels.append(pixels)
        self.following = following
        return Request(
            slot=self.slot,
            ids=ids,
            positions=positions,
            next_position=following,
            pixel_values=pixels,
            image_grid_thw=grid_array,
            key=rng.turn_keys([(0, 0, self.slot, 0, len(self.ids), 0)])[0],
            temperature=1.0,
            max_new_tokens=count,
            is_new=is_new,
            keep=lambda ids, start: None,
            view=None,
        )

    def take(self, turn):
        self._add(turn.ids, turn.logps, True)
        self.following += len(turn.ids)

    def episode(self):
        grids = np.asarray(self.grids, np.int32)
        return dataclasses.replace(
            tiny.make_episode("task", self.slot, 0, (), tiny.NO_PICTURE, ((3, 4),)),
            ids=self.ids,
            loss_mask=self.is_sampled.astype(np.int32),
            positions=mrope_positions(self.ids, grids, self.config)[0],
            sampler_logps=self.logps.astype(np.float32),
            pixel_values=np.concatenate(self.pixels),
            image_grid_thw=grids,
            temperature=1.0,
        )

    def _add(self, ids, logps, is_sampled):
        self.ids = np.concatenate([self.ids, ids])
        self.logps = np.concatenate([self.logps, logps])
        self.is_sampled = np.concatenate([self.is_sampled, np.full(len(ids), is_sampled)])


@pytest.fixture(autouse=True)
def quick_compiler():
    with compiler(is_quick=True):
        yield


@pytest.mark.case("A-M18")
@pytest.mark.parametrize("family", CONFIGS)
def test_sampler_and_trainer_agree_where_only_one_tool_returned_a_picture(family):
    """Each sample has its own picture; in the second turn only sample 2's tool returns one,
    in the third both do."""
    config = CONFIGS[family]
    model = QwenVL(config, rngs=nnx.Rngs(0))
    policy = EnginePolicy(model, tiny.BANNED, rollout_config(budget=128, slots=2, lanes=2))
    one, two = contexts = [Context(slot, config) for slot in range(2)]

    def play(*requests):
        for request in requests:
            policy.submit(request)
        while found := policy.collect():
            for turn in found:
                contexts[turn.slot].take(turn)

    play(one.request(words(0, 6, SMALL), SMALL, 5), two.request(words(1, 9, LARGE), LARGE, 5))
    play(one.request(words(2, 7), None, 6), two.request(words(3, 5, TOOL), TOOL, 6))
    play(one.request(words(4, 6, TOOL), TOOL, 4), two.request(words(5, 4, SMALL), SMALL, 4))
    episodes = [context.episode() for context in contexts]
    assert [len(e.pixel_values) for e in episodes] == [16 + 24, 48 + 24 + 16]
    grpo = get_config().grpo
    grpo.layout, grpo.length_buckets = "single", (64,)
    batch = make_batches(
        [episodes],
        np.asarray([[0.5, -0.5]]),
        np.ones((1, 2), bool),
        grpo,
        merge_size=2,
        image_token_id=tiny.IMAGE,
        pad_id=tiny.PAD,
    )
    (micro,) = batch.microbatches
    for number, row in zip(batch.minibatches[0].origins[0], range(8)):
        cells = micro.image_index[row][micro.image_index[row] >= 0]
        own = [micro.pixel_values[4 * cell : 4 * cell + 4] for cell in cells]
        if number >= 0:
            np.testing.assert_array_equal(np.concatenate(own), episodes[number].pixel_values)
    plan = plan_vision(np.asarray(micro.image_grid_thw), config.vision_config)
    graphdef, params = nnx.split(model)

    @jax.jit
    def logps(params, micro, plan):
        return per_token_logps(
            nnx.merge(graphdef, params),
            micro,
            plan,
            temperature=1.0,
            banned_ids=tiny.BANNED,
        )[0]

    found = np.asarray(logps(params, dataclasses.replace(micro, image_grid_thw=()), plan))
    for number, row in zip(batch.minibatches[0].origins[0], range(8)):
        if number >= 0:
            episode = episodes[number]
            assert episode.loss_mask.sum() == 15
            expected = episode.sampler_logps[episode.loss_mask > 0]
            np.testing.assert_allclose(found[row, :15], expected, atol=2e-5)
