"""The learner's loop: batches in, updates, priorities and parameters out; checkpoints and figures on the way."""

import dataclasses
import logging
import time
from pathlib import Path

import msgspec
import psutil
import torch
from torch import Tensor

from apexrl.agents.apex_dqn import ApexLearner
from apexrl.checkpoint import (
    BEST,
    LATEST,
    CheckpointHeader,
    Counters,
    load_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
)
from apexrl.config import LearnerCommand
from apexrl.errors import ConfigError, PeerError, WireError
from apexrl.files import write_json
from apexrl.lifecycle import Stop, Stopwatch, resident_bytes
from apexrl.metrics import Board, returns_by_epsilon
from apexrl.net.metrics_channel import REPORT_PERIOD_SECONDS, Evaluation, MetricsServer
from apexrl.net.parameter_channel import ParameterPublisher
from apexrl.net.replay_client import LogClient
from apexrl.net.sockets import address
from apexrl.parameters import decode_parameters, encode_parameters
from apexrl.replica import Replica
from apexrl.status import STATUS_FILE, Status
from apexrl.types import Episode

logger = logging.getLogger(__name__)

BATCH_WAIT_SECONDS = 0.2


class LearnerLoop:
    """The learner process: owns the agent, the counters and the run directory."""

    def __init__(self, command: LearnerCommand, name: str):
        """Binds the ports and connects; waits for nobody.

        Raises: ConfigError when a port or the device cannot be had.
        """
        self._command = command
        self._run_dir = Path(command.run_dir)
        self._device = choose_device(command.learning.device)
        wires = command.wires
        self._publisher = ParameterPublisher(wires.bind_host, wires.parameter_port)
        self._metrics = MetricsServer(wires.bind_host, wires.metrics_port)
        self._client = LogClient(
            address(wires.replay_host, wires.batch_port),
            name,
            command.update.batch_size,
            command.learning.prefetch_batches,
        )
        self._board = Board(self._run_dir / "tensorboard")
        self._counters = Counters()
        self._stopwatch = Stopwatch()
        self._recent_episodes: list[Episode] = []
        self._last_figures: dict[str, float] = {}

    def run(self, stop: Stop) -> None:
        """Learns until stopped, or until the totals of the configuration are reached.

        Raises: PeerError when the replay is away for longer than the patience; the error of a thread that failed.
        """
        command = self._command
        replica = Replica(self._client, command.agent.gamma, self._device, command.learning.prefetch_batches + 2, stop)
        stop.thread(self._metrics.run, "metrics")
        replica_thread = stop.thread(replica.run, "replica")
        stop.thread(self._publisher.run, "parameters")
        try:
            agent = self._start(replica, stop)
            if agent is not None:
                self._learn(agent, replica, stop)
                self._finish(agent, replica, replica_thread)
        finally:
            stop.set()
            replica_thread.join(timeout=2)
            self._metrics.close()
            self._publisher.close()
            self._board.close()

    def _start(self, replica: Replica, stop: Stop) -> ApexLearner | None:
        """Waits for the spec of the log, and makes or restores the agent."""
        waiter = Waiter(self._command.wires.patience_seconds)
        while replica.spec is None:
            if stop.wait(0.05):
                return None
            waiter.check(replica.waits_for)
        command = self._command
        torch.manual_seed(command.seed)
        agent = ApexLearner(command.agent, command.update, command.network, replica.spec, self._device)
        path = self._run_dir / "checkpoints" / LATEST
        if path.exists():
            checkpoint = load_checkpoint(path)
            if (checkpoint.header.spec, checkpoint.header.network) != (replica.spec, command.network):
                raise ConfigError(f"{path} is of {checkpoint.header}, not of this run: choose another --run-dir")
            self._counters = checkpoint.header.counters
            agent.load_state_dict(checkpoint.tensors, self._counters.updates)
            set_random_state(checkpoint.tensors)
            logger.info("continuing %s from update %d", path, self._counters.updates)
        self._base = self._counters
        self._started = time.monotonic()
        self._publish(agent)
        return agent

    def _learn(self, agent: ApexLearner, replica: Replica, stop: Stop) -> None:
        learning = self._command.learning
        waiter = Waiter(self._command.wires.patience_seconds)
        now = time.monotonic()
        next_report, next_checkpoint = now + 1.0, now + learning.checkpoint_period_seconds
        reported_updates, reported_at = agent.num_updates, now
        figures: dict[str, Tensor] = {}
        while not stop.is_set() and not self._is_complete(agent, replica):
            asked = time.monotonic()
            batch = replica.next_batch(BATCH_WAIT_SECONDS)
            waited = time.monotonic() - asked
            if waited > 1e-3:
                self._stopwatch.add(replica.waits_for or "replay", waited)
            if batch is None:
                waiter.check(replica.waits_for)
            else:
                waiter.reset()
                priorities, figures = agent.update(batch)
                replica.update_priorities(batch.keys, priorities)
                if agent.num_updates % learning.publish_period_updates == 0:
                    self._publish(agent)
            now = time.monotonic()
            if now >= next_report:
                rate = (agent.num_updates - reported_updates) / (now - reported_at)
                reported_updates, reported_at = agent.num_updates, now
                self._report(agent, replica, figures, rate)
                next_report = now + REPORT_PERIOD_SECONDS
            if now >= next_checkpoint:
                self._checkpoint(agent, replica)
                next_checkpoint = now + learning.checkpoint_period_seconds

    def _is_complete(self, agent: ApexLearner, replica: Replica) -> bool:
        learning = self._command.learning
        if learning.total_updates and agent.num_updates >= learning.total_updates:
            return True
        return bool(learning.total_frames) and self._frames(replica) >= learning.total_frames

    def _finish(self, agent: ApexLearner, replica: Replica, replica_thread: object) -> None:
        self._report(agent, replica, {}, 0.0)
        self._checkpoint(agent, replica)
        logger.info("stopped at update %d, %d frames", agent.num_updates, self._frames(replica))

    def _publish(self, agent: ApexLearner) -> None:
        self._publisher.publish(encode_parameters(*agent.parameters()))

    def _count(self, agent: ApexLearner, replica: Replica) -> None:
        base = self._base
        batch_size = self._command.update.batch_size
        self._counters = msgspec.structs.replace(
            self._counters,
            updates=agent.num_updates,
            transitions_inserted=base.transitions_inserted + replica.transitions_inserted,
            transitions_sampled=base.transitions_sampled + (agent.num_updates - base.updates) * batch_size,
            agent_steps=base.agent_steps + int(self._metrics.total("actor/agent_steps_total")),
            seconds=base.seconds + time.monotonic() - self._started,
        )

    def _frames(self, replica: Replica) -> int:
        assert replica.spec is not None
        return (self._base.transitions_inserted + replica.transitions_inserted) * replica.spec.frames_per_step

    def _report(self, agent: ApexLearner, replica: Replica, figures: dict[str, Tensor], rate: float) -> None:
        """Writes everything that is known to TensorBoard and to the status file."""
        frames = self._frames(replica)
        self._take_evaluations(frames)
        episodes = replica.take_episodes()
        self._counters = msgspec.structs.replace(self._counters, episodes=self._counters.episodes + len(episodes))
        self._count(agent, replica)
        scalars = self._metrics.figures() | returns_by_epsilon(episodes)
        scalars |= {f"learner/{name}": float(value) for name, value in figures.items()}
        scalars |= self._stopwatch.shares("learner/waits_for/")
        lags = [agent.num_updates - version for version in list(replica.params_lag)]
        scalars |= {
            "learner/updates_per_second": rate,
            "learner/updates_total": float(agent.num_updates),
            "actor/params_lag_updates": sum(lags) / max(len(lags), 1),
            "system/learner_memory_bytes": float(resident_bytes()),
            "system/cpu_share": psutil.cpu_percent() / 100,
        }
        if self._device.type == "cuda":
            scalars["system/gpu_memory_bytes"] = float(torch.cuda.memory_reserved(self._device))
        self._board.scalars(scalars, frames)
        self._last_figures = self._last_figures | scalars
        assert replica.spec is not None
        status = Status(replica.spec.env, frames, self._counters, self._last_figures, replica.waits_for)
        write_json(self._run_dir / STATUS_FILE, status)

    def _take_evaluations(self, frames: int) -> None:
        for evaluation in self._metrics.evaluations():
            self._board.scalars(evaluation.figures(), frames)
            self._last_figures |= evaluation.figures()
            if evaluation.picture:
                self._board.png("evaluation/game", evaluation.picture, frames)
            mean = evaluation.figures()["evaluation/return_mean"]
            counters = self._counters
            is_best = counters.best_evaluation_return is None or mean > counters.best_evaluation_return
            self._counters = msgspec.structs.replace(
                counters,
                evaluation_episodes=counters.evaluation_episodes + len(evaluation.returns),
                last_evaluation_return=mean,
                best_evaluation_return=mean if is_best else counters.best_evaluation_return,
            )
            self._append_curve(frames, evaluation)
            if is_best and evaluation.parameters:
                self._keep_best(evaluation)

    def _append_curve(self, frames: int, evaluation: Evaluation) -> None:
        """Adds one line to evaluations.csv."""
        path = self._run_dir / "evaluations.csv"
        seconds = self._base.seconds + time.monotonic() - self._started
        if not path.exists():
            path.write_text("seconds,frames,updates,episodes,mean,median,min,max\n")
        f = evaluation.figures()
        names = ("return_mean", "return_median", "return_min", "return_max")
        values = ",".join(f"{f[f'evaluation/{name}']:.2f}" for name in names)
        with path.open("a") as file:
            file.write(f"{seconds:.0f},{frames},{evaluation.params_version},{len(evaluation.returns)},{values}\n")

    def _keep_best(self, evaluation: Evaluation) -> None:
        try:
            parameters = decode_parameters(evaluation.parameters)
        except WireError as error:
            logger.warning("an evaluation came with parameters that cannot be read: %s", error)
            return
        counters = msgspec.structs.replace(self._counters, updates=parameters.header.params_version)
        header = CheckpointHeader(parameters.header.spec, parameters.header.network, counters)
        tensors = {f"online.{name}": tensor for name, tensor in parameters.tensors.items()}
        save_checkpoint(self._run_dir / "checkpoints" / BEST, header, tensors)

    def _checkpoint(self, agent: ApexLearner, replica: Replica) -> None:
        self._count(agent, replica)
        header = CheckpointHeader(agent.parameters().header.spec, self._command.network, self._counters)
        save_checkpoint(self._run_dir / "checkpoints" / LATEST, header, agent.state_dict() | random_state())


@dataclasses.dataclass
class Waiter:
    """Gives up when the replay has been away for longer than the patience; other waits may take as long as they do."""

    patience_seconds: float
    since: float = dataclasses.field(default_factory=time.monotonic)
    said: float = dataclasses.field(default_factory=time.monotonic)

    def reset(self) -> None:
        """Something came."""
        self.since = time.monotonic()

    def check(self, waits_for: str) -> None:
        """Nothing came; says now and then what is missing.

        Raises: PeerError when the replay server has been away for too long.
        """
        now = time.monotonic()
        if waits_for != "replay_connection":
            self.since = now
        if now - self.since > self.patience_seconds:
            raise PeerError(f"the replay server was away for {self.patience_seconds:.0f} s: is it running?")
        if now - self.said > 10:
            self.said = now
            logger.info("waiting for %s", waits_for or "a batch")


def choose_device(name: str) -> torch.device:
    """Returns the device to learn on; auto takes a GPU when there is one.

    Raises: ConfigError when the named device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {error}") from error
    return device
