"""Splits by item, draws by name, and a training stream whose whole state is one number."""

import itertools

import pytest

from svrl_jax.data import facts, world

SIZE = (84, 56)


def stream(position=0, seed=0, batch=7):
    return world.TrainStream(seed, batch, *SIZE, position=position)


def test_counts_of_the_splits():
    counts = {split: len(items) for split, items in world.split_items().items()}
    assert counts["train"] >= 600
    assert counts["test"] == 150
    assert counts["ood"] >= 150
    assert sum(counts.values()) >= 900


def test_splits_share_no_item():
    ids = {split: {i.id for i in items} for split, items in world.split_items().items()}
    for a, b in itertools.combinations(world.SPLITS, 2):
        assert ids[a].isdisjoint(ids[b])


def test_places_of_the_ood_split_are_seen_nowhere_else():
    titles = {s: {i.entity.title for i in items} for s, items in world.split_items().items()}
    assert titles["ood"].isdisjoint(titles["train"] | titles["test"])


def test_test_items_ask_about_every_relation_and_known_places():
    items = world.split_items()
    assert {i.relation for i in items["test"]} == set(facts.QUESTIONS)
    trained = {i.entity.title for i in items["train"]}
    places = [i for i in items["test"] if i.entity.is_flag]
    assert [i.id for i in places if i.entity.title not in trained] == []


def test_a_task_carries_its_item():
    task = world.eval_tasks("test", 1, *SIZE)[0]
    item = world.split_items()["test"][0]
    assert task.item == item.id and task.golds == item.golds and task.category == item.relation
    assert task.entity == item.entity.names and task.evidence_ids == item.evidence_ids
    assert task.question in facts.QUESTIONS[item.relation]
    assert task.source == "world/test" and task.picture.startswith(b"\x89PNG")


def test_draws_of_an_item_differ_and_are_made_again_exactly():
    item = world.split_items()["ood"][3]
    tasks = [world.make_task(item, "ood", draw, *SIZE) for draw in range(4)]
    assert len({t.id for t in tasks}) == len({t.picture for t in tasks}) == 4
    assert world.make_task(item, "ood", 2, *SIZE) == tasks[2]


def test_evaluation_tasks_go_item_by_item_with_unique_ids():
    tasks = world.eval_tasks("ood", 2, *SIZE)
    items = world.split_items()["ood"]
    assert len({t.id for t in tasks}) == len(tasks) == 2 * len(items)
    assert [t.item for t in tasks[:4]] == [items[0].id] * 2 + [items[1].id] * 2


def test_an_epoch_of_the_stream_is_every_training_item_once():
    one = stream(batch=len(world.split_items()["train"]))
    epoch, again = next(one), next(one)
    assert sorted(t.item for t in epoch) == [i.id for i in world.split_items()["train"]]
    assert [t.item for t in epoch] != [t.item for t in again]
    # The draw is the epoch, so no picture comes twice.
    assert len({t.picture for t in epoch} | {t.picture for t in again}) == 2 * len(epoch)


@pytest.mark.case("A-C3")
def test_a_stream_goes_on_from_its_position():
    whole = stream(batch=5)
    batches = [next(whole) for _ in range(4)]
    half = stream(batch=5)
    next(half), next(half)
    resumed = stream(position=half.position, batch=5)
    assert half.position == 10
    assert [next(resumed), next(resumed)] == batches[2:]


@pytest.mark.case("A-C3")
def test_the_next_row_after_three_is_the_fourth():
    one = stream(batch=1)
    rows = [next(one)[0].id for _ in range(10)]
    assert next(stream(position=3, batch=1))[0].id == rows[3]
    assert len(set(rows)) == 10


def test_a_position_across_an_epoch_and_another_batch_size_is_the_same_row():
    count = len(world.split_items()["train"])
    late = next(stream(position=count - 2, batch=4))
    assert [t.id for t in late[2:]] == [t.id for t in next(stream(position=count, batch=2))]
    assert [t.id.rpartition("#")[2] for t in late] == ["0", "0", "1", "1"]


def test_the_seed_changes_the_order_only():
    size = len(world.split_items()["train"])
    orders = [[t.item for t in next(stream(seed=s, batch=60))] for s in (0, 1)]
    assert orders[0] != orders[1] and size > 60


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ValueError, match="prompts_per_step"):
        world.TrainStream(0, 0, *SIZE)
