"""Demonstrations are what a rollout would have recorded, token for token."""

import numpy as np
import pytest

from svrl_jax.data import facts, world
from svrl_jax.rollout.episodes import run_episodes
from svrl_jax.rollout.policy import ScriptedPolicy
from svrl_jax.training.demos import DemoMaker
from svrl_jax.types import Task
from tests.conftest import changed


class Recorder:
    """The tools, with every result kept in order."""

    def __init__(self, tools):
        self.tools, self.results = tools, []

    def image_search(self, task):
        self.results.append(self.tools.image_search(task))
        return self.results[-1]

    def text_search(self, query, task):
        self.results.append(self.tools.text_search(query, task))
        return self.results[-1]


class Replay:
    """The kept results, in order, whatever is asked."""

    def __init__(self, results):
        self.results = iter(results)

    def image_search(self, task):
        return next(self.results)

    def text_search(self, query, task):
        return next(self.results)


def phase(config, **changes):
    """Whole episodes as they are: nothing swapped, every item shown, one text search."""
    plain = {"swap_names": 0.0, "swap_answers": 0.0, "second_search": 0.0}
    one = changed(config.pretrain.phases.p4_habits, **plain | changes)
    return one


def runs(mask):
    """Slices of each run of ones."""
    edges = np.flatnonzero(np.diff(np.pad(mask, 1)))
    return [slice(a, b) for a, b in edges.reshape(-1, 2)]


def texts(tokenizer, demo):
    return [tokenizer.decode(demo.ids[span]) for span in runs(demo.loss_mask)]


@pytest.mark.parametrize("regime, share", [("agent", 0.0), ("direct", 1.0)])
def test_ids_and_mask_equal_those_of_a_rollout(builder, world_tools, tiny_config, regime, share):
    tokenizer = builder.tokenizer
    rollout = changed(tiny_config.rollout, budget=2000, max_turn_tokens=1000)
    num_calls = set()
    for index in range(8 if regime == "agent" else 3):
        recorder = Recorder(world_tools)
        maker = DemoMaker(builder, recorder, tiny_config, seed=0)
        demo = maker.draw("test", phase(tiny_config, direct_share=share), index)
        turns = texts(tokenizer, demo)
        question = tokenizer.decode(demo.ids).split("<|vision_end|>")[1].split("<|im_end|>")[0]
        picture = world.eval_tasks("test", 1, 84, 56)[0].picture  # of the same size
        task = Task("t", question, picture, ("x",), "test", "c")
        [[episode]] = run_episodes(
            [task], [builder.build(task, regime)],
            ScriptedPolicy(lambda view, turns=turns: turns[len(view.turns)], tokenizer),
            Replay(recorder.results), tokenizer, builder.config, rollout, tiny_config.search,
            seed=0, step=0, group_size=1, regime=regime, temperature=0.0, query_choice="first",
            policy_name="script",
        )  # fmt: skip
        assert episode.end_reason == "answered"
        count = len(demo.ids)
        np.testing.assert_array_equal(episode.ids[:count], demo.ids)
        np.testing.assert_array_equal(episode.loss_mask[:count], demo.loss_mask)
        np.testing.assert_array_equal(episode.positions[:, :count], demo.positions)
        # Behind it stands the template's turn end, which no policy writes.
        assert tokenizer.decode(episode.ids[count:]) == "<|im_end|>\n"
        assert episode.loss_mask[count:].sum() == 0
        num_calls.add(len(episode.calls))
    assert num_calls == ({0, 1, 2} if regime == "agent" else {0})


def test_a_demonstration_can_be_drawn_again(demo_maker, tiny_config):
    one = phase(tiny_config, swap_names=0.5, swap_answers=0.5, max_items=2)
    a, b = (demo_maker.draw("test", one, 5) for _ in range(2))
    other = demo_maker.draw("test", one, 6)
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.pixel_values, b.pixel_values)
    assert len(a.ids) != len(other.ids) or (a.ids != other.ids).any()


def test_arrays_belong_together(demo_maker, tiny_config):
    image_id = demo_maker.builder.tokenizer.image_token_id
    for index in range(20):
        demo = demo_maker.draw("test", phase(tiny_config, second_search=1.0), index)
        assert demo.ids.shape == demo.loss_mask.shape == demo.positions.shape[1:]
        assert demo.ids.dtype == demo.loss_mask.dtype == np.int32
        assert (demo.ids == image_id).sum() == demo.image_grid_thw.prod() // 4
        assert demo.loss_mask[demo.ids == image_id].sum() == 0
        special = np.isin(demo.ids, demo_maker.builder.tokenizer.special_ids)
        assert demo.loss_mask[special].sum() == 0  # the stop rule ends turns, not an end id


