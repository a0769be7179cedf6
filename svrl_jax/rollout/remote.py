"""A policy behind any OpenAI-compatible server: the episode as messages -> the turn that it writes.

Proprietary models, vLLM and SGLang are asked by POST /chat/completions, pictures as data addresses,
through the same episode code as our own engine. The server's text is tokenised by the tokenizer of
the episodes, so budgets and masks mean the same; log-probs are unknown and recorded as 0.

A server that does not answer ends the run with the cause: no failure is counted as a wrong answer.
A refusal is an answer: the turn has no action and the episode ends as malformed.
"""

from __future__ import annotations

import base64
import collections
import concurrent.futures
import functools
import io
import os
import time
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from svrl_jax.processing.images import PictureError, load_picture
from svrl_jax.protocol import render
from svrl_jax.protocol.prompts import message_of
from svrl_jax.rollout.information import UNREADABLE
from svrl_jax.rollout.policy import Request, SampledTurn, TurnView, turn_of_text
from svrl_jax.search.errors import ToolError
from svrl_jax.search.limits import Budget
from svrl_jax.search.providers.caller import Caller, Fault
from svrl_jax.search.providers.chat import fault_of as chat_fault_of
from svrl_jax.search.web import Reply, Web
from svrl_jax.types import SearchItem

KEY = "POLICY_API_KEY"  # environment variable; many servers of one's own want none
OPEN = render.PREFIX.partition("\n")[2]  # the template around is the server's business
CLOSE = render.SUFFIX.partition("<|")[0]


class PolicyStopped(RuntimeError):
    """The served policy cannot be asked; the message says why and what to do."""


class RemotePolicy:
    """A `TurnSampler` over a server.

    Args:
      config: the whole config; `remote`, `rollout` and `search` are read.
      texts: regime -> system message, the prompt files' texts.
      tokenizer: of the episodes.

    Attributes:
      counts: `calls`, `refusals`, `cut` (texts that reached the server's limit), and the server's
        own `prompt_tokens` and `completion_tokens`.
    """

    def __init__(self, config: ConfigDict, texts: Mapping[str, str], tokenizer):
        """Raises PolicyStopped where the config asks for what such a server cannot do."""
        remote, rollout = config.remote, config.rollout
        if not remote.model:
            raise PolicyStopped("config.remote.model is not set: name the served model")
        if rollout.top_k:
            raise PolicyStopped(
                f"config.rollout.top_k is {rollout.top_k}, which the OpenAI interface does not "
                "have: set it to 0 for a served policy"
            )
        self.counts: collections.Counter[str] = collections.Counter()
        self._remote, self._search = remote, config.search
        self._top_p, self._picture_pixels = rollout.top_p, rollout.tool_picture_pixels
        self._texts, self._tokenizer = texts, tokenizer
        self._key = os.environ.get(KEY) or None
        self._caller = Caller(
            "the served policy",
            Web(allow_private=True),  # named by the user, not by a page
            Budget(0, 0.0),
            remote,
            self._key,
            _fault_of,
            max_retries=remote.max_retries,
            max_wait_s=remote.max_wait_s,
        )
        self._pool = concurrent.futures.ThreadPoolExecutor(remote.concurrency, "policy")
        self._calls: dict[concurrent.futures.Future, Request] = {}
        self._data_address = functools.lru_cache(maxsize=1024)(_data_address)
        self._max_pixels = config.data.max_picture_pixels

    def submit(self, request: Request) -> None:
        """Queues one turn."""
        self.counts["calls"] += 1
        self._calls[self._pool.submit(self._ask, request)] = request

    def collect(self) -> list[SampledTurn]:
        """Waits until at least one queued turn is answered; [] only if none is queued.

        Raises:
          PolicyStopped: the server did not answer, after all retries.
        """
        done, _ = concurrent.futures.wait(
            self._calls, return_when=concurrent.futures.FIRST_COMPLETED
        )
        return [self._turn(self._calls.pop(call), call) for call in done]

    def discard(self) -> None:
        """Forgets every queued turn; calls under way are left to end by themselves."""
        for call in self._calls:
            call.cancel()
        self._calls = {}

    def messages(self, view: TurnView) -> list[dict[str, Any]]:
        """The episode so far as the interface's messages."""
        task = view.task
        shown = [self._picture(task.picture, self._max_pixels)] if task.picture else []
        found = [
            {"role": "system", "content": message_of(self._texts, view.regime)},
            {"role": "user", "content": [*shown, _text(task.question)]},
        ]
        for turn in view.turns:
            found.append({"role": "assistant", "content": turn.text})
            if turn.call is not None:
                call = turn.call
                texts = render.render_items(call.tool, call.items, self._search)
                found.append(
                    {"role": "user", "content": self._information(texts, call.status, call.items)}
                )
        return found

    def _information(self, texts, status: str, items: tuple[SearchItem, ...]) -> list[dict]:
        _, texts, _ = render.wrap_information(texts, status)
        parts, text = [], OPEN
        for i, item_text in enumerate(texts):
            picture = items[i].picture if i < len(items) and self._picture_pixels else None
            if picture is not None:
                try:
                    part = self._picture(picture, self._picture_pixels)
                except PictureError:
                    item_text = f"{item_text.rstrip()} {UNREADABLE}\n"
                else:
                    parts += [_text(text), part]
                    text = ""
            text += item_text
        return [*parts, _text(text + CLOSE)]

    def _picture(self, picture: bytes, max_pixels: int) -> dict[str, Any]:
        address = self._data_address(picture, max_pixels)
        return {"type": "image_url", "image_url": {"url": address}}

    def _ask(self, request: Request) -> dict[str, Any]:
        remote = self._remote
        messages = self.messages(request.view)
        if request.begin:  # the server goes on from what the workflow wrote
            messages.append({"role": "assistant", "content": request.begin})
        body = {
            "model": remote.model,
            "messages": messages,
            "temperature": request.temperature,
            remote.limit_field: request.max_new_tokens,
            "seed": int(request.key[-1]) & 0x7FFFFFFF,
        }
        if self._top_p < 1.0:
            body["top_p"] = self._top_p
        return self._caller.json(
            "POST",
            "/chat/completions",
            time.monotonic() + remote.timeout_s,
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            json=body,
        )

    def _turn(self, request: Request, call: concurrent.futures.Future) -> SampledTurn:
        try:
            text, ended = _read(call.result())
        except _RefusedError as error:
            text, ended = str(error), "refusal"
        except ToolError as error:
            raise PolicyStopped(
                f"{error} ({error.kind}): finished episodes are kept; mend that, or raise "
                "config.remote.timeout_s or max_retries, and start the same command again"
            ) from error
        self.counts["refusals"] += ended == "refusal"
        self.counts["cut"] += ended == "length"
        if ended != "refusal":
            usage = call.result().get("usage") or {}
            for name in ("prompt_tokens", "completion_tokens"):
                self.counts[name] += int(usage.get(name) or 0)
        if request.begin:
            text = _behind(text, request.begin)
        return turn_of_text(request, text, self._tokenizer, is_cut=ended == "length")


