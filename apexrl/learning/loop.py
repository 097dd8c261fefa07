"""The learner's loop: it takes draws, updates, and sends priorities and parameters; metrics and checkpoints follow."""

import logging
import time
from pathlib import Path

import psutil
import torch

from apexrl.agents.contract import Family
from apexrl.agents.families import family_of, implementation
from apexrl.config import LearnerCommand, LearningConfig, OfflineCommand, ReplayConfig, tables_of
from apexrl.errors import ConfigError
from apexrl.flags import explicit_replay
from apexrl.learning.connections import Connections
from apexrl.learning.draw import Draw
from apexrl.learning.journal_client import JournalClient
from apexrl.learning.metrics import returns_by_exploration
from apexrl.learning.replica import Replica
from apexrl.learning.results import Results
from apexrl.learning.run_record import RunRecord, latest_checkpoint
from apexrl.learning.updater import Pending, Updater
from apexrl.learning.waiter import Waiter
from apexrl.lifecycle import Stop, Stopwatch, resident_bytes
from apexrl.net.log_client import LogClient
from apexrl.net.metrics_channel import REPORT_PERIOD_SECONDS
from apexrl.networks.checkpoint import Checkpoint
from apexrl.networks.device import choose_device
from apexrl.networks.device_stream import Arrivals, DeviceStream
from apexrl.networks.parameters import Identity, ParametersHeader
from apexrl.replay.journal import identity_of
from apexrl.types import LogPosition, StreamSpec

logger = logging.getLogger(__name__)

BATCH_WAIT_SECONDS = 0.2
ARRIVAL_WAIT_SECONDS = 1e-3
NOTED_WAIT_SECONDS = 1e-3
MAX_JOIN_SECONDS = 2.0
RETRY_SECONDS = 10.0  # after a checkpoint that the disk did not take


