"""A folder of `build` -> a server on this machine's loopback address, for reading alone."""

from __future__ import annotations

import functools
import http.server
import pathlib

HOST = "127.0.0.1"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Files only, under a strict policy, for requests that name this machine."""

    def do_GET(self) -> None:
        """Refuses names of other hosts: a page elsewhere must not read runs by rebinding."""
        if self._is_local():
            super().do_GET()

    def do_HEAD(self) -> None:
        """See do_GET."""
        if self._is_local():
            super().do_HEAD()

    def _is_local(self) -> bool:
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if host in (HOST, "localhost"):
            return True
        self.send_error(403, "this server answers to 127.0.0.1 and localhost only")
        return False

    def list_directory(self, path):
        """No listings."""
        self.send_error(404)

    def end_headers(self) -> None:
        """Adds the policy to every answer."""
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, *args) -> None:
        """Silent: the terminal shows the address alone."""


def make_server(folder: pathlib.Path, port: int) -> http.server.ThreadingHTTPServer:
    """A server that is bound and not yet running; `serve_forever` runs it.

    Args:
      folder: made by `build`.
      port: 0 takes any that is free.
    Raises:
      OSError: the port is taken.
    """
    handler = functools.partial(_Handler, directory=str(folder))
    return http.server.ThreadingHTTPServer((HOST, port), handler)
