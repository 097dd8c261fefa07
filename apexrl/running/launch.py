"""One machine, everything: `apexrl train`, which run.sh calls. Starts, watches and ends the roles."""

import contextlib
import dataclasses
import logging
import os
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from apexrl.children import role_script
from apexrl.config.commands import Command, RunCommand
from apexrl.config.fields import with_values
from apexrl.config.flags import actor_command, learner_command, replay_command, to_flags
from apexrl.config.words import sister
from apexrl.errors import ApexError
from apexrl.files import write_json
from apexrl.guard import check_not_imported
from apexrl.learning.record.status_file import LAST_EVALUATION, Status, Statuses, read_status
from apexrl.lifecycle import INTERRUPTED_STATUS, Stop, end_with_parent, exit_status, run_program
from apexrl.lines import log_to
from apexrl.networks.headers import Counters, latest_path, load_header
from apexrl.running.callbacks import News, is_end
from apexrl.running.clock import Clock, what_is_missing
from apexrl.running.display import (
    ConsoleHandler,
    Display,
    RunConsole,
    probabilities_of,
    say_failed,
    summary_of,
    targets_of,
)
from apexrl.running.plan import Plan
from apexrl.running.prepare import prepare, trackers_of
from apexrl.running.run_directory import CONFIG_FILE, SUMMARY_FILE, journals_of
from apexrl.running.supervise import STOP_LIMIT_SECONDS, Supervisor
from apexrl.running.trackers import KINDS as TRACKERS
from apexrl.runs import CHECKPOINTS, SWEEP_FILE, network_words
from apexrl.types import StreamSpec

logger = logging.getLogger("run")

ACTORS_IDLE_SECONDS, LEARNER_IDLE_SECONDS, OTHERS_IDLE_SECONDS = 3.5, 4.0, 1.5  # 9 s together
TRACKERS_IDLE_SECONDS = 10.0  # they wait for servers, which takes neither processor nor disk
ENDING_SECONDS = 3 * STOP_LIMIT_SECONDS + 10.0  # a run ends within this time: its roles stop in three steps
WATCH_SECONDS = 0.2
LAST_WORD_SECONDS = 30.0  # after the time of a run, in which its learner says that it waits for the last evaluation
SIGNS = (CONFIG_FILE, "tensorboard", SWEEP_FILE)  # of a run, of one by learner.py alone, of a sweep
FINISHING = frozenset({"learner", "lockstep"})  # the roles that reach the end of a run; it has one of them


def main() -> int:
    """Runs the command line; returns the exit status."""
    check_not_imported()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = RunConsole()
    log_to(ConsoleHandler(console))
    stop = Stop()
    end_with_parent(stop, ENDING_SECONDS)
    try:
        with contextlib.ExitStack() as held:
            plan = prepare(sys.argv[1:], console, held, begin=stop.on_signals)
            return Run(plan, console).run(stop)
    except KeyboardInterrupt:
        console.print("stopped before it began: nothing was changed")
        return INTERRUPTED_STATUS
    except (ApexError, OSError) as error:
        say_failed("cannot run", error)
        return exit_status(error)


def roles_of(
    command: RunCommand, stream: StreamSpec | None = None, ends_at: float = 0.0
) -> dict[str, tuple[str, Command]]:
    """Returns the script or module, and the command of each role of a run.

    Args:
      stream: the run's, for its replay.
      ends_at: when the run's time is over, for its learner; 0: never.
    """
    directory, evaluation = Path(command.run_dir), command.evaluation
    if not evaluation.record_dir:
        evaluation = dataclasses.replace(evaluation, record_dir=str(directory / "videos"))
    if command.reproducible:
        return {"lockstep": ("apexrl.lockstep", dataclasses.replace(command, evaluation=evaluation))}
    actors, learner = actor_command(command), dataclasses.replace(learner_command(command), ends_at=ends_at)
    if not command.evaluator:
        learner = with_values(learner, {"final_evaluation_seconds": 0.0})
    if not command.has_actors:
        roles: dict[str, tuple[str, Command]] = {"learner": ("learner.py", learner)}
    else:
        roles = dict(replays_of(command, stream))
        roles |= {"learner": ("learner.py", learner), "actors": ("actor.py", actors)}
    if command.evaluator:
        evaluator = dataclasses.replace(actors, evaluation=evaluation, device="cpu", evaluate=True)
        roles["evaluator"] = ("actor.py", evaluator)
    return roles


