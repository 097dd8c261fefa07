"""The real `actor.py`, measured from outside: its replay server never makes it wait, its parameters come from here."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import zmq

from apexrl.config import PRESETS, AgentConfig, EnvConfig, NetworkConfig
from apexrl.environments.vector import make_environment, make_spec
from apexrl.flags import with_defaults
from apexrl.net.metrics_channel import Evaluation, MetricsServer, Report
from apexrl.net.parameter_channel import ParameterPublisher
from apexrl.networks.dueling import make_network
from apexrl.networks.parameters import ParametersHeader, encode_parameters
from benchmarks.replay import ROOT, free_ports, wait_for_port

STEPS = "actor/agent_steps_total"
WAITS = "actor/waits_for/"
PUBLISH_SECONDS = 0.5  # between new parameters, as often as a learner has some
START_SECONDS = 90.0  # until the first report
REPORT_SECONDS = 30.0  # until the next one
NOTED_WAIT_SHARE = 0.02
ENOUGH = 0.95  # of the seconds asked for: the reports are five seconds apart, more or less


class Reading(NamedTuple):
    """One report of the actor, and what it had cost when the report came."""

    at: float
    cpu_seconds: float
    figures: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Played:
    """What the actor did between two of its reports."""

    agent_steps: float
    cpu_seconds: float
    wall_seconds: float
    figures: dict[str, float]  # means of its reports in this time


class Readings(MetricsServer):
    """Keeps the reports of one actor process with the CPU time that it had taken when each came."""

    def __init__(self, context: zmq.Context):
        super().__init__("127.0.0.1", 0, context=context)
        self.process: psutil.Process | None = None
        self.kept: list[Reading] = []

    def take(self, message: Report | Evaluation, num_bytes: int = 0) -> None:
        """Takes one report; the replay server's are of no interest."""
        if self.process is not None and isinstance(message, Report) and STEPS in message.scalars:
            self.kept.append(Reading(time.perf_counter(), cpu_seconds(self.process), message.scalars))


def cpu_seconds(process: psutil.Process) -> float:
    """Returns the CPU time of a process and its children so far, of all threads that are or were: the scheduler's."""
    pids = [process.pid, *(child.pid for child in process.children(recursive=True))]
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # clock_getcpuclockid(3), CPUCLOCK_SCHED


def play(game: str, preset: str, device: str, seconds: float) -> Played:
    """Runs one actor with the network of a preset, and returns what it did in at least so many seconds.

    Raises: RuntimeError when it ends or says nothing.
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
        ports = ["--preset", preset, "--metrics-port", _port(readings.endpoint), "--actor-port", actor_port]
        limits = ["--samples-per-insert", 0, "--capacity", 500_000, "--journal-dir", "off"]
        replay = [*ports, "--batch-port", batch_port, *limits]
        acting = [*ports, "--env", env.env, "--parameter-port", _port(publisher.endpoint)]
        if device != "cpu":
            acting += ["--device", device]
        stack.enter_context(_running("replay.py", replay, directory))
        wait_for_port(actor_port)
        readings.process = stack.enter_context(_running("actor.py", acting, directory))
        return _measure(readings, publisher, _Versions(env, preset), directory / "actor.py.txt", seconds)


class _Versions:
    """Encoded parameters of a network that was never trained, under a new version each time."""

    def __init__(self, env: EnvConfig, preset: str):
        environment = make_environment(env, 1)
        self._spec = make_spec(env, environment, AgentConfig.unroll_starts, AgentConfig.n_steps)
        environment.close()
        self._config = with_defaults(NetworkConfig(), PRESETS[preset])
        self._tensors = make_network(self._spec, self._config).state_dict()
        self._version = 0

    def next(self) -> bytes:
        """Returns the parameters as a learner would send them after its next update."""
        self._version += 1
        return encode_parameters(ParametersHeader(self._version, self._spec, self._config, "benchmark"), self._tensors)


def _measure(
    readings: Readings, publisher: ParameterPublisher, versions: _Versions, log: Path, seconds: float
) -> Played:
    """Waits for the reports: what comes before the first is the warm-up."""
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


@contextlib.contextmanager
def _running(script: str, arguments: list[object], directory: Path) -> Iterator[psutil.Process]:
    """A role's process, which is ended with the context."""
    with (directory / f"{script}.txt").open("wb") as log:
        command = [sys.executable, script, *map(str, arguments)]
        process = psutil.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ))
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait()


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]
