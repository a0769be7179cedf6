"""Configs that cannot run are refused with the keys and the remedy."""

import pytest

from svrl_jax.config import ConfigError, check
from tests.conftest import changed


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"reward.scorer": "exact"}, ["reward.scorer", "em"]),
        ({"grpo.objective": "ppo"}, ["grpo.objective", "dr_grpo"]),
        ({"search.image_items": "all"}, ["search.image_items", "titles"]),
        ({"rollout.query_choice": "best"}, ["rollout.query_choice", "random"]),
        ({"model.param_dtype": "float8"}, ["model.param_dtype"]),
        ({"reward.w_format": 1.5}, ["reward.w_format", "[0, 1]"]),
        ({"reward.search_free_scale": -0.1}, ["reward.search_free_scale"]),
        ({"num_steps": 0}, ["num_steps", "at least 1"]),
        ({"rollout.num_queries": 0}, ["rollout.num_queries"]),
        ({"search.summary_words": 0}, ["search.summary_words"]),
        ({"search.kind": "web"}, ["search.kind", "live"]),
        ({"search.kind": "index"}, ["search.index_folder"]),
        ({"search.record_mode": "replay"}, ["search.record_mode", "search.kind"]),
        ({"search.kind": "live", "search.record_mode": "replay"}, ["search.record_file"]),
        ({"search.record_file": "r.sqlite"}, ["search.record_mode", "search.record_file"]),
        ({"search.thumbnails": True}, ["search.thumbnails", "search.kind"]),
        (
            {"search.kind": "live", "search.image_provider": "none"},
            ["search.image_provider", "rollout.max_image_searches"],
        ),
        ({"search.max_usd": -1.0}, ["search.max_usd"]),
        ({"search.jina.per_minute": 0.0}, ["search.jina", "per_minute"]),
        ({"rollout.temperature": -1.0}, ["rollout.temperature"]),
        ({"rollout.slots": 2}, ["rollout.slots", "rollout.lanes", "raise slots"]),
        ({"rollout.budget": 50}, ["rollout.budget", "max_turn_tokens", "answer_reserve"]),
        ({"eval.modes": ()}, ["eval.modes"]),
        ({"eval.splits": ("test", "dev")}, ["eval.splits", "dev", "ood"]),
        ({"eval.modes": ("beam",)}, ["eval.modes", "beam", "greedy"]),
        ({"rollout.temperature": 0.0}, ["rollout.temperature", "above 0"]),
        ({"rollout.group_size": 1}, ["rollout.group_size", "2 or more"]),
        ({"rollout.budget": 500}, ["grpo.length_buckets", "rollout.budget", "224", "500"]),
        (
            {"rollout.budget": 500, "grpo.layout": "shared", "grpo.row_tokens": 448},
            ["grpo.row_tokens", "rollout.budget", "448", "500"],
        ),
        (
            {"reward.search_free_source": "rate"},
            ["reward.search_free_source", "reward.search_free_samples"],
        ),
        ({"grpo.kl_coef": -1.0}, ["grpo.kl_coef"]),
        ({"optim.learning_rate": 0.0}, ["optim.learning_rate"]),
    ],
)
def test_a_config_that_cannot_run_is_refused(tiny_config, changes, named):
    with pytest.raises(ConfigError) as error:
        check(changed(tiny_config, **changes), training=True)
    for word in named:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_evaluation_may_be_greedy_and_ungrouped(tiny_config):
    config = changed(tiny_config, **{"rollout.temperature": 0.0, "rollout.group_size": 1})
    check(config, training=False)
