"""One machine, everything: `python -m apexrl.running.launch`, for run.sh. Starts, watches and ends the roles."""

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from apexrl.config import Command, OfflineCommand, RunCommand, part_of
from apexrl.errors import ApexError, ConfigError
from apexrl.files import write_json
from apexrl.flags import (
    actor_command,
    agent_of,
    default_command,
    learner_command,
    parse_onto,
    replay_command,
    to_flags,
    value_given,
)
from apexrl.learning.status_file import read_status
from apexrl.lifecycle import Stop, end_with_parent, exit_status
from apexrl.networks.checkpoint import Counters, load_checkpoint
from apexrl.replay.journal import identity_of
from apexrl.running.clock import Clock, what_is_missing
from apexrl.running.display import ConsoleHandler, Display, probabilities_of, summary_of
from apexrl.running.plan import Plan, check_asked, describe, make_plan
from apexrl.running.ports import check_ports
from apexrl.running.run_directory import (
    CONFIG_FILE,
    ROOT,
    SUMMARY_FILE,
    as_fork,
    as_guest,
    check_new,
    checkpoint_of,
    continued,
    environment_of,
    fork_run,
    host_of,
    journals_of,
    latest_path,
    lock_run,
    save_config,
    saved_command,
    set_aside,
)
from apexrl.running.supervise import STOP_LIMIT_SECONDS, Supervisor
from apexrl.types import StreamSpec

logger = logging.getLogger("run")

ACTORS_IDLE_SECONDS, LEARNER_IDLE_SECONDS, OTHERS_IDLE_SECONDS = 3.5, 4.0, 1.5  # 9 s together
ENDING_SECONDS = 3 * STOP_LIMIT_SECONDS + 10.0  # a run ends within this time: its roles stop in three steps
WATCH_SECONDS = 0.2
FINISHING = frozenset({"learner", "lockstep"})  # the roles that reach the end of a run; it has one of them


def main() -> int:
    """Runs the command line; returns the exit status."""
    console = Console(markup=False, emoji=False, highlight=False)  # others wrote much of the printed text
    form, handlers = "%(asctime)s %(name)s: %(message)s", [ConsoleHandler(console)]
    logging.basicConfig(level=logging.INFO, format=form, datefmt="%H:%M:%S", handlers=handlers)
    stop = Stop()
    stop.on_signals()
    end_with_parent(stop, ENDING_SECONDS)
    try:
        with contextlib.ExitStack() as held:
            plan = _prepare(console, held)
            return Run(plan.command, plan.spec, console).run(stop)
    except (ApexError, OSError) as error:
        console.print(Text.assemble(("cannot run:", "bold red"), f" {error}"), soft_wrap=True)
        return exit_status(error) if isinstance(error, ApexError) else 1


def _prepare(console: Console, held: contextlib.ExitStack) -> Plan:
    """Returns the plan of a run whose directory is locked, until `held` is closed, and ready.

    Raises: ConfigError when the run cannot work; nothing was changed then.
    """
    if not (ROOT / "actor.py").exists():
        raise ConfigError(f"there are no role scripts in {ROOT}: run from a checkout of the repository")
    agent, saved = value_given("--agent", sys.argv), None
    if earlier := value_given("--resume", sys.argv) or value_given("--fork", sys.argv):
        saved, not_given = saved_command(Path(earlier))
        agent = agent or saved.agent
    host = value_given("--guest", sys.argv)
    if host and saved is None:
        agent = agent or host_of(Path(host)).agent
    default = default_command(RunCommand, agent or agent_of(sys.argv))
    if saved is None and (journal := value_given("--from-journal", sys.argv)):
        environment = environment_of(Path(journal), identity_of(Path(journal)).spec.env)
        default = dataclasses.replace(default, env=environment)
    if host and saved is None:
        default = as_guest(default, host_of(Path(host)))
    asked = parse_onto(default)
    check_asked(asked)
    with contextlib.ExitStack() as copying:  # a fork needs the other run's directory for a moment only
        if saved is not None:
            (copying if asked.fork else held).enter_context(lock_run(earlier))
            if not_given:
                missing = ", ".join(not_given)
                console.print(f"{CONFIG_FILE} does not give {missing}: the defaults are taken", soft_wrap=True)
        plan = make_plan(asked, as_fork(saved) if saved is not None and asked.fork else saved)
        check_ports(plan.command)
        if not asked.resume:
            _make_directory(asked, saved, plan.command, held)
    directory = Path(plan.command.run_dir)
    going_on = None if saved is None or asked.from_scratch else continued(directory)
    if asked.resume and asked.from_scratch:
        console.print(f"the earlier results are in {set_aside(directory)}", soft_wrap=True)
    save_config(plan.command)
    _show_plan(console, plan, going_on)
    return plan


