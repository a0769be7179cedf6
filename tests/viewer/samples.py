"""Runs to look at: scripted agents in the embedded world, and episodes made to break a page."""

import dataclasses
import io
import pathlib
import shutil

import numpy as np
from PIL import Image

from svrl_jax import rng as rng_lib
from svrl_jax.data import facts, pictures, script
from svrl_jax.data.traces import Trace, TraceCall
from svrl_jax.protocol import parse
from svrl_jax.records import Record, write_records
from svrl_jax.rewards.audit import scripted_episode
from svrl_jax.rewards.oracle import RuleOracle
from svrl_jax.rewards.score import score_episode
from svrl_jax.rollout.imported import episode_of_trace
from svrl_jax.types import SearchItem, Task, ToolCall

EVAL_STEP = 2**31 + 1
HABITS = {
    "initial": script.Habits(needless_search=True, lazy_mask=True, repeats=2),
    "trained": script.Habits(),
    "no_search": script.Habits(never_search=True),
}


def encoded(colour=(200, 30, 30), size=(60, 40), kind="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, kind, **options)
    return buffer.getvalue()


class World:
    """Plays scripted agents with the real tools; items carry their own pictures."""

    def __init__(self, tools, builder, config):
        self.tools, self.builder, self.config = tools, builder, config
        self._entities = {e.title: e for e in facts.entities()}

    def record(self, task, policy, habits, *, step=EVAL_STEP, sample=0, is_scored=True) -> Record:
        rng = rng_lib.host_rng("viewer sample", task.id, policy, step, sample)
        turns, calls = [], []
        while not turns or turns[-1][1] is not None:
            text = script.write_turn(
                task, calls, habits, rng, regime="agent", guess="unknown",
                known=script.is_known(task.entity[0], 0.4),
            )  # fmt: skip
            call = self._call(task, text, len(calls[-1].items) if calls else None, rng)
            turns.append((text, call))
            if call is not None:
                calls.append(call.call)
        trace = Trace(task, tuple(turns), None, "answered", None)
        answer = parse.parse_turn(
            turns[-1][0], num_queries=5, items_to_verify=None, regime="agent", ended=False
        ).answer
        episode = episode_of_trace(
            dataclasses.replace(trace, answer=answer), self.builder.build(task, "agent"),
            self.builder.tokenizer, self.builder.config, self.config.rollout, self.config.search,
            policy_name=policy,
        )  # fmt: skip
        is_policy = episode.loss_mask == 1
        logps = np.where(is_policy, -rng.exponential(0.4, len(episode.ids)), 0).astype(np.float32)
        episode = dataclasses.replace(episode, step=step, sample=sample, sampler_logps=logps)
        if not is_scored:
            return Record(episode, task)
        labels = RuleOracle().label(task, episode)
        free = task.category in facts.VISUAL
        score = score_episode(episode, task, self.config.reward, labels, free, 5)
        gaps = np.where(is_policy, rng.normal(0, 0.01, len(logps)), 0).astype(np.float32)
        return Record(episode, task, score, score.total - 0.5, logps + gaps)

    def _call(self, task, text, items_to_verify, rng):
        parsed = parse.parse_turn(
            text, num_queries=5, items_to_verify=items_to_verify, regime="agent", ended=False
        )
        if parsed.action == "answer":
            return None
        query = ""
        if parsed.action == "image_search":
            items = self.tools.image_search(task)
        else:
            query = parsed.proposals[int(rng.integers(len(parsed.proposals)))]
            items = self.tools.text_search(query, task)
        items = tuple(dataclasses.replace(i, picture=self._picture(i.title)) for i in items)
        call = ToolCall(parsed.action, query, items, num_found=len(items), seconds=0.18)
        return TraceCall(call, items, (), (), ())

    def _picture(self, title):
        entity = self._entities.get(title)
        if entity is None:
            return None
        clean = pictures.clean_picture(entity.code, 120, 80, is_flag=entity.is_flag)
        return pictures.to_png(clean)


def write_world_runs(folder: pathlib.Path, world: World, tasks, tokenizer_folder) -> list[str]:
    """Runs `svrl` (three steps of training and an evaluation), `initial` and `no_search`."""
    svrl = folder / "svrl" / "episodes"
    for step in range(3):
        habits = HABITS["trained" if step == 2 else "initial"]
        records = [
            world.record(task, "svrl", habits, step=step, sample=sample)
            for task in tasks[: 4 + step]
            for sample in range(2)
        ]
        write_records(svrl, f"step_{step:06d}", records)
    write_records(svrl, "eval_test", [world.record(t, "svrl", HABITS["trained"]) for t in tasks])
    (folder / "svrl" / "export").mkdir()
    shutil.copy(tokenizer_folder / "tokenizer.json", folder / "svrl" / "export")
    for name in ("initial", "no_search"):
        records = [world.record(t, name, HABITS[name]) for t in tasks]
        write_records(folder / name / "episodes", "eval_test", records)
    return [str(folder / name) for name in ("svrl", "initial", "no_search")]


# Each sets `window.pwned` or opens a dialog if it is ever read as anything but text.
PAYLOADS = (
    '</script><img src=x onerror="window.pwned=1">',
    "\"><svg onload='window.pwned=2'></svg><script>window.pwned=3</script>",
    "' onmouseover='window.pwned=4' x='",
    "javascript:window.pwned=5",
    "data:text/html,<script>window.pwned=6</script>",
    "line\u2028separator\u2029 \u202egnp.exe\u202c \u2066left\u2069 \u200fright \ufeff end",
    "lone \ud800 surrogate, NUL \x00, bell \x07, tag \U000e0041",
    "${window.pwned=7} {{constructor.constructor('window.pwned=8')()}} <!-- ]]> -->",
)
MEGABYTE = "<b onclick=window.pwned=9>summary</b>\u202e " * 24_000  # 1 MB


def hostile_records(policy="hostile") -> list[Record]:
    """One episode whose every text is hostile, one of 1 MB summaries, one of broken pictures."""
    jpeg = b"\xff\xd8 no picture at all"
    html = b"<html><script>window.pwned=10</script>"
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" onload="window.pwned=11"/>'
    items = tuple(
        SearchItem(
            p, p, link=p, text=p, picture=(jpeg, html, svg, encoded())[i % 4], provider=p[:9]
        )
        for i, p in enumerate(PAYLOADS)
    )
    mask = ",".join("01"[i % 2] for i in range(len(items)))
    big = tuple(SearchItem(f"big{i}", f"Big {i}", "http://x.example/", MEGABYTE) for i in range(2))
    everything = " ".join(PAYLOADS)
    return [
        _record("hostile/" + PAYLOADS[0], everything, html, policy, [
            (f"<reason>{everything}</reason><search><img></search>",
             ToolCall("image_search", "", items, num_found=len(items), error=PAYLOADS[0])),
            (f"<reason>x</reason><verify>{mask}</verify><answer>{PAYLOADS[0]}</answer>", None),
        ]),
        _record("hostile/big", "What is big?", encoded((9, 90, 9)), policy, [
            ("<reason>big</reason><verify> </verify><text_search>aa bb, aa bb, cc</text_search>",
             ToolCall("text_search", "aa bb", big, num_found=3)),
            ("<reason>x</reason><verify>1,0</verify><answer>big</answer>", None),
        ]),
        _record("hostile/failed", "What fails?", b"", policy, [
            ("<reason>x</reason><search><img></search>",
             ToolCall("image_search", "", (), "failed", PAYLOADS[1], failure="timeout")),
            ("<reason>x</reason><verify> </verify><answer>nothing</answer>", None),
        ]),
    ]  # fmt: skip


def _mapped(value, change):
    """Every text inside a record changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(v, change) for v in value)
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value)]
        return dataclasses.replace(
            value, **{name: _mapped(getattr(value, name), change) for name in fields}
        )
    return value


def _record(task_id, question, picture, policy, turns) -> Record:
    task = Task(task_id, question, picture, ("big", PAYLOADS[0]), PAYLOADS[1], PAYLOADS[2])

    # The script's ids are the texts' UTF-8: what is none, or too long, stands aside meanwhile.
    def hide(text):
        return text.replace("\ud800", "\ue000").replace(MEGABYTE, "\ue001")

    def bring(text):
        return text.replace("\ue001", MEGABYTE).replace("\ue000", "\ud800")

    episode = scripted_episode(_mapped(task, hide), _mapped(tuple(turns), hide), num_queries=5)
    return Record(dataclasses.replace(_mapped(episode, bring), policy=policy), task)