class _RefusedError(ToolError):
    """The server will not answer this; the message is what it says."""


def _fault_of(reply: Reply, body: Any) -> Fault | None:
    error = body.get("error") if isinstance(body, dict) else None
    if reply.status == 400 and isinstance(error, dict) and error.get("code") == "content_filter":
        raise _RefusedError(str(error.get("message") or "refused"), "blocked")
    return chat_fault_of(reply, body)


def _read(body: dict[str, Any]) -> tuple[str, str]:
    """(text, `stop` | `length` | `refusal`) of a reply.

    Raises:
      ToolError: bad_response where it is not one.
    """
    try:
        choice = body["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        text, refusal = message.get("content"), message.get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ToolError("the served policy: a reply without choices", "bad_response") from None
    if isinstance(text, list):  # some servers answer in parts
        text = "".join(str(p.get("text", "")) for p in text if isinstance(p, dict))
    if refusal or reason == "content_filter":
        return str(refusal or text or ""), "refusal"
    if not isinstance(text, str):
        raise ToolError("the served policy: a reply without text", "bad_response")
    return text, "length" if reason == "length" else "stop"


def _behind(text: str, begin: str) -> str:
    """What goes on behind `begin`: some servers repeat it, some write a whole turn of their own."""
    opening = begin[begin.rfind("<") :]
    return text[text.find(opening) + len(opening) :] if opening in text else text


def _data_address(picture: bytes, max_pixels: int) -> str:
    """A picture as a PNG data address, upright and at most so large."""
    image = load_picture(picture)
    shrink = (max_pixels / (image.width * image.height)) ** 0.5
    if shrink < 1.0:
        size = (max(1, int(image.width * shrink)), max(1, int(image.height * shrink)))
        image = image.resize(size)
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
