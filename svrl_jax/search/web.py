"""A request -> a reply, within a deadline and a number of opened bytes, from addresses we allow.

Requests are built by httpx2 and sent through its core, httpcore2, with a network backend of ours:
only there the address that is really connected to is known, and only there a server that drips
bytes can be held to the deadline. Messages name hosts, never whole addresses, which may hold keys.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import ipaddress
import socket
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpcore2
import httpx2

from svrl_jax.search.errors import ToolError

_USER_AGENT = "svrl-jax/0.1 (research agent)"
_CHUNK = 65_536


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a server answered.

    Attributes:
      status: HTTP status.
      headers: names in any case.
      body: opened (not compressed) bytes.
      is_cut: the body went on past `max_bytes`, or stopped before its announced end.
    """

    status: int
    headers: httpx2.Headers
    body: bytes
    is_cut: bool = False


class Web:
    """A pool of connections; shared by threads."""

    def __init__(self, *, allow_private: bool, keep_alive: bool = True):
        """Args:
        allow_private: connect to private, loopback and link-local addresses too.
        keep_alive: keep connections for the next call; off for pages of many hosts.
        """
        self._backend = _Backend(allow_private)
        self._pool = httpcore2.ConnectionPool(
            max_connections=256,
            max_keepalive_connections=32 if keep_alive else 0,
            keepalive_expiry=30.0,
            network_backend=self._backend,
        )

    def send(
        self,
        method: str,
        url: str,
        *,
        deadline: float,
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
    ) -> Reply:
        """One request; redirects are not followed.

        Args:
          url: http(s).
          deadline: a `time.monotonic` value for everything, the body's last byte included.
          max_bytes: of the opened body; what is behind it is not read.
        Raises:
          ToolError: timeout, unreachable, blocked or bad_response.
        """
        request, host = _request(method, url, headers, params, json)
        self._backend.deadline.value = deadline
        left = max(0.001, deadline - time.monotonic())
        waits = dict.fromkeys(("connect", "read", "write", "pool"), left)
        try:
            response = self._pool.handle_request(
                httpcore2.Request(
                    method=request.method,
                    url=httpcore2.URL(
                        scheme=request.url.raw_scheme,
                        host=request.url.raw_host,
                        port=request.url.port,
                        target=request.url.raw_path,
                    ),
                    headers=request.headers.raw,
                    content=request.read(),
                    extensions={"timeout": waits},
                )
            )
            try:
                found = httpx2.Headers(response.headers)
                body, is_cut = _read(response.iter_stream(), found, max_bytes, deadline)
            finally:
                response.close()
        except httpcore2.TimeoutException:
            raise ToolError(f"{host} did not answer in time", "timeout") from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError):
            raise ToolError(f"{host} broke the connection or refused it", "unreachable") from None
        return Reply(response.status, found, body, is_cut)

    def close(self) -> None:
        """Closes every connection."""
        self._pool.close()


def is_public(address: str) -> bool:
    """Whether an IP address is a public one; those that carry an inner IPv4 address count as it."""
    ip = ipaddress.ip_address(address.split("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in ipaddress.ip_network("64:ff9b::/96"):  # NAT64
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _request(method, url, headers, params, json) -> tuple[httpx2.Request, str]:
    own = {"User-Agent": _USER_AGENT, "Accept": "*/*", "Accept-Encoding": "gzip"}
    try:
        request = httpx2.Request(
            method, url, params=params, json=json, headers={**own, **(headers or {})}
        )
    except (httpx2.InvalidURL, UnicodeError, ValueError):
        raise ToolError("an address that cannot be read", "bad_response") from None
    if request.url.scheme not in ("http", "https") or not request.url.host:
        raise ToolError("only http and https addresses are opened", "blocked")
    return request, request.url.host


def _read(
    chunks: Iterable[bytes], headers: httpx2.Headers, max_bytes: int, deadline: float
) -> tuple[bytes, bool]:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip", "x-gzip", "deflate"):
        raise ToolError(f"a body in the encoding {encoding[:20]!r}", "bad_response")
    opened = chunks if encoding in ("identity", "") else _open(chunks, encoding)
    body = bytearray()
    try:
        for piece in opened:
            body += piece
            if len(body) > max_bytes:
                return bytes(body[:max_bytes]), True
            if time.monotonic() > deadline:
                raise httpcore2.ReadTimeout()
    except (httpcore2.RemoteProtocolError, httpcore2.ReadError):
        if not body:  # else: ended before its announced length, and what came is there
            raise
        return bytes(body), True
    return bytes(body), False


def _open(chunks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Opens compressed bytes in pieces of at most _CHUNK, so that a bomb never unfolds whole."""
    inflate = None
    for chunk in chunks:
        if inflate is None:
            # Some servers send `deflate` without its header.
            raw = encoding == "deflate" and chunk[:1] not in (b"\x78", b"")
            inflate = zlib.decompressobj(-15 if raw else 47)
        try:
            piece = inflate.decompress(chunk, _CHUNK)
            while piece:
                yield piece
                piece = inflate.decompress(inflate.unconsumed_tail, _CHUNK)
        except zlib.error:
            raise ToolError("a compressed body that cannot be opened", "bad_response") from None


class _Backend(httpcore2.NetworkBackend):
    """Connects to checked addresses; every wait ends at the thread's deadline."""

    def __init__(self, allow_private: bool):
        self.deadline = threading.local()
        self._allow_private = allow_private
        self._inner = httpcore2.SyncBackend()
        self._resolver = concurrent.futures.ThreadPoolExecutor(16, "resolve")

    def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        failure: Exception = httpcore2.ConnectError("no address")
        for address in self._addresses(host, port, timeout):
            try:
                stream = self._inner.connect_tcp(
                    address, port, self.left(timeout), local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
                continue
            return _Stream(stream, self)
        raise failure

    def _addresses(self, host: str, port: int, timeout: float | None) -> list[str]:
        found = self._resolver.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            rows = found.result(self.left(timeout))
        except concurrent.futures.TimeoutError:
            raise httpcore2.ConnectTimeout() from None
        except (OSError, UnicodeError):
            raise httpcore2.ConnectError() from None
        addresses = list(dict.fromkeys(row[4][0] for row in rows))
        allowed = [a for a in addresses if self._allow_private or is_public(a)]
        if not allowed:
            raise ToolError("the address is not a public one", "blocked")
        return allowed

    def left(self, timeout: float | None) -> float:
        """Seconds that a wait may take."""
        left = self.deadline.value - time.monotonic()
        if left <= 0:
            raise httpcore2.ReadTimeout()
        return left if timeout is None else min(left, timeout)


class _Stream(httpcore2.NetworkStream):
    def __init__(self, inner: httpcore2.NetworkStream, backend: _Backend):
        self._inner, self._backend = inner, backend

    def read(self, max_bytes, timeout=None):
        return self._inner.read(max_bytes, self._backend.left(timeout))

    def write(self, buffer, timeout=None):
        self._inner.write(buffer, self._backend.left(timeout))

    def close(self):
        self._inner.close()

    def start_tls(self, ssl_context, server_hostname=None, timeout=None):
        left = self._backend.left(timeout)
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, left), self._backend)

    def get_extra_info(self, info):
        return self._inner.get_extra_info(info)
