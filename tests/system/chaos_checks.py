"""Expectations of a run that has ended, after any faults: each is one function.

A function returns its finding in words, and the reasons why the expectation failed.
"""

import collections
import contextlib
import dataclasses
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from apexrl.agents.families import family_of
from apexrl.errors import ApexError
from apexrl.learning.experience.sizes import bytes_needed
from apexrl.learning.record.status_file import read_status
from apexrl.net import wire
from apexrl.networks.checkpoint import ACTING, load_checkpoint
from apexrl.networks.config import to_text
from apexrl.networks.headers import BEST, LATEST
from apexrl.replay.journal import segment_paths
from apexrl.replay.replay import ring_unrolls
from apexrl.replay.segment import Entry, scan
from apexrl.running.display import Summary
from apexrl.running.run_directory import CONFIG_FILE, SUMMARY_FILE, read_config
from apexrl.runs import CURVE_FILE
from apexrl.types import StreamSpec
from tests.system import witness
from tests.system.chaos_world import Sample, World

Finding = tuple[str, list[str]]
WARM_UP_SECONDS = 60.0  # age of a process from which its memory counts for a slope
# Half as much again as runs on two cores take, Pong's and Catch's; the learner's without its frames.
LIMITS_MB = {"replay": 300, "learner": 800, "actors": 450, "worker": 1350, "evaluator": 500, "tensorboard": 300}
EVALUATED = re.compile(r"update (\d+): (\d+) games?, mean (\S+),")
ENDED = re.compile(r"^.*: (.+ ended with (?!signal SIGKILL).*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Check:
    """One expectation, what was found, and why it failed; no reasons: it held."""

    name: str
    found: str
    reasons: list[str]


class Remains(NamedTuple):
    """The remains of a run on the disk."""

    directory: Path
    entries: list[Entry]  # every unroll that was ever journalled
    spec: StreamSpec


def read_remains(world: World, spec: StreamSpec) -> Remains:
    """Reads a journal whole. A number that was written twice counts once, with its later entry."""
    entries = {e.number: e for path in segment_paths(world.kept) for e in scan(path.read_bytes()).entries}
    return Remains(world.directory, [entries[number] for number in sorted(entries)], spec)


def run_checks(expectations: dict[str, Callable[[], Finding]]) -> list[Check]:
    """Calls each; one that fails with an error has failed for that reason."""
    checks = []
    for name, expectation in expectations.items():
        try:
            found, reasons = expectation()
        except (ApexError, OSError, msgspec.MsgspecError, AssertionError, KeyError, ValueError) as error:
            found, reasons = "cannot be told", [f"{type(error).__name__}: {error}"]
        checks.append(Check(name, found, reasons))
    return checks


def processes(world: World) -> Finding:
    """Nothing that the run started lives on."""
    left = []
    for process in world.left_over():
        with contextlib.suppress(Exception):
            left.append(" ".join(process.cmdline()[:3]))
    return f"{len(world.processes)} seen, {len(left)} left", [f"it lives still: {text}" for text in left]


def ports(world: World) -> Finding:
    """Every port can be bound again."""
    taken = []
    for port in world.ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                taken.append(f"port {port}: {error.strerror}")
    return f"{len(world.ports) - len(taken)} of {len(world.ports)} free", taken


def deaths(world: World, killed: int) -> Finding:
    """No role ended but those that were killed."""
    texts = [world.launcher.text()]
    texts += [path.read_text(errors="replace") for path in sorted((world.directory / "logs").glob("*.log"))]
    ended = [match for text in texts for match in ENDED.findall(text)]
    tracebacks = sum(text.count("Traceback (most recent call last)") for text in texts)
    reasons = [f"it was not killed: {line}" for line in ended[:5]]
    sigkills = sum(text.count("ended with signal SIGKILL") for text in texts)
    if sigkills > killed:
        reasons.append(f"{sigkills - killed} were killed by somebody else, such as the kernel for their memory")
    if tracebacks:
        reasons.append(f"{tracebacks} tracebacks in launcher.txt and logs")
    return f"{killed} killed, {len(ended)} ended otherwise, {tracebacks} tracebacks", reasons


def checkpoints(remains: Remains) -> Finding:
    """The latest checkpoint is of this run and finite; so is the best one, and it is a network like the latest."""
    directory = remains.directory / "checkpoints"
    command, _ = read_config(remains.directory / CONFIG_FILE)
    online: dict[str, dict[str, torch.Size]] = {}
    reasons, found = [], []
    for name in (LATEST, BEST):
        if name == BEST and not (directory / BEST).exists():
            found.append("no best one")
            continue
        checkpoint = load_checkpoint(directory / name)
        tensors = checkpoint.tensors
        online[name] = {n: t.shape for n, t in tensors.items() if n.startswith(ACTING)}
        bad = [n for n, t in tensors.items() if t.is_floating_point() and not torch.isfinite(t).all()]
        if checkpoint.header.identity != (remains.spec, command.agent, to_text(command.network)):
            reasons.append(f"{name} is of {checkpoint.header.spec.env}, or of another network than this run")
        if bad:
            reasons.append(f"{name}: {len(bad)} tensors are not finite, such as {bad[0]}")
        found.append(f"{name} of update {checkpoint.header.counters.updates}")
    if BEST in online and online[BEST] != online[LATEST]:
        reasons.append(f"{BEST} holds other tensors than {LATEST}")
    left = [path.name for path in directory.glob("*.tmp")]
    return ", ".join(found), reasons + [f"unfinished files are left: {left}"] * bool(left)


def evaluations(remains: Remains) -> Finding:
    """Every evaluation of the curve and the best return are ones that the evaluator told."""
    log = remains.directory / "logs" / "evaluator.log"
    told = EVALUATED.findall(log.read_text()) if log.exists() else []
    means = {mean for _, _, mean in told}
    path = remains.directory / CURVE_FILE
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]] if path.exists() else []
    foreign = [row for row in rows if (row[2], row[3], f"{float(row[4]):.2f}") not in told]
    reasons = [f"{len(foreign)} evaluations are nobody's, such as {','.join(foreign[0])}"] if foreign else []
    summary = read_summary(remains)
    for name in ("evaluation_mean_return", "evaluation_best_return"):
        value = getattr(summary, name)
        if value is not None and f"{value:.2f}" not in means:
            reasons.append(f"{name} {value} is nobody's")
    return f"{len(told)} told, {len(rows)} in the curve, best {summary.evaluation_best_return}", reasons


