"""A folder that `index` made -> the two searches, without network: BM25 over documents, nearest
neighbours over pictures. Everything large is memory-mapped.

    index.json        what is inside and every file's size; written last
    documents.jsonl   one document a line; documents.npy: int64, where each line starts
    bm25/             bm25s
    pictures.usearch  vectors; pictures.jsonl: one picture's title, link, text a line
"""

from __future__ import annotations

import hashlib
import importlib
import json
import mmap
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from svrl_jax.processing.images import PictureError, load_picture
from svrl_jax.search import summarise
from svrl_jax.search.embeddings import embedding_of
from svrl_jax.search.errors import SearchSetupError, ToolError
from svrl_jax.types import SearchItem, Task

FORM = 1
_FIELDS = ("id", "title", "text", "link")


class IndexBuildError(RuntimeError):
    """Documents or pictures that cannot be indexed; the message names the row and the remedy."""


def build(
    out: str | os.PathLike,
    documents: Iterable[Mapping[str, Any]],
    pictures: Iterable[tuple[bytes, Mapping[str, Any]]] = (),
    *,
    embedding: str = "colours",
) -> dict[str, Any]:
    """Writes an index folder; until it is whole, nothing stands at `out`.

    Args:
      out: must not exist.
      documents: rows with `text` and, where known, `id`, `title`, `link`.
      pictures: (encoded bytes, row with `title` and, where known, `id`, `link`, `text`).
      embedding: of pictures; see `embeddings.embedding_of`.
    Returns:
      index.json's content.
    Raises:
      IndexBuildError: `out` exists, a row without text, a picture that cannot be read, or nothing.
    """
    out = pathlib.Path(out)
    if out.exists():
        raise IndexBuildError(f"{out} exists: remove it, or name another --out")
    embed = embedding_of(embedding)  # fails now rather than after the documents
    out.parent.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        num_documents = _build_text(work, documents)
        num_pictures = _build_pictures(work, pictures, embed)
        if not num_documents and not num_pictures:
            raise IndexBuildError("no document and no picture to index")
        files = {
            str(p.relative_to(work)): p.stat().st_size
            for p in sorted(work.rglob("*"))
            if p.is_file()
        }
        about = {
            "form": FORM,
            "num_documents": num_documents,
            "num_pictures": num_pictures,
            "embedding": embedding,
            "documents_sha256": _digest(work / "documents.jsonl"),
            "files": files,
        }
        (work / "index.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
        os.chmod(work, 0o755)  # mkdtemp's 0700 would hide it from other readers
        os.replace(work, out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return about


class IndexTools:
    """Both searches over an index folder; shared by threads."""

    def __init__(self, config: ConfigDict):
        """Opens `config.index_folder`.

        Raises:
          SearchSetupError: no index there, or one that is not whole.
        """
        self.config = config
        self._folder = pathlib.Path(config.index_folder)
        self.about = _read_about(self._folder)
        if self.about["num_documents"]:
            self._lines = _Lines(self._folder / "documents")
            self._bm25s, self._text = _load_bm25(self._folder / "bm25")
        if self.about["num_pictures"]:
            self._picture_lines = _Lines(self._folder / "pictures")
            self._embed = embedding_of(self.about["embedding"])
            self._pictures = _usearch().restore(str(self._folder / "pictures.usearch"), view=True)

    def text_search(self, query: str, task: Task) -> list[SearchItem]:
        """Items for a query, best first; [] where none of its words occurs.

        Raises:
          ToolError: (bad_response) the index has no documents.
        """
        if not self.about["num_documents"]:
            raise ToolError("the index holds no documents", "bad_response")
        tokens = self._bm25s.tokenize(
            [query], stopwords="en", return_ids=False, show_progress=False
        )
        if not tokens[0]:
            return []
        rows, scores = self._text.retrieve(
            tokens,
            k=min(self.config.text_top_k, self.about["num_documents"]),
            show_progress=False,
            backend_selection="numpy",
            n_threads=0,
        )
        found = zip(rows[0].tolist(), scores[0].tolist(), strict=True)
        return [self._item(self._lines[r], query, s) for r, s in found if s > 1e-6]

    def image_search(self, task: Task) -> list[SearchItem]:
        """Items whose picture is nearest to the task's, nearest first.

        Raises:
          ToolError: (bad_response) no pictures in the index, or a question without one.
        """
        if not self.about["num_pictures"]:
            raise ToolError("the index holds no pictures", "bad_response")
        if not task.picture:
            raise ToolError("the question has no picture", "no_address")
        vector = self._embed(np.asarray(load_picture(task.picture)))
        keep = min(self.config.image_top_k, self.about["num_pictures"])
        found = self._pictures.search(vector, keep)
        keys, distances = np.asarray(found.keys).ravel(), np.asarray(found.distances).ravel()
        return [
            self._item(self._picture_lines[int(k)], task.question, -float(d))
            for k, d in zip(keys, distances, strict=True)
        ]

    def _item(self, row: Mapping[str, str], question: str, score: float) -> SearchItem:
        text = summarise.window(row["text"], question, row["title"], self.config.summary_words)
        return SearchItem(
            id=row["id"], title=row["title"], link=row["link"], text=text, score=float(score),
            provider="index",
        )  # fmt: skip


class _Lines:
    """JSON lines by number, memory-mapped."""

    def __init__(self, stem: pathlib.Path):
        self._starts = np.load(stem.with_suffix(".npy"), mmap_mode="r")
        with stem.with_suffix(".jsonl").open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getitem__(self, number: int) -> dict[str, str]:
        return json.loads(self._bytes[self._starts[number] : self._starts[number + 1]])


def _build_text(work: pathlib.Path, documents: Iterable[Mapping[str, Any]]) -> int:
    bm25s = _import("bm25s")
    texts = []

    def rows():
        for row in _clean(documents, "document", wants="text"):
            texts.append(f"{row['title']} " * 3 + row["text"])  # a title's words count three times
            yield row

    count = _write_lines(work / "documents", rows())
    if count:
        tokens = bm25s.tokenize(texts, stopwords="en", show_progress=False)
        index = bm25s.BM25(backend="numpy")
        index.index(tokens, show_progress=False)
        index.save(str(work / "bm25"))
    return count


def _build_pictures(work: pathlib.Path, pictures, embed: Callable) -> int:
    vectors = []

    def rows():
        for number, (data, row) in enumerate(pictures):
            try:
                vectors.append(np.asarray(embed(np.asarray(load_picture(data))), np.float32))
            except PictureError as error:
                raise IndexBuildError(f"picture {number} ({row['title']}): {error}") from error
            yield row

    count = _write_lines(work / "pictures", _clean(rows(), "picture", wants="title"))
    if count:
        index = _usearch()(ndim=len(vectors[0]), metric="l2sq", dtype="f32")
        index.add(np.arange(count), np.stack(vectors))
        index.save(str(work / "pictures.usearch"))
    return count


def _clean(rows: Iterable[Mapping[str, Any]], what: str, *, wants: str) -> Iterator[dict[str, str]]:
    for number, row in enumerate(rows):
        kept = {}
        for field in _FIELDS:
            value = row.get(field)
            kept[field] = "" if value is None else str(value)
        if not kept[wants].strip():
            raise IndexBuildError(f"{what} {number} has no {wants}: every row needs one")
        kept["id"] = kept["id"] or kept["link"] or kept["title"] or str(number)
        yield kept


def _write_lines(stem: pathlib.Path, rows: Iterable[Mapping[str, str]]) -> int:
    starts = [0]
    with stem.with_suffix(".jsonl").open("wb") as file:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            file.write(line)
            starts.append(starts[-1] + len(line))
    np.save(stem.with_suffix(".npy"), np.asarray(starts, np.int64))
    return len(starts) - 1


def _read_about(folder: pathlib.Path) -> dict[str, Any]:
    remedy = "make it with `python -m experiments index`"
    try:
        about = json.loads((folder / "index.json").read_text("utf-8"))
        files = about["files"]
        if about["form"] != FORM:
            raise SearchSetupError(
                f"the index {folder} is of form {about['form']}, not {FORM}: {remedy}"
            )
    except (FileNotFoundError, NotADirectoryError):
        raise SearchSetupError(
            f"config.search.index_folder={str(folder)!r} holds no index: {remedy}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SearchSetupError(f"the index {folder} is damaged ({error}): {remedy}") from error
    for name, size in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise SearchSetupError(f"the index {folder} is not whole ({name}): {remedy}")
    return about


def _load_bm25(folder: pathlib.Path):
    bm25s = _import("bm25s")
    return bm25s, bm25s.BM25.load(str(folder), mmap=True, load_corpus=False)


def _usearch():
    return _import("usearch.index").Index


def _import(name: str):
    try:
        return importlib.import_module(name)  # late: bm25s runs a jax function when imported
    except ImportError:
        raise SearchSetupError(
            f"the package {name.split('.')[0]!r} is missing: pip install -e '.[search]'"
        ) from None


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
