"""One whole run, measured: `python -m benchmarks.gpu_run --json FILE --keep DIR [--until RETURN] -- FLAGS of run.sh`.

It starts `python -m apexrl.running.launch` in a directory of its own, reads status.json, and ends the run. Rates are
those between two reports of the learner, while updates go on. The time to a return counts from the start of the
launcher to the report that has the evaluation.
"""

import argparse
import contextlib
import itertools
import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from apexrl.files import write_json
from apexrl.learning.record.status_file import STATUS_FILE, Status, read_status
from apexrl.runs import CURVE_FILE
from benchmarks.replay import ROOT, free_ports

POLL_SECONDS = 0.5
SETTLE_SECONDS = 4.0  # from the first update seen to the begin of the rates
STOP_SECONDS = 20.0
KEPT = (CURVE_FILE, STATUS_FILE, "config.json", "summary.json")
PORTS = ("--actor-port", "--batch-port", "--parameter-port", "--metrics-port")


class Report(NamedTuple):
    """One state of the status file."""

    written: float  # modification time of the file, in seconds
    status: Status
    cpu_seconds: dict[str, float]  # that each role has taken up to then


def watch(launcher: subprocess.Popen[bytes], directory: Path, deadline: float, until: float | None) -> list[Report]:
    """Returns all reports until the deadline, the launcher's end, or an evaluation with the mean return asked for."""
    reports: list[Report] = []
    while time.time() < deadline and launcher.poll() is None:
        time.sleep(POLL_SECONDS)
        status = read_status(directory)
        if status is None:
            continue
        written = (directory / STATUS_FILE).stat().st_mtime
        if not reports or written > reports[-1].written:
            reports.append(Report(written, status, cpu_seconds_of(psutil.Process(launcher.pid))))
        if until is not None and _best(reports[-1]) >= until:
            break
    return reports


def cpu_seconds_of(launcher: psutil.Process) -> dict[str, float]:
    """Returns the CPU seconds of the launcher and of each role, its own processes included; of those that run."""
    seconds: dict[str, float] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        seconds["launch"] = _cpu_seconds(launcher)
        for child in launcher.children():
            name, family = role_of(child.cmdline()), [child, *child.children(recursive=True)]
            seconds[name] = seconds.get(name, 0.0) + sum(map(_cpu_seconds, family))
    return seconds


def role_of(command: list[str]) -> str:
    """Returns the name of the script or module that a command line runs."""
    scripts = [word for before, word in itertools.pairwise(command) if before == "-m" or word.endswith(".py")]
    return scripts[0].removesuffix(".py").replace("/", ".").split(".")[-1] if scripts else "others"


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def figures_of(reports: list[Report], started: float, until: float | None) -> dict[str, Any]:
    """Returns the figures of the reports, without rates when the return asked for came before there were any.

    Raises: ValueError when the reports give no figures.
    """
    learning = [report for report in reports if report.status.counters.updates > 0]
    learning = [report for report in learning if report.written >= learning[0].written + SETTLE_SECONDS]
    reached = [report for report in reports if until is not None and _best(report) >= until]
    if len(learning) < 2 and not reached:
        raise ValueError(f"{len(reports)} reports, {len(learning)} of them with updates going on: too few for a rate")
    last = reports[-1]
    return {
        **(_rates(learning[0], last) if len(learning) > 1 else {}),
        "env": last.status.env,
        "seconds": last.written - started,
        "frames": last.status.frames,
        "updates": last.status.counters.updates,
        "last_return": last.status.counters.last_evaluation_return,
        "best_return": last.status.counters.best_evaluation_return,
        "return_asked": until,
        "return_reached_after_seconds": reached[0].written - started if reached else None,
        "figures": last.status.metrics,
    }


def _best(report: Report) -> float:
    best = report.status.counters.best_evaluation_return
    return -math.inf if best is None else best


def _rates(first: Report, last: Report) -> dict[str, Any]:
    elapsed = last.written - first.written
    spent = {role: seconds - first.cpu_seconds.get(role, 0.0) for role, seconds in last.cpu_seconds.items()}
    return {
        "cores_by_role": {role: seconds / elapsed for role, seconds in spent.items()},
        "frames_per_second": (last.status.frames - first.status.frames) / elapsed,
        "updates_per_second": (last.status.counters.updates - first.status.counters.updates) / elapsed,
        "measured_seconds": elapsed,
    }


def stop(launcher: subprocess.Popen[bytes]) -> None:
    """Ends a run as Ctrl-C does."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
    try:
        launcher.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()  # its roles notice this, and end by themselves
        launcher.wait()


def measure(flags: list[str], seconds: float, until: float | None, keep: Path, out: Path) -> dict[str, Any]:
    """Runs once, writes the figures to `out`, and leaves the small files and the logs of the run in `keep`.

    The figures are there before the run is ended, which can take long.

    Raises: RuntimeError when the launcher failed, ValueError when the reports give no figures.
    """
    ports = [text for name, port in zip(PORTS, free_ports(4), strict=True) for text in (name, str(port))]
    with tempfile.TemporaryDirectory(prefix="apexrl-run-") as directory:
        run = Path(directory) / "run"
        command = [
            sys.executable,
            "-m",
            "apexrl.running.launch",
            "--run-dir",
            str(run),
            "--no-tensorboard",
            *ports,
            *flags,
        ]
        started = time.time()
        launcher = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
        try:
            # The deadline counts from the start of this process, so that loading makes no run longer than planned.
            reports = watch(launcher, run, psutil.Process().create_time() + seconds, until)
            if launcher.poll() not in (None, 0):
                raise RuntimeError(f"the launcher ended with status {launcher.returncode}; logs: {keep / 'logs'}")
            batch_size = json.loads((run / "config.json").read_bytes())["command"]["update"]["batch_size"]
            found = {"flags": flags, "batch_size": batch_size, **figures_of(reports, started, until)}
            write_json(out, found)
            return found
        finally:
            stop(launcher)
            keep.mkdir(parents=True, exist_ok=True)
            for name in KEPT:
                if (run / name).exists():
                    shutil.copy(run / name, keep)
            if (run / "logs").exists():
                shutil.copytree(run / "logs", keep / "logs", dirs_exist_ok=True)


def interrupted(*_: object) -> None:
    """Ends the program through its `finally` clauses. A second signal does not disturb them: timeout sends two."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(143)


def main() -> None:
    """Measures one run, prints its figures and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    parser.add_argument("--keep", type=Path, required=True, help="directory for the run's curve, configuration, logs")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="from the start of this process to the end of the run"
    )
    parser.add_argument("--until", type=float, help="end when an evaluation has this mean return")
    parser.add_argument("flags", nargs="*", help="after --: flags of apexrl.running.launch")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupted)
    found = measure(arguments.flags, arguments.seconds, arguments.until, arguments.keep, arguments.json)
    print(json.dumps({name: value for name, value in found.items() if name != "figures"}, indent=1))


if __name__ == "__main__":
    main()
