"""The learning half of a reproducible run: an update for each draw, whose priorities count for the next one."""

from pathlib import Path

import torch

from apexrl.agents.families import family_of
from apexrl.config.commands import LearnerCommand
from apexrl.learning.experience.keeping import Keeping
from apexrl.learning.experience.replica import Replica
from apexrl.learning.goal import Courses, is_complete
from apexrl.learning.record.metrics import episode_sums, returns_by_exploration
from apexrl.learning.record.run_page import about
from apexrl.learning.record.run_record import RunRecord
from apexrl.learning.results import Results, learner_metrics
from apexrl.learning.updates.updater import make_updater
from apexrl.lifecycle import Stop
from apexrl.lockstep.local_log import LocalLog
from apexrl.networks.device_stream import DeviceStream
from apexrl.networks.headers import Identity, ParametersHeader
from apexrl.networks.parameters import encode_parameters
from apexrl.types import LogPosition, StreamSpec


class LockstepLearner:
    """Owns the replica of the log, the network, and the counters and files of the run.

    The updater may compute parts of one update in a second thread. No number depends on its timing.
    """

    def __init__(self, command: LearnerCommand, spec: StreamSpec, log: LocalLog, stop: Stop):
        """Makes the network and the run directory.

        Raises: ConfigError when one of them cannot be made.
        """
        self._command = command
        self._spec = spec
        self._log = log
        device_stream = DeviceStream(torch.device("cpu"))
        keeping = Keeping.of(command, device_stream)
        self._replica = Replica(log, keeping, LogPosition(), stop)
        self.updater = make_updater(command, spec, device_stream, moments=keeping.moments)
        self._identity = Identity.of(spec, command.agent, command.network)
        self.record = RunRecord(Path(command.run_dir), self._identity, command.learning.keep_checkpoints)
        self.record.about(*about(command))
        self._courses = Courses(command)
        self._results = Results(family_of(command.agent).tables(command.update))

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached one of its totals."""
        return is_complete(self._command.learning, self.updater.num_updates, self._frames)

    def follow(self) -> None:
        """Takes everything that is new in the log."""
        while self._replica.follow(0):
            pass

    def update(self) -> bool:
        """Takes the next update; returns False when the limiters let no samples out.

        Raises: ApexError when the network has diverged; ConfigError when the limiters let nobody go on.
        """
        while self._log.draw():
            self.follow()
            draw = self._replica.next_draw(0)
            if draw is None:  # nothing of it could be decoded
                continue
            self._replica.num_updates = self.updater.num_updates
            late = self._courses.late(0.0, self.updater.num_updates)
            self.updater.schedule(self._courses.advance(self._frames, late))
            pending = self.updater.update(draw)
            assert pending is not None
            self._results.take(pending, draw, self.updater.num_updates - 1, self.updater, self._replica)
            self.follow()
            return True
        return False

    def parameters(self, is_last: bool = False) -> bytes:
        """Returns the parameters as actors get them.

        Raises: ApexError when a value is beyond float16.
        """
        header = ParametersHeader(self.updater.num_updates, *self._identity, self.record.run, is_last)
        return encode_parameters(header, self.updater.parameters()[0])

    def parameters_to_evaluate(self) -> bytes:
        """Returns the parameters as actors get them, and notes how far the run is at them."""
        self._count(0)
        self.record.published(self.updater.num_updates)
        return self.parameters(self.is_complete)

    def checkpoint(self) -> None:
        """Writes a checkpoint; a disk that takes none is said."""
        self.updater.follow_moments()
        self._count(0)
        self.record.checkpoint(self.updater)

    def report(self, others: dict[str, float], updates_per_second: float) -> None:
        """Writes all metrics, with those of others."""
        episodes = self._replica.drain_episodes()
        self._count(len(episodes))
        metrics = others | learner_metrics(self.updater, self._replica, self._results, updates_per_second)
        metrics |= self._courses.metrics
        bands = family_of(self._command.agent).exploration_bands
        self.record.report(metrics, returns_by_exploration(episode_sums(episodes, bands), bands), "")

    @property
    def _frames(self) -> int:
        return self._replica.counted.transitions * self._spec.frames_per_step

    def _count(self, num_episodes: int) -> None:
        sampled = sum(want.num_transitions(self._spec) for want in self._log.wants)
        counted = (self._replica.counted,)
        self.record.count(self.updater.num_updates, sampled, counted, num_episodes, self._courses.progress)