def replays_of(command: RunCommand, stream: StreamSpec | None) -> Iterator[tuple[str, tuple[str, Command]]]:
    """Yields name, script and command of the replay server of each shard."""
    replay, journals, num_shards = replay_command(command), journals_of(command), command.wires.shards
    told = msgspec.json.encode(stream).decode() if stream is not None else ""
    for shard in range(num_shards):
        kept = str(journals[shard].resolve()) if journals else "off"
        name = "replay" if num_shards == 1 else f"replay {shard}"
        yield name, ("replay.py", with_values(replay, {"shard": shard, "stream": told, "journal_dir": kept}))


def start_role(supervisor: Supervisor, command: RunCommand, name: str, script: str, config: Command) -> None:
    """Starts one of `roles_of` a run. It writes a log of its own.

    The replay servers that a guest's learner follows are another run's, which ends without us.
    """
    arguments = [*([role_script(script)] if script.endswith(".py") else ["-m", script]), *to_flags(config)]
    is_needed = name != "evaluator" or command.smoke
    log, is_guest = Path(command.run_dir) / "logs" / f"{name}.log", bool(command.guest) and name == "learner"
    supervisor.start(name, arguments, is_needed, name in FINISHING, log, peers_come_back=not is_guest)


def start_callbacks(supervisor: Supervisor, command: RunCommand) -> None:
    """Starts the roles that call code of the user's own. Each ends the run when it finishes."""
    for called in command.callback:
        arguments = ["-m", "apexrl.running.callbacks", command.run_dir, called]
        log = Path(command.run_dir) / "logs" / f"callback-{called.replace(':', '-')}.log"
        supervisor.start(f"callback {called}", arguments, may_finish=True, log=log)


def start_observers(supervisor: Supervisor, command: RunCommand) -> None:
    """Starts TensorBoard on a run, and on those beside it, and the roles that tell trackers of experiments about it."""
    directory, observers = Path(command.run_dir), dict[str, list[str]]()
    if command.tensorboard:
        shown = str(shown_by_board(directory))
        observers["tensorboard"] = ["tensorboard", shown, command.tensorboard_host, str(command.tensorboard_port)]
    observers |= {name: ["trackers", name, command.run_dir] for name in trackers_of(command)}
    for name, (module, *arguments) in observers.items():
        log = directory / "logs" / f"{name}.log"
        supervisor.start(name, ["-m", f"apexrl.running.{module}", *arguments], is_needed=False, log=log)


def shown_by_board(directory: Path) -> Path:
    """Returns the directory below which TensorBoard looks for event files: that of all runs, or the run's own.

    It is the run's own where others than runs and sweeps lie beside it: a home would be searched again and again.
    """
    directory = directory.resolve()
    try:
        others = (path for path in directory.parent.iterdir() if path != directory and path.is_dir())
        are_runs = all(any((path / name).exists() for name in SIGNS) for path in others)
        return directory.parent if are_runs else directory
    except OSError:  # somebody else's, such as lost+found
        return directory


def end_steps(names: Iterable[str]) -> list[tuple[list[str], float]]:
    """Returns the steps in which a run's roles end: their names, and how long one may do nothing.

    Actors first, so that nothing new comes; then the learner, which checkpoints; then the others.
    """
    actors = [name for name in names if name.startswith(("actors", "evaluator"))]
    learner = [name for name in names if name in FINISHING]
    others = [name for name in names if name not in (*actors, *learner)]
    others_idle_seconds = OTHERS_IDLE_SECONDS if TRACKERS.keys().isdisjoint(others) else TRACKERS_IDLE_SECONDS
    return [(actors, ACTORS_IDLE_SECONDS), (learner, LEARNER_IDLE_SECONDS), (others, others_idle_seconds)]


def players_of(names: Iterable[str]) -> list[str]:
    """Returns the names of the roles that have environments."""
    return [name for name in names if name.startswith(("actors", "evaluator", "lockstep"))]


