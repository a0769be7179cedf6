"""The embedded world's two tools: text search over summaries, image search over clean pictures."""

from __future__ import annotations

import functools

from ml_collections import ConfigDict

from svrl_jax.data import facts, pictures, sources
from svrl_jax.search import summarise
from svrl_jax.search.index import PictureIndex, TextIndex
from svrl_jax.types import SearchItem, Task


class LocalTools:
    """Both searches over the embedded corpus; deterministic, so results are kept in memory."""

    def __init__(self, config: ConfigDict, width_px: int, height_px: int):
        self.config = config
        entities = facts.entities()
        self._documents = sources.documents_by_title()
        self._text = TextIndex(sources.documents())
        self._pictures = PictureIndex(
            [e.title for e in entities],
            [
                pictures.clean_picture(e.code, width_px, height_px, is_flag=e.is_flag)
                for e in entities
            ],
        )
        self.search_text = functools.lru_cache(maxsize=50_000)(self._search_text)

    def text_search(self, query: str, task: Task) -> list[SearchItem]:
        """Items for a query, best first; [] when nothing matches."""
        return list(self.search_text(query))

    def image_search(self, task: Task) -> list[SearchItem]:
        """Items whose picture is nearest to the task's, nearest first; [] without a picture."""
        if not task.picture:
            return []
        found = self._pictures.search(task.picture, self.config.image_top_k)
        return [self._item(title, task.question, score) for title, score in found]

    def _search_text(self, query: str) -> tuple[SearchItem, ...]:
        found = self._text.search(query, self.config.text_top_k)
        return tuple(self._item(d.title, query, score) for d, score in found)

    def _item(self, title: str, query: str, score: float) -> SearchItem:
        document = self._documents[title]
        text = summarise.window(document.text, query, title, self.config.summary_words)
        return SearchItem(id=title, title=title, link=document.link, text=text, score=score)
