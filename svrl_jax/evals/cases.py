"""Record sets and what lies beside them -> cases: one finished episode and all that is known of it.

    episodes/NAME.jsonl (and .npz)   the episodes
    episodes/NAME.verdicts.jsonl     what the scorers say (`eval`, `rescore`)
    episodes/NAME.labels.jsonl       what verifiers say of items and queries (`annotate`)
    search_free.json                 labels of the questions
    evals/GROUP.json                 what a group of sets was made with

Nothing here runs a policy, an oracle or a judge.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from svrl_jax.evals import stats
from svrl_jax.records import Record, RecordError, read_records, record_files, write_atomic
from svrl_jax.rewards import factors
from svrl_jax.rewards.judge import Verdict
from svrl_jax.rewards.search_free import CATEGORIES
from svrl_jax.types import Episode, OracleLabels, Task

LABEL_SOURCES = ("initial", "self", "category")  # of search_free


@dataclasses.dataclass(frozen=True)
class Case:
    """One finished episode.

    Attributes:
      episode, task: as recorded.
      verdicts: scorer -> verdict.
      scorer: whose verdict is Acc's.
      labels: of a verifier that knew the golds, or None.
      oracle: its name; "" without labels.
      query_verdicts: an external judge's 0/1 for each executed text query, None where it gave none;
        () where it was not asked.
      search_free: the question's label under the chosen source, None where unknown.
      rate: tool-free success rate in [0, 1], None where unknown.
      allowed: tool calls that the episode might have made.
      group: name of the group of sets it lies in.
    """

    episode: Episode
    task: Task
    verdicts: Mapping[str, Verdict]
    scorer: str
    labels: OracleLabels | None = None
    oracle: str = ""
    query_verdicts: tuple[int | None, ...] = ()
    search_free: bool | None = None
    rate: float | None = None
    allowed: int = 3
    group: str = ""

    @property
    def score(self) -> float | None:
        """Acc's verdict in [0, 1]; None: unscored."""
        found = self.verdicts.get(self.scorer)
        return None if found is None else found.value

    @property
    def is_right(self) -> bool | None:
        """Full score; None: unscored."""
        return None if self.score is None else self.score >= 1.0

    @property
    def item(self) -> str:
        """The distinct question behind it; intervals are taken over these."""
        return self.task.item or self.task.id

    @property
    def row(self) -> stats.Row:
        """Its part of the figures."""
        return stats.make_row(
            self.episode,
            self.item,
            self.is_right,
            self.search_free,
            self.labels,
            factors.r_format(self.episode),
            score=self.score,
            allowed=self.allowed,
        )


def rows_of(cases: Iterable[Case]) -> list[stats.Row]:
    """One row a case."""
    return [case.row for case in cases]


@dataclasses.dataclass(frozen=True)
class Group:
    """One policy under one regime on one split.

    Attributes:
      name: of its file in evals/, and the beginning of its sets' names.
      about: policy, regime, split, mode, scorers, prompt, search, seconds and so on.
      cases: in the order of the questions.
    """

    name: str
    about: Mapping[str, Any]
    cases: tuple[Case, ...]

    @property
    def title(self) -> str:
        """For tables: `policy, regime, split, mode`."""
        return ", ".join(str(self.about[k]) for k in ("policy", "regime", "split", "mode"))


def read_run(folder: pathlib.Path, *, scorer: str = "", source: str = "initial") -> list[Group]:
    """Every evaluated group of a run folder, by name; [] where it has none.

    Args:
      folder: a run folder.
      scorer: whose verdict is Acc's; "" takes each group's first.
      source: of search_free, one of LABEL_SOURCES: the initial policy; the policy itself (its own
        tool-free greedy episodes of the same split in this folder); the data set's category.
    Raises:
      ValueError: unknown source.
      RecordError: files that are damaged or do not belong together.
    """
    if source not in LABEL_SOURCES:
        raise ValueError(f"source must be one of {LABEL_SOURCES}, got {source!r}")
    labels = _read_search_free(folder / "search_free.json")
    groups = []
    for path in group_files(folder):
        about = json.loads(path.read_text("utf-8"))
        cases: list[Case] = []
        for records in _sets(folder / "episodes", path.stem):
            cases += _cases(records, path.stem, about, scorer or about["scorers"][0], labels)
        groups.append(Group(path.stem, about, tuple(cases)))
    if source == "initial":
        return groups
    return [_relabel(group, groups, source) for group in groups]