def _make_directory(
    asked: RunCommand, saved: RunCommand | None, command: RunCommand, held: contextlib.ExitStack
) -> None:
    """Makes and locks the directory of a new run; that of a fork gets the experience and the checkpoint of `saved`.

    Raises: ConfigError when it is not empty, or when the other run cannot be forked.
    """
    checkpoint = None
    if asked.fork and (asked.at or not asked.from_scratch):
        checkpoint = checkpoint_of(Path(asked.fork), asked.at)
    check_new(Path(command.run_dir))
    held.enter_context(lock_run(command.run_dir))
    if saved is not None:
        fork_run(saved, checkpoint, command)


def _show_plan(console: Console, plan: Plan, going_on: Counters | None) -> None:
    table = Table(show_header=False, box=None)
    for row in describe(plan):
        table.add_row(*row)
    console.print(table)
    if going_on is not None:
        frames = going_on.transitions_inserted * plan.spec.frames_per_step
        path = latest_path(Path(plan.command.run_dir))
        console.print(f"continuing {path} at update {going_on.updates:,}, {frames:,} frames", soft_wrap=True)
    elif plan.command.resume or plan.command.from_scratch:
        console.print("training a new network on the run's experience")


def roles_of(command: RunCommand) -> dict[str, tuple[str, Command]]:
    """Returns the script or module, and the command of each role of a run."""
    directory, evaluation = Path(command.run_dir), command.evaluation
    if not evaluation.record_dir:
        evaluation = dataclasses.replace(evaluation, record_dir=str(directory / "videos"))
    if command.reproducible:
        return {"lockstep": ("apexrl.lockstep", dataclasses.replace(command, evaluation=evaluation))}
    actors = actor_command(command)
    if not command.has_actors:
        learner = OfflineCommand(
            **vars(learner_command(command)), replay=command.replay, from_journal=command.from_journal,
            guest=bool(command.guest),
        )  # fmt: skip
        roles: dict[str, tuple[str, Command]] = {"learner": ("learner.py", learner)}
    else:
        roles = dict(replays_of(command))
        roles |= {"learner": ("learner.py", learner_command(command)), "actors": ("actor.py", actors)}
    if command.evaluator:
        evaluator = dataclasses.replace(actors, evaluation=evaluation, device="cpu", evaluate=True)
        roles["evaluator"] = ("actor.py", evaluator)
    return roles


def replays_of(command: RunCommand) -> Iterator[tuple[str, tuple[str, Command]]]:
    """Yields name, script and command of the replay server of each shard."""
    replay, journals, num_shards = replay_command(command), journals_of(command), command.wires.shards
    for shard in range(num_shards):
        kept = part_of(replay.replay, num_shards)
        if command.replay.journal_dir != "off":
            kept = dataclasses.replace(kept, journal_dir=str(journals[shard].resolve()))
        # One seed would draw the same positions of every shard.
        seed, wires = command.seed + shard, command.wires.of_shard(shard)
        name = "replay" if num_shards == 1 else f"replay {shard}"
        yield name, ("replay.py", dataclasses.replace(replay, seed=seed, wires=wires, replay=kept))


