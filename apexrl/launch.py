"""One machine, everything: `python -m apexrl.launch`, which run.sh calls. Starts the roles, watches them, ends them."""

import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from apexrl.checkpoint import LATEST, load_checkpoint
from apexrl.config import ActorCommand, LearnerCommand, ReplayCommand, RunCommand
from apexrl.errors import ApexError, ConfigError, WireError
from apexrl.files import write_json
from apexrl.flags import parse_onto, to_flags
from apexrl.lifecycle import Stop
from apexrl.plan import Plan, check_ports, check_run_dir, describe, make_plan
from apexrl.status import Display, read_status, summary_of
from apexrl.supervise import Supervisor
from apexrl.types import StreamSpec

logger = logging.getLogger("run")

ROOT = Path(__file__).resolve().parent.parent
ACTORS_STOP_SECONDS, LEARNER_STOP_SECONDS, OTHERS_STOP_SECONDS = 3.5, 4.0, 1.5  # 9 s together
WATCH_SECONDS = 0.2
CONFIG_FILE, SUMMARY_FILE = "config.json", "summary.json"


def main() -> int:
    """Runs what the command line asks for; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    stop = Stop()
    stop.on_signals()
    console = Console()
    try:
        if not (ROOT / "actor.py").exists():
            raise ConfigError(f"there are no role scripts in {ROOT}: run from a checkout of the repository")
        asked = parse_onto(RunCommand())
        plan = make_plan(asked, _saved(asked.resume))
        check_ports(plan.command)
        check_run_dir(plan.command)
        _save_config(plan.command)
        _show_plan(console, plan)
        return Run(plan.command, plan.spec, console).run(stop)
    except ApexError as error:
        console.print(f"[bold red]cannot run:[/] {error}", highlight=False)
        return 1


class Run:
    """One run on this machine; owns the child processes."""

    def __init__(self, command: RunCommand, spec: StreamSpec, console: Console):
        self._command = command
        self._spec = spec
        self._console = console
        self._directory = Path(command.run_dir)
        self._supervisor = Supervisor(command.max_restarts)
        self._started = time.monotonic()

    def run(self, stop: Stop) -> int:
        """Runs until the learner has finished, the time is up, or a signal comes; returns the exit status."""
        status = 0
        with contextlib.ExitStack() as files:
            try:
                self._start(files)
                with Display(self._console, self._directory, self._supervisor) as display:
                    while not stop.wait(WATCH_SECONDS):
                        finished = self._supervisor.watch()
                        display.update()
                        if "learner" in finished:
                            break
                        if self._command.max_seconds and self._elapsed() >= self._command.max_seconds:
                            break
            except ApexError as error:
                logger.error("%s; see the logs in %s", error, self._directory / "logs")
                status = 1
            finally:
                self._stop()
        self._summarize()
        return status

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _start(self, files: contextlib.ExitStack) -> None:
        """Starts all roles; each writes a log of its own."""
        command = self._command
        logs = self._directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        acting = ActorCommand(
            command.env, command.wires, command.agent, command.acting, command.evaluation, command.actor_device,
            seed=command.seed, preset=command.preset,
        )  # fmt: skip
        kept = command.replay
        if kept.journal_dir == "auto":
            kept = dataclasses.replace(kept, journal_dir=str((self._directory / "journal").resolve()))
        replay = ReplayCommand(command.wires, kept, command.seed, command.preset)
        learner = LearnerCommand(
            command.wires, command.agent, command.update, command.network, command.learning, command.run_dir,
            command.seed, command.preset,
        )  # fmt: skip
        evaluation = command.evaluation
        if not evaluation.record_dir:
            evaluation = dataclasses.replace(evaluation, record_dir=str(self._directory / "videos"))
        evaluator = dataclasses.replace(acting, evaluation=evaluation, device="cpu", evaluate=True)
        roles = {"replay": ("replay.py", replay), "learner": ("learner.py", learner), "actors": ("actor.py", acting)}
        if command.evaluator:
            roles["evaluator"] = ("actor.py", evaluator)
        for name, (script, config) in roles.items():
            log = files.enter_context((logs / f"{name}.log").open("ab"))
            arguments = [str(ROOT / script), *to_flags(config)]
            self._supervisor.start(name, arguments, name != "evaluator", may_finish=name == "learner", log=log)
        if command.tensorboard:
            log = files.enter_context((logs / "tensorboard.log").open("ab"))
            board = [str(self._directory / "tensorboard"), command.tensorboard_host, str(command.tensorboard_port)]
            self._supervisor.start("tensorboard", ["-m", "apexrl.board", *board], is_needed=False, log=log)

    def _stop(self) -> None:
        """Actors first, so that nothing new comes; then the learner, which checkpoints; then the others."""
        self._supervisor.stop(["actors", "evaluator"], ACTORS_STOP_SECONDS)
        self._supervisor.stop(["learner"], LEARNER_STOP_SECONDS)
        self._supervisor.stop(["replay", "tensorboard"], OTHERS_STOP_SECONDS)

    def _summarize(self) -> None:
        summary = summary_of(
            read_status(self._directory), self._spec.env, self._elapsed(), self._supervisor.num_restarts
        )
        write_json(self._directory / SUMMARY_FILE, summary)
        self._console.print(f"summary: {self._directory / SUMMARY_FILE}", highlight=False)
        for name, value in msgspec.structs.asdict(summary).items():
            self._console.print(f"  {name:24} {value}", highlight=False)


def _saved(directory: str) -> RunCommand | None:
    """Returns the configuration of the run to continue, None for a new run.

    Raises: ConfigError when there is no such run, WireError when its configuration cannot be read.
    """
    if not directory:
        return None
    path = Path(directory) / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} has no {CONFIG_FILE}: --resume takes the directory of an earlier run")
    try:
        command = msgspec.json.decode(path.read_bytes(), type=SavedConfig).command
    except msgspec.MsgspecError as error:
        raise WireError(f"{path} is not the configuration of a run: {error}") from error
    learning = dataclasses.replace(command.learning, total_updates=0, total_frames=0)
    return dataclasses.replace(command, run_dir=directory, learning=learning, max_seconds=0.0)


@dataclasses.dataclass(frozen=True)
class SavedConfig:
    """What is written to config.json."""

    command: RunCommand
    revision: str
    versions: dict[str, str]


def _save_config(command: RunCommand) -> None:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "ale-py", "gymnasium", "numpy", "pyzmq")}
    versions |= {"python": platform.python_version(), "machine": platform.platform(), "cores": str(psutil.cpu_count())}
    write_json(Path(command.run_dir) / CONFIG_FILE, SavedConfig(command, _revision(), versions))


def _revision() -> str:
    """Returns the git revision of the code, marked when it was changed since."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.strip() or "unknown"


def _show_plan(console: Console, plan: Plan) -> None:
    table = Table(show_header=False, box=None)
    for row in describe(plan):
        table.add_row(*row)
    console.print(table, highlight=False)
    latest = Path(plan.command.run_dir) / "checkpoints" / LATEST
    if plan.command.resume and latest.exists():
        counters = load_checkpoint(latest).header.counters
        frames = counters.transitions_inserted * plan.spec.frames_per_step
        console.print(f"continuing {latest} at update {counters.updates:,}, {frames:,} frames", highlight=False)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
