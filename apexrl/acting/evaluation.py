"""The evaluator: whole unclipped games with the newest parameters, or with those of a checkpoint."""

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from apexrl.acting.foreign import ForeignEnvironment
from apexrl.acting.games import Ending, Games, GamesTold, play_games
from apexrl.acting.loop import check_fits, why_unfit
from apexrl.acting.video import MAX_FILM_SECONDS, VideoFolder, VideoWriter
from apexrl.agents.contract import Actor
from apexrl.agents.families import family_of, implementation
from apexrl.clocks import Absence
from apexrl.config.commands import ActorCommand
from apexrl.control_groups import num_cores
from apexrl.environments.renewal import Failures
from apexrl.environments.vector import EVALUATED, WATCHED, VectorEnvironment
from apexrl.errors import ApexError, PeerTimeout, WireError
from apexrl.lifecycle import CpuMeter, Stop, make_way, process_name
from apexrl.lines import say
from apexrl.net.keyring import load_keyring
from apexrl.net.metrics_channel import MAX_GAMES, Evaluation, MetricsClient, checksum
from apexrl.net.parameter_channel import ParameterSubscriber
from apexrl.net.sockets import address
from apexrl.networks.checkpoint import load_checkpoint
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import Parameters, decode_header, decode_parameters
from apexrl.runs import video_name
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)

MAX_ENVIRONMENTS = 10
LOOK_SECONDS = 0.5  # between two looks for newer parameters
FILM_SECONDS = 2 * MAX_FILM_SECONDS  # of playing and drawing, for which newer parameters that are due wait


class Evaluator:
    """Owns the games of an evaluation. Used from one thread."""

    def __init__(self, command: ActorCommand):
        """Makes the environments and the directory of videos.

        Raises: ConfigError when one of them cannot be made.
        """
        self._command = command
        directory = command.evaluation.record_dir
        self.videos = VideoFolder(Path(directory)) if directory else None
        num_envs, failures = min(command.evaluation.episodes, MAX_ENVIRONMENTS), Failures()
        first_copy = WATCHED if command.evaluation.checkpoint else EVALUATED
        options = {"evaluate": True, "failures": failures, "making_seconds": command.wires.patience_seconds}
        self._envs: list[VectorEnvironment] = [
            ForeignEnvironment(command.env, 1, render=i == 0, first_copy=first_copy + i, **options)
            for i in range(num_envs)
        ]
        self._own_key = (2,) if command.evaluation.checkpoint else ()  # no games that chose a run's best network
        self._best: float | None = None  # the greatest mean so far
        self._newest = 0  # the latest version that was played
        self._played = 0  # evaluations
        self._family = family_of(command.agent)
        self.environment = self._envs[0].spec
        self.spec: StreamSpec = self._family.stream(command.algorithm, self.environment)

    def is_film_due(self, header: ParametersHeader) -> bool:
        """Returns whether the next evaluation has a film: the first, each `film_every`th one after it, a run's last."""
        return header.is_last or self._played % self._command.evaluation.film_every == 0

    def evaluate(
        self,
        parameters: Parameters,
        encoded: bytes,
        report: Callable[[dict[str, float]], None],
        stop: Ending,
        is_filmed: bool,
        hurry: Ending | None = None,
        tell: Callable[[Evaluation], object] = lambda evaluation: None,
    ) -> Evaluation | None:
        """Plays the configured number of games; None when stopped before they end. Figures go to `report` meanwhile.

        A mean that no earlier one exceeds may be luck: as many other games are played then, and all of them count.

        Args:
          encoded: the parameters as they came, for the learner to keep where they are the best.
          is_filmed: draw the first game while all are played, which holds up the others; `film` does not.
          hurry: ends those other games, too; then the first ones are told, and the parameters are not kept.
          tell: gets the first games of a run's last network so, before the others, which may come too late.
        """
        started = time.monotonic()
        version, agent = parameters.header.params_version, self._actor(parameters)
        if version < self._newest:
            self._best = None  # a learner that goes on from its last checkpoint may not know it
        self._newest, is_sure = version, True
        recorder = self._recorder(version) if is_filmed else None
        games = self._play(agent, (version, *self._own_key), recorder, report, stop)
        film = self._finished(recorder) if recorder else {}

        def told(games: Games, kept: bytes) -> Evaluation:
            counted = agent.evaluation_exploration, tuple(games.returns), tuple(games.steps)
            return Evaluation(version, *counted, time.monotonic() - started, parameters=kept, **film)

        if games is None:
            return None
        if self._may_be_best(games, version):
            count = len(games.returns)
            logger.info("update %d: mean %.2f of %d may be the best: as many more games", version, games.mean, count)
            if parameters.header.is_last:
                tell(told(games, b""))
            try:
                others = self._play(agent, (version, 1), None, report, hurry or stop)
            except ApexError as error:
                if parameters.header.is_last:  # whose first games are told, and others are waited for
                    raise
                logger.warning("update %d: the other games cannot be played: %s", version, error)
                others = None
            if others is None and stop.is_set():
                return None
            is_sure = others is not None
            if others is not None:
                games = Games(games.returns + others.returns, games.steps + others.steps)
        if is_sure:
            self._best = games.mean if self._best is None else max(self._best, games.mean)
        self._played += 1
        return told(games, encoded if is_sure else b"")

    def film(self, parameters: Parameters, stop: Ending) -> dict[str, Any]:
        """Plays a game from the start of an evaluation's first one, or its beginning until the stop, and films it.

        It is the same game but for choices that are drawn: alone, an environment gets others.

        Returns: picture and video as the fields of an `Evaluation`, nothing where it cannot be drawn.
        """
        if self._envs[0].render() is None:
            return {}
        version, agent = parameters.header.params_version, self._actor(parameters)
        recorder = self._recorder(version)
        silent = GamesTold(1, version, lambda metrics: None)
        once = dataclasses.replace(self._command.evaluation, episodes=1)
        with contextlib.suppress(ApexError):  # it fails, and the games that count did not
            play_games(agent, self._envs[:1], once, self._seed(version), recorder, silent, stop)
        film = self._finished(recorder)
        if not film["picture"]:
            logger.info("update %d: no film, which ended before its first picture", version)
        return film

    def _actor(self, parameters: Parameters) -> Actor:
        return implementation(self._family).make_actor(self._command.algorithm, parameters, torch.device("cpu"))

    def _recorder(self, version: int) -> VideoWriter:
        video = self.videos.new_path(video_name(version)) if self.videos else None
        most_seconds = math.inf if self._command.evaluation.checkpoint else MAX_FILM_SECONDS
        return VideoWriter(video, self._envs[0].pictures_per_second, most_seconds)

    def _finished(self, recorder: VideoWriter) -> dict[str, Any]:
        picture = recorder.close()
        if self.videos:
            self.videos.take(recorder.video)
        return {"picture": picture, "video": str(recorder.video.resolve()) if recorder.video else ""}

    def _seed(self, *key: int) -> int:
        """Returns the seed of games, by the run's seed and a key, the update first."""
        # Neighbouring seeds of runs share no games, as they would if the environments' seeds were counted on from them.
        return int(np.random.SeedSequence(self._command.seed, spawn_key=key).generate_state(1)[0] >> 1)

    def _play(self, agent: Actor, key: tuple[int, ...], recorder: VideoWriter | None,
              report: Callable[[dict[str, float]], None], stop: Ending) -> Games | None:  # fmt: skip
        """Plays the configured number of games."""
        config, seed = self._command.evaluation, self._seed(*key)
        return play_games(agent, self._envs, config, seed, recorder, GamesTold(config.episodes, key[0], report), stop)

    def _may_be_best(self, games: Games, version: int) -> bool:
        """Returns whether parameters may replace the best ones; those of update 0 replace none."""
        is_candidate = bool(version) if self._best is None else games.mean >= self._best
        return is_candidate and not self._command.evaluation.checkpoint and 2 * len(games.returns) <= MAX_GAMES

    def close(self) -> None:
        """Closes the environments."""
        for env in self._envs:
            env.close()


