import jax
import numpy as np
import pytest

from svrl_jax.training import assemble, task_source
from tests.conftest import changed


@pytest.mark.parametrize("path", [None, "", "nowhere/at/all"])
def test_a_missing_policy_folder_names_key_and_remedy(path):
    with pytest.raises(FileNotFoundError, match=r"config\.model\.folder"):
        assemble.policy_folder(path)


def test_a_policy_folder_is_found_from_any_directory(tiny_folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tiny_folder.parent)
    assert assemble.policy_folder(tiny_folder.name).samefile(tiny_folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="make pretrain"):
        assemble.policy_folder(tiny_folder.name)


def test_a_bench_holds_one_policy(bench, tiny_folder):
    assert bench.folder == tiny_folder
    size = bench.model.config.text_config.vocab_size
    assert len(bench.tokenizer) == size == 600
    assert bench.tokenizer.image_token_id in bench.banned
    assert not set(bench.tokenizer.eos_ids) & set(bench.banned)


def test_evaluation_tasks_are_the_first_items(tiny_config):
    config = changed(tiny_config, **{"data.draws_per_item": 3})
    tasks = task_source.eval_tasks(config, "test")
    assert len(tasks) == 2 * 3 and len({t.item for t in tasks}) == 2
    everything = task_source.eval_tasks(changed(config, **{"eval.num_items": 0}), "test")
    assert len(everything) == 150 * 3 and everything[:6] == tasks


def test_the_stream_follows_the_config(tiny_config, builder):
    def first_of(config, position=0):
        tasks, prompts = next(task_source.train_stream(config, builder, position))
        assert prompts is None
        return tasks

    first = first_of(tiny_config)
    assert len(first) == 2
    assert first_of(tiny_config, 1)[0] == first[1]
    other = first_of(changed(tiny_config, seed=1))
    assert [t.item for t in other] != [t.item for t in first]


def run(bench, tasks, **changes):
    bench.sampler.set_params(bench.initial_params)
    options = {"step": 0, "group_size": 2} | changes
    return bench.run(tasks, bench.sampler, **options)


def test_episodes_come_by_task_and_can_be_drawn_again(bench, tiny_config):
    tasks = task_source.eval_tasks(tiny_config, "test")
    groups = run(bench, tasks)
    again = run(bench, tasks)
    assert [[e.task_id for e in g] for g in groups] == [[t.id] * 2 for t in tasks]
    for one, other in zip(sum(groups, []), sum(again, []), strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
    assert any(a.ids.tolist() != b.ids.tolist() for a, b in groups)  # two draws of a task differ


def test_the_direct_regime_has_no_tools(bench, tiny_config):
    tasks = task_source.eval_tasks(tiny_config, "test")
    episodes = sum(run(bench, tasks, regime="direct", temperature=0.0, group_size=1), [])
    assert all(e.calls == () and e.regime == "direct" for e in episodes)


def test_another_policy_must_be_of_the_bench_s_kind(bench, tiny_folder):
    same = assemble.policy_params(bench, tiny_folder)
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(bench.initial_params), strict=True):
        np.testing.assert_array_equal(a, b)
    other = assemble.policy_folder("svrl_jax/data/quickstart")
    with pytest.raises(assemble.PolicyFolderError, match=r"--config\.model\.folder too"):
        assemble.policy_params(bench, other)
