"""The learner's loop: batches in; updates, priorities and parameters out; figures and checkpoints on the way."""

import dataclasses
import logging
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import torch

from apexrl.agents.apex_dqn import ApexLearner
from apexrl.config import LearnerCommand
from apexrl.errors import ApexError, ConfigError, JournalError, PeerError
from apexrl.learning.metrics import returns_by_epsilon
from apexrl.learning.replica import Replica
from apexrl.learning.run_record import RunRecord, latest_checkpoint
from apexrl.learning.unroll_store import Batch
from apexrl.learning.updater import Pending
from apexrl.lifecycle import Stop, Stopwatch, resident_bytes
from apexrl.net.keyring import load_keyring
from apexrl.net.log_client import LogClient
from apexrl.net.metrics_channel import REPORT_PERIOD_SECONDS, MetricsServer
from apexrl.net.parameter_channel import ParameterPublisher
from apexrl.net.sockets import address
from apexrl.networks.checkpoint import Checkpoint, all_finite
from apexrl.networks.device import choose_device
from apexrl.networks.device_stream import Arrivals, Lane
from apexrl.networks.parameters import Parameters, encode_parameters
from apexrl.types import LogPosition, StreamSpec

logger = logging.getLogger(__name__)

BATCH_WAIT_SECONDS = 0.2
ARRIVAL_WAIT_SECONDS = 1e-3
LEAST_PUBLISH_SECONDS = 0.2  # actors look less often; a GPU makes 25 updates in less
NOTED_WAIT_SECONDS = 1e-3
MAX_JOIN_SECONDS = 2.0
RETRY_SECONDS = 10.0  # after a checkpoint that the disk did not take
MOST_UNUSABLE_BATCHES = 20  # one after the other, without a single finite error: then it is the network


