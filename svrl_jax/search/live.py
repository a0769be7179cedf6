"""Queries and pictures -> items from the web: a provider's results, their pages read, summarised.

Every outside call (search, page, summary, thumbnail) goes through the record, if there is one.
Pages of one call are read at once; one that is not read in time does not hold up the others: its
item shows the provider's own snippet or is left out, as the config says, and `unread` counts it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from svrl_jax.search.errors import PERMANENT, ToolError
from svrl_jax.search.fetch import Page
from svrl_jax.search.found import Found
from svrl_jax.search.record import SearchRecord, content_of_picture, fold_query
from svrl_jax.types import SearchItem, Task

_READERS = 64  # threads that read pages; each mostly waits
_KEPT_CHARS = 200_000  # of a page; a record of whole books would be of no use
_PAGES_SHARE = 0.9  # of a call's time; the rest is for putting the answer together


@dataclasses.dataclass(frozen=True)
class Services:
    """What is asked outside. Deadlines are `time.monotonic` values; failures are ToolErrors.

    Attributes:
      text_provider, image_provider: names, for items and the record.
      search_text: (query, deadline) -> results.
      search_image: (public address, deadline) -> results; None where there is no image search.
      upload: picture bytes -> public address, or None.
      read_page: (link, deadline) -> its text; None where pages are not read.
      summarise: (text, question, deadline) -> a short text.
      fetch_picture: (address, deadline) -> a small encoded picture.
      text_settings, image_settings, page_settings, summary_settings: what a recorded answer of
        each kind depends on besides what was asked.
    """

    text_provider: str
    image_provider: str
    search_text: Callable[[str, float], list[Found]]
    search_image: Callable[[str, float], list[Found]] | None
    upload: Callable[[bytes], str] | None
    read_page: Callable[[str, float], Page] | None
    summarise: Callable[[str, str, float], str]
    fetch_picture: Callable[[str, float], bytes]
    text_settings: Mapping[str, Any]
    image_settings: Mapping[str, Any]
    page_settings: Mapping[str, Any]
    summary_settings: Mapping[str, Any]


class LiveTools:
    """Both searches; shared by threads.

    Attributes:
      unread: (`page` or `thumbnail`, failure kind) -> how many were not to be had.
    """

    def __init__(
        self,
        config: ConfigDict,
        services: Services,
        record: SearchRecord | None,
        *,
        timeout_s: float,
    ):
        """Args: config: `config.search`; timeout_s: of one call, pages and summaries included."""
        self.config, self.record = config, record
        self.unread: collections.Counter[tuple[str, str]] = collections.Counter()
        self._services, self._timeout_s = services, timeout_s
        self._readers = concurrent.futures.ThreadPoolExecutor(_READERS, "page")

    def text_search(self, query: str, task: Task) -> list[SearchItem]:
        """Items for a query, best first; [] where the provider found nothing.

        Raises:
          ToolError: of any kind.
          SearchStopped: the budget is spent.
        """
        deadline, services = time.monotonic() + self._timeout_s, self._services
        found = self._ask_found(
            "text_search",
            {"query": fold_query(query)},
            services.text_settings,
            lambda: services.search_text(query, deadline),
        )
        return self._items(found[: self.config.text_top_k], services.text_provider, query, deadline)

    def image_search(self, task: Task) -> list[SearchItem]:
        """Pages with pictures like the task's; raises as text_search."""
        deadline, services = time.monotonic() + self._timeout_s, self._services
        found = self._ask_found(
            "image_search",
            content_of_picture(task.picture),
            services.image_settings,
            lambda: services.search_image(self._public_address(task), deadline),
        )
        question = None if self.config.image_items == "titles" else task.question
        found = found[: self.config.image_top_k]
        return self._items(
            found, services.image_provider, question, deadline, self.config.thumbnails
        )

    def _public_address(self, task: Task) -> str:
        if self._services.search_image is None:
            raise ToolError("no image search is set up", "no_address")
        if not task.picture:
            raise ToolError("the question has no picture", "no_address")
        if task.picture_url:
            return task.picture_url
        if self._services.upload is None:
            raise ToolError(
                "the picture has no public address: name config.search.uploader", "no_address"
            )
        return self._services.upload(task.picture)

    def _ask_found(self, tool, content, settings, live) -> list[Found]:
        rows = self._ask(tool, content, settings, lambda: [dataclasses.asdict(f) for f in live()])
        return [Found(**row) for row in rows]

    def _items(
        self,
        found: Sequence[Found],
        provider: str,
        question: str | None,
        deadline: float,
        has_thumbnails: bool = False,
    ) -> list[SearchItem]:
        """Items of results. Args: question: what summaries are for; None shows titles alone."""
        now = time.monotonic()
        pages_end = now + _PAGES_SHARE * (deadline - now)
        is_read = question is not None and self._services.read_page is not None
        texts = [f.snippet if question is not None else "" for f in found]
        jobs = {}
        for i, one in enumerate(found):
            if is_read and one.link:
                jobs["page", i] = self._readers.submit(self._summary, one.link, question, pages_end)
            if has_thumbnails and one.thumbnail_url:
                jobs["thumbnail", i] = self._readers.submit(
                    self._thumbnail, one.thumbnail_url, pages_end
                )
        done, failures = self._wait(jobs, pages_end)
        kept = []
        for i, one in enumerate(found):
            if is_read and ("page", i) not in done and self.config.unread_pages == "drop":
                continue
            item = SearchItem(
                id=one.link or one.title,
                title=one.title,
                link=one.link,
                text=done.get(("page", i), texts[i]),
                score=1.0 / (1 + i),
                picture=done.get(("thumbnail", i)),
                provider=provider,
            )
            kept.append(item)
        if found and not kept:
            first = next(iter(failures.values()), ToolError("no result has a page", "bad_response"))
            raise ToolError(f"no page of {len(found)} could be read; first: {first}", first.kind)
        return kept

    def _wait(self, jobs: Mapping, end: float) -> tuple[dict, dict]:
        """(results, failures) of jobs by name; one that is not back by `end` has failed."""
        concurrent.futures.wait(jobs.values(), timeout=max(0.0, end - time.monotonic()))
        done, failures = {}, {}
        for name, job in jobs.items():
            try:
                if not job.done():
                    job.cancel()
                    raise ToolError("not read in time", "timeout")
                done[name] = job.result()
            except ToolError as error:
                if error.kind in PERMANENT:
                    raise
                failures[name] = error
                self.unread[name[0], error.kind] += 1
        return done, failures

    def _summary(self, link: str, question: str, deadline: float) -> str:
        services = self._services

        def live() -> str:
            page = self._ask(
                "page",
                {"link": link},
                services.page_settings,
                lambda: _kept(services.read_page(link, deadline)),
            )
            text = page["text"][: self.config.page_chars]
            return services.summarise(text, question, deadline)

        content = {"link": link, "question": fold_query(question)}
        return self._ask("summary", content, services.summary_settings, live)

    def _thumbnail(self, url: str, deadline: float) -> bytes:
        return self._ask(
            "thumbnail",
            {"link": url},
            {"thumbnail_px": self.config.thumbnail_px},
            lambda: self._services.fetch_picture(url, deadline),
        )

    def _ask(self, tool, content, settings, live):
        if self.record is None:
            return live()
        return self.record.ask(tool, content, settings, live)


def _kept(page: Page) -> dict[str, Any]:
    """A page as it is recorded."""
    is_long = len(page.text) > _KEPT_CHARS
    cut = dataclasses.replace(page, text=page.text[:_KEPT_CHARS], is_cut=page.is_cut or is_long)
    return dataclasses.asdict(cut)
