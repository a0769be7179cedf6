"""SerpApi (serpapi.com): engines `google` and `google_lens`.

Its key travels in the query string, so whole addresses never reach a message. Nothing found is HTTP
200 with an `error` text. 429 means either the hourly pace or a used-up plan: account.json says
which.
"""

from __future__ import annotations

from typing import Any

from svrl_jax.search.errors import ToolError
from svrl_jax.search.found import Found, of_rows
from svrl_jax.search.providers.caller import Caller, Fault, fault_of_status, message_of
from svrl_jax.search.web import Reply

KEY = "SERPAPI_API_KEY"  # environment variable


def fault_of(reply: Reply, body: Any) -> Fault | None:
    """SerpApi's own signs, then HTTP's."""
    text = message_of(body).lower()
    if reply.status == 429 and ("run out of searches" in text or "out of searches" in text):
        return Fault("quota", f"the account is used up ({message_of(body)})")
    if reply.status == 200 and isinstance(body, dict):
        about = body.get("search_metadata")
        if isinstance(about, dict) and about.get("status") == "Error":
            return Fault("bad_response", message_of(body) or "the search failed")
    return fault_of_status(reply, body)


def search_text(
    caller: Caller, key: str, query: str, num_results: int, deadline: float
) -> list[Found]:
    """Results of a query, best first."""
    params = {"engine": "google", "q": query, "num": num_results}
    body = _ask(caller, key, params, deadline)
    return _found(body.get("organic_results"), snippet="snippet", thumbnail_url="thumbnail")


def search_image(caller: Caller, key: str, url: str, deadline: float) -> list[Found]:
    """Pages with pictures like the one at a public address: visual matches, or else exact ones."""
    body = _ask(caller, key, {"engine": "google_lens", "url": url}, deadline)
    rows = body.get("visual_matches") or body.get("exact_matches")
    return _found(rows, thumbnail_url="thumbnail")


def _ask(caller: Caller, key: str, params: dict[str, Any], deadline: float) -> dict[str, Any]:
    try:
        return caller.json("GET", "/search.json", deadline, params=params | {"api_key": key})
    except ToolError as error:
        if error.kind == "rate_limited" and _is_used_up(caller, key, deadline):
            raise ToolError(f"{caller.name}: no searches are left", "quota") from None
        raise


def _is_used_up(caller: Caller, key: str, deadline: float) -> bool:
    try:
        account = caller.json("GET", "/account.json", deadline, params={"api_key": key})
    except ToolError:
        return False  # not known: the first failure stands
    return account.get("total_searches_left") == 0


def _found(rows: Any, **more: str) -> list[Found]:
    return of_rows(rows, title="title", link="link", **more)
