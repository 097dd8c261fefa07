"""A whole run of ours, as run.sh starts it, measured from what it leaves: rates in a window, memory by role."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from apexrl.checkpoint import Counters
from apexrl.launch import CONFIG_FILE, SavedConfig
from apexrl.status import Status, read_status
from benchmarks.replay import ROOT, free_ports

PORTS = ("--actor-port", "--batch-port", "--parameter-port", "--metrics-port")
LOOK_SECONDS = 0.5
LEARNING_SECONDS = 600.0  # until the first update
STATUS_SECONDS = 60.0  # until the next status
END_SECONDS = 20.0  # the run promises less
UNSTEADY = 0.1


class Window(NamedTuple):
    """What happened between two statuses."""

    wall_seconds: float
    frames: int
    updates: int
    samples: int


def run(game: str, flags: tuple[str, ...], settle_seconds: float, seconds: float) -> dict:
    """Runs everything until it has learned for `settle_seconds`, and returns what it does in the seconds after that.

    Raises: RuntimeError when it ends or stands still.
    """
    with tempfile.TemporaryDirectory(prefix="apexrl-benchmark-") as name:
        directory = Path(name) / "run"
        ports = [str(word) for pair in zip(PORTS, free_ports(len(PORTS)), strict=True) for word in pair]
        where = ["--env", f"{game}NoFrameskip-v4", "--run-dir", str(directory), "--no-tensorboard", *ports]
        with _launched([*where, *flags], directory.with_suffix(".txt")) as launcher:
            statuses = _follow(launcher, directory, settle_seconds, seconds)
            memory = memory_by_role(launcher)
        saved = msgspec.json.decode((directory / CONFIG_FILE).read_bytes(), type=SavedConfig).command
    window, halves = _between(statuses[0], statuses[-1]), _halves(statuses)
    inserted = statuses[-1].counters.transitions_inserted
    wanted = saved.replay.samples_per_insert
    sampled = window.samples / max(inserted - statuses[0].counters.transitions_inserted, 1)
    if abs(sampled - wanted) > UNSTEADY * wanted > 0:
        print(f"NOTE: not steady: {sampled:.2f} samples a transition in the window, not {wanted:g}", flush=True)
    return window._asdict() | {
        "steadiness": halves,
        "transitions_held": min(inserted, saved.replay.capacity),
        "batch_size": saved.update.batch_size,
        "network": [*saved.network.channels, saved.network.hidden_size],
        "preset": saved.preset,
        "memory_bytes": sum(resident for resident, _ in memory.values()),
        "memory_bytes_by_role": {role: resident for role, (resident, _) in memory.items()},
        "memory_bytes_shared_once": sum(proportional for _, proportional in memory.values()),
        "waits": {tag: share for tag, share in statuses[-1].figures.items() if "/waits_for/" in tag and share >= 0.01},
    }


def memory_by_role(launcher: psutil.Process) -> dict[str, tuple[int, int]]:
    """Returns resident bytes of each role's processes, and the same with what they share counted once (PSS)."""
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


def _follow(launcher: psutil.Process, directory: Path, settle_seconds: float, seconds: float) -> list[Status]:
    """Returns the statuses of the window, by the learner's own clock."""
    statuses: list[Status] = []
    learning_at = None
    deadline = time.monotonic() + LEARNING_SECONDS
    while True:
        time.sleep(LOOK_SECONDS)
        status = read_status(directory)
        at = _seconds(status)
        if status is not None and status.counters.updates and (not statuses or at > _seconds(statuses[-1])):
            deadline = time.monotonic() + STATUS_SECONDS
            learning_at = at if learning_at is None else learning_at
            statuses = [*statuses, status] if at >= learning_at + settle_seconds else []
            if statuses and at - _seconds(statuses[0]) >= seconds:
                return statuses
        if time.monotonic() > deadline or launcher.status() == psutil.STATUS_ZOMBIE:
            log = directory.with_suffix(".txt").read_text()[-1500:]
            raise RuntimeError(f"the run ended or stands still; it said: {log}")


def _seconds(status: Status | None) -> float:
    return (status.counters if status is not None else Counters()).seconds


def _between(first: Status, last: Status) -> Window:
    a, b = first.counters, last.counters
    samples = b.transitions_sampled - a.transitions_sampled
    return Window(b.seconds - a.seconds, last.frames - first.frames, b.updates - a.updates, samples)


def _halves(statuses: list[Status]) -> float | None:
    """Returns frames/s in the second half of the window over those in the first; says it when they differ."""
    middle = statuses[len(statuses) // 2]
    first, second = _between(statuses[0], middle), _between(middle, statuses[-1])
    if not (first.frames and second.frames):
        return None
    ratio = (second.frames / second.wall_seconds) / (first.frames / first.wall_seconds)
    if abs(ratio - 1) > UNSTEADY:
        print(f"NOTE: not steady: the second half of the window has {ratio:.2f} times the frames/s", flush=True)
    return ratio


@contextlib.contextmanager
def _launched(arguments: list[str], log: Path) -> Iterator[psutil.Process]:
    """The launcher's process, which is ended with the context, and all roles with it."""
    with log.open("wb") as file:
        command = [sys.executable, "-m", "apexrl.launch", *arguments]
        launcher = psutil.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield launcher
        finally:
            launcher.terminate()
            try:
                launcher.wait(END_SECONDS)
            except psutil.TimeoutExpired:  # the roles notice within seconds that it is gone
                launcher.kill()
                launcher.wait()
