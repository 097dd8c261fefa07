"""Measures the real `actor.py` from outside. Its replay server never makes it wait; this process gives parameters."""

import contextlib
import dataclasses
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import torch
import zmq

from apexrl.agents.families import family_of, implementation
from apexrl.config.commands import LearnerCommand
from apexrl.config.flags import default_command, with_preset
from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment
from apexrl.net.metrics_channel import Evaluation, MetricsServer, Report
from apexrl.net.parameter_channel import ParameterPublisher
from apexrl.networks.config import to_text
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import encode_parameters
from apexrl.running.machine import ENVIRONMENTS_BESIDE_A_GPU
from benchmarks.replay import free_ports, running, wait_for_port

STEPS = "actor/agent_steps_total"
WAITS = "actor/waits_for/"
PUBLISH_SECONDS = 0.5  # between new parameters, about as often as a learner publishes
START_SECONDS = 600.0  # the longest wait for the first report
REPORT_SECONDS = 300.0  # the longest wait for the next report
NOTED_WAIT_SHARE = 0.02
ENOUGH = 0.95  # smallest share of the seconds asked for: reports are about five seconds apart


class Reading(NamedTuple):
    """One report of the actor, with its time and the CPU time that the actor had used by then."""

    at: float
    cpu_seconds: float
    figures: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Played:
    """The actor's work between two of its reports."""

    agent_steps: float
    cpu_seconds: float
    wall_seconds: float
    figures: dict[str, float]  # means over its reports in this time


class Readings(MetricsServer):
    """Keeps each report of one actor process with the CPU time that the process had used by then."""

    def __init__(self, context: zmq.Context):
        super().__init__("127.0.0.1", 0, context=context)
        self.process: psutil.Process | None = None
        self.kept: list[Reading] = []

    def take(self, message: Report | Evaluation, num_bytes: int = 0) -> None:
        """Keeps a report of the actor, and ignores the replay server's."""
        if self.process is not None and isinstance(message, Report) and STEPS in message.scalars:
            self.kept.append(Reading(time.perf_counter(), cpu_seconds(self.process), message.scalars))


def cpu_seconds(process: psutil.Process) -> float:
    """Returns the CPU time of a process and its children so far: the scheduler's, of living and ended threads."""
    pids = [process.pid, *(child.pid for child in process.children(recursive=True))]
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # clock_getcpuclockid(3), CPUCLOCK_SCHED


def play(game: str, agent: str, preset: str, device: str, seconds: float) -> Played:
    """Runs one actor with the network of an agent's preset, and returns its work in at least ENOUGH of the seconds.

    Raises: RuntimeError when it ends or reports nothing.
    """
    env = EnvConfig(env=f"{game}NoFrameskip-v4")
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="apexrl-benchmark-")))
        context = stack.enter_context(zmq.Context())
        publisher = ParameterPublisher("127.0.0.1", 0, context=context)
        readings = Readings(context)
        for server in (publisher, readings):
            thread = threading.Thread(target=server.run, daemon=True)
            thread.start()
            stack.callback(thread.join, 5.0)
            stack.callback(server.close)
        actor_port, batch_port = free_ports(2)
        ports = ["--agent", agent, "--preset", preset]
        ports += ["--metrics-port", _port(readings.endpoint), "--actor-port", actor_port]
        limits = ["--tables", "all=uniform:0:1", "--capacity", 500_000, "--journal-dir", "off"]
        replay = [*ports, "--batch-port", batch_port, *limits]
        acting = [*ports, "--env", env.env, "--parameter-port", _port(publisher.endpoint)]
        if device != "cpu":
            acting += ["--device", device, "--environments-per-worker", ENVIRONMENTS_BESIDE_A_GPU]  # as the launcher
        stack.enter_context(running(["replay.py", *replay], directory / "replay.py.txt"))
        wait_for_port(actor_port)
        log = directory / "actor.py.txt"
        readings.process = stack.enter_context(running(["actor.py", *acting], log))
        return _measure(readings, publisher, _Versions(env, agent, preset), log, seconds)


class _Versions:
    """Encodes the parameters of an untrained network, under a new version each time."""

    def __init__(self, env: EnvConfig, agent: str, preset: str):
        environment = make_environment(env, 1)
        command = with_preset(default_command(LearnerCommand, agent), preset)
        family = family_of(agent)
        spec = family.stream(command.algorithm, environment.spec)
        environment.close()
        make_learner, cpu = implementation(family).make_learner, torch.device("cpu")
        learner = make_learner(command.algorithm, command.network, command.update, spec, cpu)
        self._tensors = learner.acting_tensors()
        self._header = ParametersHeader(0, spec, agent, to_text(command.network), "benchmark")

    def next(self) -> bytes:
        """Returns the parameters as a learner would send them after its next update."""
        self._header = msgspec.structs.replace(self._header, params_version=self._header.params_version + 1)
        return encode_parameters(self._header, self._tensors)


def _measure(
    readings: Readings, publisher: ParameterPublisher, versions: _Versions, log: Path, seconds: float
) -> Played:
    """Publishes parameters and waits for the reports. The time before the first report is the warm-up."""
    assert readings.process is not None
    deadline = time.perf_counter() + START_SECONDS
    while True:
        publisher.publish(versions.next())
        time.sleep(PUBLISH_SECONDS)
        kept = list(readings.kept)
        if len(kept) > 1 and kept[-1].at - kept[0].at >= ENOUGH * seconds:
            return _played(kept)
        if kept:
            deadline = kept[-1].at + REPORT_SECONDS
        if time.perf_counter() > deadline or readings.process.status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError(f"actor.py ended or reports nothing; its log ends with: {log.read_text()[-1500:]}")


def _played(kept: list[Reading]) -> Played:
    first, last = kept[0], kept[-1]
    means = {
        name: sum(reading.figures.get(name, 0.0) for reading in kept[1:]) / (len(kept) - 1) for name in last.figures
    }
    waited = sum(share for name, share in means.items() if name.startswith(WAITS))
    if waited > NOTED_WAIT_SHARE:
        print(f"NOTE: the actor waited for the replay server {waited:.0%} of the time", flush=True)
    agent_steps = last.figures[STEPS] - first.figures[STEPS]
    return Played(agent_steps, last.cpu_seconds - first.cpu_seconds, last.at - first.at, means)


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]
