"""Test-time scaling: K parallel text searches a question, each to its own answer (SPEC 6).

The trunk is the plain greedy episode. Its first text search is run for each of the queries that it
proposed; where K is more, the search turn is drawn again at gradually rising temperature for
queries that are new. Every branch goes on greedily from there; the branches of one point share its
cache.
With K = 1 the answer is the trunk's, which is plain evaluation's.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from svrl_jax.evals import evaluate, setup, stats
from svrl_jax.evals.consensus import aggregate, embedding_of
from svrl_jax.protocol.parse import fold
from svrl_jax.records import Record, read_records, write_atomic, write_records
from svrl_jax.rewards.judge import score_all
from svrl_jax.rollout.branches import Branch, run_branches
from svrl_jax.training.assemble import Bench
from svrl_jax.types import Episode, Prompt, Task

FOLDER = "scaling"
ROUNDS = 3  # in which new queries are drawn; a policy that finds no more has fewer branches
# The j-th further draw of a search turn, j from 0, is at FIRST + j * RISE, at most LAST.
FIRST, RISE, LAST = 0.5, 0.1, 1.5


@dataclasses.dataclass
class Point:
    """Where a question's trunk first searches text.

    Attributes:
      task, prompt, trunk: of the question.
      turn: index of the search turn; None where the trunk never searches text.
      queries: (episode whose turn proposed it, query), the trunk's own first, no two alike.
      drawn: of each search turn that was drawn for more queries, (queries there were before it,
        its tokens).
    """

    task: Task
    prompt: Prompt
    trunk: Episode
    turn: int | None
    queries: list[tuple[Episode, str]]
    drawn: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def add(self, episode: Episode, proposals: Sequence[str], most: int) -> None:
        """Adds the proposals that are new, up to `most` queries."""
        known = {fold(q) for _, q in self.queries}
        for query in proposals:
            if len(self.queries) < most and fold(query) not in known:
                known.add(fold(query))
                self.queries.append((episode, query))


def run(
    bench: Bench,
    folder: pathlib.Path,
    actor: evaluate.Actor,
    split: str,
    widths: Sequence[int],
    scoring: evaluate.Scoring,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Runs and scores one split; goes on with a stopped one, chunk by chunk.

    Args:
      folder: the run's: trunks lie in episodes/, branches in scaling/, the figures in
        scaling/GROUP.json.
      widths: numbers K of searches, each at least 1.
    Returns:
      The figures, as `figures_of` gives them, with what they are of.
    """
    store = setup.open_store(bench, folder, actor, "agent", split, "greedy", scoring)
    points: list[tuple[Point, list[Episode]]] = []
    for chunk, records in evaluate.run_group(
        bench, actor, split, "greedy", regime="agent", store=store
    ):
        path = folder / FOLDER / f"{chunk.path.stem}.jsonl"
        found = _kept(path, store.about["digest"], max(widths), records)
        if found is None:
            found = _run_chunk(bench, actor, records, max(widths))
            _keep(path, found, store.about["digest"], max(widths))
        points += found
        say(f"scaling, {split}: {len(points)} questions")
    figures = figures_of(points, widths, scoring, embedding_of(bench.config.eval.embedding))
    result = {
        "policy": actor.name,
        "split": split,
        "scorer": scoring.scorers[0],
        "prompt": store.about["prompt"],
        "search": store.about["search"],
        "embedding": bench.config.eval.embedding or "by_letters",
        "widths": figures,
    }
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    write_atomic(folder / FOLDER / f"{store.name}.json", text.encode())
    return result


def figures_of(
    points: Sequence[tuple[Point, Sequence[Episode]]],
    widths: Sequence[int],
    scoring: evaluate.Scoring,
    embed,
) -> list[dict[str, Any]]:
    """The curve: for each K what the answers come to, and what they cost.

    Args:
      points: with each point's branches, in the order of its queries; the first is the trunk.
    Returns:
      For each K: acc with its 95% interval over items; n and n_unscored; majority: share of
      questions decided by a majority; searches: mean text searches of a question; branches: mean
      number that there were; tokens: mean generated tokens, each
      shared one once.
    """
    out = []
    tasks = [p.task for p, _ in points]
    for width in widths:
        decided = [aggregate([e.answer for e in branches[:width]], embed) for _, branches in points]
        verdicts = score_all(tasks, [a for a, _ in decided], scoring.scorers[:1], scoring.judge)
        rows = [
            stats.make_row(
                p.trunk, p.task.item or p.task.id,
                None if v[0].value is None else v[0].value >= 1.0, None, None, 0.0,
            )
            for (p, _), v in zip(points, verdicts, strict=True)
        ]  # fmt: skip
        acc = stats.interval(rows, "acc")
        count = max(len(points), 1)
        out.append(
            {
                "k": width,
                "acc": acc["value"], "low": acc["low"], "high": acc["high"],
                "n": len(points), "n_unscored": sum(r.is_right is None for r in rows),
                "majority": sum(how == "majority" for _, how in decided) / count,
                "branches": sum(len(b[:width]) for _, b in points) / count,
                "searches": sum(_searches(p, b[:width]) for p, b in points) / count,
                "tokens": sum(_tokens(p, b[:width], width) for p, b in points) / count,
            }
        )  # fmt: skip
    return out


