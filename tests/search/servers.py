"""Servers on loopback that do what pytest-httpserver cannot: drip, lie, break off."""

import contextlib
import socket
import threading


@contextlib.contextmanager
def raw_server(answer):
    """Serves `answer(connection)` on a thread a connection; gives (http address, requests seen).

    Args:
      answer: is called when the request's head is in; what it raises ends the connection.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    seen = []

    def serve(connection):
        with connection, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                piece = connection.recv(65_536)
                if not piece:
                    return
                head += piece
            seen.append(head)
            answer(connection)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        listener.close()


def closed_address():
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def head(*lines: str) -> bytes:
    """The head of an answer that ends with its connection."""
    return "\r\n".join(["HTTP/1.1 200 OK", "Connection: close", *lines, "", ""]).encode()
