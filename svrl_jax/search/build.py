"""config.search -> the two search tools of a run, checked before the run begins.

Keys of accounts come from the environment and are kept nowhere else.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable

from ml_collections import ConfigDict

from svrl_jax.search import extract, wire
from svrl_jax.search.errors import SearchSetupError
from svrl_jax.search.fetch import Fetcher, trafilatura
from svrl_jax.search.imported import Settings
from svrl_jax.search.limits import Budget
from svrl_jax.search.live import LiveTools, Services
from svrl_jax.search.local import LocalTools
from svrl_jax.search.providers import chat, jina, serpapi, serper, tavily
from svrl_jax.search.providers.caller import Caller, fault_of_status
from svrl_jax.search.record import SearchRecord
from svrl_jax.search.remote import RemoteTools
from svrl_jax.search.stored import IndexTools
from svrl_jax.search.web import Web

_TEXT = {"serper": serper, "serpapi": serpapi, "tavily": tavily}
_IMAGE = {"serper": serper, "serpapi": serpapi}


def build_tools(config: ConfigDict) -> LocalTools | IndexTools | LiveTools | RemoteTools:
    """The tools that `config.search.kind` names.

    Args:
      config: the whole config; `search`, `rollout.tool_timeout_s` and, for the embedded world, the
        picture size are read.
    Raises:
      SearchSetupError: a key, package, index or hook is missing.
      SearchRecordError: a record that cannot be used.
    """
    kind = config.search.kind
    if kind == "local":
        data = config.data
        return LocalTools(config.search, data.picture_width_px, data.picture_height_px)
    if kind == "index":
        return IndexTools(config.search)
    if kind == "server":
        return server_tools(config.search, timeout_s=config.rollout.tool_timeout_s)
    return live_tools(config.search, timeout_s=config.rollout.tool_timeout_s)


def live_tools(config: ConfigDict, *, timeout_s: float) -> LiveTools:
    """Tools that ask providers, a record, or both.

    Args:
      config: `config.search`.
      timeout_s: of one call; it answers a little earlier.
    """
    record = None
    if config.record_mode != "off":
        record = SearchRecord(config.record_file, config.record_mode)
    # A replay asks nobody, so it wants no key.
    if config.record_mode != "replay":
        _refuse_proxies()
    services = _services(config, wants_keys=config.record_mode != "replay")
    return LiveTools(config, services, record, timeout_s=0.95 * timeout_s)


def server_tools(config: ConfigDict, *, timeout_s: float) -> RemoteTools:
    """Tools that ask a search server.

    Args:
      config: `config.search`.
      timeout_s: of one call; it answers a little earlier.
    Raises:
      SearchSetupError: no token.
    """
    token = os.environ.get(wire.TOKEN)
    if not token:
        raise SearchSetupError(
            f"config.search.kind is 'server', but the environment variable {wire.TOKEN} is not "
            "set: set it to the server's"
        )
    caller = Caller(
        "search server", Web(allow_private=True), Budget(config.max_calls, config.max_usd),
        config.server, token, fault_of_status,
        max_retries=config.max_retries, max_wait_s=config.max_wait_s,
    )  # fmt: skip
    return RemoteTools(caller, token, timeout_s=0.95 * timeout_s)


def chat_model(config: ConfigDict, name: str, key_name: str) -> Callable[[str, str], str]:
    """A model behind an OpenAI-compatible endpoint: (system, user) -> what it writes.

    The function raises ToolError as `chat.complete` does, and may be called by several threads.

    Args:
      config: endpoint, model, per_minute, concurrency, usd_per_call, timeout_s, max_retries.
      name: for messages.
      key_name: environment variable of its key; servers of one's own may want none.
    Raises:
      SearchSetupError: the environment names a proxy.
    """
    _refuse_proxies()
    key = os.environ.get(key_name) or None
    caller = Caller(
        name, Web(allow_private=True), Budget(0, 0.0), config, key, chat.fault_of,
        max_retries=config.max_retries, max_wait_s=config.timeout_s,
    )  # fmt: skip

    def complete(system: str, user: str) -> str:
        deadline = time.monotonic() + config.timeout_s
        return chat.complete(caller, key, config.model, system, user, deadline)

    return complete


def describe(config: ConfigDict, tools: object) -> str:
    """What a table says of its searches: their source and the snapshot that they come from.

    Args:
      config: `config.search`.
      tools: as `build_tools` made them.
    """
    if config.kind == "index":
        return f"index {tools.about['documents_sha256'][:12]}"
    if config.kind == "local":
        return "local"
    if config.kind == "server":
        return tools.about()
    sources = f"live, text {config.text_provider}, image {config.image_provider}"
    pages = f"pages {config.page_reader}, summaries {config.summariser}"
    record = "" if tools.record is None else f", record {tools.record.snapshot()}"
    return f"{sources}, {pages}{record}"


def record_settings(config: ConfigDict) -> Settings:
    """The settings under which a run of this config records its calls.

    Args:
      config: `config.search`.
    """
    services = _services(config, wants_keys=False)
    return Settings(services.text_settings, services.image_settings, services.summary_settings)


def _services(config: ConfigDict, *, wants_keys: bool) -> Services:
    web = Web(allow_private=True)  # providers are named by the config: they may be one's own
    pages = Web(allow_private=config.allow_private, keep_alive=False)
    budget = Budget(config.max_calls, config.max_usd)
    fetcher = Fetcher(
        pages,
        max_bytes=config.page_max_bytes,
        max_redirects=config.max_redirects,
        max_pixels=config.max_picture_pixels,
        thumbnail_px=config.thumbnail_px,
    )
    callers: dict[str, tuple[Caller, str | None]] = {}

    def caller_of(name: str, module, is_key_needed: bool = True) -> tuple[Caller, str | None]:
        if name not in callers:
            key = os.environ.get(module.KEY) or None
            if key is None and is_key_needed and wants_keys:
                raise SearchSetupError(
                    f"config.search asks {name}, but the environment variable {module.KEY} is not "
                    "set: set it, or use config.search.kind=local"
                )
            callers[name] = (
                Caller(
                    name, web, budget, config[name], key, module.fault_of,
                    max_retries=config.max_retries, max_wait_s=config.max_wait_s,
                ),
                key,
            )  # fmt: skip
        return callers[name]

    text, text_key = caller_of(config.text_provider, _TEXT[config.text_provider])
    search_image = None
    if config.image_provider != "none":
        image_module = _IMAGE[config.image_provider]
        image, image_key = caller_of(config.image_provider, image_module)

        def search_image(url, deadline):
            return image_module.search_image(image, image_key, url, deadline)

    read_page = None
    if config.page_reader == "fetch":
        if wants_keys:
            trafilatura()  # a missing package is known before the run begins
        read_page = fetcher.page
    elif config.page_reader == "jina":
        reader, reader_key = caller_of("jina", jina, is_key_needed=False)

        def read_page(url, deadline):
            return jina.read_page(reader, reader_key, url, deadline)

    summary_settings = {
        "reader": config.page_reader,
        "page_chars": config.page_chars,
        "summariser": config.summariser,
        "num_words": config.summary_words,
    }
    if config.summariser == "model":
        summary_settings["model"] = config.chat.model
        writer, writer_key = caller_of("chat", chat, is_key_needed=False)

        def summarise(text, question, deadline):
            return chat.summarise(
                writer, writer_key, config.chat.model, text, question, config.summary_words,
                deadline,
            )  # fmt: skip
    else:

        def summarise(text, question, deadline):
            return extract.best_sentences(text, question, config.summary_words)

    return Services(
        text_provider=config.text_provider,
        image_provider=config.image_provider,
        search_text=lambda query, deadline: _TEXT[config.text_provider].search_text(
            text, text_key, query, config.text_top_k, deadline
        ),
        search_image=search_image,
        upload=_uploader(config.uploader),
        read_page=read_page,
        summarise=summarise,
        fetch_picture=fetcher.picture,
        text_settings={"provider": config.text_provider, "num_results": config.text_top_k},
        image_settings={"provider": config.image_provider},
        page_settings={"reader": config.page_reader},
        summary_settings=summary_settings,
    )


def _refuse_proxies() -> None:
    """Behind a proxy the address really connected to is the proxy's, and could not be checked."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for spelt in (name, name.upper()):
            if os.environ.get(spelt):
                raise SearchSetupError(
                    f"the environment names a proxy ({spelt}), which searches do not use, since "
                    "the addresses of pages could not be checked behind it: connect directly and "
                    f"start the command with `env -u {spelt}`"
                )


def _uploader(name: str) -> Callable[[bytes], str] | None:
    """The function that `module:function` names, or None for ""."""
    if not name:
        return None
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SearchSetupError(
            f"config.search.uploader {name!r} cannot be imported ({error}): write module:function"
        ) from error
