"""The parts of a run on a Ray cluster, as Ray actors: groups of processes on one node, and the registry they meet at.

Ray places them, starts them again and shows their logs. Experience and parameters go the roles' own way, not through
Ray: a group starts our scripts as its children, and knows from the registry where those of the others listen.
"""

import contextlib
import dataclasses
import io
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util import get_node_ip_address
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from apexrl.config.commands import Command, RunCommand
from apexrl.config.sections import WireConfig
from apexrl.errors import ApexError, ConfigError
from apexrl.learning.record.status_file import Status, Statuses, read_status
from apexrl.lifecycle import exit_status
from apexrl.lines import log_to
from apexrl.running.clock import Clock
from apexrl.running.display import RunConsole
from apexrl.running.launch import (
    FINISHING,
    checkpoint_time,
    end_steps,
    players_of,
    roles_of,
    start_observers,
    start_role,
    summarize,
    waits_in_vain,
)
from apexrl.running.plan import Plan
from apexrl.running.ports import free_row
from apexrl.running.prepare import prepare
from apexrl.running.run_directory import CONFIG_FILE, journals_of, lock_run
from apexrl.running.supervise import Supervisor
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)

REGISTRY, REPLAY, LEARNER, ACTORS = "registry", "replay", "learner", "actors"
ADDRESSES = ("replay_host", "actor_port", "batch_port", "learner_host", "parameter_port", "metrics_port")
BEAT_SECONDS = 0.5
LOCK_SECONDS = 120.0
STATUS_SECONDS = 5.0
NUM_STAGES = 3  # the steps of `launch.end_steps`
CHUNK_BYTES = 8 * 2**20
NOT_SENT = [".venv", ".git", "runs", "tests", "docs", "benchmarks", "deploy", "**/__pycache__"]


class Report(NamedTuple):
    """The report of a group about itself, every BEAT_SECONDS."""

    group: str
    node: str  # its address
    addresses: Mapping[str, Any]  # fields of WireConfig that it serves
    stages_ended: int = 0
    has_finished: bool = False  # the learner has reached the end of the run
    fault: str = ""
    exit_status: int = 0
    lines: tuple[str, ...] = ()  # for the driver to print, all since the group's start
    status: Status | None = None
    summary: str = ""


class Reply(NamedTuple):
    """The registry's answer to a report."""

    stage: int  # end the processes of so many steps
    addresses: Mapping[str, Any]


class Planner:
    """Makes the plan of a run for the node of its learner. An actor: Ray 2.60 may never start a task there."""

    def plan(self, arguments: list[str]) -> tuple[Plan | None, str, str, int]:
        """Returns the plan for these flags, what there is to read about it, and an error with its exit status."""
        text = io.StringIO()
        console = RunConsole(file=text, width=120)
        try:
            with contextlib.ExitStack() as held:
                return prepare(arguments, console, held, fixed_ports=False), text.getvalue(), "", 0
        except ApexError as error:
            return None, text.getvalue(), str(error), exit_status(error)


