"""One learner of `benchmarks.learners`: `python -m benchmarks.learners_rank ...`; prints one line of JSON.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are as torchrun sets them.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

from apexrl.agents.families import family_of, implementation
from apexrl.learning.experience.draw import Draw
from apexrl.learning.updates.team import RankStanding, Team, scale_of
from apexrl.learning.updates.updater import Updater
from apexrl.lifecycle import end_at_once
from apexrl.net import LogBatch, LogClient
from apexrl.net.parameter_channel import ParameterPublisher
from apexrl.networks.device import prepare_for_updates
from apexrl.networks.device_stream import DeviceStream
from benchmarks.learner_work import Setting, draws_from, filled_store

WARM_UP_SECONDS = 3.0
PUBLISH_SECONDS = 0.2
TABLE = "transitions"


@dataclasses.dataclass
class Options:
    """The work of one learner."""

    work: Literal["real", "simulated"]
    """real: updates from recorded Pong. simulated: a wait in the place of each update's arithmetic."""
    seconds: float = 20.0
    """Seconds of measurement, after the warm-up."""
    core: int = -1
    """The core to stay on; -1: any."""
    preset: str = "two-cores"
    """The preset of the network and the optimizer."""
    batch_size: int = 64
    """Transitions in the batch of this learner."""
    frames: Path = Path("runs/benchmark-replay/Pong.npz")
    """real: the recorded game."""
    replay: str = ""
    """simulated: the port for learners of this learner's shard."""
    compute_milliseconds: float = 50.0
    """simulated: mean time of an update's arithmetic."""
    variation: float = 0.05
    """simulated: its standard deviation, as a share of the mean."""
    parameters: int = 700_000
    """simulated: numbers in the gradient."""


def main(options: Options) -> None:
    """Measures one learner."""
    if options.core >= 0:
        os.sched_setaffinity(0, {options.core})
    prepare_for_updates(1)
    team = TimedTeam(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    steps = real_steps if options.work == "real" else simulated_steps
    counted, waits, clock = 0, 0.0, Clock(options.seconds)
    for waited in steps(options, team, clock):
        if clock.has_begun():
            counted, waits = counted + 1, waits + waited
    seconds = time.perf_counter() - clock.started
    print(json.dumps({"updates": counted, "seconds": seconds, "exchange_seconds": waits}))
    team.close()
    end_at_once(0)


class Clock:
    """The time of a measurement, after a warm-up."""

    def __init__(self, seconds: float):
        self._warm_until, self._seconds, self.started = time.perf_counter() + WARM_UP_SECONDS, seconds, 0.0

    def has_begun(self) -> bool:
        """Returns whether an update counts that is done now: none that began in the warm-up does."""
        counts, now = self.started > 0, time.perf_counter()
        if not counts and now >= self._warm_until:
            self.started = now
        return counts

    def is_over(self) -> bool:
        """Returns whether the time is up."""
        return self.started > 0 and time.perf_counter() >= self.started + self._seconds


class TimedTeam(Team):
    """A team that counts the seconds of its exchanges."""

    seconds = 0.0

    def _exchange(self, exchange: Callable[[], object]) -> None:
        started = time.perf_counter()
        super()._exchange(exchange)
        self.seconds += time.perf_counter() - started


def real_steps(options: Options, team: TimedTeam, clock: Clock) -> Iterator[float]:
    """Makes updates until the time is up for one learner; yields the seconds that each spent in the exchange."""
    device_stream = DeviceStream(torch.device("cpu"))
    command = Setting("ours", options.preset, options.batch_size, 1, agent="apex-dqn").command()
    store, _ = filled_store(command, options.frames, 25_600, device_stream)
    wants = family_of(command.agent).wants(command.algorithm, command.update)
    draws = draws_from(store, wants)
    sections = command.algorithm, command.network, command.update
    torch.manual_seed(0)
    learner = implementation(family_of(command.agent)).make_learner(*sections, store.spec, device_stream.device)
    updater = Updater(learner, device_stream, team)
    number = 0
    while True:
        samples = draws[number % len(draws)]
        gathered = {table: store.gather(table, sample.keys, sample.weights) for table, sample in samples.items()}
        team.seconds = 0.0
        standings = team.agree(RankStanding(True, stops=clock.is_over(), largest_weight=samples[TABLE].largest_weight))
        if any(standing.stops for standing in standings):
            return
        pending = updater.update(Draw(store.generation, gathered), None, scale_of(standings, team.rank))
        assert pending is not None
        pending.result()
        number += 1
        yield team.seconds


def simulated_steps(options: Options, team: TimedTeam, clock: Clock) -> Iterator[float]:
    """Does all but the arithmetic of updates, as long; yields the seconds that each spent in the exchange."""
    client = LogClient(options.replay, f"rank {team.rank}", {TABLE: options.batch_size}, 4, follows_log=False)
    publisher = ParameterPublisher("127.0.0.1", 0) if team.is_first else None
    gradient, encoded = torch.zeros(options.parameters + 1), bytes(2 * options.parameters)
    rng, published = np.random.default_rng(team.rank), 0.0
    while True:
        event = client.poll(200)
        if not isinstance(event, LogBatch):
            continue
        client.batch_used(TABLE)
        team.seconds = 0.0
        standings = team.agree(RankStanding(True, stops=clock.is_over(), largest_weight=event.sample.largest_weight))
        if any(standing.stops for standing in standings):
            return
        wanted = options.compute_milliseconds / 1000 * (1 + options.variation * rng.standard_normal())
        time.sleep(max(wanted, 0.0))
        if team.size > 1:
            team.add_up(gradient, scale_of(standings, team.rank))
        client.update_priorities(event.sample.keys, rng.exponential(size=options.batch_size).astype(np.float32))
        if publisher is not None and time.perf_counter() - published > PUBLISH_SECONDS:
            published = time.perf_counter()
            publisher.publish(encoded)
        yield team.seconds


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
