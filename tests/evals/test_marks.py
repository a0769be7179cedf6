"""The scripted agents through the real episode code and tools."""

import numpy as np
import pytest

from svrl_jax import rng
from svrl_jax.data import facts, script, world
from svrl_jax.evals import evaluate, marks, stats
from svrl_jax.records import Record
from svrl_jax.rewards.oracle import RuleOracle
from svrl_jax.rollout.episodes import run_episodes
from svrl_jax.rollout.policy import ScriptedPolicy
from svrl_jax.types import ToolCall


@pytest.fixture(scope="module")
def figures(builder, world_tools, tiny_config):
    tasks = world.eval_tasks("test", 1, 84, 56)[::2]
    prompts = builder.build_all(tasks, "agent")
    rollout = tiny_config.rollout.copy_and_resolve_references()
    with rollout.unlocked():
        rollout.budget, rollout.max_turn_tokens = 2000, 500  # the small tokenizer writes long
    found = {}
    for name, habits in marks.MARKS.items():
        policy = ScriptedPolicy(marks.scripted(habits, 5, 0.5), builder.tokenizer)
        groups = run_episodes(
            tasks, prompts, policy, world_tools, builder.tokenizer, builder.config, rollout,
            tiny_config.search, seed=0, step=0, group_size=1, regime="agent", temperature=0.0,
            query_choice="first", policy_name=name,
        )  # fmt: skip
        records = [Record(g[0], t) for g, t in zip(groups, tasks, strict=True)]
        rows = evaluate.make_rows(
            records, evaluate.Scoring(("em",))(records),
            search_free={t.id: t.category in ("top", "bottom") for t in tasks},
            label=RuleOracle().label,
        )  # fmt: skip
        found[name] = stats.figures(rows)
    return found


def test_all_scripts_obey_the_protocol(figures):
    assert [f["r_format"] for f in figures.values()] == [1.0] * len(marks.MARKS)


def test_the_ceiling_is_high_and_searches_when_needed(figures):
    ceiling = figures["scripted"]
    assert ceiling["acc"] > 0.75
    assert ceiling["over_search"] == 0.0 and ceiling["under_search"] < 0.05
    assert ceiling["mask_balanced"] == 1.0 and ceiling["unique_queries"] == 5.0


def test_always_and_never(figures):
    assert figures["always_search"]["sr"] == figures["always_search"]["over_search"] == 1.0
    assert figures["never_search"]["sr"] == 0.0
    assert figures["never_search"]["acc"] < figures["scripted"]["acc"] - 0.2
    assert figures["never_search"]["under_search"] > 0.5


def test_a_mask_of_ones_is_worth_half(figures):
    assert figures["all_ones"]["mask_balanced"] == 0.5
    assert figures["all_ones"]["mask_agreement"] < figures["scripted"]["mask_agreement"]
    np.testing.assert_allclose(figures["all_ones"]["acc"], figures["scripted"]["acc"], atol=0.02)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("tool", ["image_search", "text_search"])
@pytest.mark.parametrize("status", ["failed", "empty"])
def test_a_search_without_items_gives_nothing_away(tool, status, lazy):
    tasks = [t for t in world.eval_tasks("test", 1, 84, 56) if t.category not in facts.VISUAL]
    for task in tasks[:40]:
        call = ToolCall(tool, "where is it", (), status=status)
        text = script.write_turn(
            task, [call], script.Habits(lazy_mask=lazy), rng.host_rng("no items", task.id),
            regime="agent", known=False, guess="a guess", max_text_searches=1,
        )  # fmt: skip
        assert "<verify> </verify>" in text and text.endswith("<answer> a guess</answer>")