class Registry:
    """The meeting point of a run's groups and its driver. All that it keeps they say again after its restart."""

    def __init__(self, run: str, patience_seconds: float, watches: bool = False) -> None:
        """Begins; with `watches` it ends the run itself where its driver is gone and no group lives."""
        self._run, self._patience_seconds = run, patience_seconds
        self._reports: dict[str, tuple[float, Report]] = {}
        self._driver_seen = time.monotonic()
        self._is_ending = False
        if watches:
            threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def tell(self, report: Report) -> Reply:
        """Takes the report of a group; returns what it is to do."""
        self._reports[report.group] = (time.monotonic(), report)
        reports = self._living()
        silent = time.monotonic() - self._driver_seen > self._patience_seconds
        if silent or any(r.has_finished or r.fault for r in reports):
            self._is_ending = True
        if not self._is_ending:
            stage = 0
        else:
            stage = min(1 + min(r.stages_ended for r in reports), NUM_STAGES)
            if silent and all(r.stages_ended == NUM_STAGES for r in reports):
                clean_up(self._run)
        found: dict[str, Any] = {}
        for one in reports:
            found.update(one.addresses)
        return Reply(stage, found)

    def ask(self, ends: bool) -> list[Report]:
        """Takes the driver's wish, and returns the newest report of each group that lives."""
        self._driver_seen = time.monotonic()
        self._is_ending |= ends
        return self._living()

    def silence(self) -> float:
        """Returns the seconds since the driver asked last."""
        return time.monotonic() - self._driver_seen

    def forget(self, group: str) -> None:
        """Forgets a group whose node is gone."""
        self._reports.pop(group, None)

    def _watch(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            if self.silence() > self._patience_seconds and not self._living():
                with contextlib.suppress(ray.exceptions.RayError):  # the cluster does not answer now
                    return clean_up(self._run)

    def _living(self) -> list[Report]:
        now = time.monotonic()
        return [report for seen, report in self._reports.values() if now - seen < self._patience_seconds]


class Group:
    """The processes of a run on one node: as a Ray actor, it supervises them like `bash run.sh`."""

    def __init__(
        self,
        run: str,
        patience_seconds: float,
        name: str,
        command: RunCommand,
        num_workers: int = 1,
        stream: StreamSpec | None = None,
        began_at: float | None = None,
    ):
        """Begins at once; Ray calls nothing else after a restart.

        Args:
          run: the namespace of the run's Ray actors.
          patience_seconds: for the registry.
          name: replay, learner, or a name that begins with actors.
          num_workers: actor processes of this group.
          stream: the run's, for its replay.
          began_at: when the driver began to count the run's time, for its learner, which may start again later.
        """
        os.environ["OMP_NUM_THREADS"] = "1"  # Ray would give each process all CPUs of the group
        self._run, self._name, self._command, self._patience_seconds = run, name, command, patience_seconds
        self._stream = stream
        self._acting = dataclasses.replace(command.acting, num_workers=num_workers)
        self._node = get_node_ip_address()
        self._addresses = self._own_addresses()
        self._directory = Path(command.run_dir)
        self._supervisor = Supervisor(command.max_restarts, echoes=True)
        self._statuses = Statuses(self._directory)
        self._wires: WireConfig | None = None  # those that the processes were started with
        self._lines: list[str] = []
        self._report = Report(name, self._node, self._addresses)
        self._registry: Any = None
        self._heard = time.monotonic()
        self._checkpointed = checkpoint_time(self._directory)
        self._clock = Clock(command, began_at=began_at)
        self._gauges: dict[str, Gauge] = {}
        self._status_due = 0.0
        log_to(form="%(asctime)s %(message)s")
        logging.getLogger("apexrl").addHandler(_Lines(self._lines, name))
        threading.Thread(target=self._live, name="group").start()

    def files(self) -> list[tuple[str, int]]:
        """Returns names and bytes of the run's files, but for its experience."""
        paths = sorted(path for path in self._directory.rglob("*") if path.is_file())
        names = [path.relative_to(self._directory) for path in paths]
        return [(str(name), (self._directory / name).stat().st_size) for name in names if name.parts[0] != "journal"]

    def sees(self, name: str) -> bool:
        """Returns whether a file of that name is in the run's directory here."""
        return (self._directory / name).exists()

    def read(self, name: str, offset: int) -> bytes:
        """Returns the next CHUNK_BYTES of one of `files`."""
        with (self._directory / name).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)

    def _own_addresses(self) -> dict[str, Any]:
        wires, node = self._command.wires, self._node
        if self._name == REPLAY:
            first = free_row(node, 2 * wires.shards)
            return {"replay_host": node, "actor_port": first, "batch_port": first + 1}
        if self._name == LEARNER:
            first = free_row(node, 3)
            return {"learner_host": node, "parameter_port": first, "metrics_port": first + 1, "meeting_port": first + 2}
        return {}

    def _live(self) -> None:
        try:
            with contextlib.ExitStack() as held:
                if self._name == LEARNER:
                    if not (self._directory / CONFIG_FILE).exists():
                        raise ConfigError(
                            f"the run's directory {self._directory} is not on this node, {self._node}: for a learner "
                            "that may move, put it on a path that all nodes share"
                        )
                    # A file server holds the lock of a node that died until its lease is over.
                    patience_seconds = LOCK_SECONDS if _is_moved() else 0.0
                    held.enter_context(lock_run(str(self._directory), patience_seconds=patience_seconds))
                if self._name == REPLAY and _is_moved():
                    self._look_for_journal()
                while True:
                    self._step()
                    time.sleep(BEAT_SECONDS)
        except ApexError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("group %s failed", self._name)
            self._fail(ApexError(f"{type(error).__name__}: {error}"))

    def _look_for_journal(self) -> None:
        missing = [str(path) for path in journals_of(self._command) if not path.exists()]
        if missing and self._command.replay.journal_dir != "off":
            logger.warning(
                "%s is not on this node, %s: the experience is lost, and training goes on with new one; on a path that "
                "all nodes share it is kept (--run-dir)", missing[0], self._node,
            )  # fmt: skip

    def _step(self) -> None:
        """Says how the processes are, and does what the registry answers."""
        reply = self._exchange()
        if reply is None:
            if time.monotonic() - self._heard < self._patience_seconds:
                return
            logger.error("the registry has not answered for %.0f s: the run ends here", self._patience_seconds)
            if self._report.stages_ended == NUM_STAGES:  # nobody else is there to give the place back
                with contextlib.suppress(ray.exceptions.RayError):  # the next step tries it again
                    clean_up(self._run)
            reply = Reply(NUM_STAGES, {})
        if reply.stage:
            self._end(reply.stage)
        elif not self._report.has_finished and all(name in reply.addresses for name in ADDRESSES):
            self._serve(reply.addresses)
        if not self._report.stages_ended and (
            FINISHING.intersection(self._supervisor.watch()) or waits_in_vain(self._supervisor, self._statuses)
        ):
            self._report = self._report._replace(has_finished=True)

    def _exchange(self) -> Reply | None:
        """Returns the registry's answer, None when it gives none now."""
        report = self._report._replace(lines=tuple(self._lines))
        if self._name == LEARNER and time.monotonic() >= self._status_due:
            self._status_due = time.monotonic() + STATUS_SECONDS
            self._report = report = report._replace(status=self._measured())
        try:
            self._registry = self._registry or ray.get_actor(REGISTRY, namespace=self._run)
            reply: Reply = ray.get(self._registry.tell.remote(report), timeout=5.0)
        except (ray.exceptions.RayError, ValueError):  # it is being started again, or its node is gone
            self._registry = None
            return None
        self._heard = time.monotonic()
        return reply

    def _serve(self, addresses: Mapping[str, Any]) -> None:
        """Starts the processes, and starts them anew when the others have moved."""
        wires = dataclasses.replace(self._command.wires, **addresses, bind_host=self._node)
        if wires == self._wires:
            return
        if self._wires is not None:
            logger.warning("%s begins again, because another group has moved", self._name)
            for names, idle_seconds in end_steps(self._supervisor.children):
                self._supervisor.stop(names, idle_seconds, repeats=players_of(names))
        self._wires = wires
        command = dataclasses.replace(self._command, wires=wires, acting=self._acting)
        if self._directory.exists():
            (self._directory / "logs").mkdir(exist_ok=True)
        for name, (script, config) in self._own(roles_of(command, self._stream, self._clock.ends_at)).items():
            start_role(self._supervisor, command, name, script, config)
        if self._name == LEARNER:
            start_observers(self._supervisor, command)

    def _own(self, roles: dict[str, tuple[str, Command]]) -> dict[str, tuple[str, Command]]:
        """Returns the roles of this group."""
        if self._name.startswith(ACTORS):
            return {name: role for name, role in roles.items() if name == "actors"}
        kept = ("replay",) if self._name == REPLAY else ("learner", "evaluator")
        return {name: role for name, role in roles.items() if name.startswith(kept)}

    def _end(self, stage: int) -> None:
        """Ends the processes of the first steps of the end."""
        steps = end_steps(self._supervisor.children)
        for number in range(self._report.stages_ended, stage):
            names, idle_seconds = steps[number]
            self._supervisor.stop(names, idle_seconds, repeats=players_of(names))
            summary = self._summary() if self._name == LEARNER and number == 1 else self._report.summary
            self._report = self._report._replace(stages_ended=number + 1, summary=summary)

    def _summary(self) -> str:
        text, command = io.StringIO(), self._command
        summarize(RunConsole(file=text), self._directory, command, self._clock, self._supervisor, self._checkpointed)
        self._report = self._report._replace(status=read_status(self._directory))
        return text.getvalue()

    def _fail(self, error: ApexError) -> None:
        """Ends the processes, and says why until the driver has heard it."""
        self._report = self._report._replace(fault=f"{self._name}: {error}", exit_status=exit_status(error))
        self._end(NUM_STAGES)
        while self._exchange() is not None or time.monotonic() - self._heard < self._patience_seconds:
            time.sleep(BEAT_SECONDS)

    def _measured(self) -> Status | None:
        """Returns the newest status, whose metrics it gives to Ray."""
        status = read_status(self._directory)
        for tag, value in (status.metrics if status is not None else {}).items():
            name = "apexrl_" + "".join(c if c.isalnum() else "_" for c in tag)
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, description=tag, tag_keys=("run",))
            self._gauges[name].set(value, tags={"run": self._run})
        return status