class Run:
    """One run on this machine; owns the child processes."""

    def __init__(self, plan: Plan, console: Console):
        self._command = command = plan.command
        self._stream = plan.spec
        self._targets = targets_of(command, plan.spec)
        self._console = console
        self._directory = Path(command.run_dir)
        self._logs = self._directory / "logs"
        # A reproducible run continues nothing, so a new start of its one role would only hide why the first one died.
        self._supervisor = Supervisor(0 if command.reproducible else command.max_restarts)
        self._clock = Clock(command)
        self._checkpointed = checkpoint_time(self._directory)
        self._statuses = Statuses(self._directory)
        self._news = None if command.stop_at_return is None else News(self._directory)

    def run(self, stop: Stop) -> int:
        """Runs until the learner has finished, the time is up, or a signal comes; returns the exit status."""
        status, fault, has_finished, is_late, why = 0, "", False, False, ""
        try:
            if not stop.is_set():
                self._start()
            with Display(self._console, self._directory, self._supervisor, self._targets) as display:
                while not stop.wait(WATCH_SECONDS):
                    finished = self._supervisor.watch()
                    display.update()
                    in_vain = waits_in_vain(self._supervisor, self._statuses)
                    if has_finished := in_vain or bool(FINISHING.intersection(finished)):
                        break
                    if why := self._why_over(finished):
                        self._console.print(f"the run ends: {why}", soft_wrap=True)
                        break
                    if self._clock.is_over(self._counters()):
                        told, goes_on = self._statuses.newest(), bool(self._checkpointed)
                        if not awaits_evaluation(self._command, told, self._clock.elapsed(), goes_on):
                            is_late = True
                            break
        except ApexError as error:
            status, fault = exit_status(error), f"{error}; see the logs in {self._logs}"
            logger.error("%s", fault)
        finally:
            self._stop(stop)
        parts = self._command, self._clock, self._supervisor, self._checkpointed
        summarize(self._console, self._directory, *parts, ended_by=why)
        if has_finished or is_late:
            say_unevaluated(self._console, self._command)
        say_next(self._console, self._command)
        if fault:  # once more: the last line says why the run ended
            logger.error("%s", fault)
        if not status and self._command.smoke and (missing := what_is_missing(self._counters())):
            status = 1
            seconds, failures = self._clock.elapsed(), ", ".join(missing)
            logger.error(
                "the smoke run failed: in %.0f s nothing was %s; see the logs in %s", seconds, failures, self._logs
            )
        return status

    def _why_over(self, finished: Collection[str]) -> str:
        """Returns why the run ends before its time, empty where it does not."""
        goal = self._command.stop_at_return
        if self._news is not None and is_end(self._news, None, lambda evaluation: evaluation.mean >= goal):
            return f"an evaluation's mean return is at least {goal:g}"
        asking = [name for name in finished if name not in FINISHING]
        return f"{asking[0]} asks for it" if asking else ""

    def _counters(self) -> Counters:
        status = read_status(self._directory)
        return status.counters if status is not None else Counters()

    def _start(self) -> None:
        """Starts all roles."""
        self._logs.mkdir(parents=True, exist_ok=True)
        start_callbacks(self._supervisor, self._command)  # first: they miss no evaluation
        for name, (script, config) in roles_of(self._command, self._stream, self._clock.ends_at).items():
            start_role(self._supervisor, self._command, name, script, config)
        start_observers(self._supervisor, self._command)

    def _stop(self, stop: Stop) -> None:
        signals = stop.num_signals
        self._console.print("ending the run; Ctrl-C kills it at once")
        for names, idle_seconds in end_steps(self._supervisor.children):
            self._supervisor.stop(
                names, idle_seconds, hurried=lambda: stop.num_signals > signals, repeats=players_of(names)
            )


def checkpoint_time(directory: Path) -> int:
    """Returns when a run's newest checkpoint was written, 0 where there is none."""
    path = latest_path(directory)
    return path.stat().st_mtime_ns if path.is_file() else 0


