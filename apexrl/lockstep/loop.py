"""The loop of a reproducible run: all environments take a step, then the learner takes every update that is due.

The order is a function of counts, never of time. Actors play until the limiters let samples out. From then on the
learner draws as soon as all its tables give a batch, and actors go on when one of them does not. Counts of updates say
when parameters are published, evaluated and saved. Time decides only when progress is reported.
"""

import contextlib
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from apexrl.acting.evaluation import Evaluator
from apexrl.config.commands import RunCommand
from apexrl.config.flags import actor_command, explicit_replay, learner_command, wants_of
from apexrl.errors import ConfigError
from apexrl.learning.record.latest import result_in
from apexrl.lifecycle import Stop
from apexrl.lockstep.actor import LockstepActor
from apexrl.lockstep.learner import LockstepLearner
from apexrl.lockstep.local_log import LocalLog
from apexrl.net.metrics_channel import REPORT_PERIOD_SECONDS
from apexrl.net.statistics import log_metrics
from apexrl.networks.headers import latest_path
from apexrl.networks.parameters import decode_parameters
from apexrl.replay.journal import new_identity
from apexrl.replay.replay import Replay

logger = logging.getLogger(__name__)

LEAST_MEASURED_SECONDS = 1.0


@contextlib.contextmanager
def untouched_generators() -> Iterator[None]:
    """Puts the global random generators of Python, numpy and torch back at the end.

    Environments that ignore the seed of their reset draw from them, those of the evaluator as those of the actor.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class LockstepLoop:
    """A whole run: owns the replay, and an actor, a learner and an evaluator that take turns."""

    def __init__(self, command: RunCommand, stop: Stop):
        """Makes everything that the run needs.

        Raises: ConfigError when something cannot be had, or the run directory holds results already.
        """
        directory = Path(command.run_dir)
        if latest_path(directory).exists() or result_in(directory) is not None:
            raise ConfigError(f"{directory} holds results, and a reproducible run continues none: begin a new one")
        self._command = command
        self._stop = stop
        self.actor = LockstepActor(actor_command(command))
        spec = self.actor.player.spec
        self.replay = Replay(explicit_replay(command), new_identity(spec), command.seed)
        self._log = LocalLog(self.replay, wants_of(command), command.learning.prefetch_batches)
        self.learner = LockstepLearner(learner_command(command), spec, self._log, stop)
        with untouched_generators():
            self._evaluator = Evaluator(actor_command(command)) if command.evaluator else None
        self._evaluated_updates = -1
        self._reported_at = self._measured_at = time.monotonic()
        self._totals, self._rates = np.zeros(2), np.zeros(2)  # steps and updates, when the rates were measured last

    def run(self) -> None:
        """Runs until stopped, or until the totals of the configuration are reached; leaves a checkpoint.

        Raises: ApexError when the network diverges, ConfigError when the limiters let nobody go on, JournalError when
          the disk does not take the last checkpoint.
        """
        learner = self.learner
        try:
            self._published = learner.parameters()
            self.actor.begin(self._published)
            self._evaluate()
            while not self._is_over():
                self._stop.heed_signals()
                self.actor.play(self._published, self._log)
                learner.follow()
                while not self._is_over() and learner.update():
                    self._after_update()
                self._report_when_due()
            learner.updater.follow_moments()  # with which the last checkpoint normalizes, too
            self._evaluate()
            self._report({})
            learner.record.last_checkpoint(learner.updater)
        finally:
            learner.record.close()
            self.actor.close()
            if self._evaluator is not None:
                self._evaluator.close()

    def _is_over(self) -> bool:
        return self._stop.is_set() or self.learner.is_complete

    def _after_update(self) -> None:
        num_updates = self.learner.updater.num_updates
        if num_updates % self._command.learning.publish_period_updates == 0:
            self._published = self.learner.parameters()
        if num_updates % self._command.evaluation_period_updates == 0:
            self._evaluate()
        if num_updates % self._command.checkpoint_period_updates == 0:
            self.learner.checkpoint()
        self._report_when_due()

    def _evaluate(self) -> None:
        """Plays whole games with the network as it is now, once; leaves no trace in the training."""
        num_updates = self.learner.updater.num_updates
        if self._evaluator is None or num_updates == self._evaluated_updates or self._stop.is_set():
            return
        self._evaluated_updates = num_updates
        encoded = self.learner.parameters_to_evaluate()
        parameters = decode_parameters(encoded)
        with untouched_generators():
            is_filmed = self._evaluator.is_film_due(parameters.header)
            outcome = self._evaluator.evaluate(parameters, encoded, self._report, self._stop, is_filmed)
        if outcome is not None:
            self.learner.record.evaluated(outcome)
            self._report({})  # so the training's metrics come at the same updates in each run, too
            logger.info("update %d: %s", num_updates, outcome.words)

    def _report_when_due(self) -> None:
        if time.monotonic() - self._reported_at >= REPORT_PERIOD_SECONDS:
            self._report({})

    def _report(self, evaluation: dict[str, float]) -> None:
        """Writes the metrics of all parts, and those of an evaluation that goes on."""
        now, player = time.monotonic(), self.actor.player
        self._reported_at = now
        if now - self._measured_at >= LEAST_MEASURED_SECONDS:
            totals = np.array([player.steps, self.learner.updater.num_updates])
            self._rates = (totals - self._totals) / (now - self._measured_at)
            self._measured_at, self._totals = now, totals
        steps_per_second, updates_per_second = self._rates.tolist()
        metrics = evaluation | {
            "actor/agent_steps_per_second": steps_per_second,
            "actor/frames_per_second": steps_per_second * player.spec.frames_per_step,
            "actor/agent_steps_total": float(player.steps),
            "actor/environment_failures_total": float(player.num_failures),
        }
        metrics |= {f"replay/{name}": value for name, value in log_metrics(self.replay, now).items()}
        self.learner.report(metrics, updates_per_second)
