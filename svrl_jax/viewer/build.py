"""Sets of records -> a folder that a browser opens: one page, its data in chunks, pictures.

    index.html, *.css, *.js        the page (svrl_jax/viewer/page), as it is in the package
    data/index.js                  every question, and one line an episode
    data/episodes_HASH.js          episodes in full, loaded when one is looked at
    data/tokens_HASH.js            their tokens, loaded when asked for
    pictures/HASH_SIZE.webp        pictures by content

A chunk is a script that registers its JSON, as pages opened from disk may not fetch files. The
index is written last, so a page that was opened before goes on with what it knows.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.resources
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from svrl_jax.processing.tokenizer import Tokenizer
from svrl_jax.types import END_REASONS
from svrl_jax.viewer.entries import Entry, make_entry, short_question
from svrl_jax.viewer.pictures import PictureFolder, write_whole
from svrl_jax.viewer.runs import RecordSet, Run, ViewError
from svrl_jax.viewer.tokens import Vocabulary, token_view

SCHEMA = 1  # of the page's data; its scripts refuse another
EPISODES_CHUNK_CHARS = 400_000
TOKENS_CHUNK_CHARS = 2_000_000
EVAL_STEPS_FROM = 2**31  # steps from here on are no training steps (training.labels)
_CHUNK = re.compile(r"(?:episodes|tokens)_[0-9a-f]{20}\.js")
_PICTURE = re.compile(r"[0-9a-f]{32}_(?:large|small)\.webp")
_COLUMNS = (
    "task", "model", "step", "sample", "right", "reward", "tools", "calls", "end", "agreement",
    "outputs", "free", "chunk", "place", "answer",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Built:
    """What a build made.

    Attributes:
      questions, episodes, models: their numbers.
      num_bytes: of the whole folder.
      problems: sets that could not be read, and other things to be told.
    """

    questions: int
    episodes: int
    models: int
    num_bytes: int
    problems: tuple[str, ...]


def build(
    out: pathlib.Path,
    sets: Iterable[RecordSet],
    *,
    scorer: str,
    tokenizers: Callable[[Run], Tokenizer | None] | None,
    say: Callable[[str], None] = lambda _: None,
) -> Built:
    """Makes the folder, or makes it anew; what this build does not need of an earlier one goes.

    Args:
      out: absent, empty, or an earlier build.
      sets: read one after another; only one is held at once.
      scorer: of answers whose record has no score.
      tokenizers: run -> its tokenizer, or None where it is not known; None in place of the
        function leaves out the token view.
      say: takes a line for the user.
    Raises:
      ViewError: `out` holds something else, or there is no episode at all.
    """
    _check_out(out)
    page = _PageData(out, scorer, tokenizers)
    for one in sets:
        page.add_set(one)
        say(f"{one.run.name}/{one.name}: {len(one.records)} episodes")
    page.close_chunk()
    if not page.lines:
        raise ViewError("; ".join(page.problems) or "there is no episode to show")
    for name, data in page_files().items():
        write_whole(out / name, data)
    write_whole(out / "data" / "index.js", script("index", page.index()))
    _remove_stale(out, page)
    num_bytes = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    return Built(
        len(page.tasks), len(page.lines), len(page.models), num_bytes, tuple(page.problems)
    )


def page_files() -> dict[str, bytes]:
    """The page's own files by name."""
    folder = importlib.resources.files("svrl_jax.viewer") / "page"
    return {
        file.name: file.read_bytes()
        for file in sorted(folder.iterdir(), key=lambda f: f.name)
        if file.name.endswith((".html", ".css", ".js", ".svg"))
    }


def script(name: str, value: Any) -> bytes:
    """A classic script that hands JSON to the page: ASCII only, and no `<` that could end a tag."""
    return f'svrlViewer.receive("{name}", {to_json(value)});\n'.encode("ascii")