class LearnerLoop:
    """The learner process: owns the servers of parameters and metrics, and the threads beside the update."""

    def __init__(self, command: LearnerCommand, name: str):
        """Binds the ports and connects; waits for nobody.

        Raises: ConfigError when a port or the device cannot be had.
        """
        self._command = command
        self._device = choose_device(command.learning.device)
        self._lane = Lane(self._device)
        self._arrivals = Arrivals()
        self._figures: dict[str, float] = {}  # of the newest update that arrived
        self._run = ""  # as it is in the run's checkpoints
        self._num_unusable = 0  # transitions whose errors were not finite
        self._unusable_batches = 0  # one after the other, up to now
        wires, learning = command.wires, command.learning
        self._keyring = load_keyring(wires.keys, "learner")
        self._publisher = ParameterPublisher(wires.bind_host, wires.parameter_port, self._keyring)
        self._metrics = MetricsServer(wires.bind_host, wires.metrics_port, self._keyring)
        replay = address(wires.replay_host, wires.batch_port)
        batch_sizes = {learning.table: command.update.batch_size}
        self._client = LogClient(replay, name, batch_sizes, learning.prefetch_batches, keyring=self._keyring)
        self._stopwatch = Stopwatch()

    def run(self, stop: Stop) -> None:
        """Learns until stopped, or until the totals of the configuration are reached.

        Raises: PeerError when the replay is away for longer than the patience; the error of a thread that failed.
        """
        checkpoint = latest_checkpoint(Path(self._command.run_dir))
        counted = checkpoint.header.counters.log if checkpoint is not None else LogPosition()
        gamma, learning = self._command.agent.gamma, self._command.learning
        ahead, memory_gb = learning.prefetch_batches, learning.memory_gb
        replica = Replica(self._client, gamma, self._lane, ahead, counted, stop, memory_gb)
        stop.thread(self._metrics.run, "metrics")
        stop.thread(self._publisher.run, "parameters")
        following = stop.thread(replica.run, "replica")
        try:
            spec = self._wait_for_spec(replica, stop)
            if spec is not None:
                self._learn(replica, spec, checkpoint, stop)
        finally:
            stop.set()
            following.join(MAX_JOIN_SECONDS)
            self._metrics.close()
            self._publisher.close()
            if self._keyring is not None:
                self._keyring.close()

    def _wait_for_spec(self, replica: Replica, stop: Stop) -> StreamSpec | None:
        """Returns what the log holds, as soon as the replay knows it; None when stopped."""
        waiter = Waiter(self._command.wires.patience_seconds)
        while replica.spec is None and not stop.wait(BATCH_WAIT_SECONDS / 4):
            waiter.check(replica.waits_for)
        agent, spec = self._command.agent, replica.spec
        if spec is not None and (spec.n_steps, spec.unroll_starts) != (agent.n_steps, agent.unroll_starts):
            raise ConfigError(f"the log holds {spec}, we have {agent}: give the same --n-steps and --unroll-starts")
        return spec

    def _learn(self, replica: Replica, spec: StreamSpec, checkpoint: Checkpoint | None, stop: Stop) -> None:
        """Makes or restores the agent, updates it until the end, and leaves a last checkpoint."""
        command = self._command
        torch.manual_seed(command.seed)
        agent = ApexLearner(command.agent, command.update, command.network, spec, self._device, self._lane)
        record = RunRecord(Path(command.run_dir), spec, command.network)
        try:
            if checkpoint is not None:
                record.restore(agent, checkpoint)
            record.checkpoint(agent)  # from now on a run without one has lost it
            self._run = record.run
            self._take_reports(replica)
            self._publish(agent.parameters())
            self._update(agent, replica, record, spec, stop)
            self._report(agent, replica, record, 0.0)
            if not record.checkpoint(agent):
                raise JournalError(
                    f"the last checkpoint could not be written to {command.run_dir}: an older one is there"
                )
            logger.info("stopped at update %d, %d frames", agent.num_updates, record.frames)
        finally:
            record.close()

    def _update(self, agent: ApexLearner, replica: Replica, record: RunRecord, spec: StreamSpec, stop: Stop) -> None:
        learning = self._command.learning
        waiter = Waiter(self._command.wires.patience_seconds)
        now = time.monotonic()
        next_report, next_checkpoint = now + 1.0, now + learning.checkpoint_period_seconds
        reported_updates, reported_at = agent.num_updates, now
        published_updates, published_at = agent.num_updates, now
        while not stop.is_set() and not self._is_complete(agent, replica, spec):
            item = self._next_batch(replica, waiter)
            pending = agent.update(item[1], replica.upcoming_batch()) if item is not None else None
            if item is not None and pending is not None:
                self._expect(pending, item[0], agent, replica)
            self._arrivals.collect(self._lane.depth)
            now = time.monotonic()
            is_old = agent.num_updates - published_updates >= learning.publish_period_updates
            if is_old and now - published_at >= LEAST_PUBLISH_SECONDS:
                published_updates, published_at = agent.num_updates, now
                self._publish_soon(agent)
            if now >= next_report:
                rate = (agent.num_updates - reported_updates) / (now - reported_at)
                reported_updates, reported_at = agent.num_updates, now
                self._report(agent, replica, record, rate)
                next_report = now + REPORT_PERIOD_SECONDS
            if now >= next_checkpoint:
                self._arrivals.collect(0)
                record.count(agent.num_updates, self._command.update.batch_size, replica.counted, 0)
                is_kept = record.checkpoint(agent)
                period = learning.checkpoint_period_seconds
                next_checkpoint = now + (period if is_kept else min(period, RETRY_SECONDS))
        self._arrivals.collect(0)

    def _expect(self, pending: Pending, life: int, agent: ApexLearner, replica: Replica) -> None:
        """Sends the priorities of an update when they are there."""

        def arrived() -> None:
            priorities, self._figures = pending.result()
            finite = np.isfinite(priorities)
            self._unusable_batches = 0 if finite.any() else self._unusable_batches + 1
            if not finite.all():
                self._check_network(agent)
                unusable = np.unique(pending.keys[~finite])
                self._num_unusable += len(unusable)
                named = unusable[:8].tolist()
                logger.warning("%d transitions give no finite errors and get priority 0: %s", len(unusable), named)
            replica.update_priorities(life, pending.keys, np.where(finite, priorities, np.float32(0)))

        self._arrivals.expect(pending.mark, arrived)

    def _check_network(self, agent: ApexLearner) -> None:
        """Raises ApexError when it is the network, not its experience, that gives no finite errors."""
        if self._unusable_batches > MOST_UNUSABLE_BATCHES or not all_finite(agent.state_dict()):
            raise ApexError(
                f"the network has diverged at update {agent.num_updates}: lower --learning-rate; "
                "the run can go on from its last checkpoint (--resume)"
            )

    def _publish_soon(self, agent: ApexLearner) -> None:
        """Publishes the parameters as they are after the last update, when they are there."""
        parameters, mark = agent.fetch_parameters()
        self._arrivals.expect(mark, lambda: self._publish(parameters))

    def _publish(self, parameters: Parameters) -> None:
        header = msgspec.structs.replace(parameters.header, run=self._run)
        encoded = encode_parameters(header, parameters.tensors)
        self._metrics.published(header.params_version, encoded)
        self._publisher.publish(encoded)

    def _take_reports(self, replica: Replica) -> None:
        """Takes the reports of those who have our parameters, and of the replay whose log we follow."""
        self._metrics.runs = frozenset({self._run, replica.counted.log} - {""})

    def _next_batch(self, replica: Replica, waiter: "Waiter") -> tuple[int, Batch] | None:
        asked = time.monotonic()
        # What arrives from the device in the meantime should not wait long.
        batch = replica.next_batch(ARRIVAL_WAIT_SECONDS if len(self._arrivals) else BATCH_WAIT_SECONDS)
        waited = time.monotonic() - asked
        if waited > NOTED_WAIT_SECONDS:
            self._stopwatch.add(replica.waits_for or "replay", waited)
        if batch is None:
            waiter.check(replica.waits_for)
        else:
            waiter.reset()
        return batch

    def _is_complete(self, agent: ApexLearner, replica: Replica, spec: StreamSpec) -> bool:
        learning = self._command.learning
        if learning.total_updates and agent.num_updates >= learning.total_updates:
            return True
        frames = replica.counted.transitions * spec.frames_per_step
        return bool(learning.total_frames) and frames >= learning.total_frames

    def _report(self, agent: ApexLearner, replica: Replica, record: RunRecord, rate: float) -> None:
        """Writes all that is known, of all roles."""
        episodes = replica.take_episodes()
        record.count(agent.num_updates, self._command.update.batch_size, replica.counted, len(episodes))
        for evaluation in self._metrics.evaluations():
            record.evaluated(evaluation)
        versions = list(replica.params_versions)
        self._take_reports(replica)
        scalars = self._metrics.figures()
        scalars |= {f"learner/{name}": value for name, value in self._figures.items()}
        scalars |= self._stopwatch.shares("learner/waits_for/")
        scalars |= {
            "learner/updates_per_second": rate,
            "learner/updates_total": float(agent.num_updates),
            "learner/undecodable_unrolls_total": float(replica.num_undecodable),
            "learner/unusable_transitions_total": float(self._num_unusable),
            "actor/params_lag_updates": agent.num_updates - sum(versions) / max(len(versions), 1),
            "system/learner_memory_bytes": float(resident_bytes()),
            "system/cpu_share": psutil.cpu_percent() / 100,
        }
        if self._device.type == "cuda":
            scalars["system/gpu_memory_bytes"] = float(torch.cuda.memory_reserved(self._device))
        record.report(scalars, returns_by_epsilon(episodes), replica.waits_for)


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
