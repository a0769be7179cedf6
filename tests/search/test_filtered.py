"""Tools behind a verifier that knows no golds."""

import json

import pytest

from svrl_jax.search.errors import ToolError
from svrl_jax.search.filtered import FilteredTools, by_model, by_words
from svrl_jax.types import SearchItem, Task

TASK = Task("t", "What is the capital of this place?", b"", ("Thimphu",), "test", "c")
ITEMS = [
    SearchItem("0", "Bhutan", text="Thimphu is the capital of Bhutan."),
    SearchItem("1", "Nissan", text="A maker of cars."),
    SearchItem("2", "Paro", text="A town in Bhutan."),
]


class Tools:
    def __init__(self, items):
        self.items = items

    def image_search(self, task):
        return self.items

    def text_search(self, query, task):
        return self.items


def test_what_is_called_useless_is_never_seen():
    seen = []

    def keep(question, query, items):
        seen.append((question, query, [i.id for i in items]))
        return [1, 0, 1]

    tools = FilteredTools(Tools(ITEMS), keep)
    assert [i.id for i in tools.text_search("Bhutan", TASK)] == ["0", "2"]
    assert [i.id for i in tools.image_search(TASK)] == ["0", "2"]
    assert seen == [(TASK.question, q, ["0", "1", "2"]) for q in ("Bhutan", "")]
    assert tools.counts == {"found": 6, "kept": 4}
    assert FilteredTools(Tools([]), keep).text_search("x", TASK) == [] and len(seen) == 2


def test_the_model_sees_no_gold_and_its_reply_is_read_strictly():
    asked, replies = [], ["keep: 1,0,1", "`Keep: 0, 0, 0`", "keep: 1,0", "1,0,1", "keep: 1,0,1!"]

    def complete(system, user):
        asked.append(json.loads(user))
        return replies.pop(0)

    keep = by_model(complete)
    assert keep(TASK.question, "q", ITEMS) == [1, 0, 1]
    assert asked[0]["question"] == TASK.question and set(asked[0]) == {"question", "query", "items"}
    assert "golds" not in str(asked[0]) and len(asked[0]["items"]) == 3
    assert keep(TASK.question, "q", ITEMS) == [0, 0, 0]
    for _ in range(3):  # too few, no grammar, something behind
        with pytest.raises(ToolError) as found:
            keep(TASK.question, "q", ITEMS)
        assert found.value.kind == "bad_response"


def test_the_rule_keeps_what_shares_a_content_word():
    assert by_words(TASK.question, "Bhutan", ITEMS) == [1, 0, 1]
    assert by_words("What is this?", "", ITEMS) == [0, 0, 0]  # function words say nothing
