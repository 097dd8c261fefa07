"""Commands and servers that tests run beside themselves."""

import contextlib
import subprocess
import threading
from collections.abc import Iterator, Sequence
from http.server import HTTPServer
from typing import Any


def ran(command: Sequence[Any], seconds: float = 100, **options: Any) -> subprocess.CompletedProcess[str]:
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
