"""No scripted cheat earns more than the honest script."""

import pytest

from configs.base import get_config
from svrl_jax.rewards import audit

KINDS = [kind.name for kind in audit.KINDS]


@pytest.fixture(scope="module")
def rows():
    found = audit.audit(get_config().reward, num_queries=5)
    return {(row["cheat"], row["task_kind"]): row for row in found}


def test_every_cheat_is_tried_on_every_kind(rows):
    assert set(rows) == {(c, k) for c in audit.CHEATS if c != "honest" for k in KINDS}


def test_no_cheat_beats_the_honest_script(rows):
    assert [row for row in rows.values() if row["beats"]] == []
    for row in rows.values():
        assert row["honest_reward"] == pytest.approx(1.0)
        assert row["reward"] <= row["honest_reward"] + 1e-9


# By hand: format 0.1; lambda 0.1; one unique query of five 0.2; the honest text mask is 1,0,0,0, so
# ones agree on 1 of 4 and zeros on 3 of 4; the image mask is 1,0,0.
@pytest.mark.parametrize(
    "cheat, search_free, fact, image_text",
    [
        ("all_ones_mask", 1.0, 0.9 * 0.625 + 0.1, 0.9 * (0.5 + (1 / 3 + 1 / 4) / 4) + 0.1),
        ("all_zeros_mask", 1.0, 0.9 * 0.875 + 0.1, 0.9 * (0.5 + (2 / 3 + 3 / 4) / 4) + 0.1),
        ("numbered_queries", 0.19, 1.0, 1.0),
        ("repeated_query", 0.9 * 0.1 * 0.2 + 0.1, 0.9 * 0.2 + 0.1, 0.9 * 0.2 + 0.1),
        ("never_search", 1.0, 0.1, 0.1),
        ("always_search", 0.19, 1.0, 1.0),
        ("all_aliases", 0.1, 0.1, 0.1),
        ("nested_tags", 0.0, 0.0, 0.0),
        ("repeated_tags", 0.9, 0.9, 0.9),
        ("page_answer", 0.0, 0.0, 0.0),
        ("answer_in_reason", 0.0, 0.0, 0.0),
    ],
)
def test_what_each_cheat_earns(rows, cheat, search_free, fact, image_text):
    earned = [rows[cheat, kind]["reward"] for kind in KINDS]
    assert earned == pytest.approx([search_free, fact, image_text])


def test_numbered_queries_tie_and_their_overlap_shows_them(rows):
    for kind in ("fact", "image_text"):
        row = rows["numbered_queries", kind]
        assert row["ties"] and not row["beats"]
        assert row["token_overlap"] > rows["all_aliases", kind]["token_overlap"]
    assert rows["never_search", "fact"]["token_overlap"] is None


def test_a_reward_without_its_guards_is_caught():
    # The audit can fail: paid per guess by containment, a list of every alias is as good as the
    # answer.
    loose = get_config().reward
    loose.scorer = "sub_em"
    found = {(r["cheat"], r["task_kind"]): r for r in audit.audit(loose, num_queries=5)}
    assert found["all_aliases", "fact"]["ties"]
    # And a lambda above 1 pays for needless search.
    loose = get_config().reward
    loose.search_free_scale = 1.5
    found = {(r["cheat"], r["task_kind"]): r for r in audit.audit(loose, num_queries=5)}
    assert found["always_search", "search_free"]["beats"]


def test_a_script_that_goes_on_behind_the_end_is_refused():
    task = audit.KINDS[0].task
    answer = "<reason>r</reason><verify> </verify><answer>x</answer>"
    with pytest.raises(ValueError, match="over at turn 0"):
        audit.scripted_episode(task, [(answer, None), (answer, None)], num_queries=5)