def point_of(task: Task, prompt: Prompt, trunk: Episode, most: int) -> Point:
    """The trunk's first executed text search, with the queries that it proposed."""
    for number, turn in enumerate(trunk.turns):
        if turn.call is not None and turn.call.tool == "text_search":
            point = Point(task, prompt, trunk, number, [])
            point.add(trunk, (turn.call.query, *turn.parsed.proposals), most)
            return point
    return Point(task, prompt, trunk, None, [])


def _run_chunk(
    bench: Bench, actor: evaluate.Actor, records: Sequence[Record], most: int
) -> list[tuple[Point, list[Episode]]]:
    prompts = bench.builder.build_all([r.task for r in records], "agent")
    points = [
        point_of(r.task, prompt, r.episode, most)
        for r, prompt in zip(records, prompts, strict=True)
    ]
    if actor.params is not None:
        bench.sampler.set_params(actor.params)
    for _ in range(ROUNDS):
        _draw_queries(bench, actor, points, most)
    branches = [
        Branch(
            p.task, p.prompt, episode, p.turn + 1, k, query=query,
            origin=None if episode is p.trunk else (p.trunk, p.turn),
        )
        for p in points
        for k, (episode, query) in enumerate(p.queries)
        if k
    ]  # fmt: skip
    done = iter(run_of(bench, actor, branches))
    return [(p, [p.trunk, *(next(done) for _ in p.queries[1:])]) for p in points]


def _draw_queries(bench: Bench, actor: evaluate.Actor, points: Sequence[Point], most: int) -> None:
    """Draws search turns anew, one for each query that a point is short of."""
    branches, owners = [], []
    for point in points:
        if point.turn is None:
            continue
        first = len(point.drawn)
        for j in range(first, first + most - len(point.queries)):
            branches.append(
                Branch(
                    point.task, point.prompt, point.trunk, point.turn, 1000 + j,
                    temperature=min(FIRST + RISE * j, LAST), only_turn=True,
                )
            )  # fmt: skip
            owners.append(point)
    for point, episode in zip(owners, run_of(bench, actor, branches), strict=True):
        turn = episode.turns[point.turn]
        before = len(point.queries)
        point.drawn.append((before, turn.stop - turn.start))
        if turn.parsed.action == "text_search" and not turn.parsed.is_hard:
            # One query a draw: its turn stays the past of what it asked.
            point.add(episode, turn.parsed.proposals, min(before + 1, most))


def run_of(bench: Bench, actor: evaluate.Actor, branches: Sequence[Branch]) -> list[Episode]:
    """One greedy episode a branch, with the bench's tools."""
    if not branches:
        return []
    return run_branches(
        branches, actor.sampler, bench.tools, bench.tokenizer, bench.model_config,
        bench.config.rollout, bench.config.search, temperature=0.0,
        query_choice=bench.config.eval.query_choice, processor=bench.builder.processor,
    )  # fmt: skip


def _keep(path: pathlib.Path, found, digest: str, most: int) -> None:
    path.parent.mkdir(exist_ok=True)
    records = [Record(e, p.task) for p, branches in found for e in branches[1:]]
    write_records(path.parent, path.stem, records)
    about = {
        "digest": digest,
        "most": most,
        "drawn": {p.task.id: p.drawn for p, _ in found},
    }
    write_atomic(path.with_suffix(".about.json"), (json.dumps(about) + "\n").encode())


def _kept(path: pathlib.Path, digest: str, most: int, trunks: Sequence[Record]):
    """What an earlier start kept of this chunk, or None where it is not of these trunks."""
    about_path = path.with_suffix(".about.json")
    if not (path.is_file() and about_path.is_file()):
        return None
    about = json.loads(about_path.read_text("utf-8"))
    same = about["digest"] == digest and about["most"] == most
    if not same or set(about["drawn"]) != {r.task.id for r in trunks}:
        return None
    branches: dict[str, list[Episode]] = {}
    for record in read_records(path):
        branches.setdefault(record.episode.task_id, []).append(record.episode)
    found = []
    for r in trunks:
        point = point_of(r.task, None, r.episode, most)
        point.drawn = [tuple(pair) for pair in about["drawn"][r.task.id]]
        found.append((point, [r.episode, *branches.get(r.task.id, [])]))
    return found


def _searches(point: Point, branches: Sequence[Episode]) -> int:
    """Text searches of all branches; what lies before the point counts once."""
    if point.turn is None:
        return _num_text(point.trunk, 0)
    before = _num_text(point.trunk, 0) - _num_text(point.trunk, point.turn)
    return before + sum(_num_text(e, point.turn) for e in branches)


def _num_text(episode: Episode, start: int) -> int:
    calls = [t.call for t in episode.turns[start:] if t.call is not None]
    return sum(c.tool == "text_search" for c in calls)


def _tokens(point: Point, branches: Sequence[Episode], width: int) -> int:
    """Generated tokens: the trunk's, what each other branch wrote behind the search turn, and the
    search turns drawn while there were fewer than `width` queries.
    """
    total = int(point.trunk.loss_mask.sum())
    total += sum(int(e.loss_mask[e.turns[point.turn].stop :].sum()) for e in branches[1:])
    return total + sum(tokens for before, tokens in point.drawn if before < width)
