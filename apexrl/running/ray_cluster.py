"""A run on a Ray cluster that exists already: `python -m apexrl.running.ray_cluster FLAGS`, with the flags of run.sh.

The driver places the groups of the run's processes (`ray_groups`), follows them, and ends them. When it is gone, they
end by themselves, with a last checkpoint. It needs the extra `ray`.
"""

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from apexrl.extras import missing
from apexrl.lines import say

if __name__ == "__main__" and (lack := missing("ray", "this program") or missing("train", "this program")):
    say(lack, file=sys.stderr)
    sys.exit(2)

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from apexrl.config.commands import RunCommand
from apexrl.errors import ApexError, ConfigError
from apexrl.hosts import knock
from apexrl.lifecycle import PERMANENT_STATUS, Stop, end_at_once, end_with_parent, exit_status
from apexrl.lines import log_to
from apexrl.networks.headers import Counters
from apexrl.running.clock import Clock, what_is_missing
from apexrl.running.display import LINE_PERIOD_SECONDS, RunConsole, duration, progress_rows, say_failed
from apexrl.running.launch import ENDING_SECONDS
from apexrl.running.plan import Plan
from apexrl.running.prepare import on_saved
from apexrl.running.ray_files import fetch, sees_directory
from apexrl.running.ray_flags import RayConfig, divided
from apexrl.running.ray_groups import (
    ACTORS,
    BEAT_SECONDS,
    LEARNER,
    NUM_STAGES,
    REGISTRY,
    REPLAY,
    Group,
    Planner,
    Registry,
    Report,
    clean_up,
    cluster,
    in_place,
    own_code,
)
from apexrl.running.refusals import check_asked
from apexrl.running.run_directory import ROOT
from apexrl.runs import new_run

HEAD = "node:__internal_head__"  # a resource that Ray gives to this node alone
END_SECONDS = 15.0  # for each step of the end; groups that need longer are killed
SAY_SECONDS, NODES_SECONDS, POLL_SECONDS, KNOCK_SECONDS = 10.0, 3.0, 0.5, 10.0  # Ray would knock for minutes


