"""The evaluator: whole unclipped games with the newest parameters, or with those of a checkpoint."""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from apexrl.acting.foreign import ForeignEnvironment
from apexrl.acting.loop import check_fits, why_unfit
from apexrl.acting.video import MAX_FILM_SECONDS, VideoFolder, VideoWriter
from apexrl.agents.contract import Actor, Observation
from apexrl.agents.families import family_of, implementation
from apexrl.config.commands import ActorCommand
from apexrl.config.sections import EvaluationConfig
from apexrl.control_groups import num_cores
from apexrl.environments.renewal import Failures
from apexrl.environments.vector import EVALUATED, WATCHED, VectorEnvironment
from apexrl.errors import ApexError, PeerTimeout, WireError
from apexrl.lifecycle import CpuMeter, Stop, make_way, process_name
from apexrl.lines import say
from apexrl.net.keyring import load_keyring
from apexrl.net.metrics_channel import MAX_GAMES, REPORT_PERIOD_SECONDS, Evaluation, MetricsClient, checksum
from apexrl.net.parameter_channel import ParameterSubscriber
from apexrl.net.sockets import address
from apexrl.networks.checkpoint import load_checkpoint
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import Parameters, decode_header, decode_parameters
from apexrl.runs import video_name
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)

MAX_ENVIRONMENTS = 10
MAX_FAILURES = 5  # of an environment in an evaluation; then it has played enough
LOOK_SECONDS = 0.5  # between two looks for newer parameters


class Games(NamedTuple):
    """Finished games in the order of their environments."""

    returns: list[float]
    steps: list[int]

    @property
    def mean(self) -> float:
        """The mean return."""
        return math.fsum(self.returns) / len(self.returns)


class Progress:
    """Tells how far an evaluation is: metrics at its start and each report period, and a line when games have ended.

    The mean so far leans towards short games, which end first.
    """

    def __init__(self, episodes: int, params_version: int, report: Callable[[dict[str, float]], None],
                 period_seconds: float = REPORT_PERIOD_SECONDS):  # fmt: skip
        self._episodes = episodes
        self._params_version = params_version
        self._report = report
        self._period_seconds = period_seconds
        self._told_at = -math.inf
        self._finished = 0

    def update(self, returns: list[float]) -> None:
        """Takes the returns of all games that have ended so far, and tells them when it is time."""
        finished = len(returns)
        if finished < self._episodes and time.monotonic() - self._told_at < self._period_seconds:
            return
        self._told_at = time.monotonic()
        mean = {"evaluation/return_so_far": float(np.mean(returns))} if returns else {}
        self._report({"evaluation/games_finished": float(finished)} | mean)
        if self._finished < finished < self._episodes:
            of = f"{finished} of {self._episodes} games finished"
            logger.info("update %d: %s, mean %.2f so far", self._params_version, of, *mean.values())
        self._finished = finished


class Ending(Protocol):
    """The part of a `Stop` that games look at in each step."""

    def is_set(self) -> bool:
        """Returns whether the games end now."""

    def heed_signals(self) -> None:
        """Sets handlers of signals again."""


