"""The last line that a child process wrote before it ended, read from its log or from a pipe. It says why it ended.

A child that supervises others logs their restarts, and one that plays logs environments that failed. `news` finds these
lines, so that the log alone does not hold them.
"""

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

TAIL_BYTES = 8192
NEWS_BYTES = 2**20
MAX_LINE_CHARACTERS = 300
DRAIN_SECONDS = 2.0
NEWS = re.compile(
    rb"^\d\d:\d\d:\d\d [\w ]+: (.+ ended with .+; restart \d+ in [\d.]+ s|environment .+ failed .+ is made anew .+)$",
    re.MULTILINE,
)

Outputs = tuple[IO[bytes] | int | None, IO[bytes] | int | None]


class FromLog:
    """Reads the last words of a child that appends to a log file."""

    def __init__(self, path: Path):
        self._path = path
        self._start_bytes = 0
        self._told_bytes: int | None = None  # of the log, whose news `news` has told

    @contextlib.contextmanager
    def outputs(self) -> Iterator[Outputs]:
        """Yields the stdout and stderr to give to a new process."""
        with self._path.open("ab") as file:
            self._start_bytes = file.tell()
            if self._told_bytes is None:
                self._told_bytes = self._start_bytes
            yield file, file

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Begins to listen to a new process."""

    def drain(self) -> None:
        """Waits for the remaining output of a process that has ended."""

    def news(self) -> list[str]:
        """Returns the restarts and failures that were logged since the last call, each a line."""
        told = self._told_bytes or 0
        try:
            if self._path.stat().st_size <= told:
                return []
            with self._path.open("rb") as file:
                file.seek(told)
                data = file.read(NEWS_BYTES)
        except OSError:  # the log was removed
            return []
        end = data.rfind(b"\n") + 1 if len(data) < NEWS_BYTES else len(data)  # the rest of a line comes later
        self._told_bytes = told + end
        return [last_line(found) for found in NEWS.findall(data[:end])]

    def last(self) -> str:
        """Returns the last line of the newest process, empty when it wrote none."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(self._start_bytes, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                return last_line(file.read(TAIL_BYTES))
        except OSError:  # the log was removed
            return ""


class FromPipe:
    """Reads the last words of a child from its stderr, which it also forwards to ours. The child shares our stdout.

    Args:
      log: a file that gets what is forwarded, too; nobody misses it where its directory is not there.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._tail = b""
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def outputs(self) -> Iterator[Outputs]:
        """Yields the stdout and stderr to give to a new process."""
        yield None, subprocess.PIPE

    def news(self) -> list[str]:
        """Returns nothing: all that the child writes is forwarded."""
        return []

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Begins to listen to a new process."""
        assert process.stderr is not None
        self._tail = b""
        self._thread = threading.Thread(target=self._pass_on, args=(process.stderr,), daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Waits for the remaining output of a process that has ended."""
        if self._thread is not None:
            self._thread.join(DRAIN_SECONDS)

    def last(self) -> str:
        """Returns the last line of the newest process, empty when it wrote none."""
        self.drain()
        return last_line(self._tail)

    def _pass_on(self, pipe: IO[bytes]) -> None:
        with pipe, contextlib.ExitStack() as held:
            outputs = [2]
            if self._log is not None and self._log.parent.is_dir():
                with contextlib.suppress(OSError):
                    outputs.append(held.enter_context(self._log.open("ab")).fileno())
            while data := os.read(pipe.fileno(), TAIL_BYTES):
                self._tail = (self._tail + data)[-TAIL_BYTES:]
                for output in outputs:
                    with contextlib.suppress(OSError):  # nobody reads it, or a full disk: the child must not wait
                        os.write(output, data)


def last_line(output: bytes) -> str:
    """Returns the last line that has a letter or digit, without its time, printable, at most MAX_LINE_CHARACTERS."""
    lines = [line for line in output.decode(errors="replace").splitlines() if any(c.isalnum() for c in line)]
    if not lines:
        return ""
    line = re.sub(r"^\d\d:\d\d:\d\d [\w ]+: ", "", lines[-1].strip())
    line = "".join(c for c in line if c.isprintable())
    if len(line) <= MAX_LINE_CHARACTERS:
        return line
    end = MAX_LINE_CHARACTERS // 2  # of a long line, which often says there what to do
    return f"{line[: MAX_LINE_CHARACTERS - end - 5]} ... {line[-end:]}"


def without_numbers(line: str) -> str:
    """Returns a line with each number replaced by 0, so that lines with other process or update numbers are equal."""
    return re.sub(r"\d+", "0", line)
