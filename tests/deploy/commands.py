"""Commands and servers that tests run beside themselves."""

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, str, Mapping[str, str], bytes], tuple[int, str]]
"""Tells status and body of what is asked: method, path, headers, body."""


def ran(command: Sequence[Any], seconds: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; returns its status and what it said."""
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, **options)


@contextlib.contextmanager
def serving(server: HTTPServer) -> Iterator[None]:
    """Lets a server answer in a thread of this process."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextlib.contextmanager
def answering(answer: Answer, address: str = "127.0.0.1", port: int = 0, inside: Any = None) -> Iterator[str]:
    """Serves what a function answers; yields the URL.

    Args:
      inside: calls what it is given, which makes the socket, in a place of its own.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            status, body = answer(self.command, self.path, self.headers, asked)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_PUT = do_POST = do_GET  # noqa: N815 - http.server's names

        def log_message(self, *_):
            """Keeps the output of the tests clean."""

    make = lambda: ThreadingHTTPServer((address, port), Handler)  # noqa: E731
    server = inside(make) if inside else make()
    with serving(server):
        yield f"http://{address}:{server.server_port}"