class GivingWay:
    """The stop of a film, and of an evaluation that may take minutes and tells little: newer ones that are due set it.

    It keeps those that came, for the next evaluation. Used from the thread that owns the subscriber.
    """

    def __init__(self, stop: Stop, subscriber: ParameterSubscriber, played: bytes, due: float):
        self.newest: bytes | None = None
        self.heed_signals = stop.heed_signals
        self.due = due  # from then on newer parameters set it
        self._stop, self._subscriber, self._played, self._looks_at = stop, subscriber, played, 0.0

    def is_set(self) -> bool:
        """Returns whether the evaluation ends now."""
        if self._stop.is_set() or (now := time.monotonic()) < self._looks_at:
            return self._stop.is_set()
        self._looks_at = now + LOOK_SECONDS
        encoded = self._subscriber.fetch_encoded()
        if encoded not in (None, self._played):
            self.newest = encoded
        return self.newest is not None and (now >= self.due or _is_last(self.newest))


def follow(command: ActorCommand, stop: Stop) -> None:
    """Evaluates the learner's newest parameters again and again until stopped, and the last ones of a run at once.

    An untrained network may play a game without end: its evaluation gives way to the next one that is due.

    Raises: PeerTimeout when the learner is away for longer than the patience.
    """
    make_way(num_cores())
    evaluator = Evaluator(command)
    stop.heed_signals()
    wires = command.wires
    keyring = load_keyring(wires.keys, "actor")
    subscriber = ParameterSubscriber(address(wires.learner_host, wires.parameter_port), keyring)
    metrics = MetricsClient(address(wires.learner_host, wires.metrics_port), process_name(0), keyring)
    due, played, told, meter, newest = time.monotonic(), None, None, CpuMeter(), None

    def report(scalars: dict[str, float]) -> None:
        metrics.report(scalars | {"system/evaluator_cores": meter.cores()})

    try:
        while not stop.is_set():
            encoded = newest_when_due(subscriber, due, wires.patience_seconds, stop, newest)
            if encoded is None:
                break
            newest = None
            parameters = _playable(encoded, evaluator, command, subscriber, played, told)
            if parameters is None:
                if told is not None and played is not None and played.is_last:
                    metrics.evaluation(told)  # once more: the learner may have been away
                continue
            header, next_due = parameters.header, time.monotonic() + command.evaluation.evaluation_period_seconds
            metrics.run, is_filmed = header.run, evaluator.is_film_due(header)
            giving_way = GivingWay(stop, subscriber, encoded, math.inf if header.params_version else next_due)
            ends, is_drawn = stop if header.params_version else giving_way, is_filmed and header.is_last
            try:
                tell = functools.partial(_tell, metrics, header.run, checksum(encoded))
                outcome = evaluator.evaluate(parameters, encoded, report, ends, is_drawn, giving_way, tell)
            except WireError as error:
                subscriber.drop(error)
                continue
            newest = giving_way.newest
            if outcome is None and newest is not None and not header.params_version:
                logger.info("update 0: its evaluation gives way to that of newer parameters")
            if outcome is not None:
                due, played = next_due, header
                told = tell(outcome)
                report({})  # no evaluation goes on
                logger.info("update %d: %s", outcome.params_version, outcome.words)
                giving_way.due = max(next_due, time.monotonic() + FILM_SECONDS)
                if is_filmed and not header.is_last and (film := evaluator.film(parameters, giving_way)):
                    told = msgspec.structs.replace(told, **film)
                    metrics.evaluation(told)  # the figures do not wait for their film
                newest = giving_way.newest
    finally:
        evaluator.close()
        subscriber.close()
        metrics.close()


