"""Episodes, scores and tasks <-> files: text as JSON lines, arrays beside it, pictures by content.

    NAME.jsonl              a header line, then one line an episode
    NAME.npz                its arrays: tokens in one run, each distinct picture once
    pictures/SHA256.png     encoded pictures of tasks and items, shared by all sets

The JSON lines are written last and name the array file's sha256, so a set that was only half
written or replaced is noticed. Nothing is pickled. Reading gives the very records back.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from svrl_jax.types import (
    SCHEMA_VERSION,
    Episode,
    OracleLabels,
    ParsedTurn,
    Score,
    SearchItem,
    Task,
    ToolCall,
    Turn,
)

PICTURES = "pictures"
_ARRAYS = ("ids", "loss_mask", "positions", "sampler_logps", "pixel_values", "image_grid_thw")
_DTYPES = {
    "ids": np.int32,
    "loss_mask": np.int32,
    "positions": np.int32,
    "sampler_logps": np.float32,
    "pixel_values": np.float32,
    "image_grid_thw": np.int32,
}
_SUFFIXES = ((b"\x89PNG", ".png"), (b"\xff\xd8", ".jpg"), (b"GIF8", ".gif"), (b"RIFF", ".webp"))


class RecordError(RuntimeError):
    """A record file that cannot be read; the message names the file and the remedy."""


@dataclasses.dataclass(frozen=True)
class Record:
    """An episode and what is known of it.

    Attributes:
      episode: as it was sampled.
      task: the question with its golds, or None.
      score: the reward with each factor, or None where nothing was scored.
      advantage: the trained advantage, or None.
      per_token_logps: float32[T], the trainer's log-probs before the update, or None where the
        episode was not trained on.
    """

    episode: Episode
    task: Task | None = None
    score: Score | None = None
    advantage: float | None = None
    per_token_logps: np.ndarray | None = None


def write_records(folder: str | os.PathLike, name: str, records: Sequence[Record]) -> pathlib.Path:
    """Writes one set of records, such as a step's; an older set of the same name is replaced at
    once.

    Args:
      folder: made if missing; its `pictures` folder is shared by all sets.
      name: file name without suffix, such as `step_000012`.
      records: any number.
    Returns:
      Path of the JSON lines.
    Raises:
      TypeError: an array's dtype is not that of `types.Episode` (a reader could not restore it).
    """
    folder = pathlib.Path(folder)
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    arrays = _Arrays()
    lines = [_record_to_json(r, arrays, folder / PICTURES) for r in records]
    data = arrays.to_bytes()
    header = {
        "schema_version": SCHEMA_VERSION,
        "num_records": len(lines),
        "arrays_sha256": hashlib.sha256(data).hexdigest(),
    }
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in [header, *lines])
    write_atomic(folder / f"{name}.npz", data)
    write_atomic(folder / f"{name}.jsonl", text.encode("utf-8"))
    return folder / f"{name}.jsonl"


def read_records(path: str | os.PathLike, *, has_pixels: bool = True) -> list[Record]:
    """Reads a set of records back exactly.

    Args:
      path: the JSON lines; arrays and pictures are found beside it.
      has_pixels: False leaves every `pixel_values` empty (float32[0, 0]): most of the reading time.
    Raises:
      FileNotFoundError: no such file.
      RecordError: another schema, or files that are damaged or do not belong together.
    """
    path = pathlib.Path(path)
    header, *lines = _lines(path)
    found = header.get("schema_version")
    if found != SCHEMA_VERSION:
        raise RecordError(
            f"{path} has schema {found}, this version reads {SCHEMA_VERSION}: "
            "read it with the version that wrote it"
        )
    if header["num_records"] != len(lines):
        count = header["num_records"]
        raise RecordError(f"{path} holds {len(lines)} of {count} records: {_REMEDY}")
    try:
        data = path.with_suffix(".npz").read_bytes()
    except FileNotFoundError:
        raise RecordError(f"{path.with_suffix('.npz')} is missing: {_REMEDY}") from None
    if hashlib.sha256(data).hexdigest() != header["arrays_sha256"]:
        raise RecordError(f"{path.with_suffix('.npz')} does not belong to {path.name}: {_REMEDY}")
    with np.load(io.BytesIO(data), allow_pickle=False) as loaded:
        arrays = {k: loaded[k] for k in loaded.files if has_pixels or not k.startswith("pixels_")}
    return [_record_from_json(x, arrays, i, path.parent / PICTURES) for i, x in enumerate(lines)]


def record_files(folder: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Paths of a folder's record sets, by name; not what is written beside them, such as
    `NAME.labels.jsonl`.
    """
    found = pathlib.Path(folder).glob("*.jsonl")
    yield from sorted(p for p in found if "." not in p.stem)