class LearnerLoop:
    """The learner process: owns the servers of parameters and metrics, and the threads beside the update."""

    def __init__(self, command: LearnerCommand, name: str):
        """Binds the ports.

        Raises: ConfigError when a port or the device cannot be had.
        """
        self._command = command
        self._family = family_of(command.agent)
        self._wants = self._family.wants(command.algorithm, command.update)
        self._device = choose_device(command.learning.device)
        self._device_stream = DeviceStream(self._device)
        self._arrivals = Arrivals()
        self._results = Results(fifo_tables(self._family, command))
        self._run = ""  # as it is in the run's checkpoints
        self._name = name
        self._connections = Connections(command.wires)
        self._stopwatch = Stopwatch()

    def run(self, stop: Stop) -> None:
        """Learns until stopped, or until the totals of the configuration are reached.

        Raises: PeerError when the replay is away for longer than the patience; ConfigError when a journal cannot be
          learned from; the error of a thread that failed.
        """
        checkpoint = latest_checkpoint(Path(self._command.run_dir))
        counted = checkpoint.header.counters.log if checkpoint is not None else LogPosition()
        learning = self._command.learning
        ahead, memory_gb = learning.prefetch_batches, learning.memory_gb
        replica = Replica(self._log(), self._wants, self._device_stream, ahead, counted, stop, memory_gb)
        self._connections.start(stop)
        following = stop.thread(replica.run, "replica")
        try:
            spec = self._wait_for_spec(replica, stop)
            if spec is not None:
                self._learn(replica, spec, checkpoint, stop)
        finally:
            stop.set()
            following.join(MAX_JOIN_SECONDS)
            self._connections.close()

    def _log(self) -> LogClient | JournalClient:
        """Returns the log to follow: the replay server's, or that of a journal."""
        command, prefetch = self._command, self._command.learning.prefetch_batches
        batch_sizes = {want.table: want.batch_size for want in self._wants}
        if not isinstance(command, OfflineCommand):
            return self._connections.log(self._name, batch_sizes, prefetch)
        if command.learning.total_frames:
            raise ConfigError("--total-frames: a journal brings no new frames, give --total-updates")
        journal = Path(command.from_journal)
        wanted = self._family.stream(command.algorithm, identity_of(journal).spec)
        return JournalClient(journal, wanted, explicit_replay(command), batch_sizes, prefetch, command.seed)

    def _wait_for_spec(self, replica: Replica, stop: Stop) -> StreamSpec | None:
        """Returns the log's spec, as soon as the replay knows it; None when stopped."""
        waiter = Waiter(self._command.wires.patience_seconds)
        while replica.spec is None and not stop.wait(BATCH_WAIT_SECONDS / 4):
            waiter.check(replica.waits_for)
        spec = replica.spec
        expected = spec and self._family.stream(self._command.algorithm, spec)
        if spec != expected:
            raise ConfigError(f"the log holds {spec}, we need {expected}: give actors and learner the same flags")
        return spec

    def _learn(self, replica: Replica, spec: StreamSpec, checkpoint: Checkpoint | None, stop: Stop) -> None:
        """Makes or restores the learner, updates it until the end, and leaves a last checkpoint."""
        command = self._command
        updater = make_updater(command, spec, self._device_stream)
        self._identity = Identity.of(spec, command.agent, command.network)
        record = RunRecord(Path(command.run_dir), self._identity, command.learning.keep_checkpoints)
        try:
            if checkpoint is not None:
                record.restore(updater, checkpoint)
            record.checkpoint(updater)  # from now on a run without one has lost it
            self._run = record.run
            self._connections.accept(self._run, replica.counted.log)
            self._publish_soon(updater)
            self._arrivals.collect(0)
            self._update(updater, replica, record, spec, stop)
            self._report(updater, replica, record, 0.0)
            record.last_checkpoint(updater)
        finally:
            record.close()

    def _update(self, updater: Updater, replica: Replica, record: RunRecord, spec: StreamSpec, stop: Stop) -> None:
        learning = self._command.learning
        waiter = Waiter(self._command.wires.patience_seconds)
        now = time.monotonic()
        next_report, next_checkpoint = now + 1.0, now + learning.checkpoint_period_seconds
        reported_updates, reported_at = updater.num_updates, now
        published_updates, published_at = updater.num_updates, now
        while not stop.is_set() and not is_complete(learning, updater, replica, spec):
            draw = self._next_draw(replica, waiter)
            if draw is not None:
                replica.num_updates = updater.num_updates
                updater.schedule(*progress(learning, replica, spec))
                pending = updater.update(draw, replica.upcoming_draw())
                if pending is not None:
                    self._expect(pending, draw, updater, replica)
            self._arrivals.collect(self._device_stream.depth)
            now = time.monotonic()
            is_old = updater.num_updates - published_updates >= learning.publish_period_updates
            if is_old and now - published_at >= learning.publish_period_seconds:
                published_updates, published_at = updater.num_updates, now
                self._publish_soon(updater)
            if now >= next_report:
                rate = (updater.num_updates - reported_updates) / (now - reported_at)
                reported_updates, reported_at = updater.num_updates, now
                self._report(updater, replica, record, rate)
                next_report = now + REPORT_PERIOD_SECONDS
            if now >= next_checkpoint:
                self._arrivals.collect(0)
                self._count(updater, replica, record, 0)
                is_kept = record.checkpoint(updater)
                period = learning.checkpoint_period_seconds
                next_checkpoint = now + (period if is_kept else min(period, RETRY_SECONDS))
        self._arrivals.collect(0)

    def _count(self, updater: Updater, replica: Replica, record: RunRecord, num_episodes: int) -> None:
        sampled = sum(want.num_transitions(self._identity.spec) for want in self._wants)
        record.count(updater.num_updates, sampled, replica.counted, num_episodes)

    def _expect(self, pending: Pending, draw: Draw, updater: Updater, replica: Replica) -> None:
        version = updater.num_updates - 1
        self._arrivals.expect(pending.event, lambda: self._results.take(pending, draw, version, updater, replica))

    def _publish_soon(self, updater: Updater) -> None:
        """Publishes the parameters as they are after the last update, when they are there."""
        header = ParametersHeader(updater.num_updates, *self._identity, self._run)
        tensors, event = updater.parameters()
        self._arrivals.expect(event, lambda: self._connections.publish(header, tensors))

    def _next_draw(self, replica: Replica, waiter: Waiter) -> Draw | None:
        asked = time.monotonic()
        # Results that arrive from the device in the meantime should not wait long.
        draw = replica.next_draw(ARRIVAL_WAIT_SECONDS if len(self._arrivals) else BATCH_WAIT_SECONDS)
        waited = time.monotonic() - asked
        if waited > NOTED_WAIT_SECONDS:
            self._stopwatch.add(replica.waits_for or "replay", waited)
        if draw is None:
            waiter.check(replica.waits_for)
        else:
            waiter.reset()
        return draw

    def _report(self, updater: Updater, replica: Replica, record: RunRecord, rate: float) -> None:
        """Writes all that is known, of all roles."""
        episodes = replica.drain_episodes()
        self._count(updater, replica, record, len(episodes))
        for evaluation in self._connections.evaluations():
            record.evaluated(evaluation)
        self._connections.accept(self._run, replica.counted.log)
        scalars = self._connections.latest()
        scalars |= self._stopwatch.shares("learner/waits_for/")
        scalars |= learner_metrics(updater, replica, self._results, rate)
        versions = list(replica.params_versions)
        if not isinstance(self._command, OfflineCommand):  # else other learners made the versions
            scalars["actor/params_lag_updates"] = updater.num_updates - sum(versions) / max(len(versions), 1)
        if self._device.type == "cuda":
            scalars["system/gpu_memory_bytes"] = float(torch.cuda.memory_reserved(self._device))
        record.report(scalars, returns_by_exploration(episodes), replica.waits_for)


