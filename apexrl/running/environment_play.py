"""Plays an environment for a moment, for `environment_look`: `python -m apexrl.running.environment_play CONFIG`."""

import contextlib
import dataclasses
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import VectorEnvironment, make_environment, take_step
from apexrl.environments.wrapper_state import check_wrapper_state
from apexrl.errors import ApexError, reason_of
from apexrl.lifecycle import Stop, end_at_once, end_with_parent
from apexrl.running.environment_look import CLOSING, MAKING, WRAPPERS, Line
from apexrl.types import EnvironmentSpec

T = TypeVar("T")
logger = logging.getLogger("apexrl.running.environment_play")  # also as a program

STEPS, PLAYING_SECONDS = 100, 1.0  # it takes so many steps, or ends after that time
SLOW_SECONDS = 0.03  # of a step, of which half take longer: whose copies it pays to spread
FASTER = (
    "a process steps its copies one after the other, so give more --num-workers with fewer --environments-per-worker, "
    "more than there are cores where a step only waits, and a higher --samples-per-insert to learn more from each step"
)
RESULTS = "reset() returns an observation and an info, step() an observation, reward, terminated, truncated and an info"


class Teller(logging.Handler):
    """Writes lines to a descriptor: what begins, what was found, and what goes to our logs."""

    def __init__(self, output: int):
        super().__init__()
        self._output = output
        self.doing = ""

    def tell(self, line: Line) -> None:
        """Writes a line."""
        os.write(self._output, msgspec.json.encode(line) + b"\n")

    def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Tells the name of a call, and makes it."""
        self.doing = name
        self.tell(Line(doing=name))
        return function(*arguments)

    def emit(self, record: logging.LogRecord) -> None:
        """Tells what goes to a log."""
        self.tell(Line(said=(record.name, record.levelno, record.getMessage())))


def play(envs: VectorEnvironment, teller: Teller) -> None:
    """Takes a reset and some random steps; tells the spec after the first one, and the cures of slow ones.

    Raises: ApexError when a result is none of the environment's spaces, or it fails again and again. What it raises
      until the first step; it may fail now and then later, which is logged.
    """
    rng, spec, ends_at = np.random.default_rng(0), envs.spec, time.monotonic() + PLAYING_SECONDS
    frames = teller.call("reset", envs.reset, 0)
    seconds: list[float] = []
    for number in range(1, STEPS + 1):
        began_at = time.monotonic()
        action = random_action(rng, spec, frames[0])
        frames = teller.call(f"step {number}", take_step, envs, action).frames
        seconds.append(time.monotonic() - began_at)
        if number == 1:
            teller.tell(Line(spec=spec, parts=getattr(envs, "parts", ())))
        if time.monotonic() >= ends_at:
            break
    if (usual := statistics.median(seconds)) > SLOW_SECONDS:
        logger.warning("%s: a step takes %.0f ms: %s", spec.env, 1000 * usual, FASTER)


def random_action(rng: np.random.Generator, spec: EnvironmentSpec, frame: np.ndarray) -> np.ndarray:
    """Returns an action for one environment, one that its newest frame allows: [1] int64, or [1, action size]."""
    if spec.mask_size and (mask := frame[-spec.mask_size :]).any():
        return rng.choice(np.flatnonzero(mask), size=1)
    if spec.num_actions:
        return rng.integers(spec.num_actions, size=1)
    low, high = np.array(spec.action_bounds).T
    return rng.uniform(low, high)[None]


def try_wrappers(envs: VectorEnvironment, config: EnvConfig) -> None:
    """Looks for a wrapper that remembers games, once the environment is closed: there may be one at a time only.

    Raises: ConfigError when one does.
    """
    with contextlib.suppress(Exception, SystemExit):  # foreign code
        envs.close()
    check_wrapper_state(config)


def main(text: str) -> None:
    """Plays the environment of a configuration, tells all of it, and ends the process whatever threads there are."""
    teller = Teller(os.dup(1))
    os.dup2(2, 1)  # what the environment prints
    end_with_parent(Stop(), 0.0)
    log = logging.getLogger("apexrl")
    log.setLevel(logging.INFO)
    log.addHandler(teller)
    config = dataclasses.replace(msgspec.json.decode(text, type=EnvConfig), step_deadline_seconds=0.0)  # the parent's
    envs: VectorEnvironment | None = None
    try:
        envs = teller.call(MAKING, make_environment, config, 1)
        play(envs, teller)
        if config.wrapper:
            alone, envs = envs, None
            teller.call(WRAPPERS, try_wrappers, alone, config)
    except ApexError as error:
        teller.tell(Line(fault=str(error), errno=getattr(error.__cause__, "errno", None)))
    except BaseException as error:
        cure = f"; {RESULTS}" if "unpack" in str(error) else ""
        teller.tell(Line(fault=f"environment {config.env!r} fails in {teller.doing}: {reason_of(error)}{cure}"))
    teller.tell(Line(doing=CLOSING))
    if envs is not None:
        with contextlib.suppress(BaseException):  # foreign code, and all is told
            envs.close()
    end_at_once(0)


if __name__ == "__main__":
    main(sys.argv[1])