def group_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """evals/GROUP.json of every group of a run folder, by name; not the figures that an evaluation
    during training leaves beside them.
    """
    return sorted((folder / "evals").glob("eval_*.json"))


def write_about(path: pathlib.Path, about: Mapping[str, Any]) -> None:
    """Writes evals/GROUP.json."""
    write_atomic(path, (json.dumps(about, indent=2, allow_nan=False) + "\n").encode("utf-8"))


def write_verdicts(path: pathlib.Path, records: Sequence[Record], verdicts) -> None:
    """Writes NAME.verdicts.jsonl beside a record set.

    Args:
      path: of the set's JSON lines.
      verdicts: for each record, the verdicts of all scorers.
    """
    lines = [
        {"task_id": r.episode.task_id, "sample": r.episode.sample, **dataclasses.asdict(verdict)}
        for r, of_record in zip(records, verdicts, strict=True)
        for verdict in of_record
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_atomic(path.with_suffix(".verdicts.jsonl"), text.encode("utf-8"))


def read_verdicts(path: pathlib.Path) -> dict[tuple[str, int], dict[str, Verdict]]:
    """(task id, sample) -> scorer -> verdict, of the set at `path`; {} where nothing was scored."""
    found: dict[tuple[str, int], dict[str, Verdict]] = {}
    for line in _lines(path.with_suffix(".verdicts.jsonl")):
        key = line.pop("task_id"), line.pop("sample")
        found.setdefault(key, {})[line["scorer"]] = Verdict(**line)
    return found


def read_labels(path: pathlib.Path) -> dict[tuple[str, int], dict[str, Any]]:
    """(task id, sample) -> the line that `annotate` wrote, of the set at `path`."""
    lines = _lines(path.with_suffix(".labels.jsonl"))
    return {(line["task_id"], line["sample"]): line for line in lines}


def set_paths(episodes: pathlib.Path, group: str) -> list[pathlib.Path]:
    """The sets of a group: `GROUP_0000.jsonl` and so on."""
    size = len(group) + 5
    return [
        p for p in record_files(episodes) if p.stem.startswith(f"{group}_") and len(p.stem) == size
    ]


def _sets(episodes: pathlib.Path, group: str):
    for path in set_paths(episodes, group):
        yield path, read_records(path, has_pixels=False)


def _cases(found, group: str, about: Mapping[str, Any], scorer: str, labels) -> list[Case]:
    path, records = found
    verdicts, written = read_verdicts(path), read_labels(path)
    cases = []
    for record in records:
        episode, task = record.episode, record.task
        if task is None:
            raise RecordError(f"{path} has episodes without their task: evaluate them again")
        key = episode.task_id, episode.sample
        line = written.get(key, {})  # an oracle's labels, an external judge's, both or none
        is_free, rate = labels.get(task.id, (None, None))
        cases.append(
            Case(
                episode=episode,
                task=task,
                verdicts=verdicts.get(key, {}),
                scorer=scorer,
                labels=_labels_of(line) if "items" in line else None,
                oracle=str(line.get("oracle", "")),
                query_verdicts=tuple(line.get("query_judge", ())),
                search_free=is_free,
                rate=rate,
                allowed=about["allowed_calls"],
                group=group,
            )
        )
    return cases


def _labels_of(line: Mapping[str, Any]) -> OracleLabels | None:
    if not line["answered"]:
        return None
    return OracleLabels(
        items=tuple(map(tuple, line["items"])),
        queries=tuple(line["queries"]),
        proposals=tuple(map(tuple, line["proposals"])),
    )


def _relabel(group: Group, groups: Sequence[Group], source: str) -> Group:
    if source == "category":
        own = {c.task.id: CATEGORIES.get(c.task.category) for c in group.cases}
    else:
        wanted = {"regime": "direct", "mode": "greedy"} | {
            k: group.about[k] for k in ("policy", "split")
        }
        own = {
            c.task.id: c.is_right
            for other in groups
            if all(other.about[k] == v for k, v in wanted.items())
            for c in other.cases
        }
    cases = [dataclasses.replace(c, search_free=own.get(c.task.id)) for c in group.cases]
    return dataclasses.replace(group, cases=tuple(cases))


def _read_search_free(path: pathlib.Path) -> dict[str, tuple[bool, float | None]]:
    """task id -> (label, success rate), as `search_free.LabelStore` keeps them."""
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text("utf-8"))["labels"]
    return {task_id: (bool(greedy), rate) for task_id, (greedy, rate, _) in rows.items()}


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
