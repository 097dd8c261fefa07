"""Measures a loop in a process of its own, after a warm-up, by the scheduler's clock. It needs nothing installed.

The scripts in this folder that run as `python -m benchmarks.peers.NAME --game Pong --envs 8 --threads 1` print their
counts as one line of JSON.
"""

import argparse
import json
import time
from collections.abc import Callable

WARM_UP_SECONDS = 2.0


def parse_arguments(description: str | None, **choices: tuple[str, ...]) -> argparse.Namespace:
    """Returns the arguments that every script takes, and more by name: each has some choices, the first by default."""
    parser = argument_parser(description)
    for name, words in choices.items():
        parser.add_argument(f"--{name}", choices=words, default=words[0])
    return parser.parse_args()


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that every script takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="Pong", help="Pong, Breakout, Seaquest, ...")
    parser.add_argument("--envs", type=int, default=1, help="environments that step together")
    parser.add_argument("--threads", type=int, default=1, help="0: as many as the library takes by itself")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the measurement, after the warm-up")
    return parser


def report(step: Callable[[], int], seconds: float) -> None:
    """Calls `step`, which returns its number of agent steps, for so many seconds; prints the steps and times.

    CPU seconds are those of all threads of this process, user and system.
    """
    repeat(step, WARM_UP_SECONDS)
    cpu, started = time.process_time(), time.perf_counter()
    agent_steps = repeat(step, seconds)
    measured = {
        "agent_steps": agent_steps,
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - started,
    }
    print(json.dumps(measured), flush=True)


def repeat(step: Callable[[], int], seconds: float) -> int:
    """Calls `step` for so many seconds; returns the number of agent steps."""
    end = time.perf_counter() + seconds
    agent_steps = step()
    while time.perf_counter() < end:
        agent_steps += step()
    return agent_steps
