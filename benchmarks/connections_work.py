"""Many actors of one process: `python -m benchmarks.connections_work ...`, started by `benchmarks.connections`.

It connects all of its actors and says so. Then it reads lines "SECONDS RATE" from stdin: it inserts RATE unrolls a
second for so long (0: none, inf: as many as the server allows), waits until all are acknowledged, and prints figures.
"""

import collections
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import tyro
import zmq

from apexrl.net import InsertClient
from apexrl.net.keyring import load_keyring
from benchmarks.replay_work import Feeder

JOIN_SECONDS = 240.0
FLUSH_SECONDS = 120.0
MAX_DELAYS = 100_000


@dataclasses.dataclass(frozen=True)
class Options:
    """The part of the connections."""

    port: int
    """Port of the server for actors."""
    frames: Path
    """File of the frames."""
    actors: int
    """Connections."""
    environments: int
    """Environments of each."""
    name: int
    """Number of this process."""
    keys: str = ""
    """Directory of keys; empty: not encrypted."""


class Actor:
    """An actor's client, and when it has sent what is not acknowledged yet."""

    def __init__(self, client: InsertClient, environments: int):
        self.client = client
        self.sent_at: collections.deque[float] = collections.deque()
        self._environments = environments
        self._sent = 0

    def poll(self, now: float) -> list[float]:
        """Takes what has arrived; returns the delays of the inserts that are acknowledged now."""
        self.client.poll()
        return [now - self.sent_at.popleft() for _ in range(len(self.sent_at) - self.client.num_unacknowledged)]

    def insert(self, feeder: Feeder) -> None:
        """Sends the next unroll of this actor's streams in turn."""
        header, block = feeder.next()
        turn, stream = divmod(self._sent, self._environments)
        header = header._replace(stream=stream, first_step=turn * feeder.spec.unroll_starts)
        self.client.insert(header, block, 30)
        self.sent_at.append(time.perf_counter())
        self._sent += 1


def load(actors: list[Actor], feeder: Feeder, seconds: float, rate: float) -> dict[str, Any]:
    """Inserts `rate` unrolls a second for so long; returns the figures."""
    delays: list[float] = []
    sent = acknowledged = turn = 0
    longest = 0.0
    started = turn_began = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        due = rate * elapsed
        for actor in actors:
            found = actor.poll(time.perf_counter())
            acknowledged += len(found)
            delays += found
        for _ in actors:
            if sent >= due:
                break
            turn = (turn + 1) % len(actors)
            if actors[turn].client.may_insert:
                actors[turn].insert(feeder)
                sent += 1
        now = time.perf_counter()
        longest, turn_began = max(longest, now - turn_began), now
        time.sleep(0.001)
    for actor in actors:
        if not actor.client.flush(FLUSH_SECONDS):
            raise TimeoutError(f"{actor.client.num_unacknowledged} inserts were not acknowledged in {FLUSH_SECONDS} s")
        actor.sent_at.clear()
    step = len(delays) // MAX_DELAYS + 1
    return {"sent": sent, "acknowledged": acknowledged, "delays": delays[::step], "longest_turn_seconds": longest}


def main(options: Options) -> None:
    """Connects, then follows the lines of stdin."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * options.actors + 64)  # a client with keys has a monitor, too
    keyring = load_keyring(options.keys, "actor")
    feeder = Feeder(options.frames, compress=False)
    started = time.perf_counter()
    endpoint = f"tcp://127.0.0.1:{options.port}"
    names = [f"actor-{options.name}-{i}" for i in range(options.actors)]
    clients = [InsertClient(endpoint, name, feeder.spec, options.environments, keyring, context) for name in names]
    for client in clients:
        client.poll()
    deadline = started + JOIN_SECONDS
    while not all(client.may_insert for client in clients):
        for client in clients:
            client.poll()
        if time.perf_counter() > deadline:
            raise TimeoutError(f"the server has not welcomed all {options.actors} actors in {JOIN_SECONDS} s")
        time.sleep(0.001)
    print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)
    actors = [Actor(client, options.environments) for client in clients]
    for line in sys.stdin:
        seconds, rate = map(float, line.split())
        print(json.dumps(load(actors, feeder, seconds, rate)), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
