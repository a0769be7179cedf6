"""Twelve hand-made episodes, on which every statistic is worked out by hand (`test_twelve.py`).

no  search    right     free  rate   items' labels and mask
1   -         yes       yes   1
2   -         no        yes   .75
3   -         no        no    0
4   -         yes       no    .25
5   I         yes       yes   1      10 / 10
6   I         yes       no    0      100 / 110
7   I T       yes       no    0      00 / 01, 101 / 101, query good, 5 different
8   I T       no        no    0      10 / 00, 00 / 00, query good, 3 different
9   T         no        no    .25    000 / 111, query bad, 2 different
10  T         no        no    0      10 / 10, query good, 5 different
11  T         malformed no    0      01 / unreadable, query good, 5 different
12  T T       unscored  no    -      11 / 11, 0 / 1, queries good, bad; 4 and 1 different
"""

import dataclasses
import json

from svrl_jax.evals import cases as cases_lib
from svrl_jax.evals.cases import Case, Group
from svrl_jax.evals.store import GroupStore, group_name
from svrl_jax.records import Record, write_records
from svrl_jax.rewards.audit import scripted_episode
from svrl_jax.rewards.judge import Verdict
from svrl_jax.types import OracleLabels, SearchItem, Task, ToolCall

R = "<reason>r</reason>"
QUERIES = ("alpha", "beta", "gamma", "delta", "kappa")


def call(tool, labels, query=""):
    items = tuple(SearchItem(f"{tool}{i}", f"title {i}", text="text") for i in range(len(labels)))
    return ToolCall(tool, query, items, seconds=0.5)


def image(labels, mask):
    return ("image_search", labels, mask, None, 0)


def text(labels, mask, is_good, unique):
    return ("text_search", labels, mask, is_good, unique)


def case(number, searches, answer, is_right, free, rate):
    """A case of searches in order; `mask` None writes nothing readable behind the search."""
    task = Task(
        f"t{number}", "Which city is it?", b"", ("Thimphu",), "test", "capital", item=f"i{number}"
    )
    script, verify = [], "<verify> </verify>"
    for tool, labels, mask, _, unique in searches:
        if tool == "image_search":
            turn = f"{R}{verify}<search><img></search>"
            script.append((turn, call(tool, labels)))
        else:
            queries = [QUERIES[min(i, unique - 1)] for i in range(5)]
            turn = f"{R}{verify}<text_search>{', '.join(queries)}</text_search>"
            script.append((turn, call(tool, labels, queries[0])))
        verify = None if mask is None else f"<verify>{','.join(map(str, mask))}</verify>"
    script.append((f"{R}{verify}<answer>{answer}</answer>" if verify else "hm", None))
    episode = scripted_episode(task, script, num_queries=5)
    good = tuple(g for _, _, _, g, _ in searches if g is not None)
    labels = OracleLabels(
        items=tuple(tuple(labels) for _, labels, _, _, _ in searches),
        queries=good,
        proposals=tuple((g,) * 5 for g in good),
    )
    value = None if is_right is None else float(is_right)
    verdict = Verdict("judge", value, cause="unreadable" if value is None else "")
    return Case(
        episode, task, {"judge": verdict}, "judge", labels, "rule", (), free, rate, 3, "twelve"
    )


def twelve():
    return (
        case(1, [], "Thimphu", True, True, 1.0),
        case(2, [], "Paro", False, True, 0.75),
        case(3, [], "Paro", False, False, 0.0),
        case(4, [], "Thimphu", True, False, 0.25),
        case(5, [image((1, 0), (1, 0))], "Thimphu", True, True, 1.0),
        case(6, [image((1, 0, 0), (1, 1, 0))], "Thimphu", True, False, 0.0),
        case(
            7, [image((0, 0), (0, 1)), text((1, 0, 1), (1, 0, 1), 1, 5)],
            "Thimphu", True, False, 0.0,
        ),
        case(8, [image((1, 0), (0, 0)), text((0, 0), (0, 0), 1, 3)], "Paro", False, False, 0.0),
        case(9, [text((0, 0, 0), (1, 1, 1), 0, 2)], "Paro", False, False, 0.25),
        case(10, [text((1, 0), (1, 0), 1, 5)], "Paro", False, False, 0.0),
        case(11, [text((0, 1), None, 1, 5)], "", False, False, 0.0),
        case(
            12, [text((1, 1), (1, 1), 1, 4), text((0,), (1,), 0, 1)],
            "Thimphu town", None, False, None,
        ),
    )  # fmt: skip


def about(**changes):
    found = {
        "policy": "toy", "regime": "agent", "split": "test", "mode": "greedy", "judge": "j (1)",
        "prompt": "0123456789ab", "search": "local", "scorers": ["judge"],
        "seconds": 6.0, "served": {},
        "usd": {
            "image_search": 0.015, "text_search": 0.001, "million_in": 1.0, "million_out": 10.0,
        },
    }  # fmt: skip
    return found | changes


def group(**changes):
    return Group("eval_toy_agent_test_greedy", about(**changes), twelve())


def write_run(folder, policies=("initial", "trained"), copies=1):
    """A run folder whose groups are the twelve, `copies` times under other names; for `trained` the
    answers of 2 and 3 are right and that of 7 is wrong.
    """
    store_about = {"digest": "d", "query_choice": "first", "filter": "", "temperature": 0.0,
                   "allowed_calls": 3}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}\n")
    labels = {}
    for policy in policies:
        name = group_name(policy, "agent", "test", "greedy")
        GroupStore(folder, name, about(policy=policy) | store_about)
        cases = [_copy(c, n) for n in range(copies) for c in twelve()]
        records = [Record(c.episode, c.task) for c in cases]
        path = write_records(folder / "episodes", f"{name}_0000", records)
        flipped = {"t2": 1.0, "t3": 1.0, "t7": 0.0} if policy == "trained" else {}
        verdicts = [
            [dataclasses.replace(v, value=flipped.get(c.task.id.split("#")[0], v.value))]
            for c in cases
            for v in c.verdicts.values()
        ]
        cases_lib.write_verdicts(path, records, verdicts)
        lines = [
            {
                "task_id": c.task.id, "sample": 0, "oracle": "rule", "items": c.labels.items,
                "queries": c.labels.queries, "proposals": c.labels.proposals, "answered": True,
            }
            for c in cases
        ]  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        path.with_suffix(".labels.jsonl").write_text(text)
        labels |= {c.task.id: [int(c.search_free), c.rate, 4] for c in cases}
    body = {"fingerprint": {}, "labels": labels}
    (folder / "search_free.json").write_text(json.dumps(body))
    return folder


def _copy(case, number):
    if number == 0:
        return case
    name = f"{case.task.id}#{number}"
    return dataclasses.replace(
        case,
        task=dataclasses.replace(case.task, id=name, item=f"{case.item}#{number}"),
        episode=dataclasses.replace(case.episode, task_id=name),
    )
