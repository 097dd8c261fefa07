"""A whole run under random faults: `python -m tests.system.chaos --minutes 15 --env PongNoFrameskip-v4 --run-dir DIR`.

It starts a run, kills and stops its roles, fills its disk and sends it whatever strangers may send, all from one seed.
At the end it says what was lost, doubled, left behind or grew, prints a table and writes DIR/chaos.json. The status is
1 when something was not as it should be. Flags that it does not know go to the run.
"""

import argparse
import dataclasses
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from apexrl.files import write_json
from apexrl.types import StreamSpec
from tests.system import chaos_checks as checks
from tests.system.chaos_checks import Check, Finding, Memory
from tests.system.chaos_world import ROLES, START_SECONDS, SmallDisk, World
from tests.system.foreigners import KINDS
from tests.system.processes import ROOT, wait_for
from tests.system.witness import Witness

Deed = tuple[str, Callable[[], None]]  # in words, and done when called
FAULTS = ("kill", "stop", "disk", "foreign")
STOP_SECONDS = (5.0, 25.0)
DISK_SECONDS = (20.0, 40.0)
FOREIGN_SECONDS = 5.0
FOREIGN_TIMEOUT_SECONDS = 180
SHARE_AT_ONCE = 0.3  # share of the faults that come before the run has got over the one before
FLUSH_SECONDS = 40.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault, and how long the run took until updates and frames grew again; None: nobody waited for that."""

    at_seconds: float
    kind: str
    what: str
    recovered_seconds: float | None


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a chaos run."""

    env: str
    seed: int
    faults: list[Fault]
    skipped: list[str]
    memory: dict[str, Memory]
    checks: list[Check]

    def reasons(self) -> list[str]:
        """Why it failed."""
        return [f"{check.name}: {reason}" for check in self.checks for reason in check.reasons]


