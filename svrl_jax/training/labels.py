"""Tasks -> search_free labels during a run: shipped ones, the run's own, or made when missing."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable, Sequence

from svrl_jax.data.prepared import Prepared
from svrl_jax.protocol.prompts import prompt_hash
from svrl_jax.rewards.search_free import LabelStore, make_labels, needs_policy
from svrl_jax.training.assemble import Bench
from svrl_jax.training.task_source import WORLD
from svrl_jax.types import Task

SHIPPED_NAME = "search_free.json"
# Evaluation and labelling draw with step numbers that no training step has.
LABEL_STEP = 2**31
EVAL_STEP = 2**31 + 1
_CHUNK = 128  # tasks a pass: bounds what is held at once, and what a stop loses


def label_fingerprint(bench: Bench) -> dict[str, str]:
    """What labels belong to: the initial policy's weights, the direct prompt, the scorer, and the
    prepared data with the size of its pictures (the embedded world is in the policy's own
    fingerprint).
    """
    digest = hashlib.sha256()
    for path in [*sorted(bench.folder.glob("*.safetensors")), bench.folder / "tokenizer.json"]:
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    found = {
        "policy": digest.hexdigest()[:16],
        "prompt": prompt_hash(bench.builder.texts["direct"]),
        "scorer": bench.config.reward.scorer,
    }
    source = bench.config.data.source
    if source != WORLD:
        limits = f"{bench.builder.max_pixels} {bench.builder.max_tokens}"
        content = Prepared(source).digest + limits
        found["data"] = hashlib.sha256(content.encode()).hexdigest()[:16]
    return found


def label_file(bench: Bench) -> pathlib.Path:
    """Where labels lie beside the policy: a file a data set."""
    source = bench.config.data.source
    if source == WORLD:
        return bench.folder / SHIPPED_NAME
    return bench.folder / f"search_free_{Prepared(source).manifest['name']}.json"


class SearchFree:
    """Labels of tasks; what is missing is made by the initial policy and kept in the run's
    folder.
    """

    def __init__(self, bench: Bench, own: pathlib.Path | None, say: Callable[[str], None]):
        """Args: own: the run's label file, or None; say: takes a line for the user."""
        self._bench, self._say = bench, say
        self.store = LabelStore(label_file(bench), own, label_fingerprint(bench))
        for path in self.store.stale:
            say(f"{path} was made by another policy, prompt, scorer or data set and is not used")

    def of(self, tasks: Sequence[Task]) -> list[bool | None]:
        """search_free of each task; None where there is none and nothing to make it with."""
        self.ensure(tasks)
        reward = self._bench.config.reward
        return [
            self.store.is_free(t, reward)
            if self.store.has(t.id) or not needs_policy(t, reward)
            else None
            for t in tasks
        ]

    def ensure(self, tasks: Sequence[Task]) -> int:
        """Makes the missing labels; returns how many were made: none without a sampler."""
        reward = self._bench.config.reward
        if self._bench.sampler is None:
            return 0
        missing = self.store.missing([t for t in tasks if needs_policy(t, reward)])
        if missing:
            self._say(f"labelling {len(missing)} tasks with the initial policy (no tools)")
        self.make(missing)
        return len(missing)

    def make(self, tasks: Sequence[Task]) -> None:
        """Labels tasks by the initial policy; kept after every chunk, so it may be stopped."""
        for start in range(0, len(tasks), _CHUNK):
            self.store.add(self._make(tasks[start : start + _CHUNK]))

    def _make(self, tasks: Sequence[Task]):
        bench = self._bench
        bench.sampler.set_params(bench.initial_params)

        def run_direct(tasks, group_size, temperature):
            return bench.run(
                tasks,
                bench.sampler,
                step=LABEL_STEP,
                group_size=group_size,
                regime="direct",
                temperature=temperature,
                policy_name="initial",
            )

        reward = bench.config.reward
        return make_labels(tasks, run_direct, reward.scorer, reward.search_free_samples)