def to_json(value: Any) -> str:
    """JSON in ASCII without `<`, `>` or `&`: sound inside any script or attribute."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _PageData:
    """Grows set by set: index lines are kept, episodes go to disk."""

    def __init__(self, out: pathlib.Path, scorer: str, tokenizers):
        self.data = out / "data"
        self.data.mkdir(parents=True, exist_ok=True)
        self.pictures = PictureFolder(out / "pictures")
        self.scorer, self._tokenizers = scorer, tokenizers
        self._vocabularies: dict[str, Vocabulary] = {}
        self.models: dict[tuple, dict[str, Any]] = {}
        self.tasks: dict[str, dict[str, Any]] = {}
        self.lines: list[list[Any]] = []
        self.chunks: list[str] = []
        self.problems: list[str] = []
        self._chunk = _Chunk()

    def add_set(self, one: RecordSet) -> None:
        if one.problem:
            self.problems.append(f"{one.run.name}/{one.name}: {one.problem}")
        vocabulary = self._vocabulary(one.run)
        for record, notes in zip(one.records, one.notes, strict=True):
            entry = make_entry(record, notes, self.scorer, self.pictures)
            tokens = None if vocabulary is None else token_view(record, vocabulary)
            model = self._model(one, record)
            task = self._task(entry, one)
            if self._chunk.is_full:
                self.close_chunk()
            place = self._chunk.add(entry, model, tokens)
            self._add_line(entry, task, model, one.is_training, place)

    def close_chunk(self) -> None:
        """Writes the chunk at hand and begins another."""
        if not self._chunk.episodes:
            return
        name, files = self._chunk.files()
        for file, data in files.items():
            write_whole(self.data / file, data)
        self.chunks.append(name)
        self._chunk = _Chunk()

    def index(self) -> dict[str, Any]:
        columns = list(zip(*self.lines, strict=True))
        return {
            "schema": SCHEMA,
            "made": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "scorer": self.scorer,
            "has_tokens": self._tokenizers is not None,
            "ends": list(END_REASONS),
            "models": list(self.models.values()),
            "tasks": list(self.tasks.values()),
            "episodes": {name: list(c) for name, c in zip(_COLUMNS, columns, strict=True)},
            "chunks": self.chunks,
            "problems": self.problems,
        }

    def _vocabulary(self, run: Run) -> Vocabulary | None:
        if self._tokenizers is None:
            return None
        if run.name not in self._vocabularies:
            self._vocabularies[run.name] = Vocabulary(self._tokenizers(run))
        return self._vocabularies[run.name]

    def _model(self, one: RecordSet, record) -> int:
        """Number of the column: a policy under one regime and temperature, in training or not."""
        episode = record.episode
        key = (one.run.name, episode.policy, episode.regime, episode.temperature, one.is_training)
        if key not in self.models:
            how = "greedy" if episode.temperature == 0 else f"T={episode.temperature:g}"
            how = "training" if one.is_training else how
            number = len(self.models)
            self.models[key] = {
                "number": number,
                "key": _slug(one.run.name, episode.policy, episode.regime, how, number),
                "run": one.run.name,
                "policy": episode.policy,
                "regime": episode.regime,
                "how": how,
                "is_training": one.is_training,
                "is_trace": one.run.kind == "traces",
            }
        return self.models[key]["number"]

    def _task(self, entry: Entry, one: RecordSet) -> int:
        """Number of the question; runs meet by its id."""
        task = entry.task
        known = self.tasks.get(task["id"])
        if known is None:
            known = self.tasks[task["id"]] = {
                "number": len(self.tasks), "id": task["id"], "question": short_question(task),
                "source": task["source"], "category": task["category"], "picture": task["picture"],
            }  # fmt: skip
        elif not known["question"]:
            known |= {"question": short_question(task), "category": task["category"]}
        elif task["question"] and known["question"] != short_question(task):
            message = f"{one.run.name}: question {task['id'][:80]} reads differently there"
            if message not in self.problems:
                self.problems.append(message)
        if known["picture"] is None:
            known["picture"] = task["picture"]
        return known["number"]

    def _add_line(self, entry: Entry, task: int, model: int, is_training: bool, place: int):
        line, view = entry.line, entry.view
        step = view["step"] if is_training and view["step"] < EVAL_STEPS_FROM else -1
        self.lines.append(
            [
                task, model, step, view["sample"], _flag(line["right"]), line["reward"],
                line["tools"], line["calls"], END_REASONS.index(line["end"]), line["agreement"],
                line["outputs"], _flag(line["free"]), len(self.chunks), place, line["answer"],
            ]
        )  # fmt: skip


class _Chunk:
    """Episodes that share two files."""

    def __init__(self):
        self.episodes: list[str] = []
        self._tokens: list[str] = []
        self._tasks: dict[str, str] = {}
        self._sizes = [0, 0]

    @property
    def is_full(self) -> bool:
        return self._sizes[0] > EPISODES_CHUNK_CHARS or self._sizes[1] > TOKENS_CHUNK_CHARS

    def add(self, entry: Entry, model: int, tokens: dict | None) -> int:
        """Takes an episode; returns its place."""
        self._tasks.setdefault(entry.task["id"], to_json(entry.task))
        task = list(self._tasks).index(entry.task["id"])
        self.episodes.append(to_json(entry.view | {"task": task, "model": model}))
        self._tokens.append(to_json(tokens))
        self._sizes[0] += len(self.episodes[-1])
        self._sizes[1] += len(self._tokens[-1])
        return len(self.episodes) - 1

    def files(self) -> tuple[str, dict[str, bytes]]:
        """(hash, file name -> bytes)."""
        tasks, episodes = ",".join(self._tasks.values()), ",".join(self.episodes)
        bodies = {
            "episodes": f'{{"tasks":[{tasks}],"episodes":[{episodes}]}}',
            "tokens": f"[{','.join(self._tokens)}]",
        }
        digest = hashlib.sha256("".join(bodies.values()).encode()).hexdigest()[:20]
        return digest, {
            f"{kind}_{digest}.js": f'svrlViewer.receive("{kind}_{digest}", {body});\n'.encode(
                "ascii"
            )
            for kind, body in bodies.items()
        }


def _slug(*words: Any) -> str:
    """A model's name in addresses; its number keeps it unique."""
    *words, number = words
    text = "-".join(dict.fromkeys(re.sub(r"[^A-Za-z0-9]+", "-", str(w)).strip("-") for w in words))
    return f"{text.strip('-')[:60] or 'model'}.{number + 1}"


def _flag(value: bool | None) -> int:
    return -1 if value is None else int(value)


def _check_out(out: pathlib.Path) -> None:
    if out.exists() and not out.is_dir():
        raise ViewError(f"--out {str(out)!r} is a file: name a folder")
    is_ours = (out / "data").is_dir() and (out / "pictures").is_dir()
    if out.exists() and any(out.iterdir()) and not is_ours:
        raise ViewError(f"--out {str(out)!r} holds something else: name an empty or a new folder")


def _remove_stale(out: pathlib.Path, page: _PageData) -> None:
    chunks = {f"{kind}_{name}.js" for name in page.chunks for kind in ("episodes", "tokens")}
    for folder, pattern, used in (
        (out / "data", _CHUNK, chunks),
        (out / "pictures", _PICTURE, page.pictures.used),
    ):
        for path in folder.iterdir():
            if pattern.fullmatch(path.name) and path.name not in used:
                path.unlink()


def read_all(runs: Sequence[Run], read: Callable[[Run], Iterable[RecordSet]]):
    """Every set of every run, in order."""
    for run in runs:
        yield from read(run)
