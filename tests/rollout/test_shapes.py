"""Episodes of random shape keep their arrays together; few shapes are compiled and none anew."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_toys import (
    ANSWER,
    CONFIG,
    IMAGE_SEARCH,
    MODEL,
    REASON,
    TEXT_SEARCH,
    TOKENIZER,
    make_prompt,
    make_task,
    rollout_config,
    search_config,
)
from test_engine import BANNED, first_request, run
from test_information import PROCESSOR, PictureTools, png

from svrl_jax.models.qwen_vl.rope import mrope_positions
from svrl_jax.rollout.episodes import run_episodes
from svrl_jax.rollout.policy import ScriptedPolicy
from svrl_jax.rollout.scheduler import EnginePolicy
from svrl_jax.rollout.transcript import Transcript

ACTIONS = st.sampled_from([IMAGE_SEARCH, TEXT_SEARCH, ANSWER, "<search>", "", "<reason>"])
TURNS = st.lists(
    st.tuples(st.sampled_from([REASON, "", "<reason> </reason>"]), st.integers(0, 4), ACTIONS),
    min_size=4, max_size=4,
)  # fmt: skip
SIDES = st.lists(st.sampled_from([None, 8, 16, 24, 40]), max_size=3)
GRID = st.tuples(st.just(1), st.sampled_from([2, 4, 6]), st.sampled_from([2, 8]))
GRIDS = st.lists(GRID, max_size=2)


@pytest.mark.case("A-S4")
@pytest.mark.case("A-S17")
@settings(max_examples=60, deadline=None)
@given(turns=TURNS, sides=SIDES, grids=GRIDS, budget=st.integers(40, 600), limit=st.integers(1, 99))
def test_random_episodes_keep_ids_mask_log_probs_and_positions_together(
    turns, sides, grids, budget, limit
):
    texts = [f"{r}<verify>{','.join('1' * n)}</verify>{a}" for r, n, a in turns]
    tools = PictureTools(*[side and png(side, 16) for side in sides])
    task = make_task()
    prompt = make_prompt(task, grids=grids)
    config = rollout_config(budget=budget, max_turn_tokens=limit, answer_reserve=16)
    ((episode,),) = run_episodes(
        [task], [prompt], ScriptedPolicy(lambda view: texts[len(view.turns)], TOKENIZER), tools,
        TOKENIZER, CONFIG, config, search_config(), seed=0, step=0, group_size=1, regime="agent",
        temperature=1.0, query_choice="first", policy_name="script", processor=PROCESSOR,
    )  # fmt: skip
    length = len(episode.ids)
    assert length == len(episode.loss_mask) == len(episode.sampler_logps)
    assert episode.positions.shape == (3, length) and length <= max(budget, len(prompt.ids))
    is_picture = episode.ids == CONFIG.image_token_id
    assert is_picture.sum() * 4 == len(episode.pixel_values) == episode.image_grid_thw.prod(1).sum()
    expected, _ = mrope_positions(episode.ids, episode.image_grid_thw, CONFIG)
    np.testing.assert_array_equal(episode.positions, expected)
    assert episode.loss_mask.sum() == sum(t.stop - t.start for t in episode.turns)
    np.testing.assert_array_equal(episode.ids[: len(prompt.ids)], prompt.ids)


@pytest.mark.case("A-S3")
@pytest.mark.case("A-S4")
def test_an_append_that_is_not_whole_raises_at_once():
    transcript = Transcript(make_prompt(make_task()), CONFIG)
    with pytest.raises(ValueError, match="as many ids"):
        transcript.append_sampled(np.asarray([5, 6]), np.zeros(3, np.float32))


@pytest.mark.case("A-J4")
def test_a_second_pass_over_mixed_shapes_compiles_nothing():
    policy = EnginePolicy(MODEL, BANNED, rollout_config(slots=8, lanes=4))
    sides = [(2, 2), (2, 4), (4, 4), (4, 6), (6, 6), (2, 8), (8, 8), (6, 8), (4, 8), (2, 6)]
    prompts = [
        make_prompt(make_task(n), grids=[(1, *sides[n % 10])], before=90 + n)
        for n in range(0, 41, 3)
    ]

    def play():
        for start in range(0, len(prompts), 5):
            group = prompts[start : start + 5][: 5 - start % 3]  # groups with dropouts
            run(policy, [first_request(p, slot=i, limit=20) for i, p in enumerate(group)])

    play()
    first = policy.engine.num_compiles
    play()
    # Prefill and decode: two numbers of rows each, and the cache lengths; one copy; pictures.
    assert policy.engine.num_compiles == first <= 12
