"""A policy and a split's tasks -> episodes, verdicts and rows of figures: the one evaluation loop.

Labels come from outside: nothing here asks an oracle.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from svrl_jax.evals import cases as cases_lib
from svrl_jax.evals import stats
from svrl_jax.evals.store import Chunk, GroupStore
from svrl_jax.records import Record
from svrl_jax.rewards import factors
from svrl_jax.rewards.judge import Judge, Verdict, score_all
from svrl_jax.rollout.figures import RolloutFigures
from svrl_jax.rollout.policy import TurnSampler
from svrl_jax.rollout.workflow import STEPS, FixedWorkflow
from svrl_jax.search.filtered import Filter, FilteredTools
from svrl_jax.training.assemble import Bench
from svrl_jax.training.labels import EVAL_STEP, SearchFree
from svrl_jax.training.task_source import eval_chunks
from svrl_jax.types import Episode, OracleLabels, Task

# Mode of `config.eval.modes` -> the policy's temperature.
TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}
REGIMES = ("direct", "rag", "agent", "agent_verifier")
# What a served policy counts; 0 for our own.
SERVED = ("calls", "refusals", "cut", "prompt_tokens", "completion_tokens")


@dataclasses.dataclass(frozen=True)
class Actor:
    """Who is evaluated.

    Attributes:
      name: for records and tables.
      digest: of its weights, or endpoint and model of a served one.
      sampler: what answers a turn.
      params: of the bench's engine; None for any other sampler.
    """

    name: str
    digest: str
    sampler: TurnSampler
    params: Any = None


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How answers become verdicts.

    Attributes:
      scorers: names; the first is Acc's.
      judge: for the scorer `judge`, or None.
    """

    scorers: tuple[str, ...]
    judge: Judge | None = None

    def __call__(self, records: Sequence[Record]) -> list[tuple[Verdict, ...]]:
        """The verdicts on each record's answer."""
        answers = [r.episode.answer for r in records]
        return score_all([r.task for r in records], answers, self.scorers, self.judge)


def run_group(
    bench: Bench,
    actor: Actor,
    split: str,
    mode: str,
    *,
    regime: str = "agent",
    samples: int = 1,
    store: GroupStore | None = None,
    keep: Filter | None = None,
    before: Callable[[Sequence[Task]], None] = lambda _: None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[Chunk | None, list[Record]]]:
    """Runs a split's questions, a chunk at a time; keys are the same for every policy.

    Args:
      mode: one of TEMPERATURES.
      regime: one of REGIMES.
      samples: episodes a question.
      store: keeps every episode as it ends, and what it holds is not run again; None keeps nothing.
      keep: the filter of `agent_verifier`.
      before: is called with each chunk's tasks before the policy's parameters are set.
      progress: takes (finished, to do) of the chunk.
    Yields:
      (the chunk of the store or None, its records in the order of the tasks).
    """
    config = bench.config
    sampler, tools, rollout = actor.sampler, bench.tools, config.rollout
    if regime == "rag":
        steps = STEPS if rollout.max_image_searches else STEPS[1:]
        sampler = FixedWorkflow(sampler, bench.tokenizer, steps)
        rollout = rollout.copy_and_resolve_references()
        with rollout.unlocked():
            rollout.max_text_searches = 1
    if regime == "agent_verifier":
        tools = FilteredTools(tools, keep)
    for number, tasks in enumerate(eval_chunks(config, split)):
        before(tasks)
        chunk = store.chunk(number) if store else None
        todo = chunk.missing(tasks, samples) if chunk else [(s, tasks) for s in range(samples)]
        if todo and actor.params is not None:
            bench.sampler.set_params(actor.params)
        found: dict[tuple[str, int], Episode] = {}
        figures = RolloutFigures()
        start = time.perf_counter()
        for sample, some in todo:
            groups = bench.run(
                some,
                sampler,
                step=EVAL_STEP,
                group_size=1,
                regime=regime,
                temperature=TEMPERATURES[mode],
                query_choice=config.eval.query_choice,
                policy_name=actor.name,
                first_sample=sample,
                on_episode=chunk.add if chunk else None,
                tools=tools,
                rollout=rollout,
                progress=progress,
                figures=figures,
            )
            found |= {(g[0].task_id, sample): g[0] for g in groups}
        if chunk is None:
            yield None, [Record(found[t.id, s], t) for t in tasks for s in range(samples)]
            continue
        store.note(seconds=store.about["seconds"] + time.perf_counter() - start)
        store.count({name: figures.counts[name] for name in SERVED})
        yield chunk, chunk.close(tasks, samples)


def evaluate(
    bench: Bench,
    actor: Actor,
    split: str,
    mode: str,
    scoring: Scoring,
    *,
    search_free: SearchFree | None,
    label: Callable[[Task, Episode], OracleLabels] | None = None,
    **how: Any,
) -> list[stats.Row]:
    """Rows of one policy on one split; with a store, the verdicts are written beside its sets.

    Args:
      search_free: labels, made where they are missing; None: unknown.
      label: 0/1 for each shown item, as `annotate` writes them; used for figures only, never shown
        to the policy. None: the mask figures are undefined.
      **how: as `run_group`.
    """
    rows: list[stats.Row] = []
    before = search_free.ensure if search_free else lambda _: None
    for chunk, records in run_group(bench, actor, split, mode, before=before, **how):
        verdicts = scoring(records)
        if chunk is not None:
            cases_lib.write_verdicts(chunk.path, records, verdicts)
        free: dict[str, bool | None] = {}
        if search_free:
            tasks = list({r.task.id: r.task for r in records}.values())
            free = dict(zip([t.id for t in tasks], search_free.of(tasks), strict=True))
        rows += make_rows(
            records, verdicts, search_free=free, label=label, allowed=allowed_calls(bench, how)
        )
    return rows


def make_rows(
    records: Sequence[Record],
    verdicts: Sequence[Sequence[Verdict]],
    *,
    search_free: Mapping[str, bool | None],
    label: Callable[[Task, Episode], OracleLabels] | None = None,
    allowed: int = 0,
) -> list[stats.Row]:
    """One row an episode.

    Args:
      records, verdicts: the same number, in the same order; the first verdict is Acc's.
      search_free: task id -> label; a task without one is unknown.
      label: see `evaluate`.
      allowed: tool calls that an episode might make.
    """
    return [
        stats.make_row(
            record.episode,
            record.task.item or record.task.id,
            None if of[0].value is None else of[0].value >= 1.0,
            search_free.get(record.task.id),
            label(record.task, record.episode) if label else None,
            factors.r_format(record.episode),
            score=of[0].value,
            allowed=allowed,
        )
        for record, of in zip(records, verdicts, strict=True)
    ]


def allowed_calls(bench: Bench, how: Mapping[str, Any]) -> int:
    """Tool calls that an episode may make under the regime."""
    return allowed_under(bench.config.rollout, how.get("regime", "agent"))


def allowed_under(rollout, regime: str) -> int:
    """Tool calls that `config.rollout` and a regime allow."""
    if regime == "direct":
        return 0
    texts = 1 if regime == "rag" else rollout.max_text_searches
    return rollout.max_image_searches + texts