def _tell(metrics: MetricsClient, run: str, of: bytes, outcome: Evaluation) -> Evaluation:
    """Tells the learner about games, of the parameters with a checksum; returns what was told."""
    told = msgspec.structs.replace(outcome, run=run, checksum=of)
    metrics.evaluation(told)
    return told


def newest_when_due(subscriber: ParameterSubscriber, due: float, patience_seconds: float, stop: Stop,
                    newest: bytes | None = None) -> bytes | None:  # fmt: skip
    """Returns the newest parameters when they are due, a run's last ones at once; None when stopped before.

    Args:
      newest: those that came already.
    Raises: PeerTimeout when none come for longer than the patience.
    """
    absence = Absence()
    while not stop.is_set():
        encoded = subscriber.fetch_encoded(500)
        newest = encoded or newest
        if absence.look(encoded is None) > patience_seconds:
            raise PeerTimeout(f"no parameters from {subscriber.endpoint} in time: is the learner running?")
        if newest is not None and (time.monotonic() >= due or _is_last(newest)):
            return newest
    return None


def _is_last(encoded: bytes) -> bool:
    """Returns whether parameters are a run's last; true also for what is malformed, which its decoding will say."""
    try:
        return decode_header(encoded).is_last
    except WireError:
        return True


def _playable(
    encoded: bytes,
    evaluator: Evaluator,
    command: ActorCommand,
    subscriber: ParameterSubscriber,
    played: ParametersHeader | None,
    told: Evaluation | None,
) -> Parameters | None:
    """Returns published parameters, None when they were played already or are dropped because they do not fit.

    The last ones of a learner that was started again may differ from those with the same header that were played, of
    which `told` has the checksum.

    Raises: ConfigError when the first ones do not fit.
    """
    try:
        parameters = decode_parameters(encoded)
    except WireError as error:
        subscriber.drop(error)
        return None
    if parameters.header == played and not (told is not None and played.is_last and checksum(encoded) != told.checksum):
        return None  # a sign of life, nothing new
    if played is None:
        check_fits(parameters, evaluator.spec, command)
    elif unfit := why_unfit(parameters, evaluator.spec, command):
        subscriber.drop(WireError(unfit))
        return None
    return parameters


def play_checkpoint(command: ActorCommand, stop: Stop) -> None:
    """Evaluates a checkpoint once and prints the outcome.

    Raises: ConfigError or WireError when the checkpoint cannot be played.
    """
    checkpoint = load_checkpoint(Path(command.evaluation.checkpoint))
    evaluator = Evaluator(command)
    stop.heed_signals()
    try:
        parameters = checkpoint.parameters()
        spec = checkpoint.header.spec  # its way of cutting streams into unrolls does not matter to play it
        cut = spec.unroll_starts, spec.overlap_steps, spec.extras, spec.has_unroll_priorities
        check_fits(parameters, evaluator.environment.streamed(*cut), command)
        outcome = evaluator.evaluate(parameters, b"", lambda metrics: None, stop, is_filmed=True)
        if outcome is not None:
            say(f"{command.env.env}, update {outcome.params_version}: {outcome.words}")
            if evaluator.videos:
                say(f"video: {evaluator.videos.newest or 'none was written'}")
    finally:
        evaluator.close()
