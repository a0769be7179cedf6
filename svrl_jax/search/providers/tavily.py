"""Tavily (api.tavily.com): text search. POST /search -> results[] {title, url, content, score}.

429 is the pace, 432 and 433 are limits of the plan; error bodies are {detail: {error: text}}.
"""

from __future__ import annotations

from typing import Any

from svrl_jax.search.found import Found, of_rows
from svrl_jax.search.providers.caller import Caller, Fault, fault_of_status, message_of
from svrl_jax.search.web import Reply

KEY = "TAVILY_API_KEY"  # environment variable
_MAX_QUERY_CHARS = 400  # longer queries are refused
_MAX_RESULTS = 20


def fault_of(reply: Reply, body: Any) -> Fault | None:
    """Tavily's own signs, then HTTP's."""
    if reply.status in (432, 433):
        return Fault("quota", f"the plan's limit is reached ({message_of(body)})")
    return fault_of_status(reply, body)


def search_text(
    caller: Caller, key: str, query: str, num_results: int, deadline: float
) -> list[Found]:
    """Results of a query, best first."""
    body = caller.json(
        "POST", "/search", deadline, headers={"Authorization": f"Bearer {key}"},
        json={
            "query": query[:_MAX_QUERY_CHARS],
            "max_results": min(num_results, _MAX_RESULTS),
            "search_depth": "basic",
        },
    )  # fmt: skip
    return of_rows(body.get("results"), title="title", link="url", snippet="content")