def summarize(
    console: Console, directory: Path, command: RunCommand, clock: Clock, supervisor: Supervisor, checkpointed: int,
    ended_by: str = "",
) -> None:  # fmt: skip
    """Prints the remains of a run that has ended: the checkpoint and the summary, which it also writes.

    Args:
      checkpointed: when the newest checkpoint was written before the run began.
      ended_by: what ended it as its flags ask, before its time.
    """
    path, status = latest_path(directory), read_status(directory)
    if checkpoint_time(directory) == checkpointed:
        console.print("no checkpoint was written")
    else:
        try:
            updates = load_header(path).counters.updates
            console.print(f"checkpoint written: {path}, update {updates:,}", soft_wrap=True)
            if (best := directory / CHECKPOINTS[0]).is_file():
                words = network_words(directory, load_header(best).counters.updates)
                console.print(f"best network: {best}, {words}", soft_wrap=True)
            if status is not None and status.counters.updates > updates:
                lost = status.counters.updates - updates
                kept = ", their experience is not" if journals_of(command) else ""
                console.print(f"no checkpoint has the {lost:,} updates since then: they are lost{kept}", soft_wrap=True)
        except ApexError as error:
            logger.error("the checkpoint cannot be read: %s", error)
    outcome = summary_of(status, command.env.env, clock.elapsed(), supervisor.num_restarts, ended_by)
    summary = msgspec.structs.asdict(outcome) | probabilities_of(status)
    try:
        write_json(directory / SUMMARY_FILE, summary)
        console.print(f"summary: {directory / SUMMARY_FILE}", soft_wrap=True)
    except OSError as error:
        logger.error("the summary cannot be written: %s", error)
    for name, value in summary.items():
        if name not in ("transitions_inserted", "ended_by"):  # the agent's steps, and said already
            shown = round(value, 3) if isinstance(value, float) else value
            note = ", the warm-up included" if name == "samples_per_insert" else ""
            console.print(f"  {name:24} {shown}{note}")


def awaits_evaluation(
    command: RunCommand, status: Status | None, elapsed_seconds: float, goes_on: bool = False
) -> bool:
    """Returns whether a run whose time is up goes on: its learner waits for the last evaluation, or may yet say so.

    Args:
      status: of this start; None: its learner has told nothing yet.
      goes_on: an earlier start has left a network, whose last evaluation may be missing.
    """
    seconds, late = command.learning.final_evaluation_seconds, elapsed_seconds - command.max_seconds
    if command.smoke or command.reproducible or not (command.evaluator and seconds):
        return False
    if status is None and goes_on:
        return late < seconds
    if status is None or not status.counters.updates:
        return False
    return late < LAST_WORD_SECONDS + (seconds if waits_for_evaluation(status) else 0.0)


def waits_in_vain(supervisor: Supervisor, statuses: Statuses) -> bool:
    """Returns whether the learner waits for the last evaluation, and nobody will play it."""
    evaluator = supervisor.children.get("evaluator")
    return evaluator is not None and evaluator.is_given_up and waits_for_evaluation(statuses.newest())


def waits_for_evaluation(status: Status | None) -> bool:
    """Returns whether a learner waits for the evaluation of its last network."""
    return status is not None and status.waits_for == LAST_EVALUATION


def is_unevaluated(command: RunCommand, directory: Path) -> bool:
    """Returns whether the last network of a run that has come to its end was not evaluated, as it should be."""
    status, seconds = read_status(directory), command.learning.final_evaluation_seconds
    if status is None or not (status.counters.updates and command.evaluator and seconds):
        return False
    if command.smoke or command.reproducible:  # the one need not, the other does so by itself
        return False
    return status.metrics.get("evaluation/params_version") != status.counters.updates


def say_unevaluated(console: Console, command: RunCommand) -> None:
    """Prints a line when the last network of a run was not evaluated."""
    if is_unevaluated(command, Path(command.run_dir)):
        console.print(
            "the last network was not evaluated: --final-evaluation-seconds may give it more time, "
            "and logs/evaluator.log says how far it was",
            soft_wrap=True,
        )


def say_next(console: Console, command: RunCommand) -> None:
    """Prints the newest video of a run, and the commands that a person may want next."""
    directory = Path(command.run_dir)
    videos = Path(command.evaluation.record_dir or directory / "videos").glob("*.webm")
    if newest := max(videos, key=lambda path: path.lstat().st_mtime, default=None):
        console.print(f"video: {newest}", soft_wrap=True)
    elif command.evaluator and (status := read_status(directory)) and status.counters.evaluation_episodes:
        console.print(f"no video was made: {directory}/logs/evaluator.log says why", soft_wrap=True)
    if latest_path(directory).is_file():
        console.print("next:")
        names = command.agent, command.env.env, command.network.network, *command.env.wrapper
        trust = " --trust" if any(":" in name for name in names) else ""  # this run's person has named the modules
        for name in ("watch", "compare" if command.reproducible else "resume"):
            flags = "" if name == "compare" else trust
            console.print(f"  {sister(name)} {shlex.quote(command.run_dir)}{flags}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(run_program(main))