class Run:
    """One run on this machine; owns the child processes."""

    def __init__(self, command: RunCommand, spec: StreamSpec, console: Console):
        self._command = command
        self._spec = spec
        self._console = console
        self._directory = Path(command.run_dir)
        self._logs = self._directory / "logs"
        self._supervisor = Supervisor(command.max_restarts)
        self._replays: list[str] = []  # names of their roles
        self._clock = Clock(command)
        self._checkpointed = self._checkpoint_time()

    def run(self, stop: Stop) -> int:
        """Runs until the learner has finished, the time is up, or a signal comes; returns the exit status."""
        status, fault = 0, ""
        try:
            self._start()
            with Display(self._console, self._directory, self._supervisor) as display:
                while not stop.wait(WATCH_SECONDS):
                    finished = self._supervisor.watch()
                    display.update()
                    if FINISHING.intersection(finished) or self._clock.is_over(self._counters()):
                        break
        except ApexError as error:
            status, fault = exit_status(error), f"{error}; see the logs in {self._logs}"
            logger.error("%s", fault)
        finally:
            self._stop(stop)
        self._summarize()
        if fault:  # once more: the last line says why the run ended
            logger.error("%s", fault)
        if not status and self._command.smoke and (missing := what_is_missing(self._counters())):
            status = 1
            seconds, failures = self._clock.elapsed(), ", ".join(missing)
            logger.error(
                "the smoke run failed: in %.0f s nothing was %s; see the logs in %s", seconds, failures, self._logs
            )
        return status

    def _counters(self) -> Counters:
        status = read_status(self._directory)
        return status.counters if status is not None else Counters()

    def _start(self) -> None:
        """Starts all roles; each writes a log of its own."""
        command = self._command
        self._logs.mkdir(parents=True, exist_ok=True)
        roles = roles_of(command)
        self._replays = [name for name in roles if name.startswith("replay")]
        for name, (script, config) in roles.items():
            arguments = [*([str(ROOT / script)] if script.endswith(".py") else ["-m", script]), *to_flags(config)]
            is_needed = name != "evaluator" or command.smoke
            self._supervisor.start(name, arguments, is_needed, name in FINISHING, self._logs / f"{name}.log")
        if command.tensorboard:
            board = [str(self._directory / "tensorboard"), command.tensorboard_host, str(command.tensorboard_port)]
            arguments = ["-m", "apexrl.running.tensorboard", *board]
            self._supervisor.start("tensorboard", arguments, is_needed=False, log=self._logs / "tensorboard.log")

    def _stop(self, stop: Stop) -> None:
        """Actors first, so that nothing new comes; then the learner, which checkpoints; then the others."""
        signals = stop.num_signals
        self._console.print("ending the run; Ctrl-C kills it at once")
        for names, idle_seconds in (
            (["actors", "evaluator"], ACTORS_IDLE_SECONDS),
            ([*FINISHING], LEARNER_IDLE_SECONDS),
            ([*self._replays, "tensorboard"], OTHERS_IDLE_SECONDS),
        ):
            self._supervisor.stop(names, idle_seconds, hurried=lambda: stop.num_signals > signals)

    def _checkpoint_time(self) -> int:
        path = latest_path(self._directory)
        return path.stat().st_mtime_ns if path.is_file() else 0

    def _summarize(self) -> None:
        """Prints the remains of the run: the checkpoint and the summary."""
        if self._checkpoint_time() == self._checkpointed:
            self._console.print("no checkpoint was written")
        else:
            path = latest_path(self._directory)
            try:
                updates = load_checkpoint(path).header.counters.updates
                self._console.print(f"checkpoint written: {path}, update {updates:,}", soft_wrap=True)
            except ApexError as error:
                logger.error("the checkpoint cannot be read: %s", error)
        status, restarts = read_status(self._directory), self._supervisor.num_restarts
        outcome = summary_of(status, self._spec.env, self._clock.elapsed(), restarts)
        summary = msgspec.structs.asdict(outcome) | probabilities_of(status)
        try:
            write_json(self._directory / SUMMARY_FILE, summary)
            self._console.print(f"summary: {self._directory / SUMMARY_FILE}", soft_wrap=True)
        except OSError as error:
            logger.error("the summary cannot be written: %s", error)
        for name, value in summary.items():
            self._console.print(f"  {name:24} {value}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
