"""A look at the environment of a run by a process of its own (`environment_play`), so that none runs in the launcher.

The environment's threads, signals, logs, directory and exits stay there. That process tells what it does and finds in
lines of JSON on its standard output, a file. All that the environment prints goes to another one.
"""

import contextlib
import functools
import logging
import os
import subprocess
import tempfile
import time
from typing import IO

import msgspec

from apexrl.children import start_child
from apexrl.config.sections import EnvConfig
from apexrl.errors import ConfigError
from apexrl.leftovers import MARK_VARIABLE, kill_family, kill_marked, new_mark
from apexrl.running.last_words import TAIL_BYTES, last_line
from apexrl.running.supervise import describe_status
from apexrl.types import EnvironmentSpec

logger = logging.getLogger("run")

MODULE = "apexrl.running.environment_play"
MAKING, WRAPPERS, CLOSING = "its making", "the trial of its wrappers", "its closing"
CLOSING_SECONDS = 10.0  # after which an environment that is being closed is killed
SAY_SECONDS, POLL_SECONDS = 10.0, 0.02

Said = tuple[str, int, str]  # to a log: its name, the level and the text


class Line(msgspec.Struct, omit_defaults=True):
    """A line that the look writes."""

    doing: str = ""  # a call of the environment begins
    spec: EnvironmentSpec | None = None  # it has been made and reset, and has taken a step
    parts: tuple[str, ...] = ()  # of its observations, as NAME=SHAPE, where these are a dictionary
    said: Said | None = None
    fault: str = ""  # for which no run can begin
    errno: int | None = None  # of the operating system, if it is its fault


class Look:
    """The process that looks, as its parent follows it."""

    def __init__(self, config: EnvConfig, patience_seconds: float, told: IO[bytes]):
        self.found = Line(doing=MAKING)  # the newest that it told of each kind
        self.said: list[Said] = []
        self._env = config.env
        self._step_seconds, self._patience_seconds = config.step_deadline_seconds, patience_seconds
        self._told, self._read_bytes = told, 0
        self._since = self._said_at = time.monotonic()

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Waits until the process has told all, or has ended.

        Raises: ConfigError when a call of the environment takes too long.
        """
        while process.poll() is None and self.found.doing != CLOSING:
            time.sleep(POLL_SECONDS)
            self.read()
            self._check_time()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSING_SECONDS)
        self.read()

    def read(self) -> None:
        """Takes the lines that are new."""
        data = os.pread(self._told.fileno(), 2**24, self._read_bytes)
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for text in whole.splitlines():
            try:
                line = msgspec.json.decode(text, type=Line)
            except msgspec.MsgspecError as error:
                raise ConfigError(
                    f"environment {self._env!r} has a size or a name that no log takes: {error}"
                ) from error
            if line.said is not None:
                self.said.append(line.said)
            if line.doing:
                self._since = self._said_at = time.monotonic()
            for name in ("doing", "spec", "parts", "fault", "errno"):
                setattr(self.found, name, getattr(line, name) or getattr(self.found, name))

    def _check_time(self) -> None:
        doing, now = self.found.doing, time.monotonic()
        is_made = doing in (MAKING, WRAPPERS)
        limit = self._patience_seconds if is_made else self._step_seconds  # 0: never
        if limit and now - self._since > limit:
            flag = "--patience-seconds" if is_made else "--step-deadline-seconds"
            late = f"environment {self._env!r} has not returned from {doing} for {limit:g} s"
            raise ConfigError(f"{late}: mend it, or give more {flag}")
        if now - self._said_at > SAY_SECONDS:
            self._said_at = now
            logger.info(
                "waits for environment %s to return from %s, for %.0f s now", self._env, doing, now - self._since
            )


def look_at(config: EnvConfig, patience_seconds: float) -> tuple[EnvironmentSpec, tuple[str, ...]]:
    """Returns the frames and the actions of an environment that can be made, reset and stepped, and its parts.

    A fault that comes after the first step, as those of simulators that fail now and then, is told in a line.

    Args:
      patience_seconds: that it may take to be made; a reset and a step have their own deadline, as in training.
    Raises: ConfigError when there is none, when it gives something else than its spaces say, or when a call of it takes
      too long.
    """
    found, said = _seen(config, patience_seconds, os.getcwd())
    for name, level, text in said:
        logging.getLogger(name).log(level, "%s", text)
    assert found.spec is not None
    return found.spec, found.parts


@functools.lru_cache  # the variants of a sweep have few environments
def _seen(config: EnvConfig, patience_seconds: float, directory: str) -> tuple[Line, list[Said]]:
    """Returns what a look from that directory has found, with a spec, and what it has said to logs."""
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as printed:
        look, mark = Look(config, patience_seconds, told), new_mark()
        arguments = ["-m", MODULE, msgspec.json.encode(config).decode()]
        process = start_child(arguments, {MARK_VARIABLE: mark}, cwd=directory, stdout=told, stderr=printed)
        try:
            look.follow(process)
            status = process.poll()
        finally:
            kill_family(process)
            kill_marked(mark, also_nested=True)
        printed.seek(max(printed.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
        words = last_line(printed.read())
    found = look.found
    if found.fault:
        printed_last = f"; it printed {words}" if words and "SystemExit" in found.fault else ""
        cause = OSError(found.errno, os.strerror(found.errno)) if found.errno else None
        raise ConfigError(found.fault + printed_last) from cause
    if found.doing != CLOSING:
        ended = f"environment {config.env!r} ended its process with {describe_status(status or 0)} in {found.doing}"
        ended += f": {words}" if words else ""
        if found.spec is None:
            raise ConfigError(ended)
        look.said.append((logger.name, logging.WARNING, f"{ended}; the run begins all the same"))
    return found, look.said
