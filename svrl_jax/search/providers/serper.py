"""Serper (google.serper.dev): text search and reverse image search by a picture's address.

Form: POST /search {q, num} -> organic[] {title, link, snippet}; POST /lens {url} -> organic[]
{title, source, link, imageUrl, thumbnailUrl}. Used-up credits come as 400 "Not enough credits".
"""

from __future__ import annotations

from typing import Any

from svrl_jax.search.found import Found, of_rows
from svrl_jax.search.providers.caller import Caller, Fault, fault_of_status, message_of
from svrl_jax.search.web import Reply

KEY = "SERPER_API_KEY"  # environment variable


def fault_of(reply: Reply, body: Any) -> Fault | None:
    """Serper's own signs, then HTTP's."""
    if reply.status == 400 and "credit" in message_of(body).lower():
        return Fault("quota", f"the account is used up ({message_of(body)})")
    return fault_of_status(reply, body)


def search_text(
    caller: Caller, key: str, query: str, num_results: int, deadline: float
) -> list[Found]:
    """Results of a query, best first."""
    body = caller.json(
        "POST", "/search", deadline, headers={"X-API-KEY": key},
        json={"q": query, "num": num_results},
    )  # fmt: skip
    return _found(body, snippet="snippet")


def search_image(caller: Caller, key: str, url: str, deadline: float) -> list[Found]:
    """Pages with pictures like the one at a public address."""
    body = caller.json("POST", "/lens", deadline, headers={"X-API-KEY": key}, json={"url": url})
    return _found(body, thumbnail_url="thumbnailUrl")


def _found(body: dict[str, Any], **more: str) -> list[Found]:
    return of_rows(body.get("organic"), title="title", link="link", **more)
