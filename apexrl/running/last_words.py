"""The output of a child process: a log with a bound, and its last line, which says why the process ended.

A child that supervises others logs their restarts; one that plays logs environments that failed, and why a game is not
filmed. `news` finds these lines, so that the log alone does not hold them.

Whatever writes to a child's output writes into its log itself: prints of C libraries and of simulators, too. So the log
stays the same file, and nobody waits or dies when the supervisor is stopped or killed. `cut` empties it in place.
"""

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from apexrl.lines import printable

MAX_LOG_BYTES = 4 * 2**20  # of a log; there may be as much again in NAME.log.1
TAIL_BYTES = 8192
NEWS_BYTES = 2**20
MAX_LINE_CHARACTERS = 300
DRAIN_SECONDS = 2.0
NEWS = re.compile(
    rb"^\d\d:\d\d:\d\d [\w ]+: (.+ ended with .+; restart \d+ in [\d.]+ s"
    rb"|environment .+ failed .+ is made anew .+|.*\bno (?:pictures|video)\b.+)$",
    re.MULTILINE,
)

Outputs = tuple[IO[bytes] | int | None, IO[bytes] | int | None]


def cut(path: Path, max_bytes: int) -> tuple[int, bytes]:
    """Empties a log that is longer than its bound; its newest `max_bytes` become NAME.1, in the place of an older one.

    Processes that append to the log go on at its new beginning. A line is lost that they write within the microseconds
    between the last read and the end of the log, and so is NAME.1 on a disk that is too full for it.

    Returns: how many bytes the log held, and the newest of them; nothing when it was not too long.
    Raises: OSError when the log cannot be read or emptied.
    """
    with path.open("r+b", buffering=0) as log:
        size = os.fstat(log.fileno()).st_size
        if size <= max_bytes:
            return 0, b""
        log.seek(size - max_bytes)
        moved = log.read(max_bytes)
        with contextlib.suppress(OSError), path.with_name(f"{path.name}.1").open("wb") as older:
            older.write(moved)
            newest = log.read(max_bytes)  # has come meanwhile
            older.write(newest)
            moved += newest
        held = log.tell()
        log.truncate(0)
    return held, moved


class FromLog:
    """Bounds the log file that a child appends to, and reads the child's last words from it."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES):
        self._path, self._max_bytes = path, max_bytes
        self._start_bytes = 0  # where the newest process began
        self._moved = b""  # the end of its output that is in the log no more
        self._told_bytes: int | None = None  # of the log, whose restarts `news` has told

    @contextlib.contextmanager
    def outputs(self) -> Iterator[Outputs]:
        """Yields the stdout and stderr to give to a new process."""
        with self._path.open("ab") as file:
            self._start_bytes, self._moved = file.tell(), b""
            if self._told_bytes is None:
                self._told_bytes = self._start_bytes
            yield file, file

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Begins to listen to a new process."""

    def drain(self) -> None:
        """Waits for the remaining output of a process that has ended."""

    def bound(self) -> None:
        """Cuts a log that has become too long. Call it several times a second, after `news`."""
        try:
            held, newest = cut(self._path, self._max_bytes)
        except OSError:  # the log was removed
            return
        if held:
            own_bytes = min(held - self._start_bytes, len(newest), TAIL_BYTES)
            self._moved = newest[len(newest) - own_bytes :]
            self._start_bytes = self._told_bytes = 0

    def news(self) -> list[str]:
        """Returns the lines of restarts, failures and games not filmed that were logged since the last call."""
        told = self._told_bytes or 0
        try:
            size = self._path.stat().st_size
            if size == told:
                return []
            told = told if told < size else 0  # somebody else has emptied it
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
                size = os.fstat(file.fileno()).st_size
                file.seek(max(self._start_bytes if self._start_bytes <= size else 0, size - TAIL_BYTES))
                return last_line(self._moved + file.read(TAIL_BYTES))
        except OSError:  # the log was removed
            return ""


class FromPipe:
    """Reads the last words of a child from its stderr, which it also forwards to ours. The child shares our stdout.

    Args:
      log: a file that gets what is forwarded, too; nobody misses it where its directory is not there.
    """

    def __init__(self, log: Path | None = None, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._log, self._max_bytes = log, max_bytes
        self._tail = b""
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def outputs(self) -> Iterator[Outputs]:
        """Yields the stdout and stderr to give to a new process."""
        yield None, subprocess.PIPE

    def news(self) -> list[str]:
        """Returns nothing: all that the child writes is forwarded."""
        return []

    def bound(self) -> None:
        """Cuts the log when it has become too long."""
        if self._log is not None:
            with contextlib.suppress(OSError):
                cut(self._log, self._max_bytes)

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
    line = printable(line)
    if len(line) <= MAX_LINE_CHARACTERS:
        return line
    end = MAX_LINE_CHARACTERS // 2  # of a long line, which often says there what to do
    return f"{line[: MAX_LINE_CHARACTERS - end - 5]} ... {line[-end:]}"


def without_numbers(line: str) -> str:
    """Returns a line with each number replaced by 0, so that lines with other process or update numbers are equal."""
    return re.sub(r"\d+", "0", line)
