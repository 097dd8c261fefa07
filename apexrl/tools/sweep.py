"""`apexrl sweep FILE.toml [FLAGS]` makes runs of variants and seeds, one after the other.

It checks every command line before the first run. A later start leaves out what is complete and goes on with what was
cut off. A run that fails is named, and the others are made. At the end the complete runs are compared. FLAGS are those
of run.sh and win over the file's. docs/experiments.md describes the file.
"""

import contextlib
import logging
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import msgspec

from apexrl.config.sections import LearningConfig
from apexrl.errors import ApexError, ConfigError
from apexrl.files import locked, read_json, write_json
from apexrl.guard import check_not_imported
from apexrl.lifecycle import INTERRUPTED_STATUS, Stop, attempt
from apexrl.lines import log_to, say
from apexrl.running.display import Summary
from apexrl.running.launch import ENDING_SECONDS, is_unevaluated
from apexrl.running.run_directory import SUMMARY_FILE, continued, lock_run
from apexrl.running.supervise import Supervisor, describe_status
from apexrl.running.torch_look import asking
from apexrl.runs import SWEEP_FILE
from apexrl.tools.comparison import write_comparison
from apexrl.tools.run_results import readable_runs
from apexrl.tools.sweep_plan import SweepFile, SweepRun, read_file, runs_of

LOCK_FILE, COMPARISON = "sweep.lock", "comparison"
WATCH_SECONDS, WAIT_SECONDS = 0.2, 2.0


class Record(msgspec.Struct, frozen=True):
    """All that a sweep remembers of a run that it has started."""

    arguments: list[str]
    is_complete: bool


class Sweep:
    """The runs of a sweep and the record of those that were started. One process at a time has it."""

    def __init__(self, directory: Path, runs: list[SweepRun], stop: Stop):
        """Takes the sweep's directory, whose lock the caller holds, and reads its record.

        Raises: ConfigError when the record is damaged, or a run was begun with other flags.
        """
        self._directory = directory
        self.runs = runs
        self._stop = stop
        path = directory / SWEEP_FILE
        fault = f"is damaged (put a sound copy there, or move {directory} away)"
        self._records = read_json(path, dict[str, Record], fault) if os.path.lexists(path) else {}
        for run in runs:
            record = self._records.get(run.directory.name)
            if record is not None and run.has_begun and record.arguments != run.arguments:
                before = shlex.join(record.arguments)
                raise ConfigError(f"{run.directory} was begun with {before}: give these again, or another directory")

    def run(self) -> list[str]:
        """Makes the runs that are not complete, until the stop is set; returns the names of the runs that failed.

        Raises: ConfigError when others keep the ports or a directory, so that a run cannot start.
        """
        failed: list[str] = []
        for number, run in enumerate(self.runs, 1):
            name = run.directory.name
            if self._stop.is_set() or self.is_complete(run):
                continue
            _tell(f"{number} of {len(self.runs)}: {name}, see {self._log(run)}")
            self._wait_until_free(run)
            if self._stop.is_set():
                break
            began = time.monotonic()
            try:
                self._make(run)
                _tell(f"{name}: complete after {(time.monotonic() - began) / 60:.1f} minutes")
            except ApexError as error:
                if not self._stop.is_set():
                    failed.append(name)
                    _tell(f"{name} failed: {error}", file=sys.stderr)
        return failed

    def is_complete(self, run: SweepRun) -> bool:
        """Returns whether a run has reached its end; it has to be made again when its directory was removed."""
        record = self._records.get(run.directory.name)
        return record is not None and record.is_complete and run.has_begun

    def _make(self, run: SweepRun) -> None:
        """Starts or resumes a run, and returns when it has reached its end; a reproducible one always starts anew.

        Raises: ApexError when it fails, or ended too early.
        """
        if run.has_begun and run.directory.name not in self._records:
            raise ConfigError(
                f"{run.directory} is a run that this sweep did not begin: move it, or give another directory"
            )
        removed = run.directory.with_name(f"{run.directory.name}.removed")
        shutil.rmtree(removed, ignore_errors=True)
        if run.has_begun and run.command.reproducible:
            _tell(f"{run.directory} keeps no experience: it begins anew, and what it had is removed")
            with lock_run(str(run.directory)):
                run.directory.rename(removed)  # at once: half of a run could neither be resumed nor made anew
        shutil.rmtree(removed, ignore_errors=True)
        seconds = self._seconds_left(run)
        self._note(run, is_complete=False)
        where = ["--run-dir", str(run.directory)]
        if run.has_begun:  # a total that it has reached, perhaps its preset's, would not be its end any more
            where = ["--resume", str(run.directory), *_totals(run.command.learning)]
        limit = ["--max-seconds", str(seconds)] if math.isfinite(seconds) else []
        self.launch(run, [*run.arguments, *limit, *where])
        self._check_end(run, seconds)
        self._note(run, is_complete=True)

    def _wait_until_free(self, run: SweepRun) -> None:
        """Waits while another launcher has the directory: when its sweep was killed it ends by itself.

        Raises: ConfigError when it still has it after the time in which a run ends.
        """
        deadline, said = time.monotonic() + ENDING_SECONDS, ""
        while not self._stop.is_set():
            try:
                with lock_run(str(run.directory)):
                    return
            except ConfigError as error:
                if time.monotonic() >= deadline:
                    raise
                if said != (said := str(error)):
                    logging.info("waiting: %s", error)
            self._stop.wait(WAIT_SECONDS)

    def _seconds_left(self, run: SweepRun) -> float:
        """Returns the seconds of --max-seconds that are left of a run, infinite without that flag.

        One at least: its last network may not have been evaluated.
        """
        if not run.command.max_seconds:
            return math.inf
        if not run.has_begun:
            return run.command.max_seconds
        with asking() as ask:
            counters = continued(run.directory, ask)
        return max(run.command.max_seconds - (0.0 if counters is None else counters.seconds), 1.0)

    def launch(self, run: SweepRun, arguments: list[str]) -> None:
        """Starts the launcher for a run, and returns when it has ended well.

        Raises: ApexError when it has not.
        """
        supervisor, name = Supervisor(max_restarts=0), run.directory.name
        supervisor.start(name, ["-m", "apexrl.running.launch", *arguments], log=self._log(run))
        child = supervisor.children[name]
        while child.status is None and not self._stop.wait(WATCH_SECONDS):
            supervisor.bound_logs()
        signals = self._stop.num_signals
        supervisor.stop([name], ENDING_SECONDS, ENDING_SECONDS, hurried=lambda: self._stop.num_signals > signals)
        if status := child.status:
            words = child.last_words(status)
            raise ApexError(f"it ended with {describe_status(status)}" + (f": {words}" if words else ""))

    def _check_end(self, run: SweepRun, seconds: float) -> None:
        """Raises ApexError when a run has not reached its end: it was stopped, and not by a flag of its own."""
        path, learning = run.directory / SUMMARY_FILE, run.command.learning
        summary = read_json(path, Summary)
        ends = (seconds, learning.total_frames or math.inf, learning.total_updates or math.inf)
        if self._stop.is_set():
            raise ApexError("it was stopped: the next start of the sweep goes on with it")
        if summary.ended_by:
            return
        if all(done < end for done, end in zip((summary.seconds, summary.frames, summary.updates), ends, strict=True)):
            raise ApexError(f"it was stopped at {summary.frames:,} frames: the next start of the sweep goes on with it")
        if is_unevaluated(run.command, run.directory):
            raise ApexError(
                "its last network was not evaluated: the next start of the sweep goes on with it, and its "
                "logs/evaluator.log says how far that was"
            )

    def _note(self, run: SweepRun, is_complete: bool) -> None:
        self._records[run.directory.name] = Record(run.arguments, is_complete)
        write_json(self._directory / SWEEP_FILE, self._records)

    def _log(self, run: SweepRun) -> Path:
        return run.directory.with_name(f"{run.directory.name}.log")


