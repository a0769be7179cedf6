"""Jina Reader (r.jina.ai): a page's address -> its text as Markdown. The key is optional.

403 is the page's own refusal, 451 a blocked domain, 422 a page that cannot be read, 402 an empty
account. HTTP 200 may carry a captcha or a warning in the page's place.
"""

from __future__ import annotations

import re
from typing import Any

from svrl_jax.search.errors import ToolError
from svrl_jax.search.fetch import Page, refuse_blocked
from svrl_jax.search.providers.caller import Caller, Fault, fault_of_status, message_of
from svrl_jax.search.web import Reply

KEY = "JINA_API_KEY"  # environment variable
_WARNING = re.compile(r"^Warning: .*?error (\d{3})", re.MULTILINE)


def fault_of(reply: Reply, body: Any) -> Fault | None:
    """Jina's own signs, then HTTP's."""
    about = f"HTTP {reply.status} {message_of(body)}".strip()
    if reply.status in (403, 451):
        return Fault("blocked", f"the page refuses ({about})")
    if reply.status in (404, 410, 422):
        return Fault("bad_response", f"the page cannot be read ({about})")
    return fault_of_status(reply, body)


def read_page(caller: Caller, key: str | None, url: str, deadline: float) -> Page:
    """A page's text; raises ToolError where there is none."""
    headers = {"Accept": "text/plain", "X-Retain-Images": "none"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    text, is_cut = caller.text("GET", "/" + url, deadline, headers=headers)
    warned = _WARNING.search(text[:2000])
    _, _, content = text.partition("Markdown Content:")
    content = (content or text).strip()
    if warned:
        kind = "blocked" if warned.group(1) in ("401", "403", "429") else "bad_response"
        raise ToolError(f"the page answers HTTP {warned.group(1)}", kind)
    refuse_blocked(content)
    return Page(content, is_cut)