def play_games(
    agent: Actor,
    envs: list[VectorEnvironment],
    config: EvaluationConfig,
    seed: int,
    recorder: VideoWriter | None,
    progress: Progress,
    stop: Ending,
) -> Games | None:
    """Plays games to their end in environments of one game each; None when stopped before.

    A recorder gets the pictures of the first game, the progress the returns. Each environment plays the same number
    of games (the first ones one more), however long they last: taking the games that end first would favour short ones.
    One that has played its games rests, for a last game may take ten times as long as the others. A game that fails
    counts for nothing, and another one is played in its place; an environment that fails MAX_FAILURES times rests, too.

    Raises: ApexError when no game came to its end.
    """
    num_envs = len(envs)
    quota = [config.episodes // num_envs + (i < config.episodes % num_envs) for i in range(num_envs)]
    games: list[list[tuple[float, int]]] = [[] for _ in envs]
    rng = np.random.default_rng(seed)
    exploration = np.full(num_envs, agent.evaluation_exploration)
    frames = np.concatenate([env.reset((seed + i) % 2**31) for i, env in enumerate(envs)])
    starts, rewards = np.ones(num_envs, bool), np.zeros(num_envs, np.float32)
    has_ended, num_failures = np.zeros(num_envs, bool), np.zeros(num_envs, int)
    state = agent.initial_state(num_envs)
    while playing := [i for i in range(num_envs) if len(games[i]) < quota[i] and num_failures[i] < MAX_FAILURES]:
        if stop.is_set():
            return None
        stop.heed_signals()
        filming = recorder if playing[0] == 0 and not games[0] else None
        if filming is not None:
            filming.film(envs[0].render)
        actions, _, state = agent.act(Observation(frames, starts, rewards), exploration, state, rng)
        for i in playing:  # those that have threads of their own play at the same time
            envs[i].send(actions[i : i + 1])
        for i in playing:
            seen = envs[i].receive()
            frames[i], starts[i], rewards[i] = seen.frames[0], seen.starts[0], seen.rewards[0]
            num_failures[i] += starts[i] and not has_ended[i]
            has_ended[i] = seen.episode_steps[0]
            if seen.episode_steps[0]:
                games[i].append((float(seen.episode_returns[0]), int(seen.episode_steps[0])))
        if filming is not None and games[0]:  # the picture with which the game ended
            filming.film(envs[0].render)
        progress.update([game[0] for stream in games for game in stream])
    played = [game for stream in games for game in stream]
    if not played:
        raise ApexError(f"no game of an evaluation came to its end: its environments failed {num_failures.sum()} times")
    if len(played) < config.episodes:
        logger.warning("an evaluation has %d of %d games: the others failed", len(played), config.episodes)
    return Games([game[0] for game in played], [game[1] for game in played])


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
        options = {"evaluate": True, "failures": failures}
        self._envs: list[VectorEnvironment] = [
            ForeignEnvironment(command.env, 1, render=i == 0, first_copy=first_copy + i, **options)
            for i in range(num_envs)
        ]
        self._best: float | None = None  # the greatest mean so far
        self._played = 0  # evaluations
        self._family = family_of(command.agent)
        self.environment = self._envs[0].spec
        self.spec: StreamSpec = self._family.stream(command.algorithm, self.environment)

    def evaluate(
        self, parameters: Parameters, report: Callable[[dict[str, float]], None], stop: Ending
    ) -> Evaluation | None:
        """Plays the configured number of games; None when stopped before they end. Figures go to `report` meanwhile.

        It films the first evaluation, each `film_every`th one after it, and a run's last one.
        A mean that no earlier one exceeds may be luck: as many other games are played then, and all of them count.
        """
        started = time.monotonic()
        version = parameters.header.params_version
        agent = implementation(self._family).make_actor(self._command.algorithm, parameters, torch.device("cpu"))
        is_filmed = parameters.header.is_last or self._played % self._command.evaluation.film_every == 0
        video = self.videos.new_path(video_name(version)) if self.videos else None
        most_seconds = math.inf if self._command.evaluation.checkpoint else MAX_FILM_SECONDS
        recorder = VideoWriter(video if is_filmed else None, self._envs[0].pictures_per_second, most_seconds)
        games = self._play(agent, (version,), recorder if is_filmed else None, report, stop)
        picture = recorder.close()
        if self.videos:
            self.videos.take(recorder.video)
        if games is not None and self._may_be_best(games, version):
            logger.info("update %d: mean %.2f may be the best, other games decide", version, games.mean)
            others = self._play(agent, (version, 1), None, report, stop)
            games = others and Games(games.returns + others.returns, games.steps + others.steps)
        if games is None:
            return None
        self._best = games.mean if self._best is None else max(self._best, games.mean)
        self._played += 1
        seconds = time.monotonic() - started
        returns, steps = tuple(games.returns), tuple(games.steps)
        path = str(recorder.video.resolve()) if recorder.video else ""
        exploration = agent.evaluation_exploration
        return Evaluation(version, exploration, returns, steps, seconds, picture=picture, video=path)

    def _play(self, agent: Actor, key: tuple[int, ...], recorder: VideoWriter | None,
              report: Callable[[dict[str, float]], None], stop: Ending) -> Games | None:  # fmt: skip
        """Plays the configured number of games, whose seeds follow from the run's seed and a key, the update first."""
        # Neighbouring seeds of runs share no games, as they would if the environments' seeds were counted on from them.
        seeds = np.random.SeedSequence(self._command.seed, spawn_key=key)
        seed, config = int(seeds.generate_state(1)[0] >> 1), self._command.evaluation
        return play_games(agent, self._envs, config, seed, recorder, Progress(config.episodes, key[0], report), stop)

    def _may_be_best(self, games: Games, version: int) -> bool:
        """Returns whether parameters may replace the best ones; those of update 0 replace none."""
        is_candidate = bool(version) if self._best is None else games.mean >= self._best
        return is_candidate and not self._command.evaluation.checkpoint and 2 * len(games.returns) <= MAX_GAMES

    def close(self) -> None:
        """Closes the environments."""
        for env in self._envs:
            env.close()


class GivingWay:
    """The stop of an evaluation that may take minutes and tells little: it is set when newer parameters are due, too.

    It keeps those that came, for the next evaluation. Used from the thread that owns the subscriber.
    """

    def __init__(self, stop: Stop, subscriber: ParameterSubscriber, played: bytes, due: float):
        self.newest: bytes | None = None
        self.heed_signals = stop.heed_signals
        self._stop, self._subscriber, self._played, self._due, self._looks_at = stop, subscriber, played, due, 0.0

    def is_set(self) -> bool:
        """Returns whether the evaluation ends now."""
        if self._stop.is_set() or (now := time.monotonic()) < self._looks_at:
            return self._stop.is_set()
        self._looks_at = now + LOOK_SECONDS
        encoded = self._subscriber.fetch_encoded()
        if encoded not in (None, self._played):
            self.newest = encoded
        return self.newest is not None and (now >= self._due or _is_last(self.newest))


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
            parameters = _playable(encoded, evaluator, command, subscriber, played)
            if parameters is None:
                if told is not None and played is not None and played.is_last:
                    metrics.evaluation(told)  # once more: the learner may have been away
                continue
            started = time.monotonic()
            metrics.run = parameters.header.run
            next_due = started + command.evaluation.evaluation_period_seconds
            giving_way = GivingWay(stop, subscriber, encoded, next_due)
            is_trained = parameters.header.params_version > 0
            try:
                outcome = evaluator.evaluate(parameters, report, stop if is_trained else giving_way)
            except WireError as error:
                subscriber.drop(error)
                continue
            newest = giving_way.newest
            if outcome is None and newest is not None:
                logger.info("update 0: its evaluation gives way to that of newer parameters")
            if outcome is not None:
                due, played = next_due, parameters.header
                told = msgspec.structs.replace(
                    outcome, run=parameters.header.run, checksum=checksum(encoded), parameters=encoded
                )
                metrics.evaluation(told)
                report({})  # no evaluation goes on
                logger.info("update %d: %s", outcome.params_version, outcome.words)
    finally:
        evaluator.close()
        subscriber.close()
        metrics.close()


def newest_when_due(subscriber: ParameterSubscriber, due: float, patience_seconds: float, stop: Stop,
                    newest: bytes | None = None) -> bytes | None:  # fmt: skip
    """Returns the newest parameters when they are due, a run's last ones at once; None when stopped before.

    Args:
      newest: those that came already.
    Raises: PeerTimeout when none come for longer than the patience.
    """
    heard = time.monotonic()
    while not stop.is_set():
        encoded, now = subscriber.fetch_encoded(500), time.monotonic()
        if encoded is not None:
            newest, heard = encoded, now
        elif now - heard > patience_seconds:
            raise PeerTimeout(f"no parameters from {subscriber.endpoint} in time: is the learner running?")
        if newest is not None and (now >= due or _is_last(newest)):
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
) -> Parameters | None:
    """Returns published parameters, None when they were played already or are dropped because they do not fit.

    Raises: ConfigError when the first ones do not fit.
    """
    try:
        parameters = decode_parameters(encoded)
    except WireError as error:
        subscriber.drop(error)
        return None
    if parameters.header == played:  # a sign of life, nothing new
        return None
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
        outcome = evaluator.evaluate(parameters, lambda metrics: None, stop)
        if outcome is not None:
            say(f"{command.env.env}, update {outcome.params_version}: {outcome.words}")
            if evaluator.videos:
                say(f"video: {evaluator.videos.newest or 'none was written'}")
    finally:
        evaluator.close()