def compare_runs(file: SweepFile, runs: Iterable[SweepRun]) -> None:
    """Compares runs by variant. A run without evaluations is named and left out."""
    runs, faults = list(runs), list[str]()
    names = dict.fromkeys(run.variant for run in runs)
    groups = {name: readable_runs((run.directory for run in runs if run.variant == name), faults) for name in names}
    for fault in faults:
        say(f"left out: {fault}", file=sys.stderr)
    if groups := {name: results for name, results in groups.items() if results}:
        write_comparison(groups, Path(file.directory) / COMPARISON, file.threshold, {})


def _tell(text: str, file: TextIO | None = None) -> None:
    """Prints how far the sweep is, which a full disk under its output does not end."""
    with contextlib.suppress(OSError):
        say(text, file=file, flush=True)


def _totals(learning: LearningConfig) -> list[str]:
    totals = {"--total-frames": learning.total_frames, "--total-updates": learning.total_updates}
    return [word for flag, total in totals.items() if total for word in (flag, str(total))]


def main() -> int:
    """Runs the command line; returns the exit status, 1 when a run is not complete."""
    check_not_imported()
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        say(__doc__)
        return 0 if "--help" in sys.argv else 2
    log_to(form="%(message)s")
    try:
        return attempt("sweep", lambda: make_all(Path(sys.argv[1]), sys.argv[2:], Stop()))
    except KeyboardInterrupt:
        say("stopped before it began", file=sys.stderr)
        return INTERRUPTED_STATUS


def make_all(path: Path, flags: list[str], stop: Stop) -> int:
    """Makes the runs of a file, and compares them; returns the exit status, 1 when a run is not complete.

    Raises: ConfigError when a command line makes no run, or others keep the ports or a directory.
    """
    file = read_file(path)
    runs = runs_of(file, flags)
    stop.on_signals()
    with locked(Path(file.directory) / LOCK_FILE, "a sweep that goes on"):
        sweep = Sweep(Path(file.directory), runs, stop)
        failed = sweep.run()
        if stop.is_set():
            say("stopped: the same command goes on with the sweep")
            return 1
        compare_runs(file, [run for run in runs if sweep.is_complete(run)])
    if failed:
        say(f"failed: {', '.join(failed)}; the same command tries again", file=sys.stderr)
    return 1 if failed else 0
