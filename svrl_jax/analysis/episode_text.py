"""An episode -> Markdown that shows it, with every text from outside as text."""

from __future__ import annotations

import re

from svrl_jax.evals.cases import Case

_SHOWN = 700  # characters of a turn or an item


def episode_markdown(case: Case, what: str) -> str:
    """One example of a report: question, golds, turns with what came back, answer.

    Whatever a policy, page or data set wrote stands in fenced blocks, longer than any fence in it.

    Args:
      what: why it is shown.
    """
    episode, task = case.episode, case.task
    lines = [f"**{what}** (sample {episode.sample}, {episode.end_reason})", ""]
    head = [f"task: {task.id}", f"question: {task.question}", f"golds: {'; '.join(task.golds)}"]
    head += [f"answer: {episode.answer}", f"verdict: {_verdict(case)}"]
    lines += [_fenced("\n".join(map(_one_line, head)))]
    outputs = iter(case.labels.items) if case.labels else None
    turns = episode.turns
    for number, (turn, following) in enumerate(zip(turns, (*turns[1:], None)), 1):
        text = [f"turn {number}: {_one_line(turn.text)}"]
        if turn.call is not None:
            useful = next(outputs) if outputs else ()
            mask = () if following is None else following.parsed.mask or ()
            text.append(f"  {turn.call.tool} {_one_line(turn.call.query)} [{turn.call.status}]")
            for rank, item in enumerate(turn.call.items):
                marks = _mark("policy", mask, rank) + _mark("label", useful, rank)
                text.append(f"  {rank + 1}.{marks} {_one_line(f'{item.title}: {item.text}')}")
        lines.append(_fenced("\n".join(text)))
    return "\n".join([*lines, ""])


def _mark(name: str, values, rank: int) -> str:
    return f" {name} {values[rank]}" if rank < len(values) else ""


def _verdict(case: Case) -> str:
    if case.is_right is None:
        return f"unscored by {case.scorer}"
    return f"{'right' if case.is_right else 'wrong'} by {case.scorer}"


def _one_line(text: str) -> str:
    folded = " ".join(text.split())
    return folded if len(folded) <= _SHOWN else f"{folded[:_SHOWN]} ..."


def _fenced(text: str) -> str:
    longest = max([len(run) for run in re.findall(r"`+", text)], default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}\n"
