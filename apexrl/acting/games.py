"""Whole games that are played to their end side by side, and the telling of how far they are."""

import logging
import math
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from apexrl.acting.video import VideoWriter
from apexrl.agents.contract import Actor, Observation
from apexrl.agents.exploration import CHOICES
from apexrl.config.sections import EvaluationConfig
from apexrl.environments.vector import VectorEnvironment
from apexrl.errors import ApexError
from apexrl.net.metrics_channel import REPORT_PERIOD_SECONDS

logger = logging.getLogger(__name__)

MAX_FAILURES = 5  # of an environment in an evaluation; then it has played enough


class Games(NamedTuple):
    """Finished games in the order of their environments."""

    returns: list[float]
    steps: list[int]

    @property
    def mean(self) -> float:
        """The mean return."""
        return math.fsum(self.returns) / len(self.returns)


class GamesTold:
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
    progress: GamesTold,
    stop: Ending,
) -> Games | None:
    """Plays games to their end in environments of one game each; None when stopped before.

    A recorder gets the pictures of the first game, the progress the returns. Each environment plays the same number
    of games (the first ones one more), however long they last: taking the games that end first would favour short ones.
    One that has played its games rests, for a last game may take ten times as long as the others. A game that fails
    counts for nothing, and another one is played in its place; an environment that fails MAX_FAILURES times rests, too.
    The agent's choices have a stream of random numbers apart from those of the environments, whatever the seed.

    Raises: ApexError when no game came to its end.
    """
    num_envs = len(envs)
    quota = [config.episodes // num_envs + (i < config.episodes % num_envs) for i in range(num_envs)]
    games: list[list[tuple[float, int]]] = [[] for _ in envs]
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=CHOICES))
    exploration = np.full(num_envs, agent.evaluation_exploration)
    frames = np.concatenate([env.reset((seed + i) % 2**31) for i, env in enumerate(envs)])
    starts, rewards = np.ones(num_envs, bool), np.zeros(num_envs, np.float32)
    has_ended, num_failures, in_vain = np.zeros(num_envs, bool), np.zeros(num_envs, int), [0] * num_envs
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
            in_vain[i] = in_vain[i] + 1 if starts[i] and not has_ended[i] else 0
            num_failures[i] += in_vain[i].bit_count() == 1  # it rests for 1, 2, 4 and so on of these steps
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
