"""The fixed workflow around policies that would do something else."""

import dataclasses

import numpy as np
import pytest
from rollout_toys import (
    ALL_BUT_PHRASES,
    CONFIG,
    MODEL,
    TOKENIZER,
    ToyTools,
    make_prompt,
    make_task,
    rollout_config,
    search_config,
)

from svrl_jax.rollout.episodes import run_episodes
from svrl_jax.rollout.policy import ScriptedPolicy
from svrl_jax.rollout.scheduler import EnginePolicy
from svrl_jax.rollout.workflow import FixedWorkflow

R, V, A = "<reason>I look.</reason>", "<verify> </verify>", "<answer>yes</answer>"
Q = "<text_search>alpha 1, beta 2</text_search>"


def play(policy, count=1, **changes):
    tasks = [make_task(i) for i in range(count)]
    prompts = [make_prompt(t, grids=[(1, 4, 6)]) for t in tasks]
    groups = run_episodes(
        tasks, [dataclasses.replace(p, regime="rag") for p in prompts],
        FixedWorkflow(policy, TOKENIZER), ToyTools(), TOKENIZER, CONFIG,
        rollout_config(budget=900, max_text_searches=1, **changes), search_config(),
        seed=0, step=0, group_size=1, regime="rag", temperature=1.0, query_choice="first",
        policy_name="toy",
    )  # fmt: skip
    return [g[0] for g in groups]


def actions(episode):
    return [t.parsed.action for t in episode.turns]


@pytest.mark.parametrize(
    "texts",
    [
        [R + V + A] * 3,  # would answer at once
        [R + "<search><img></search>", R + "<verify>1,0,1</verify>" + Q, R + V + A],  # obeys
        [R + V + Q] * 3,  # would search text for ever
    ],
)
def test_every_policy_looks_up_searches_and_answers(texts):
    class Goes(ScriptedPolicy):
        """Writes queries or an answer where the turn is begun for it."""

        def _answer(self, request):
            if request.begin:
                rest = (
                    "gamma 3</text_search>" if "<text_search>" in request.begin else "no</answer>"
                )
                self._script, kept = (lambda view: rest), self._script
                try:
                    return super()._answer(request)
                finally:
                    self._script = kept
            return super()._answer(request)

    (episode,) = play(Goes(lambda view: texts[len(view.turns)], TOKENIZER), max_turn_tokens=120)
    assert actions(episode) == ["image_search", "text_search", "answer"]
    assert episode.end_reason == "answered" and episode.regime == "rag"
    assert all(t.parsed.reason == "I look." for t in episode.turns)
    assert [c.tool for c in episode.calls] == ["image_search", "text_search"]
    assert len(episode.ids) == len(episode.loss_mask) == len(episode.sampler_logps)


def test_a_random_model_is_kept_to_it_too_and_its_context_stays_whole():
    policy = EnginePolicy(MODEL, ALL_BUT_PHRASES, rollout_config(budget=900))
    seen = []
    append = policy.engine.append
    policy.engine.append = lambda parts: (seen.extend(parts), append(parts))
    episodes = play(policy, count=4)
    for episode in episodes:
        assert actions(episode)[0] == "image_search"
        if len(episode.turns) > 1 and episode.end_reason != "budget":
            assert actions(episode)[1] in ("text_search", None)
        assert (np.diff(episode.positions[0][episode.prompt_length :]) > 0).all()
    # Whatever was put into a context anew is the beginning of an episode, token by token.
    new = [one for one in seen if any((e.ids[: len(one.ids)] == one.ids).all() for e in episodes
                                      if len(e.ids) >= len(one.ids))]  # fmt: skip
    assert len(new) >= 4
