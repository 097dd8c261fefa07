"""The last line that a child process wrote before it ended, which says why: from its log, or from a pipe."""

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

TAIL_BYTES = 8192
MAX_LINE_CHARACTERS = 300
DRAIN_SECONDS = 2.0

Outputs = tuple[IO[bytes] | int | None, IO[bytes] | int | None]


class FromLog:
    """For a child that appends to a log file."""

    def __init__(self, path: Path):
        self._path = path
        self._start_bytes = 0

    @contextlib.contextmanager
    def outputs(self) -> Iterator[Outputs]:
        """Yields where stdout and stderr of a new life go."""
        with self._path.open("ab") as file:
            self._start_bytes = file.tell()
            yield file, file

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Begins to listen to a new life."""

    def drain(self) -> None:
        """Waits for the words of a life that has ended."""

    def last(self) -> str:
        """Returns the last line of the newest life, empty when it wrote none."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(self._start_bytes, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                return last_line(file.read(TAIL_BYTES))
        except OSError:  # somebody removed it
            return ""


class FromPipe:
    """For a child whose errors we pass on to our own stderr; its stdout is ours."""

    def __init__(self) -> None:
        self._tail = b""
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def outputs(self) -> Iterator[Outputs]:
        """Yields where stdout and stderr of a new life go."""
        yield None, subprocess.PIPE

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Begins to listen to a new life."""
        assert process.stderr is not None
        self._tail = b""
        self._thread = threading.Thread(target=self._pass_on, args=(process.stderr,), daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Waits for the words of a life that has ended."""
        if self._thread is not None:
            self._thread.join(DRAIN_SECONDS)

    def last(self) -> str:
        """Returns the last line of the newest life, empty when it wrote none."""
        self.drain()
        return last_line(self._tail)

    def _pass_on(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), TAIL_BYTES):
                self._tail = (self._tail + data)[-TAIL_BYTES:]
                with contextlib.suppress(OSError):  # nobody reads ours: the child must not wait for that
                    os.write(2, data)


def last_line(output: bytes) -> str:
    """Returns the last line that says something: without its time, printable, and not too long."""
    lines = [line for line in output.decode(errors="replace").splitlines() if any(c.isalnum() for c in line)]
    if not lines:
        return ""
    line = re.sub(r"^\d\d:\d\d:\d\d [\w ]+: ", "", lines[-1].strip())
    return "".join(c for c in line if c.isprintable())[:MAX_LINE_CHARACTERS]


def without_numbers(line: str) -> str:
    """Returns a line with which others are equal that differ by a number of a process or an update only."""
    return re.sub(r"\d+", "0", line)