def test_the_first_turn_alone(demo_maker, tiny_config):
    one = phase(tiny_config, first_turn_only=True)
    for index in range(10):
        demo = demo_maker.draw("test", one, index)
        assert len(runs(demo.loss_mask)) == 1 and demo.loss_mask[-1] == 1


def test_fewer_items_are_shown_where_the_phase_says_so(demo_maker, tiny_config):
    tokenizer = demo_maker.builder.tokenizer
    one = phase(tiny_config, max_items=1, direct_share=0.0, needless_search=1.0)
    shown = [tokenizer.decode(demo_maker.draw("test", one, i).ids) for i in range(15)]
    results = [part for text in shown for part in text.split("<information>")[1:]]
    assert results and all("#1 " in r.split("</information>")[0] for r in results)
    assert not any("#2 " in r.split("</information>")[0] for r in results)


def test_swapped_answers_are_read_from_the_shown_text(demo_maker, tiny_config):
    """After a text search, most answers are not the real ones but stand in what was shown."""
    tokenizer = demo_maker.builder.tokenizer
    one = phase(tiny_config, swap_names=0.5, swap_answers=1.0, direct_share=0.0)
    golds = {g for i in facts.items() if i.relation in facts.FACTS for g in i.golds}
    is_shown, is_real = [], []
    for index in range(60):
        demo = demo_maker.draw("test", one, index)
        whole = tokenizer.decode(demo.ids)
        if "<text_search>" not in whole:
            continue
        answer = whole.rsplit("<answer>", 1)[1].removesuffix("</answer>").strip()
        is_shown.append(answer in whole.rsplit("<information>", 1)[1].split("</information>")[0])
        is_real.append(answer in golds)
    assert len(is_shown) > 15
    assert np.mean(is_shown) > 0.6
    assert np.mean(is_real) < 0.9


def test_habits_come_at_their_rates(demo_maker, tiny_config):
    tokenizer = demo_maker.builder.tokenizer
    rates = {}
    for rate in (0.0, 1.0):
        one = phase(tiny_config, direct_share=0.0, lazy_mask=rate, repeat_queries=rate)
        lazy, repeats = [], []
        for index in range(30):
            for text in texts(tokenizer, demo_maker.draw("test", one, index)):
                mask = (
                    text.split("<verify>")[1].split("</verify>")[0].strip()
                    if "<verify>" in text
                    else ""
                )
                if mask:
                    lazy.append("0" not in mask)
                if "<text_search>" in text:
                    queries = text.split("<text_search>")[1].split("</text_search>")[0].split(",")
                    repeats.append(len(set(q.strip() for q in queries)) < 5)
        rates[rate] = np.mean(lazy), np.mean(repeats)
    assert rates[0.0][0] < 0.3 and rates[0.0][1] == 0.0
    assert rates[1.0] == (1.0, 1.0)


def copies(builder, demo_maker, config, indices, **changes):
    one = phase(config, copy_share=1.0, **changes)
    return [demo_maker.draw("copies", one, i) for i in indices]


def test_a_copy_is_random_ids_twice_and_the_second_writing_is_learnt(
    builder, demo_maker, tiny_config
):
    lengths = set()
    for demo in copies(builder, demo_maker, tiny_config, range(40)):
        once = demo.ids[: len(demo.ids) // 2]
        np.testing.assert_array_equal(demo.ids, np.tile(once, 2))
        # Its first id cannot be known: nothing says that the second writing begins.
        assert demo.loss_mask.tolist() == [0] * (len(once) + 1) + [1] * (len(once) - 1)
        assert not np.isin(demo.ids, builder.tokenizer.special_ids).any()
        assert demo.pixel_values.shape[0] == len(demo.image_grid_thw) == 0
        assert (demo.positions == np.arange(len(demo.ids))).all()
        lengths.add(len(once))
    assert min(lengths) >= 4 and max(lengths) < 24 and len(lengths) > 8


def test_copies_begin_with_few_ids_and_end_with_all(builder, demo_maker, tiny_config):
    early = copies(builder, demo_maker, tiny_config, range(60), copy_doubling=100)
    late = copies(builder, demo_maker, tiny_config, range(900, 960), copy_doubling=100)
    assert len(np.unique(np.concatenate([d.ids for d in early]))) <= 64 * 2 ** (60 / 100)
    assert np.concatenate([d.ids for d in late]).max() > 0.98 * builder.tokenizer.vocab_size
