"""Does the mask matter? The same episode, gone on with the kept items alone or the dropped ones.

The causal use of evidence (SPEC 6): if the mask tells evidence from noise and the policy reads what
it keeps, the kept items alone lose nothing and the dropped ones alone lose the answer.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from svrl_jax.evals import evaluate, setup, stats
from svrl_jax.evals.scaling import run_of
from svrl_jax.records import Record, write_atomic, write_records
from svrl_jax.rollout.branches import Branch
from svrl_jax.training.assemble import Bench
from svrl_jax.types import Episode, SearchItem

FOLDER = "mask_effect"
ARMS = ("kept", "dropped")


def split_items(
    episode: Episode,
) -> tuple[int, tuple[SearchItem, ...], tuple[SearchItem, ...]] | None:
    """(turn, kept, dropped) of the last search whose mask keeps some items and drops some.

    None where there is none: such an episode has no contrast.
    """
    for number in reversed(range(len(episode.turns) - 1)):
        call, mask = episode.turns[number].call, episode.turns[number + 1].parsed.mask
        if call is None or mask is None or len(mask) != len(call.items):
            continue
        kept = tuple(i for i, m in zip(call.items, mask) if m)
        dropped = tuple(i for i, m in zip(call.items, mask) if not m)
        if kept and dropped:
            return number, kept, dropped
    return None


def run(
    bench: Bench,
    folder: pathlib.Path,
    actor: evaluate.Actor,
    split: str,
    scoring: evaluate.Scoring,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Runs and scores one split.

    Args:
      folder: the run's: the plain greedy episodes lie in episodes/, the others in mask_effect/, the
        figures in mask_effect/GROUP.json.
    Returns:
      n: questions; n_mixed: those with a mixed mask; acc of these as they were (`all`), with the
      kept items alone and with the dropped alone, each with its interval; and the differences from
      `all`, paired, with theirs.
    """
    store = setup.open_store(bench, folder, actor, "agent", split, "greedy", scoring)
    rows: dict[str, list[stats.Row]] = {arm: [] for arm in ("all", *ARMS)}
    count = 0
    for chunk, records in evaluate.run_group(
        bench, actor, split, "greedy", regime="agent", store=store
    ):
        count += len(records)
        mixed = [(r, found) for r in records if (found := split_items(r.episode))]
        if not mixed:
            continue
        arms = _run_arms(bench, actor, mixed)
        arms["all"] = [r for r, _ in mixed]
        for arm, some in arms.items():
            if arm != "all":
                write_records(folder / FOLDER, f"{chunk.path.stem}_{arm}", some)
            rows[arm] += evaluate.make_rows(some, scoring(some), search_free={})
        say(f"mask effect, {split}: {len(rows['all'])} of {count} questions have a mixed mask")
    result = {
        "policy": actor.name,
        "split": split,
        "scorer": scoring.scorers[0],
        "n": count,
        "n_mixed": len(rows["all"]),
        "acc": {arm: stats.interval(some, "acc") for arm, some in rows.items()},
        "difference": {arm: stats.paired_difference(rows["all"], rows[arm], "acc") for arm in ARMS},
    }
    (folder / FOLDER).mkdir(exist_ok=True)
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    write_atomic(folder / FOLDER / f"{store.name}.json", text.encode())
    return result


def _run_arms(bench: Bench, actor: evaluate.Actor, mixed: Sequence) -> dict[str, list[Record]]:
    if actor.params is not None:
        bench.sampler.set_params(actor.params)
    prompts = bench.builder.build_all([r.task for r, _ in mixed], "agent")
    branches = [
        Branch(r.task, prompt, r.episode, turn + 1, number, items=items)
        for (r, (turn, *parts)), prompt in zip(mixed, prompts, strict=True)
        for number, items in enumerate(parts)
    ]
    done = run_of(bench, actor, branches)
    return {
        arm: [Record(e, r.task) for e, (r, _) in zip(done[number::2], mixed, strict=True)]
        for number, arm in enumerate(ARMS)
    }