def make_updater(command: LearnerCommand, spec: StreamSpec, device_stream: DeviceStream) -> Updater:
    """Returns an updater with new networks, which follow from the seed."""
    torch.manual_seed(command.seed)
    make = implementation(family_of(command.agent)).make_learner
    with device_stream.exclusive():
        learner = make(command.algorithm, command.network, command.update, spec, device_stream.device)
    return Updater(learner, device_stream)


def progress(learning: LearningConfig, replica: Replica, spec: StreamSpec) -> tuple[int, float]:
    """Returns the environment frames so far, and their share of the total: 0 where the run has none."""
    frames, total = replica.counted.transitions * spec.frames_per_step, learning.total_frames
    return frames, min(frames / total, 1.0) if total else 0.0


def is_complete(learning: LearningConfig, updater: Updater, replica: Replica, spec: StreamSpec) -> bool:
    """Returns whether a run has reached one of its totals."""
    if learning.total_updates and updater.num_updates >= learning.total_updates:
        return True
    return progress(learning, replica, spec)[1] == 1


def learner_metrics(
    updater: Updater, replica: Replica, results: Results, updates_per_second: float
) -> dict[str, float]:
    """Returns the metrics of a learner by tag."""
    metrics = {f"learner/selection/{name}": value for name, value in replica.selection_metrics.items()}
    return (
        metrics
        | results.metrics()
        | {
            "learner/updates_per_second": updates_per_second,
            "learner/updates_total": float(updater.num_updates),
            "learner/undecodable_unrolls_total": float(replica.num_undecodable),
            "system/learner_memory_bytes": float(resident_bytes()),
            "system/cpu_share": psutil.cpu_percent() / 100,
        }
    )


def fifo_tables(family: Family, command: LearnerCommand) -> list[str]:
    """Returns the tables that the algorithm itself makes queues; only the replay knows its own --tables."""
    tables = tables_of(ReplayConfig(tables=family.tables(command.update)), command.algorithm.unroll_starts)
    return [name for name, table in tables.items() if table.kind == "fifo"]
