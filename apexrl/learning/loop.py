"""The learner's loop: it takes draws, updates, and sends priorities and parameters; metrics and checkpoints follow.

Of several learners each follows shards of its own, all make every update together, and the first one speaks for all.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from apexrl.agents.families import family_of
from apexrl.clocks import time_of_day
from apexrl.config.commands import LearnerCommand, OfflineCommand
from apexrl.config.flags import explicit_replay, wants_of
from apexrl.config.tables import part_of
from apexrl.errors import ConfigError
from apexrl.learning.connections import Connections, OtherConnections
from apexrl.learning.experience.draw import Draw, DrawQueue
from apexrl.learning.experience.guest_client import GuestClient
from apexrl.learning.experience.journal_client import JournalClient
from apexrl.learning.experience.keeping import Keeping
from apexrl.learning.experience.mixed_log import with_journal
from apexrl.learning.experience.replica import LogSource, Replica
from apexrl.learning.experience.replicas import Replicas
from apexrl.learning.experience.run_moments import RunMoments
from apexrl.learning.goal import Courses, is_complete
from apexrl.learning.record.latest import latest_checkpoint
from apexrl.learning.record.metrics import episode_sums, returns_by_exploration
from apexrl.learning.record.run_page import about
from apexrl.learning.record.run_record import RunRecord
from apexrl.learning.record.status_file import LAST_EVALUATION
from apexrl.learning.results import Results, learner_metrics
from apexrl.learning.sharing import Beginning, beginning, shards_of, share_of, totals
from apexrl.learning.updates.team import RankStanding, Team, may_update, scale_of, who_is_late
from apexrl.learning.updates.updater import Pending, Updater, make_updater
from apexrl.learning.waiter import SAID_SECONDS, Waiter
from apexrl.lifecycle import Stop, Stopwatch, switch_threads_often
from apexrl.net.metrics_channel import REPORT_PERIOD_SECONDS, Evaluation
from apexrl.networks.checkpoint import Checkpoint
from apexrl.networks.device import choose_device
from apexrl.networks.device_stream import Arrivals, DeviceStream
from apexrl.networks.headers import Identity, ParametersHeader
from apexrl.replay.journal import identity_of
from apexrl.streams import difference
from apexrl.types import LogPosition, StreamSpec

logger = logging.getLogger(__name__)

BATCH_WAIT_SECONDS, ARRIVAL_WAIT_SECONDS = 0.2, 1e-3
NOTED_WAIT_SECONDS = 1e-3
MAX_JOIN_SECONDS = 2.0
RETRY_SECONDS = 10.0  # after a checkpoint that the disk did not take
DRY_SECONDS = 5.0  # the other learners go on without one that has had no draw for so long


class LearnerLoop:
    """A learner process: owns its connections, and the threads beside the update."""

    def __init__(self, command: LearnerCommand, name: str, team: Team | None = None):
        """Binds the ports.

        Args:
          team: the learners that make each update together, as this one sees it; by default it is alone.
        Raises: ConfigError when a port or the device cannot be had, or shards and batch are not the team's to divide.
        """
        self._team = team or Team()
        self._command = command = share_of(command, self._team.size)
        self._shards = shards_of(command.wires, self._team)
        self._family = family_of(command.agent)
        self._wants = wants_of(command)
        self._device = choose_device(command.learning.device)
        self._device_stream = DeviceStream(self._device)
        self._arrivals = Arrivals()
        self.results = Results(self._family.tables(command.update), isinstance(command, OfflineCommand))
        self._moments: RunMoments | None = None  # of what is normalized
        self._courses = Courses(command)
        self._run, self._name = "", name  # the run's id, as its checkpoints have it, and the learner's name
        bound = command.learning.publish_megabytes_per_second
        self._logs: Connections | OtherConnections
        if self._team.is_first:
            self._logs = Connections(command.wires, bound)
        else:
            self._logs = OtherConnections(command.wires, name)
        self._stopwatch = Stopwatch()
        self._waits_for, self._said_late = "", 0.0
        self._first_games: Evaluation | None = None  # of the last network
        self._bands = self._family.exploration_bands
        self._games = episode_sums([], self._bands)  # since the last report, of all learners

    @property
    def _connections(self) -> Connections:
        assert isinstance(self._logs, Connections), "of the first learner alone"
        return self._logs

    def run(self, stop: Stop) -> bool:
        """Learns until stopped, or to the end that the configuration gives; returns whether it is reached.

        Raises: PeerError when the replay is away for longer than the patience, or another learner is gone; ConfigError
          when a journal cannot be learned from; the error of a thread that failed.
        """
        checkpoint = latest_checkpoint(Path(self._command.run_dir)) if self._team.is_first else None
        begun = self._team.share({}, msgspec.json.encode(beginning(checkpoint, self._command.wires.shards)))
        start = msgspec.json.decode(begun, type=Beginning)
        replicas = self._follow(start, stop)
        threads = [stop.thread(replica.run, f"replica {replica.shard}") for replica in replicas]
        self._logs.start(stop)
        try:
            if (spec := self._wait_for_spec(replicas, stop)) is None:
                return False
            self._courses = Courses(self._command, start.now)
            self._courses.begin(start.steps * spec.frames_per_step, start.progress, start.updates, start.seconds)
            return self._learn(replicas, spec, checkpoint, stop)
        finally:
            stop.set()
            for following in threads:
                following.join(MAX_JOIN_SECONDS)
            self._logs.close()
            self._team.close()

    def _follow(self, start: Beginning, stop: Stop) -> Replicas:
        """Returns replicas of our shards' logs, which nobody runs yet."""
        draws, shards = DrawQueue(), self._shards
        keeping = Keeping.of(self._command, self._device_stream, len(shards), start.moments)
        self._moments = keeping.moments
        replicas = [Replica(self._log(i, start.updates), keeping, start.logs[i], stop, i, draws) for i in shards]
        return Replicas(replicas, draws)

    def _log(self, shard: int, updates: int) -> LogSource:
        """Returns the log to follow: a replay server's, that of another run, or that of a journal."""
        command, ahead = self._command, self._command.learning.prefetch_batches
        seed = command.seed, updates  # a learner that goes on from a checkpoint draws others
        batch_sizes = {want.table: want.batch_size for want in self._wants}
        if not isinstance(command, OfflineCommand):
            return with_journal(command, batch_sizes, lambda rows: self._logs.log(self._name, rows, ahead, shard), seed)
        if command.learning.total_frames:
            raise ConfigError("--total-frames: what a log holds comes at once, give --total-updates")
        if command.guest:
            client = self._logs.log(self._name, {}, ahead, shard)
            replay = part_of(explicit_replay(command), command.wires.shards)
            return GuestClient(client, self._stream, replay, batch_sizes, ahead, command.seed + shard)
        journal = Path(command.from_journal)
        wanted = self._stream(identity_of(journal).spec)
        return JournalClient(journal, wanted, explicit_replay(command), batch_sizes, ahead, seed)

    def _stream(self, spec: StreamSpec) -> StreamSpec:
        """Returns the unrolls that we need of an environment."""
        return self._family.stream(self._command.algorithm, spec)

    def _wait_for_spec(self, replicas: Replicas, stop: Stop) -> StreamSpec | None:
        """Returns the logs' spec, as soon as the replay knows it; None when one of the learners is stopped."""
        waiter = Waiter(self._command.wires.patience_seconds)
        standings: list[RankStanding] = []
        while not standings or not all(standing.has_draw for standing in standings):
            if replicas.spec is None and not stop.wait(BATCH_WAIT_SECONDS / 4):
                waiter.check(replicas.waits_for, which=replicas.away)
            standings = self._team.agree(RankStanding(replicas.spec is not None, stops=stop.is_set()))
            if any(standing.stops for standing in standings):
                return None
        spec = replicas.spec
        assert spec is not None
        if spec != (expected := self._stream(spec)):
            raise ConfigError(
                f"the log holds another stream ({difference(spec, expected)}): give actors and learner the same flags"
            )
        return spec

    def _learn(self, replicas: Replicas, spec: StreamSpec, checkpoint: Checkpoint | None, stop: Stop) -> bool:
        """Makes or restores the learner, updates it, leaves a last checkpoint; returns whether the run is complete."""
        command = self._command
        if spec.has_small_frames or self._device.type == "cuda":
            switch_threads_often()
        updater = make_updater(command, spec, self._device_stream, self._team, self._moments)
        self._identity = Identity.of(spec, command.agent, command.network)
        record = None
        if self._team.is_first:
            record = RunRecord(Path(command.run_dir), self._identity, command.learning.keep_checkpoints)
            record.about(*about(command))
        try:
            if record is not None:
                if checkpoint is not None:
                    record.restore(updater, checkpoint)
                record.checkpoint(updater)  # from now on a run without one has lost it
                self._run = record.run
            self._begin_together(updater)
            logs, _ = totals(self._team, replicas, episode_sums([], self._bands))
            if record is not None:
                self._connections.accept(self._run, *(log.log for log in logs))
                self._publish_soon(updater, record)
            self._arrivals.collect(0)
            for replica in replicas:  # while the actors fill the replay
                if (store := replica.store) is not None:  # else the replay has begun again just now
                    updater.prepare(store, replica.shard)
            has_finished = self.update(updater, replicas, record, spec, stop)
            self.end(updater, replicas, record, stop, has_finished)
            return has_finished
        finally:
            if record is not None:
                record.close()

    def _begin_together(self, updater: Updater) -> None:
        """Gives all learners the state, the number of updates and the run of the first one."""
        state = updater.state_dict()
        own = Beginning(updater.num_updates, run=self._run)
        begun = msgspec.json.decode(self._team.share(state, msgspec.json.encode(own)), type=Beginning)
        self._run = begun.run
        if not self._team.is_first:
            updater.load_state_dict(state, begun.updates)

    def update(
        self, updater: Updater, replicas: Replicas, record: RunRecord | None, spec: StreamSpec, stop: Stop
    ) -> bool:
        """Updates until the run is complete, or a learner stops; returns whether it is complete."""
        learning, team = self._command.learning, self._team
        waiter = Waiter(self._command.wires.patience_seconds)
        now = time.monotonic()
        next_report, next_checkpoint = now + 1.0, now + learning.checkpoint_period_seconds
        reported_updates, reported_at = updater.num_updates, now
        published_updates, published_at = updater.num_updates, now
        draw, drew_at, others_go_on = None, now, False
        while True:
            is_skipped = team.size > 1 and time.monotonic() - drew_at > DRY_SECONDS
            draw = draw or self._next_draw(replicas, waiter, is_skipped and others_go_on)
            now = time.monotonic()
            drew_at = drew_at if draw is None else now
            standings = self._agree(
                RankStanding(
                    has_draw=draw is not None,
                    is_skipped=is_skipped,
                    stops=stop.is_set(),
                    reports=team.is_first and now >= next_report,
                    writes_checkpoint=team.is_first and now >= next_checkpoint,
                    waits_for=replicas.waits_for,
                    transitions=replicas.transitions,
                    largest_weight=1.0 if draw is None else draw.largest_weight,
                    late=self._courses.late(time_of_day(), updater.num_updates),
                    is_over=0 < self._command.ends_at <= time_of_day(),
                )
            )
            frames = sum(standing.transitions for standing in standings) * spec.frames_per_step
            numbers = self._courses.advance(frames, standings[0].late)
            has_finished = standings[0].is_over or is_complete(learning, updater.num_updates, frames)
            if has_finished or any(standing.stops for standing in standings):
                break
            others_go_on = may_update(standings)
            if others_go_on:
                replicas.made(updater.num_updates)
                updater.schedule(numbers)
                pending = updater.update(draw, replicas.upcoming_draw(), scale_of(standings, team.rank))
                if pending is not None and draw is not None:
                    self._expect(pending, draw, updater, replicas)
                draw = None
            self._arrivals.collect(self._device_stream.depth)
            if record is not None:
                self._take_evaluations(record)
            now = time.monotonic()
            is_old = updater.num_updates - published_updates >= learning.publish_period_updates
            if record is not None and is_old and now - published_at >= learning.publish_period_seconds:
                published_updates, published_at = updater.num_updates, now
                self._publish_soon(updater, record, frames)
            if not (standings[0].reports or standings[0].writes_checkpoint):
                continue
            rate = (updater.num_updates - reported_updates) / (now - reported_at)
            is_kept = self._speak(updater, replicas, record, standings[0], rate)
            if standings[0].reports:
                reported_updates, reported_at = updater.num_updates, now
                next_report = now + REPORT_PERIOD_SECONDS
            if standings[0].writes_checkpoint:
                period = learning.checkpoint_period_seconds
                next_checkpoint = now + (period if is_kept else min(period, RETRY_SECONDS))
        self._arrivals.collect(0)
        return has_finished

    def end(self, updater: Updater, replicas: Replicas, record: RunRecord | None, stop: Stop, is_over: bool) -> None:
        """Says and keeps what the last update has left; the network of a run that is over is evaluated before."""
        seconds = self._command.learning.final_evaluation_seconds
        if is_over and updater.num_updates and seconds and not stop.is_set():
            self._waits_for = LAST_EVALUATION  # the first status of a learner that came back for this alone says so
        self._speak(updater, replicas, record, RankStanding(reports=True), 0.0)
        self._team.check_equal(updater.state_dict())
        if record is not None:
            if self._waits_for == LAST_EVALUATION:
                record.checkpoint(updater)
                self.evaluate_last(updater, replicas, record, stop)
            record.last_checkpoint(updater)

    def evaluate_last(self, updater: Updater, replicas: Replicas, record: RunRecord, stop: Stop) -> None:
        """Publishes the last parameters, and waits until they are evaluated, for a limited time."""
        seconds, next_report = self._command.learning.final_evaluation_seconds, 0.0
        self._publish_soon(updater, record, is_last=True)
        self._arrivals.collect(0)
        self._waits_for, began = LAST_EVALUATION, time.monotonic()
        while record.evaluated_updates != updater.num_updates and not stop.wait(BATCH_WAIT_SECONDS):
            if (now := time.monotonic()) - began >= seconds:
                logger.warning("%s did not end within %.0f s", LAST_EVALUATION, seconds)
                break
            self._take_evaluations(record)
            if now >= next_report:
                next_report = now + REPORT_PERIOD_SECONDS
                self.report(updater, replicas, record, {}, record.counters.logs, 0.0)
        if self._first_games and record.evaluated_updates != updater.num_updates:
            record.evaluated(self._first_games)
        self._waits_for = ""
        self.report(updater, replicas, record, {}, record.counters.logs, 0.0)

    def _agree(self, standing: RankStanding) -> list[RankStanding]:
        """Returns where all learners stand; says for whom they wait."""
        asked = time.monotonic()
        standings = self._team.agree(standing)
        waited = time.monotonic() - asked
        if waited > NOTED_WAIT_SECONDS:
            self._stopwatch.add("learners", waited)
        self._waits_for = standing.waits_for
        if standing.has_draw and (late := who_is_late(standings)):
            self._waits_for = late
            if asked - self._said_late > SAID_SECONDS:
                self._said_late = asked
                logger.info("waiting for %s", late)
        return standings

    def _expect(self, pending: Pending, draw: Draw, updater: Updater, replicas: Replicas) -> None:
        version, replica = updater.num_updates - 1, replicas.of(draw)
        self._arrivals.expect(pending.event, lambda: self.results.take(pending, draw, version, updater, replica))

    def _publish_soon(self, updater: Updater, record: RunRecord, *frames: int, is_last: bool = False) -> None:
        """Publishes the parameters as they are after the last update, at `frames` if more than the record counted."""
        header = ParametersHeader(updater.num_updates, *self._identity, self._run, is_last)
        publish, (tensors, event) = self._connections.publish, updater.parameters()
        self._arrivals.expect(event, lambda: publish(header, tensors))
        record.published(updater.num_updates, *frames)

    def _next_draw(self, replicas: Replicas, waiter: Waiter, is_expected: bool) -> Draw | None:
        """Returns the next draw, None when there is none in time.

        Args:
          is_expected: the other learners go on without a draw of ours, and wait only for us to say so.
        """
        asked = time.monotonic()
        # Results that arrive from the device in the meantime should not wait long.
        timeout = ARRIVAL_WAIT_SECONDS if len(self._arrivals) or is_expected else BATCH_WAIT_SECONDS
        draw = replicas.next_draw(timeout)
        waited = time.monotonic() - asked
        if waited > NOTED_WAIT_SECONDS:
            self._stopwatch.add(replicas.waits_for or "replay", waited)
        waiter.check(replicas.waits_for, something_came=draw is not None, which=replicas.away)
        return draw

    def _speak(
        self, updater: Updater, replicas: Replicas, record: RunRecord | None, asked: RankStanding, rate: float
    ) -> bool:
        """Adds up what all learners know; the first one writes what was asked for. Returns whether the disk took it."""
        updater.follow_moments()
        logs, sums = totals(self._team, replicas, episode_sums(replicas.drain_episodes(), self._bands))
        self._games += sums
        if asked.writes_checkpoint:
            self._arrivals.collect(0)
            self._team.check_equal(updater.state_dict())
        if record is None:
            self._report_to_first(updater, replicas, rate)
            return True
        sampled = sum(want.num_transitions(self._identity.spec) for want in self._wants) * self._team.size
        record.count(updater.num_updates, sampled, logs, int(sums[0, 0]), self._courses.progress)
        if asked.reports:
            self.report(updater, replicas, record, returns_by_exploration(self._games, self._bands), logs, rate)
            self._games[:] = 0
        return record.checkpoint(updater) if asked.writes_checkpoint else True

    def report(self, updater: Updater, replicas: Replicas, record: RunRecord, games: dict[str, float],
                logs: Sequence[LogPosition], rate: float) -> None:  # fmt: skip
        """Writes all that is known, of all roles."""
        self._take_evaluations(record)
        self._connections.accept(self._run, *(log.log for log in logs))
        scalars = self._connections.metrics.latest() | self._own_metrics(updater, replicas, rate)
        versions = [version for version in replicas.params_versions if 0 <= version <= updater.num_updates]
        if versions and not isinstance(self._command, OfflineCommand):  # else other learners made the versions
            scalars["actor/params_lag_updates"] = updater.num_updates - sum(versions) / len(versions)
        record.report(scalars, games, self._waits_for)

    def _take_evaluations(self, record: RunRecord) -> None:
        for evaluation in self._connections.metrics.evaluations():
            is_of_last = self._waits_for == LAST_EVALUATION and evaluation.params_version == record.counters.updates
            if is_of_last and not evaluation.parameters:
                self._first_games = evaluation  # as many more may follow in time
            else:
                record.evaluated(evaluation)

    def _report_to_first(self, updater: Updater, replicas: Replicas, rate: float) -> None:
        assert isinstance(self._logs, OtherConnections)
        own = self._own_metrics(updater, replicas, rate)
        prefix = f"learner_{self._team.rank}/"
        self._logs.report(self._run, {prefix + tag.removeprefix("learner/"): value for tag, value in own.items()})

    def _own_metrics(self, updater: Updater, replicas: Replicas, rate: float) -> dict[str, float]:
        metrics = self._stopwatch.shares("learner/waits_for/") | learner_metrics(updater, replicas, self.results, rate)
        metrics |= self._courses.metrics
        if self._device.type == "cuda":
            metrics["system/gpu_memory_bytes"] = float(torch.cuda.memory_reserved(self._device))
        return metrics
