"""From a command line to a run that is ready to start: its plan, its directory, its configuration."""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from apexrl.config.commands import RunCommand
from apexrl.config.fields import with_values
from apexrl.config.flags import Asked, default_command, learner_command, names_agent
from apexrl.config.presets import VECTOR_AGENT
from apexrl.config.sections import DEFAULT_AGENT
from apexrl.config.words import Basis
from apexrl.errors import ConfigError
from apexrl.extras import missing
from apexrl.learning.goal import RATE, Courses
from apexrl.learning.record.status_file import read_status
from apexrl.net.keyring import ROLES, load_keyring
from apexrl.networks.headers import Counters, latest_path, load_header
from apexrl.own_modules import Trust
from apexrl.replay.journal import IDENTITY_FILE, identity_of, read_identity
from apexrl.replay.segment_files import SEGMENT_PATTERN
from apexrl.running.clock import Clock
from apexrl.running.display import table_of
from apexrl.running.plan import MEASURES, Plan, describe, make_plan
from apexrl.running.ports import from_base, with_free_ports
from apexrl.running.refusals import check_asked
from apexrl.running.run_directory import (
    CONFIG_FILE,
    as_fork,
    check_has_server,
    check_new,
    checkpoint_of,
    config_beside,
    continued,
    environment_of,
    following,
    fork_run,
    host_of,
    journals_of,
    lock_run,
    save_config,
    saved_command,
    saved_values,
    set_aside,
    trust_of,
    update_of,
)
from apexrl.running.torch_look import Ask, asking
from apexrl.runs import made_run


def prepare(
    arguments: Sequence[str],
    console: Console,
    held: contextlib.ExitStack,
    fixed_ports: bool = True,
    begin: Callable[[], None] = lambda: None,
) -> Plan:
    """Returns the plan of a run whose directory is locked, until `held` is closed, and ready.

    Args:
      fixed_ports: the run listens on this machine, on ports of the plan that are free.
      begin: called before anything is changed; an interrupt after it would leave half of a run.
    Raises: ConfigError when the run cannot work; nothing was changed then.
    """
    basis, trust = Basis.of(arguments), trust_of(arguments)
    saved, not_given = _saved(basis, trust, arguments) if basis.run else (None, [])
    if saved is not None and saved.guest:  # whose ports may be others by now
        saved = following(saved, host_of(Path(saved.guest), trust))
    asked = from_base(Asked.of(first_default(basis, saved, trust, arguments), arguments), saved)
    check_asked(asked, saved)
    trackers_of(asked.command)
    if (guest := asked.command.guest or (saved.guest if saved is not None else "")) and not asked.wants_help:
        check_has_server(Path(guest), host_of(Path(guest), trust))
    from_scratch = asked.command.from_scratch
    with contextlib.ExitStack() as copying:  # a fork needs the other run's directory for a moment only
        ask = copying.enter_context(asking())
        before = as_fork(saved) if saved is not None and basis.fork else saved
        if asked.wants_help:
            make_plan(asked, before, ask)  # it prints the help, with the defaults of a run here, and ends the program
        if saved is not None:
            (copying if basis.fork else held).enter_context(lock_run(basis.run, is_shared=bool(basis.fork)))
            if not_given:
                missing = ", ".join(not_given)
                console.print(f"{CONFIG_FILE} does not give {missing}: the defaults are taken", soft_wrap=True)
        plan = make_plan(asked, before, ask)
        if fixed_ports:
            for role in ROLES if plan.command.has_actors else ():
                load_keyring(plan.command.wires.keys, role)
            command, taken = with_free_ports(plan.command, asked.given, held)
            plan = plan._replace(command=command)
            if taken:
                console.print(taken, soft_wrap=True)
        if saved is not None and basis.resume and plan.command.replay.journal_dir != saved.replay.journal_dir:
            _check_journals(plan.command, _logs_of(Path(basis.run)))
        begin()
        if not basis.resume:
            plan = plan._replace(command=_make_directory(asked.command, saved, plan.command, held, ask))
        directory = Path(plan.command.run_dir)
        going_on = None if saved is None or from_scratch else continued(directory, ask)
    if basis.resume and from_scratch:
        console.print(f"the earlier results are in {set_aside(directory)}", soft_wrap=True)
    save_config(plan.command)
    _show_plan(console, plan, going_on)
    return plan


def first_default(basis: Basis, saved: RunCommand | None, trust: Trust, arguments: Sequence[str]) -> RunCommand:
    """Returns the defaults of a command line that is not planned yet: the algorithm's, and what another run decides."""
    if saved is not None:
        return default_command(RunCommand, basis.agent or saved.agent)
    host = host_of(Path(basis.guest), trust) if basis.guest else None
    default = default_command(RunCommand, basis.agent or (basis.algorithm if host is None else host.agent))
    is_usual = not basis.agent and host is None and default.agent == DEFAULT_AGENT
    if is_usual and names_agent(VECTOR_AGENT, default, arguments):  # the actions decide later
        default = default_command(RunCommand, VECTOR_AGENT)
    if basis.from_journal:
        journal = Path(basis.from_journal)
        default = dataclasses.replace(default, env=environment_of(journal, identity_of(journal).spec, trust))
        if (beside := config_beside(journal)) is not None:
            default = with_values(default, measures_in(saved_values(beside).get("learning")))
    if host is not None:  # a guest has its environment, replay servers and capacity
        default = dataclasses.replace(default, env=host.env, wires=host.wires)
        default = with_values(default, {"capacity": host.replay.capacity, **measures_in(vars(host.learning))})
    return default


