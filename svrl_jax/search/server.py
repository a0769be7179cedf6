"""The searches of a config over HTTP: all hosts of a run share keys, limits and one record.

    POST /text_search {"query": ..., "task": ...}    -> {"items": [...]}, {"failure": ...}
    POST /image_search {"task": ...}                    or {"stopped": ...}
    GET  /about                                      -> {"search": ...}

Every call needs `Authorization: Bearer TOKEN`. A search that fails is an answer like another
(status 200); other statuses say that the call itself was wrong.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
from collections.abc import Callable
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from svrl_jax.search import wire
from svrl_jax.search.errors import PERMANENT, SearchStopped, ToolError
from svrl_jax.types import SearchItem

_THREADS = 256  # searches under way; each mostly waits
_MAX_BYTES = 32_000_000  # of a call: a picture of 20 MB in base64, and its question


class _Refused(Exception):
    """A call that is wrong in itself."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def make_app(tools, about: Callable[[], str], token: str) -> Starlette:
    """The application.

    Args:
      tools: with `text_search(query, task)` and `image_search(task)`.
      about: says where results come from, for tables; may take a moment.
      token: that clients must show.
    Raises:
      ValueError: an empty token.
    """
    if not token:
        raise ValueError("a search server needs a token")

    async def text_search(request: Request) -> JSONResponse:
        body = await _body(request, token)
        query, task = body.get("query"), wire.task_of_json(body.get("task"))
        if not isinstance(query, str):
            raise wire.WireError("query is missing or of another kind")
        return await _search(lambda: tools.text_search(query, task))

    async def image_search(request: Request) -> JSONResponse:
        task = wire.task_of_json((await _body(request, token)).get("task"))
        return await _search(lambda: tools.image_search(task))

    async def show_about(request: Request) -> JSONResponse:
        _check_token(request, token)
        return JSONResponse({"search": await run_in_threadpool(about)})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette):
        anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
        yield

    return Starlette(
        routes=[
            Route("/text_search", text_search, methods=["POST"]),
            Route("/image_search", image_search, methods=["POST"]),
            Route("/about", show_about),
        ],
        exception_handlers={
            _Refused: lambda request, error: _said(error.status, str(error)),
            wire.WireError: lambda request, error: _said(400, str(error)),
        },
        lifespan=lifespan,
    )


async def _search(call: Callable[[], list[SearchItem]]) -> JSONResponse:
    try:
        return JSONResponse(wire.items_to_json(await run_in_threadpool(call)))
    except ToolError as error:
        if error.kind in PERMANENT:
            logging.getLogger(__name__).error("a search can never answer: %s", error)
        return JSONResponse(wire.failure_to_json(error))
    except SearchStopped as error:
        logging.getLogger(__name__).error("searches have stopped: %s", error)
        return JSONResponse(wire.failure_to_json(error))


async def _body(request: Request, token: str) -> dict[str, Any]:
    _check_token(request, token)
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > _MAX_BYTES:
            raise _Refused(413, f"a call of more than {_MAX_BYTES} bytes")
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise wire.WireError("the body is no JSON object")
    return body


def _check_token(request: Request, token: str) -> None:
    shown = request.headers.get("authorization", "")
    if not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
        raise _Refused(401, f"the token is not accepted: set {wire.TOKEN} to the server's")


def _said(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)
