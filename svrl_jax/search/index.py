"""Documents and pictures -> local indexes: BM25 over text, nearest neighbours over colour grids."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from svrl_jax.data import sources


class TextIndex:
    """BM25 over titles and summaries. A title's words count three times: once more each copy."""

    def __init__(self, documents: Sequence[sources.Document]):
        try:
            import bm25s  # imported late: it runs a jax function when imported
        except ImportError as error:
            raise sources.missing("bm25s") from error

        self._bm25s = bm25s
        self.documents = tuple(documents)
        texts = [f"{d.title} {d.title} {d.title} {d.text}" for d in self.documents]
        tokens = bm25s.tokenize(texts, stopwords="en", show_progress=False)
        self._index = bm25s.BM25(backend="numpy")
        self._index.index(tokens, show_progress=False)

    def search(self, query: str, top_k: int) -> list[tuple[sources.Document, float]]:
        """The best documents and their scores, best first; [] if no word of the query occurs."""
        tokens = self._bm25s.tokenize(
            [query], stopwords="en", return_ids=False, show_progress=False
        )
        if not tokens[0]:
            return []
        rows, scores = self._index.retrieve(
            tokens,
            k=min(top_k, len(self.documents)),
            show_progress=False,
            backend_selection="numpy",
            n_threads=0,
        )
        found = zip(rows[0].tolist(), scores[0].tolist(), strict=True)
        return [(self.documents[r], s) for r, s in found if s > 1e-6]


class PictureIndex:
    """Nearest neighbours by a coarse grid of mean colours.

    Coarse on purpose: look-alike flags stay near each other, which is the visual noise of a real
    reverse image search.
    """

    def __init__(self, titles: Sequence[str], pictures: Sequence[np.ndarray], grid=(2, 3)):
        try:
            from usearch.index import Index
        except ImportError as error:
            raise sources.missing("usearch") from error

        self.titles, self.grid = tuple(titles), grid
        vectors = np.stack([self._embed(p) for p in pictures])
        self._index = Index(ndim=vectors.shape[1], metric="l2sq", dtype="f32")
        self._index.add(np.arange(len(vectors)), vectors)

    def search(self, picture: bytes, top_k: int) -> list[tuple[str, float]]:
        """Titles and scores (minus squared distance), nearest first."""
        vector = self._embed(np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")))
        found = self._index.search(vector, min(top_k, len(self.titles)), exact=True)
        keys, distances = np.asarray(found.keys).ravel(), np.asarray(found.distances).ravel()
        return [(self.titles[int(k)], -float(d)) for k, d in zip(keys, distances, strict=True)]

    def _embed(self, picture: np.ndarray) -> np.ndarray:
        rows, columns = self.grid
        small = Image.fromarray(picture).resize((columns, rows), Image.Resampling.BOX)
        return np.asarray(small, np.float32).ravel() / 255.0