def read_summary(remains: Remains) -> Summary:
    """Returns the summary of the run."""
    return msgspec.json.decode((remains.directory / SUMMARY_FILE).read_bytes(), type=Summary)


def counters(remains: Remains) -> Finding:
    """Status and summary agree with each other and with a recount of the journal."""
    status, summary = read_status(remains.directory), read_summary(remains)
    assert status is not None, "status.json cannot be read"
    counted = status.counters.logs[0]
    numbers = [entry.number for entry in remains.entries]
    reasons = []
    if numbers != list(range(len(numbers))):
        reasons.append(f"the journal's numbers have gaps: {len(numbers)} unrolls up to {numbers[-1]}")
    starts = 0
    for entry in remains.entries:
        if entry.number < counted.next_number:
            starts += int(wire.decode_insert(entry.message).header(remains.spec.unroll_starts).valid.sum())
    if starts != summary.transitions_inserted:
        reasons.append(f"the summary counts {summary.transitions_inserted} transitions, the journal {starts}")
    if (summary.updates, summary.frames) != (status.counters.updates, status.frames):
        reasons.append("summary and status disagree")
    behind = len(numbers) - counted.next_number
    return f"{starts} transitions, {behind} unrolls behind the journal, {summary.updates} updates", reasons


def streams(remains: Remains) -> Finding:
    """The unrolls of the run's own actors are contiguous by stream, and their numbers by actor."""
    host = socket.gethostname()[:32]
    by_stream: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
    by_actor: dict[str, list[int]] = collections.defaultdict(list)
    for entry in remains.entries:
        insert = wire.decode_insert(entry.message)
        if insert.actor.startswith(f"{host}-"):
            by_stream[insert.actor, insert.stream].append(insert.first_step)
            by_actor[insert.actor].append(insert.sequence)
    starts = remains.spec.unroll_starts
    broken = [key for key, steps in by_stream.items() if steps != [starts * i for i in range(len(steps))]]
    jumps = [actor for actor, sequences in by_actor.items() if sequences != list(range(len(sequences)))]
    reasons = [f"{len(broken)} streams have gaps or come twice, such as {broken[0]}"] if broken else []
    reasons += [f"the inserts of {len(jumps)} actors are not 0, 1, 2 ..., such as of {jumps[0]}"] if jumps else []
    unrolls = sum(map(len, by_actor.values()))
    return f"{unrolls} unrolls, {len(by_actor)} actors, {len(by_stream)} streams", reasons


def witnessed(remains: Remains, actor: witness.Witness) -> Finding:
    """The journal holds each insert that was acknowledged to the witness, once."""
    found, reasons = witness.faults_of(remains.entries, remains.spec, actor.num_acknowledged)
    reasons += [f"the witness ended: {actor.error}"] if actor.error else []
    return found, reasons + ["nothing was acknowledged to the witness"] * (not actor.num_acknowledged)


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a role over a run, in MB; the learner's without its frames."""

    first: float
    last: float
    highest: float
    slope: float  # MB a minute, inside the lives of its processes after their warm-up
    lives: int


def memory_of(samples: Sequence[Sample], remains: Remains) -> dict[str, Memory]:
    """Returns the memory of each role over time."""
    command, _ = read_config(remains.directory / CONFIG_FILE)
    ring = ring_unrolls(command.replay.capacity, remains.spec.unroll_starts)
    wants = family_of(command.agent).wants(command.algorithm, command.update)
    found = {}
    for role in dict.fromkeys(sample.role for sample in samples):
        lives: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
        for sample in samples:
            if sample.role == role:
                held = min(sample.transitions // remains.spec.unroll_starts, ring) if role == "learner" else 0
                frames = bytes_needed(remains.spec, held, wants) / 1e6 if held else 0.0
                lives[sample.pid].append((sample.seconds, max(sample.megabytes - frames, 0.0)))
        values = [megabytes for life in lives.values() for _, megabytes in life]
        warm = [[point for point in life if point[0] > life[0][0] + WARM_UP_SECONDS] for life in lives.values()]
        found[role] = Memory(values[0], values[-1], max(values), _slope([life for life in warm if life]), len(lives))
    return found


def _slope(lives: list[list[tuple[float, float]]]) -> float:
    """Returns the common slope of several lines, a minute."""
    covariance = variance = 0.0
    for life in lives:
        seconds, megabytes = np.array(life).T
        covariance += float(((seconds - seconds.mean()) * (megabytes - megabytes.mean())).sum())
        variance += float(((seconds - seconds.mean()) ** 2).sum())
    return 60 * covariance / variance if variance else 0.0


def memory(found: dict[str, Memory]) -> Finding:
    """No role takes more than it needs."""
    reasons = [
        f"{role} took {held.highest:.0f} MB, {LIMITS_MB[role]} should do"
        for role, held in found.items()
        if held.highest > LIMITS_MB[role]
    ]
    return ", ".join(f"{role} {held.highest:.0f} MB" for role, held in found.items()), reasons