def write_atomic(path: pathlib.Path, data: bytes) -> None:
    """Writes a file so that a kill at any moment leaves the old one or the new one."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide a run from its readers
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class Journal:
    """Records one after the other in one file: they outlive a kill before their set is whole.

    A record that `add` has returned from is read back by the next process. A line that a kill cut
    short is dropped. Sets are kept by `write_records`; a journal is removed then.
    """

    def __init__(self, folder: str | os.PathLike, name: str):
        """Args:
        folder: of the sets; shares its pictures.
        name: of the file, without suffix.
        """
        self._folder = pathlib.Path(folder)
        self._path = self._folder / f"{name}.journal"

    def read(self) -> list[Record]:
        """Every whole record, in the order of `add`; [] without a file."""
        if not self._path.is_file():
            return []
        *lines, torn = self._path.read_bytes().split(b"\n")
        if torn:
            write_atomic(self._path, b"".join(line + b"\n" for line in lines))
        found = []
        for line in lines:
            entry = json.loads(line)
            with np.load(io.BytesIO(base64.b64decode(entry["arrays"]))) as loaded:
                arrays = {key: loaded[key] for key in loaded.files}
            found.append(_record_from_json(entry["record"], arrays, 0, self._folder / PICTURES))
        return found

    def add(self, record: Record) -> None:
        """Appends one record."""
        (self._folder / PICTURES).mkdir(parents=True, exist_ok=True)
        arrays = _Arrays()
        line = _record_to_json(record, arrays, self._folder / PICTURES)
        entry = {"record": line, "arrays": base64.b64encode(arrays.to_bytes()).decode()}
        with self._path.open("ab") as file:
            file.write(json.dumps(entry, allow_nan=False).encode() + b"\n")

    def remove(self) -> None:
        """Deletes the file."""
        self._path.unlink(missing_ok=True)


_REMEDY = "remove the set and write it again"


def _lines(path: pathlib.Path) -> list[Any]:
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    except ValueError as error:
        raise RecordError(f"{path} is not JSON lines ({error}): {_REMEDY}") from error
    if not lines or not isinstance(lines[0], dict):
        raise RecordError(f"{path} has no header line: {_REMEDY}")
    return lines


class _Arrays:
    """Arrays of many episodes as few members: one run of tokens, and each distinct picture once."""

    def __init__(self):
        self._runs: dict[str, list[np.ndarray]] = {}
        self._pixels: dict[str, np.ndarray] = {}
        self._pixel_numbers: list[int] = []
        self._known: dict[int, int] = {}  # a group shares its pictures' array: hash it once
        self._lengths: list[tuple[int, int, bool]] = []
        self._kept: list[Episode] = []  # so that id() stays unique

    def add(self, record: Record) -> None:
        episode = record.episode
        for name in _ARRAYS:
            array = getattr(episode, name)
            if array.dtype != _DTYPES[name]:
                raise TypeError(f"Episode.{name} is {array.dtype}, wants {_DTYPES[name].__name__}")
        for name in ("ids", "loss_mask", "sampler_logps", "image_grid_thw"):
            self._runs.setdefault(name, []).append(getattr(episode, name))
        self._runs.setdefault("positions", []).append(episode.positions.T)
        logps = record.per_token_logps
        if logps is not None:
            self._runs.setdefault("per_token_logps", []).append(np.asarray(logps, np.float32))
        self._lengths.append((len(episode.ids), len(episode.image_grid_thw), logps is not None))
        self._pixel_numbers.append(self._pixel_number(episode))

    def to_bytes(self) -> bytes:
        """The .npz file."""
        members = {name: np.concatenate(runs) for name, runs in self._runs.items()}
        members["lengths"] = np.array(self._lengths, np.int64).reshape(-1, 3)
        members["pixel_number"] = np.array(self._pixel_numbers, np.int64)
        for number, pixels in enumerate(self._pixels.values()):
            members |= _pack_pixels(f"pixels_{number}", pixels)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **members)
        return buffer.getvalue()

    def _pixel_number(self, episode: Episode) -> int:
        pixels = episode.pixel_values
        if id(pixels) not in self._known:
            self._kept.append(episode)
            key = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()
            self._pixels.setdefault(key, pixels)
            self._known[id(pixels)] = list(self._pixels).index(key)
        return self._known[id(pixels)]


def _pack_pixels(name: str, pixels: np.ndarray) -> dict[str, np.ndarray]:
    """Exact and small: normalised 8-bit pictures hold at most 768 distinct floats, so a table and
    16-bit codes, which compress well; other arrays as they are."""
    bits, codes = np.unique(np.ascontiguousarray(pixels).view(np.uint32), return_inverse=True)
    if len(bits) > 2**16:
        return {name: pixels}
    return {f"{name}_table": bits, f"{name}_codes": codes.reshape(pixels.shape).astype(np.uint16)}


def _unpack_pixels(name: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    if name in arrays:
        return arrays[name]
    if f"{name}_codes" not in arrays:
        return np.zeros((0, 0), np.float32)  # asked to be left out
    codes = arrays[f"{name}_codes"]
    if not codes.size:
        return np.zeros(codes.shape, np.float32)
    return arrays[f"{name}_table"][codes].view(np.float32)


def _episode_arrays(arrays: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray | None]:
    """The arrays of one episode, as `Episode` and `Record` name them."""
    lengths = arrays["lengths"]
    tokens, images, has_logps = (int(n) for n in lengths[number])
    start, first_image = (int(n) for n in lengths[:number, :2].sum(axis=0))
    span = slice(start, start + tokens)
    logps = None
    if has_logps:
        before = int((lengths[:number, 0] * lengths[:number, 2]).sum())
        logps = arrays["per_token_logps"][before : before + tokens].copy()
    return {
        "ids": arrays["ids"][span].copy(),
        "loss_mask": arrays["loss_mask"][span].copy(),
        "positions": np.ascontiguousarray(arrays["positions"][span].T),
        "sampler_logps": arrays["sampler_logps"][span].copy(),
        "pixel_values": _unpack_pixels(f"pixels_{int(arrays['pixel_number'][number])}", arrays),
        "image_grid_thw": arrays["image_grid_thw"][first_image : first_image + images].copy(),
        "per_token_logps": logps,
    }


def _record_to_json(record: Record, arrays: _Arrays, pictures: pathlib.Path) -> dict[str, Any]:
    arrays.add(record)
    fields = [f.name for f in dataclasses.fields(Episode) if f.name not in _ARRAYS]
    episode = {name: getattr(record.episode, name) for name in fields}
    episode["turns"] = [_turn_to_json(turn, pictures) for turn in record.episode.turns]
    task = score = None
    if record.task is not None:
        task = _plain(record.task) | {"picture": _store(record.task.picture, pictures)}
    if record.score is not None:
        score = dataclasses.asdict(record.score)
    advantage = None if record.advantage is None else float(record.advantage)
    return _to_builtin({"episode": episode, "task": task, "score": score, "advantage": advantage})


def _record_from_json(
    line: dict[str, Any], arrays: dict[str, np.ndarray], number: int, pictures: pathlib.Path
) -> Record:
    values = _episode_arrays(arrays, number)
    logps = values.pop("per_token_logps")
    turns = tuple(_turn_from_json(turn, pictures) for turn in line["episode"].pop("turns"))
    episode = Episode(**line["episode"], **values, turns=turns)
    task, score = line["task"], line["score"]
    if task is not None:
        task = Task(**_tuples(task) | {"picture": _fetch(task["picture"], pictures)})
    if score is not None:
        labels = score["labels"]
        labels = None if labels is None else OracleLabels(**_tuples(labels))
        score = Score(**score | {"labels": labels})
    return Record(episode, task, score, line["advantage"], logps)


def _turn_to_json(turn: Turn, pictures: pathlib.Path) -> dict[str, Any]:
    call = None
    if turn.call is not None:
        items = [_plain(i) | {"picture": _store(i.picture, pictures)} for i in turn.call.items]
        call = _plain(turn.call) | {"items": items}
    return _plain(turn) | {"parsed": _plain(turn.parsed), "call": call}


def _turn_from_json(line: dict[str, Any], pictures: pathlib.Path) -> Turn:
    parsed = ParsedTurn(**_tuples(line["parsed"]))
    call = line["call"]
    if call is not None:
        items = tuple(
            SearchItem(**item | {"picture": _fetch(item["picture"], pictures)})
            for item in call["items"]
        )
        call = ToolCall(**call | {"items": items})
    return Turn(**line | {"parsed": parsed, "call": call})


def _plain(record: Any) -> dict[str, Any]:
    """A record's fields, not copied and not descended into."""
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def _tuples(value: Any) -> Any:
    """JSON lists as the tuples they were; the records hold no lists."""
    if isinstance(value, list):
        return tuple(_tuples(v) for v in value)
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return value


def _to_builtin(value: Any) -> Any:
    """NumPy scalars as Python's, which JSON can write."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_to_builtin(v) for v in value]
    if isinstance(value, dict):
        return {k: _to_builtin(v) for k, v in value.items()}
    return value


def _store(picture: bytes | None, pictures: pathlib.Path) -> str | None:
    """Keeps encoded bytes under their sha256 and returns the file's name; "" and None mean none."""
    if not picture:
        return None if picture is None else ""
    suffix = next((s for start, s in _SUFFIXES if picture.startswith(start)), ".bin")
    name = hashlib.sha256(picture).hexdigest() + suffix
    if not (pictures / name).exists():
        write_atomic(pictures / name, picture)
    return name


def _fetch(name: str | None, pictures: pathlib.Path) -> bytes | None:
    if not name:
        return None if name is None else b""
    try:
        data = (pictures / name).read_bytes()
    except FileNotFoundError:
        raise RecordError(f"picture {pictures / name} is missing: restore the folder") from None
    if hashlib.sha256(data).hexdigest() != name.split(".")[0]:
        raise RecordError(f"picture {pictures / name} is damaged: restore the folder")
    return data