def main() -> int:
    """Runs the command line; returns the exit status."""
    console = RunConsole()
    log_to(level=logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to end before there is a cluster
    stop = Stop()
    end_with_parent(stop, ENDING_SECONDS)
    try:
        return Driver(*divided(sys.argv[1:]), console).run(stop)
    except ApexError as error:
        say_failed("cannot run", error)
        return exit_status(error)
    except ray.exceptions.RayError as error:
        say_failed("Ray failed", error)
        return 1
    finally:
        ray.shutdown()


class Driver:
    """One run on a cluster, as the process sees it that started it."""

    def __init__(self, config: RayConfig, arguments: list[str], num_workers: int, console: Console):
        self._config, self._console, self._num_workers = config, console, num_workers
        asked, self.asked = on_saved(arguments)
        check_asked(asked)
        if not self.asked.has_actors or self.asked.reproducible:  # as a run that is resumed may be
            raise ConfigError(f"{self.asked.resume or self.asked.fork} needs no cluster: continue it by run.sh")
        directory = asked.command.resume or asked.command.run_dir
        if not directory:
            directory = str(Path(new_run(self.asked.env.env, arguments)).resolve())
            arguments = [*arguments, "--name", "", "--run-dir", directory]  # which has the name
        self.directory, self._arguments = Path(directory), arguments
        self._run = config.ray_namespace or f"apexrl-{self.directory.name}"
        self._groups: dict[str, Any] = {}  # handles
        self._nodes: dict[str, tuple[str, int]] = {}  # node and processes, by group of actors
        self._printed: dict[str, tuple[str, ...]] = {}  # the newest lines, by group
        self._nodes_due = self._line_due = 0.0
        self._heard = time.monotonic()

    def run(self, stop: Stop) -> int:
        """Runs until the learner has finished, the time is up, or a signal comes; returns the exit status.

        Raises: ConfigError when the run cannot work on the cluster.
        """
        self._connect()
        stop.on_signals()  # not before: Ray takes SIGTERM for itself, and would die of it
        self._await_namesake(stop)
        if stop.is_set():
            return 0
        try:  # first: so others see that a run of this name is there, and it gives the place back where we die
            self._start(REGISTRY, Registry, True, num_cpus=0, resources={HEAD: 0.001})  # without a head there is no run
        except ValueError as error:
            raise ConfigError(f"--ray-namespace {self._run}: a run of that name begins here; give another") from error
        try:
            place = self._reserve(stop)
            if place is None:
                return 0
            plan = self._prepare(place, stop)
            if plan is None:
                return 0
            reports = self._follow(plan, place, stop)
            return self._end(plan.command, reports, stop)
        finally:
            with contextlib.suppress(Exception):  # the cluster may be gone
                clean_up(self._run)

    def _connect(self) -> None:
        address = self._config.ray_address or os.environ.get("RAY_ADDRESS", "")
        if not address:
            raise ConfigError("--ray-address: give HOST:PORT of a Ray cluster, or auto for the one of this machine")
        # A job that was submitted with its working directory has its code already.
        sent = None if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else own_code(ROOT)
        try:
            knock(address, KNOCK_SECONDS)
            ray.init(
                address=address, namespace=self._run, runtime_env=sent, log_to_driver=False,
                logging_level=logging.ERROR, configure_logging=True,
            )  # fmt: skip
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"--ray-address {address}: no Ray cluster answers ({error})") from error

    def _await_namesake(self, stop: Stop) -> None:
        """Waits until a run of the same name has ended whose driver is gone.

        Raises: ConfigError when its driver is there, or it does not end in time.
        """
        started, last = time.monotonic(), -1.0
        while not stop.is_set() and (silence := _driver_silence()) is not None:
            if silence < last:
                raise ConfigError(f"--ray-namespace {self._run}: a run of that name goes on here; give another")
            if last < 0:
                self._print(f"there is a run {self._run} already: waits for its end, if its driver is gone")
            if time.monotonic() - started > self._config.ray_patience_seconds + NUM_STAGES * END_SECONDS:
                raise ConfigError(f"--ray-namespace {self._run}: a run of that name does not end; give another")
            last = silence
            stop.wait(POLL_SECONDS)

    def _reserve(self, stop: Stop) -> Any:
        """Returns the placement group of replay and learner; None when a signal came first.

        Raises: ConfigError when the cluster has no such place in time.
        """
        asked, learning = self.asked, self.asked.learning
        gpus, there = learning.num_learners if learning.device != "cpu" else 0, ray.cluster_resources()
        if learning.device == "auto" and there.get("GPU", 0) < gpus:
            gpus = 0
        cpus = learning.num_learners * learning.learner_threads + asked.evaluator
        replay = {"CPU": max(asked.wires.shards, learning.num_learners)} | ({"replay": 1} if "replay" in there else {})
        learner = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        place = ray.util.placement_group([replay, learner], "PACK", name=self._run, lifetime="detached")
        if not self._wait(place.ready(), stop, f"a place for the replay ({replay}) and the learner ({learner})"):
            return None
        return place

    def _wait(self, reference: Any, stop: Stop, name: str) -> bool:
        """Waits for something of Ray, and says for what; returns False when a signal comes first.

        Raises: ConfigError when it does not come in time.
        """
        started = said = heard = time.monotonic()
        while not ray.wait([reference], timeout=POLL_SECONDS)[0]:
            now = time.monotonic()
            if stop.is_set():
                return False
            if now - started > self._config.ray_wait_seconds:
                raise ConfigError(
                    f"{name}: the cluster had none in {now - started:.0f} s ({cluster()}); see `ray status`"
                )
            if now - heard > BEAT_SECONDS:
                heard = now
                self._groups[REGISTRY].ask.remote(False)  # so it knows that we are there
            if now - said > SAY_SECONDS:
                said = now
                self._print(f"waits for {name}: {cluster()}")
        return True

    def _prepare(self, place: Any, stop: Stop) -> Plan | None:
        """Returns the plan of the run, made where the learner will be; None when a signal came first.

        Raises: ConfigError or ApexError when there is none.
        """
        gpus = place.bundle_specs[1].get("GPU", 0)
        options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": in_place(place, 1)}
        planner: Any = ray.remote(Planner).options(**options).remote()
        planned = planner.plan.remote(self._arguments)
        if not self._wait(planned, stop, "the plan"):
            return None
        plan, text, fault, status = ray.get(planned)
        ray.kill(planner)
        self._print(text.rstrip())
        if plan is None:
            raise (ConfigError if status == PERMANENT_STATUS else ApexError)(fault)
        self._print(f"Ray: namespace {self._run}; {cluster()}")
        return plan

    def _follow(self, plan: Plan, place: Any, stop: Stop) -> list[Report]:
        """Returns the last reports of the groups, when the run is to end."""
        command, clock = plan.command, Clock(plan.command)
        specs = place.bundle_specs
        for number, name in enumerate((REPLAY, LEARNER)):
            needs = {"num_cpus": specs[number]["CPU"], "num_gpus": specs[number].get("GPU", 0)}
            given = name, command, 1, plan.spec, clock.began_at
            self._start(name, Group, *given, **needs, scheduling_strategy=in_place(place, number))
        self._wait(self._groups[REGISTRY].ask.remote(False), stop, "the registry")
        self._heard = time.monotonic()
        threading.Thread(target=self._watch_cluster, name="cluster", daemon=True).start()
        while True:
            self._spread(command, place)
            reports = self._ask(False) or []
            self._show(reports, clock)
            finished = any(report.has_finished or report.fault for report in reports)
            if finished or clock.is_over(counters_of(reports)) or stop.wait(POLL_SECONDS):
                return reports

    def _start(self, name: str, kind: type, *arguments: Any, **options: Any) -> None:
        remote: Any = ray.remote(kind).options(
            name=name, namespace=self._run, lifetime="detached", max_restarts=-1, max_concurrency=2, **options
        )
        self._groups[name] = remote.remote(self._run, self._config.ray_patience_seconds, *arguments)

    def _spread(self, command: RunCommand, place: Any) -> None:
        """Gives each node that has come a group of actors, and forgets those of nodes that are gone."""
        if time.monotonic() < self._nodes_due:
            return
        self._nodes_due = time.monotonic() + NODES_SECONDS
        nodes = [node for node in ray.nodes() if node["Alive"]]
        alive = {node["NodeID"] for node in nodes}
        for group, (node, _) in list(self._nodes.items()):
            if node not in alive:
                self._print(f"{group}: its node is gone")
                self._drop(group)
        table = ray.util.placement_group_table(place)
        if table["state"] != "CREATED":  # replay or learner have lost their node
            if self._nodes:
                largest = max(self._nodes, key=lambda group: self._nodes[group][1])
                self._print(f"{largest}: makes room for replay or learner, whose node is gone")
                self._drop(largest)
            return
        taken = {node for node, _ in self._nodes.values()}
        # Other runs and jobs hold CPUs, too, and so do replay and learner.
        free = {node: kinds.get("CPU", 0) for node, kinds in available_resources_per_node().items() if node in alive}
        for node, cpus in sorted(free.items(), key=lambda item: -item[1]):
            workers = int(min(cpus, self._missing_workers))
            if node in taken or workers < 1:
                continue
            group = f"{ACTORS} {node[:8]}"
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            self._start(group, Group, group, command, workers, num_cpus=workers, scheduling_strategy=where)
            self._nodes[group] = node, workers

    @property
    def _missing_workers(self) -> float:
        """The number of actor processes that have no node yet."""
        return (self._num_workers or math.inf) - sum(count for _, count in self._nodes.values())

    def _drop(self, group: str) -> None:
        self._nodes.pop(group, None)
        ray.kill(self._groups.pop(group))
        self._groups[REGISTRY].forget.remote(group)

    def _ask(self, ends: bool) -> list[Report] | None:
        """Returns the groups' newest reports; None when the registry gives no answer now."""
        with contextlib.suppress(ray.exceptions.RayError):
            reports: list[Report] = ray.get(self._groups[REGISTRY].ask.remote(ends), timeout=5.0)
            self._heard = time.monotonic()
            return reports
        return None

    def _watch_cluster(self) -> None:
        """Ends the process when the cluster is silent: calls of Ray may never return then."""
        patience_seconds = self._config.ray_patience_seconds
        while time.monotonic() - self._heard < patience_seconds:
            time.sleep(POLL_SECONDS)
        self._print(
            f"ERROR the Ray cluster has not answered for {patience_seconds:.0f} s: its processes end by themselves, "
            f"with a last checkpoint; go on with --resume {self.directory}"
        )
        end_at_once(1)

    def _show(self, reports: list[Report], clock: Clock) -> None:
        """Prints what is new; every LINE_PERIOD_SECONDS how far the run is, and who is missing."""
        for report in reports:
            for line in report.lines:
                if line not in self._printed.get(report.group, ()):
                    self._print(f"{report.node} {line}")
            self._printed[report.group] = report.lines
        if time.monotonic() < self._line_due or not reports:
            return
        self._line_due = time.monotonic() + LINE_PERIOD_SECONDS
        status = next((r.status for r in reports if r.status is not None), None)
        rows = [("time", duration(clock.elapsed()))]
        rows += progress_rows(status) if status is not None else [("state", "starting")]
        workers = sum(count for group, (_, count) in self._nodes.items() if any(r.group == group for r in reports))
        rows.append(("actors", f"{workers} on {len(self._nodes)} nodes"))
        there = {report.group for report in reports}
        missing = [name for name in self._groups if name not in there and name != REGISTRY]
        if not self._nodes or 0 < self._missing_workers < math.inf:
            missing.append(f"CPUs for more actors ({cluster()})")
        if missing:
            rows.append(("waits for", ", ".join(missing)))
        self._print("  ".join(f"{name} {value}" for name, value in rows))

    def _end(self, command: RunCommand, reports: list[Report], stop: Stop) -> int:
        """Ends the groups in order, prints the summary, and fetches what this machine does not see."""
        self._print("ending the run; Ctrl-C kills it at once")
        signals, ended, deadline = stop.num_signals, 0, time.monotonic() + END_SECONDS
        while stop.num_signals == signals:
            answer = self._ask(True)
            reports = answer or reports
            is_known = answer is not None and bool(answer or not self._printed)  # a new registry knows no group yet
            if is_known and all(report.stages_ended == NUM_STAGES for report in reports):
                break
            if (now_ended := sum(report.stages_ended for report in reports)) > ended:
                ended, deadline = now_ended, time.monotonic() + END_SECONDS
            if time.monotonic() > deadline:
                if not self._kill_late(reports):
                    break
                deadline = time.monotonic() + END_SECONDS
            time.sleep(POLL_SECONDS)
        faults = [report for report in reports if report.fault]
        for summary in filter(None, (report.summary for report in reports)):
            self._print(summary.rstrip())
        if LEARNER in self._groups and not sees_directory(self._groups[LEARNER], self.directory):
            self._print(fetch(self._groups[LEARNER], self.directory, self._hear))
        for report in faults:
            self._print(f"ERROR {report.node} {report.fault}; see `ray logs` or {self.directory / 'logs'}")
        if command.smoke and not faults and (missing := what_is_missing(counters_of(reports))):
            self._print(f"the smoke run failed: nothing was {', '.join(missing)}")
            return 1
        return max((report.exit_status for report in faults), default=int(not reports and bool(self._printed)))

    def _kill_late(self, reports: list[Report]) -> bool:
        """Kills the actors that hold the end up; returns whether it goes on without them, which the learner may need.

        Those of a node that is gone say nothing more, and count until then.
        """
        least = min((report.stages_ended for report in reports), default=0)
        late = [report.group for report in reports if report.stages_ended == least]
        actors = [group for group in late if group.startswith(ACTORS) and group in self._groups]
        self._print(f"{', '.join(actors or late) or 'the run'} did not end in {END_SECONDS:.0f} s: killed")
        for group in actors:
            self._drop(group)
        return bool(actors)

    def _hear(self) -> None:
        self._heard = time.monotonic()

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def counters_of(reports: list[Report]) -> Counters:
    """Returns how far the run is, as its learner says."""
    return next((report.status.counters for report in reports if report.status is not None), Counters())


def _driver_silence() -> float | None:
    """Returns the seconds since the driver of this namespace's run asked last, inf while it ends; None without one."""
    try:
        registry: Any = ray.get_actor(REGISTRY)
        silence: float = ray.get(registry.silence.remote(), timeout=END_SECONDS)
    except ValueError:
        return None
    except ray.exceptions.RayError:
        return math.inf
    return silence


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