def _is_moved() -> bool:
    """Returns whether Ray has started this group again, after its process or its node was lost."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


class _Lines(logging.Handler):
    """Keeps the warnings of a group for the driver, the newest MOST of them."""

    MOST = 100

    def __init__(self, lines: list[str], group: str):
        super().__init__(logging.WARNING)
        self._lines, self._group, self._count = lines, group, 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a record, numbered."""
        self._count += 1
        self._lines.append(f"{self._group} {self._count}: {record.getMessage()}")
        del self._lines[: -self.MOST]


def own_code(root: Path) -> dict[str, Any]:
    """Returns the part of Ray's runtime environment that brings our code: the checkout, or the installed package."""
    if (root / "pyproject.toml").is_file():
        return {"working_dir": str(root), "excludes": NOT_SENT}
    return {"py_modules": [str(root / "apexrl")]}


def clean_up(run: str) -> None:
    """Ends all Ray actors of a run, also those that have not begun, the registry last, and gives its place back."""
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        ray.util.remove_placement_group(ray.util.get_placement_group(run))
    found: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    names = [one["name"] for one in found if one["namespace"] == run]
    for name in sorted(names, key=lambda name: name == REGISTRY):
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(ray.get_actor(name, namespace=run))


def in_place(place: Any, bundle: int) -> PlacementGroupSchedulingStrategy:
    """Returns the scheduling strategy of a bundle."""
    return PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=bundle)


def cluster() -> str:
    """Returns what the cluster has and what is free, in words."""
    has, free = ray.cluster_resources(), ray.available_resources()
    parts = [f"{free.get(kind, 0):g} of {has.get(kind, 0):g} {kind}s free" for kind in ("CPU", "GPU")]
    return f"{sum(node['Alive'] for node in ray.nodes())} nodes, {', '.join(parts)}"
