"""Measures a whole run of ours, as run.sh starts it, by its files: rates in a window, memory by role."""

import contextlib
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from apexrl.config.commands import RunCommand
from apexrl.config.flags import explicit_replay, wants_of
from apexrl.config.tables import tables_of
from apexrl.learning.record.status_file import Status, read_status
from apexrl.running.run_directory import CONFIG_FILE, read_config
from benchmarks.replay import free_ports, running

PORTS = ("--actor-port", "--batch-port", "--parameter-port", "--metrics-port")
LOOK_SECONDS = 0.5
START_SECONDS = 600.0  # longest time until the window begins, beyond the time to settle
STATUS_SECONDS = 60.0  # longest time until the next status
BALANCE = "replay/samples_per_insert"
IN_BALANCE = 0.9  # share of the samples an insert asked for, from which a run is in balance
UNSTEADY = 0.1


class Window(NamedTuple):
    """The work of a run between two statuses."""

    wall_seconds: float
    frames: int
    updates: int
    samples: int


def run(game: str, flags: tuple[str, ...], settle_seconds: float, seconds: float) -> dict:
    """Runs everything until it has learned for `settle_seconds`, and returns the figures of the seconds after that.

    Raises: RuntimeError when the run ends or stands still.
    """
    with tempfile.TemporaryDirectory(prefix="apexrl-benchmark-") as name:
        directory = Path(name) / "run"
        ports = [str(word) for pair in zip(PORTS, free_ports(len(PORTS)), strict=True) for word in pair]
        where = ["--env", f"{game}NoFrameskip-v4", "--run-dir", str(directory), "--no-tensorboard", *ports]
        command_line = ["-m", "apexrl.running.launch", *where, *flags]
        with running(command_line, directory.with_suffix(".txt")) as launcher:
            statuses, command = _follow(launcher, directory, settle_seconds, seconds)
            memory = memory_by_role(launcher)
    window, halves = _between(statuses[0], statuses[-1]), _halves(statuses)
    inserted = statuses[-1].counters.transitions_inserted
    gained = inserted - statuses[0].counters.transitions_inserted
    if not gained:
        raise RuntimeError("the actors stood still in the whole window: give more --minutes")
    sampled, wanted = window.samples / gained, samples_wanted(command)
    if abs(sampled - wanted) > UNSTEADY * wanted > 0:
        print(f"NOTE: not steady: {sampled:.2f} samples a transition in the window, not {wanted:g}", flush=True)
    return window._asdict() | {
        "steadiness": halves,
        "transitions_held": min(inserted, command.replay.capacity),
        "batch_size": command.update.batch_size,
        "network": dataclasses.asdict(command.network),
        "preset": command.preset,
        "memory_bytes": sum(resident for resident, _ in memory.values()),
        "memory_bytes_by_role": {role: resident for role, (resident, _) in memory.items()},
        "memory_bytes_shared_once": sum(proportional for _, proportional in memory.values()),
        "waits": {tag: share for tag, share in statuses[-1].metrics.items() if "/waits_for/" in tag and share >= 0.01},
    }


def samples_wanted(command: RunCommand) -> float:
    """Returns how often all tables together are to sample a transition; 0 when none of them sets a pace."""
    tables, wants = tables_of(explicit_replay(command), command.algorithm.unroll_starts), wants_of(command)
    paces = (tables[want.table].samples_per_insert / want.batch_size for want in wants)  # updates an insert
    return max(paces) * sum(want.batch_size for want in wants)


def memory_by_role(launcher: psutil.Process) -> dict[str, tuple[int, int]]:
    """Returns the resident bytes of each role's processes, and the same with shared memory counted once (PSS)."""
    found: dict[str, tuple[int, int]] = {}
    for process in [launcher, *launcher.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            role, memory = _role(process.cmdline()), process.memory_full_info()
            resident, proportional = found.get(role, (0, 0))
            found[role] = resident + memory.rss, proportional + memory.pss
    return found


def _role(words: list[str]) -> str:
    script = next((Path(word).stem for word in words if Path(word).name in ("replay.py", "learner.py", "actor.py")), "")
    if script == "actor":
        return "evaluator" if "--evaluate" in words else "actors"
    return script or "launcher"


def _follow(
    launcher: psutil.Process, directory: Path, settle_seconds: float, seconds: float
) -> tuple[list[Status], RunCommand]:
    """Returns the statuses of the window, by the learner's own clock, and the run's configuration."""
    statuses: list[Status] = []
    learning_at = None
    command = None
    give_up = time.monotonic() + START_SECONDS + settle_seconds
    while command is None or not statuses or statuses[-1].counters.seconds - statuses[0].counters.seconds < seconds:
        if time.monotonic() > give_up or launcher.status() == psutil.STATUS_ZOMBIE:
            log = directory.with_suffix(".txt").read_text()[-1500:]
            raise RuntimeError(f"the run ended, stands still or never came into balance; it said: {log}")
        time.sleep(LOOK_SECONDS)
        status = read_status(directory)
        if status is None or not status.counters.updates or status in statuses[-1:]:
            continue
        command = command or read_config(directory / CONFIG_FILE)[0]
        at = status.counters.seconds
        learning_at = at if learning_at is None else learning_at
        # At first the actors are ahead. Then they stand still until the learner has caught up.
        in_balance = status.metrics.get(BALANCE, 0.0) >= IN_BALANCE * samples_wanted(command)
        if statuses or (at >= learning_at + settle_seconds and in_balance):
            statuses.append(status)
            give_up = time.monotonic() + STATUS_SECONDS
    return statuses, command


def _between(first: Status, last: Status) -> Window:
    a, b = first.counters, last.counters
    samples = b.transitions_sampled - a.transitions_sampled
    return Window(b.seconds - a.seconds, last.frames - first.frames, b.updates - a.updates, samples)


def _halves(statuses: list[Status]) -> float | None:
    """Returns the ratio of frames/s in the second half of the window to the first; prints a note when they differ."""
    middle = statuses[len(statuses) // 2]
    first, second = _between(statuses[0], middle), _between(middle, statuses[-1])
    if not (first.frames and second.frames):
        return None
    ratio = (second.frames / second.wall_seconds) / (first.frames / first.wall_seconds)
    if abs(ratio - 1) > UNSTEADY:
        print(f"NOTE: not steady: the second half of the window has {ratio:.2f} times the frames/s", flush=True)
    return ratio