def measures_in(learning: object) -> dict[str, bool]:
    """Returns in which measures a run learns, which are those of all who learn from its log, by flag."""
    return {name: True for name in MEASURES if isinstance(learning, Mapping) and learning.get(name) is True}


def _saved(basis: Basis, trust: Trust, arguments: Sequence[str]) -> tuple[RunCommand, list[str]]:
    """Returns what `saved_command` does for the run that a command line continues."""
    is_resumed = bool(basis.resume) and "--from-scratch" not in arguments
    return saved_command(Path(basis.run), update_of(basis.at), trust, is_resumed)


def on_saved(arguments: Sequence[str]) -> tuple[Asked[RunCommand], RunCommand]:
    """Returns a command line, and its command on top of the run that it continues, where its directory is seen."""
    basis, saved, trust = Basis.of(arguments), None, trust_of(arguments)
    if basis.run and (Path(basis.run) / CONFIG_FILE).is_file():
        saved, _ = _saved(basis, trust, arguments)
    asked = Asked.of(first_default(basis, saved, trust, arguments), arguments)
    if saved is None or saved.agent != asked.command.agent:  # the plan refuses another algorithm
        return asked, asked.command
    return asked, asked.onto(saved)


def _make_directory(
    asked: RunCommand, saved: RunCommand | None, command: RunCommand, held: contextlib.ExitStack, ask: Ask
) -> RunCommand:
    """Makes and locks the directory of a new run; that of a fork gets the experience and the checkpoint of `saved`.

    Returns: the command with its directory; one that nobody gave may have a number behind its name.
    Raises: ConfigError when it is not empty, or when the other run cannot be forked.
    """
    checkpoint = None
    if asked.fork and (asked.at or not asked.from_scratch):
        checkpoint = checkpoint_of(Path(asked.fork), asked.at, ask)
    _check_journals(command)
    if not asked.run_dir:
        command = dataclasses.replace(command, run_dir=made_run(command.run_dir))
    check_new(Path(command.run_dir))
    held.enter_context(lock_run(command.run_dir))
    if saved is not None:
        try:
            fork_run(saved, checkpoint, command)
        except BaseException:  # half of a fork, which is neither a run nor nothing
            shutil.rmtree(command.run_dir, ignore_errors=True)
            raise
    return command


def _logs_of(directory: Path) -> set[str]:
    """Returns the names of the logs that a run has counted, by its status and the header of its checkpoint."""
    status = read_status(directory)
    found = [] if status is None else [status.counters]
    with contextlib.suppress(OSError, ConfigError):  # it may be damaged, and the run begins from scratch
        found.append(load_header(latest_path(directory)).counters)
    return {position.log for counters in found for position in counters.logs}


def _check_journals(command: RunCommand, own: Collection[str] = ()) -> None:
    """Raises ConfigError when a run would go on with, and at last remove, the experience of another one.

    A journal in the run's own directory is its own.

    Args:
      own: the names of the logs of a run that goes on, whose journal may have been moved.
    """
    for journal in () if command.replay.journal_dir == "auto" else journals_of(command):
        if (journal / IDENTITY_FILE).exists() or any(journal.glob(SEGMENT_PATTERN)):
            identity = read_identity(journal)
            if identity is not None and identity.log in own:
                continue
            raise ConfigError(
                f"--journal-dir {journal} holds the experience of another run: give another directory, --resume that "
                "run, or learn from it with --from-journal"
            )


def _show_plan(console: Console, plan: Plan, going_on: Counters | None) -> None:
    console.print(table_of(describe(plan), console), soft_wrap=True)
    if going_on is not None:
        frames = going_on.transitions_inserted * plan.spec.frames_per_step
        path = latest_path(Path(plan.command.run_dir))
        clock = Clock(plan.command)
        now = clock.began_at
        courses = Courses(dataclasses.replace(learner_command(plan.command), ends_at=clock.ends_at), now)
        courses.begin(frames, going_on.progress, going_on.updates, going_on.seconds)
        late = courses.late(now, going_on.updates)
        rate = f", learning rate {courses.advance(frames, late)[RATE]:g}" if going_on.progress else ""
        console.print(f"continuing {path} at update {going_on.updates:,}, {frames:,} frames{rate}", soft_wrap=True)
    elif plan.command.resume or plan.command.from_scratch:
        console.print("training a new network on the run's experience")


def trackers_of(command: RunCommand) -> list[str]:
    """Returns the names of the trackers that a run wants.

    Raises: ConfigError when one is not installed.
    """
    wanted = [name for name, asked in (("wandb", command.wandb), ("mlflow", command.mlflow)) if asked]
    for name in wanted:
        if lack := missing(name, f"--{name}"):
            raise ConfigError(lack)
    return wanted
