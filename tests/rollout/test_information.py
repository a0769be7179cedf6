"""Thumbnails of items as vision tokens: true positions, never cut, the same in one full pass."""

import io

import numpy as np
import pytest
from PIL import Image
from rollout_toys import (
    ALL_BUT_PHRASES,
    ANSWER,
    CONFIG,
    IMAGE_SEARCH,
    MODEL,
    REASON,
    TOKENIZER,
    VERIFY,
    ToyTools,
    full_logps,
    make_prompt,
    make_task,
    rollout_config,
    search_config,
)

from svrl_jax.models.qwen_vl.rope import mrope_positions
from svrl_jax.processing.images import ImageProcessor
from svrl_jax.rollout.episodes import run_episodes
from svrl_jax.rollout.information import UNREADABLE
from svrl_jax.rollout.policy import ScriptedPolicy
from svrl_jax.rollout.scheduler import EnginePolicy
from svrl_jax.types import SearchItem

PROCESSOR = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=4096)


def png(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class PictureTools(ToyTools):
    """Each item of an image search has a thumbnail; `pictures` in order, None for none."""

    def __init__(self, *pictures):
        super().__init__()
        self.pictures = pictures

    def image_search(self, task):
        return [
            SearchItem(id=str(i), title=f"t{i}", text="w", picture=picture)
            for i, picture in enumerate(self.pictures)
        ]


def play(policy, tools, *, processor=PROCESSOR, tasks=1, group_size=1, seed=3, **changes):
    tasks = [make_task(i) for i in range(tasks)]
    config = rollout_config(
        **{"budget": 500, "max_turn_tokens": 100, "answer_reserve": 120} | changes
    )
    return run_episodes(
        tasks, [make_prompt(t) for t in tasks], policy, tools, TOKENIZER, CONFIG, config,
        search_config(), seed=seed, step=0, group_size=group_size, regime="agent", temperature=1.0,
        query_choice="first", policy_name="toy", processor=processor,
    )  # fmt: skip


def script(num_items):
    texts = (
        REASON + VERIFY + IMAGE_SEARCH,
        REASON + f"<verify>{','.join('1' * num_items)}</verify>" + ANSWER,
    )
    return ScriptedPolicy(lambda view: texts[len(view.turns)], TOKENIZER)


def check(episode):
    is_picture = episode.ids == CONFIG.image_token_id
    assert is_picture.sum() * 4 == len(episode.pixel_values) == episode.image_grid_thw.prod(1).sum()
    positions, _ = mrope_positions(episode.ids, episode.image_grid_thw, CONFIG)
    np.testing.assert_array_equal(positions, episode.positions)


@pytest.mark.case("A-M18")
def test_thumbnails_enter_in_order_with_true_positions():
    pictures = [png(16, 16), None, png(32, 16, 1)]
    ((episode,),) = play(script(3), PictureTools(*pictures))
    assert episode.end_reason == "answered" and episode.violations == ()
    assert episode.image_grid_thw.tolist() == [[1, 4, 4], [1, 4, 4], [1, 4, 8]]
    expected, _ = PROCESSOR([Image.open(io.BytesIO(p)) for p in pictures if p])
    np.testing.assert_array_equal(episode.pixel_values[16:], expected)
    text = TOKENIZER.decode(episode.ids)
    assert (
        text.index("<|vision_end|>#1 t0") < text.index("#2 t1") < text.index("<|vision_end|>#3 t2")
    )
    check(episode)


@pytest.mark.case("A-M17")
def test_a_thumbnail_that_cannot_be_read_becomes_a_note():
    ((episode,),) = play(script(2), PictureTools(b"no picture", png(8, 8)))
    assert UNREADABLE in TOKENIZER.decode(episode.ids) and len(episode.image_grid_thw) == 2
    assert episode.calls[0].items[0].picture == b"no picture"
    check(episode)


@pytest.mark.case("A-S16")
@pytest.mark.case("A-S17")
@pytest.mark.parametrize("budget", range(185, 330, 9))
def test_the_budget_never_cuts_a_picture(budget):
    tools = PictureTools(png(48, 48), png(48, 48, 1))
    ((episode,),) = play(script(2), tools, budget=budget, answer_reserve=20, max_turn_tokens=60)
    check(episode)
    shown = len(episode.image_grid_thw) - 1
    assert shown == (len(episode.calls[0].items) if episode.calls else 0)
    assert len(episode.ids) <= budget and (episode.ids[:12] == make_prompt(make_task()).ids).all()


def test_pictures_without_a_processor_are_an_error_unless_none_are_shown():
    with pytest.raises(ValueError, match="tool_picture_pixels"):
        play(script(1), PictureTools(png(8, 8)), processor=None)
    ((episode,),) = play(script(1), PictureTools(png(8, 8)), processor=None, tool_picture_pixels=0)
    assert len(episode.image_grid_thw) == 1 and episode.end_reason == "answered"


def test_sampled_log_probs_behind_thumbnails_are_those_of_one_pass():
    policy = EnginePolicy(MODEL, ALL_BUT_PHRASES, rollout_config(budget=500))
    tools = PictureTools(png(16, 24), png(40, 16, 1))
    groups = play(policy, tools, tasks=2, group_size=6, seed=1, max_turn_tokens=40)
    shown = [e for e in sum(groups, []) if len(e.image_grid_thw) > 1 and len(e.turns) > 1]
    assert len(shown) >= 2
    for episode in shown[:4]:
        check(episode)
        expected = full_logps(
            episode.ids, episode.positions, episode.pixel_values, episode.image_grid_thw,
            temperature=1.0, banned=ALL_BUT_PHRASES,
        )  # fmt: skip
        is_policy = episode.loss_mask == 1
        np.testing.assert_allclose(episode.sampler_logps[is_policy], expected[is_policy], atol=1e-4)