class Chaos:
    """Does the faults of one run. One owner."""

    def __init__(self, options: argparse.Namespace, world: World, disk: SmallDisk):
        self.faults: list[Fault] = []
        self.skipped: list[str] = []
        self.troubles: list[str] = []
        self._options = options
        self._world = world
        self._disk = disk
        self._rng = random.Random(options.seed)
        makers = {"kill": self._kill, "stop": self._stop, "disk": self._fill_disk, "foreign": self._send_strangers}
        self._makers = {kind: makers[kind] for kind in options.faults}
        self._yet_to_come: dict[str, list[str]] = {}
        if "disk" in self._makers and not disk.is_mounted:
            self._skip(f"disk: no small disk is mounted ({disk.reason})")
            del self._makers["disk"]

    def run(self) -> None:
        """Does faults until the time is up or the run does not go on."""
        ends = time.monotonic() + 60 * self._options.minutes
        try:
            while time.monotonic() < ends and len(self.faults) < self._options.num_faults and self._makers:
                time.sleep(self._rng.uniform(1, self._options.pause_seconds))
                self._do(self._next("faults", list(self._makers)))
            self._world.wait_for_progress(self._options.stall_seconds)
        except AssertionError as error:
            self.troubles.append(f"after {self.faults[-1].what if self.faults else 'the start'}: {error}")

    def num_killed(self) -> int:
        """Returns the number of processes that were killed."""
        return sum(fault.kind == "kill" for fault in self.faults)

    def _do(self, kind: str) -> None:
        at_once = self._rng.random() < SHARE_AT_ONCE
        what, act = self._makers[kind]()
        at = time.monotonic() - self._world.started
        self.faults.append(Fault(at, kind, what, None))
        act()
        if not at_once:
            seconds = self._world.wait_for_progress(self._options.stall_seconds)
            self.faults[-1] = dataclasses.replace(self.faults[-1], recovered_seconds=seconds)
        print(_line_of(self.faults[-1]), flush=True)

    def _kill(self) -> Deed:
        roles = self._world.roles()
        role = self._next("kill", [role for role in ROLES if role in roles])
        process = self._rng.choice(roles[role])
        return role, lambda: self._world.kill(role, process)

    def _stop(self) -> Deed:
        roles = self._world.roles()
        role = self._next("stop", [role for role in ROLES if role in roles])
        process, seconds = self._rng.choice(roles[role]), self._rng.uniform(*STOP_SECONDS)
        return f"{role} for {seconds:.0f} s", lambda: self._world.stop(process, seconds)

    def _fill_disk(self) -> Deed:
        seconds = self._rng.uniform(*DISK_SECONDS)
        return f"full for {seconds:.0f} s", lambda: self._disk.fill(seconds)

    def _send_strangers(self) -> Deed:
        kind = self._next("strangers", self._options.foreign)
        seed = self._rng.randrange(10**6)
        return kind, lambda: self._run_strangers(kind, seed)

    def _run_strangers(self, kind: str, seed: int) -> None:
        """Runs strangers of one kind in a process of their own, which may break without us."""
        arguments = [kind, self._world.journal, seed, FOREIGN_SECONDS, *self._world.ports[:4]]
        command = [sys.executable, "-m", "tests.system.foreigners", *map(str, arguments)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=FOREIGN_TIMEOUT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            self._skip(f"the rest of {kind}: not done in {FOREIGN_TIMEOUT_SECONDS} s")
            return
        if done.returncode:
            self._skip(f"the rest of {kind}: {' '.join(done.stderr.strip().splitlines()[-1:])}")

    def _next(self, of: str, names: list[str]) -> str:
        """Chooses one of the names; each comes once before one comes again."""
        left = [name for name in self._yet_to_come.get(of, ()) if name in names]
        if not left:
            left = self._rng.sample(names, len(names))
        self._yet_to_come[of] = left[1:]
        return left[0]

    def _skip(self, what: str) -> None:
        self.skipped.append(what)
        print(f"skipped: {what}", flush=True)


def judge(options: argparse.Namespace, chaos: Chaos, world: World, witness: Witness, spec: StreamSpec) -> Report:
    """Ends the run and compares what it left with what it should have left."""
    witness.finish(FLUSH_SECONDS)
    status = world.end()
    remains = checks.read_remains(world, spec)
    memory = checks.memory_of(world.samples, remains)
    ended = "it did not end" if status is None else f"status {status}"
    expectations: dict[str, Callable[[], Finding]] = {
        "goes on": lambda: (f"{len(chaos.faults)} faults", chaos.troubles),
        "ends": lambda: (ended, [ended] * (status != 0)),
        "processes": lambda: checks.processes(world),
        "ports": lambda: checks.ports(world),
        "deaths": lambda: checks.deaths(world, chaos.num_killed()),
        "checkpoints": lambda: checks.checkpoints(remains),
        "evaluations": lambda: checks.evaluations(remains),
        "counters": lambda: checks.counters(remains),
        "streams": lambda: checks.streams(remains),
        "witness": lambda: checks.witnessed(remains, witness),
        "memory": lambda: checks.memory(memory),
    }
    found = checks.run_checks(expectations)
    return Report(options.env, options.seed, chaos.faults, chaos.skipped, memory, found)


def show(report: Report) -> None:
    """Prints the outcome."""
    print(f"\n{report.env}, seed {report.seed}: {len(report.faults)} faults")
    for fault in report.faults:
        print(_line_of(fault))
    print("\n  role           first    last    most  MB/min  lives   (MB; the learner without its frames)")
    for role, held in report.memory.items():
        print(f"  {role:12} {held.first:7.0f} {held.last:7.0f} {held.highest:7.0f} {held.slope:7.2f} {held.lives:6}")
    print()
    for check in report.checks:
        print(f"  {'FAILED' if check.reasons else 'held':7} {check.name:12} {check.found}")
        for reason in check.reasons:
            print(f"            {reason}")
    for what in report.skipped:
        print(f"  skipped {what}")


def chaos(options: argparse.Namespace, flags: list[str]) -> Report:
    """Does a chaos run."""
    directory = options.run_dir.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    with SmallDisk(directory / "disk", options.disk_mib if "disk" in options.faults else 0) as disk:
        with World(directory, directory / "disk", ["--env", options.env, "--seed", str(options.seed), *flags]) as world:
            spec = world.wait_for_spec()
            witness = Witness(f"tcp://127.0.0.1:{world.ports[0]}", spec, seconds_between=0.2)
            world.wait_until_learning()
            wait_for(lambda: witness.num_acknowledged, START_SECONDS, "an acknowledgement to the witness")
            faults = Chaos(options, world, disk)
            faults.run()
            report = judge(options, faults, world, witness, spec)
        _keep(world.directory, directory)
    return report


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and the flags that are for the run."""

    def some_of(names: tuple[str, ...]) -> Callable[[str], list[str]]:
        def chosen(text: str) -> list[str]:
            asked = [name for name in text.split(",") if name]
            if not asked or not set(asked) <= set(names):
                raise argparse.ArgumentTypeError(f"{text}: choose among {','.join(names)}")
            return asked

        return chosen

    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--num-faults", type=int, default=10**6, help="end after so many, if that is earlier")
    parser.add_argument("--env", default="PongNoFrameskip-v4")
    parser.add_argument("--run-dir", type=Path, required=True, help="of this program: the run and its launcher's log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disk-mib", type=int, default=512, help="size of the disk that is filled; 0: none")
    parser.add_argument("--pause-seconds", type=float, default=15.0, help="at most, between two faults")
    parser.add_argument("--stall-seconds", type=float, default=240.0, help="without growth so long, a run stands still")
    parser.add_argument("--faults", type=some_of(FAULTS), default=list(FAULTS), help=",".join(FAULTS))
    parser.add_argument("--foreign", type=some_of(tuple(KINDS)), default=list(KINDS), help=",".join(KINDS))
    options, flags = parser.parse_known_args(arguments)
    if options.run_dir.exists() and any(options.run_dir.iterdir()):
        parser.error(f"--run-dir {options.run_dir} is not empty: give another")
    return options, flags


def main() -> int:
    """Returns the exit status."""
    options, flags = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the run too
    try:
        report = chaos(options, flags)
    except AssertionError as error:
        print(f"the run never came so far that it could be broken: {error}")
        return 1
    show(report)
    write_json(options.run_dir / "chaos.json", report)
    print(f"\n{options.run_dir / 'chaos.json'}: {len(report.reasons())} reasons to fail")
    return 1 if report.reasons() else 0


def _line_of(fault: Fault) -> str:
    recovered = "" if fault.recovered_seconds is None else f"went on in {fault.recovered_seconds:.0f} s"
    return f"  {fault.at_seconds:6.0f} s  {fault.kind:8} {fault.what:28} {recovered}"


def _keep(run: Path, directory: Path) -> None:
    """Copies what a person may want to look at from the disk that goes away."""
    subprocess.run(["cp", "-r", run, directory / "run"], timeout=300, check=True)


if __name__ == "__main__":
    sys.exit(main())
