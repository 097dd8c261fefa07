"""One measuring process of `benchmarks.replay` for our own service: `python -m benchmarks.replay_work WORK ...`.

It works as an actor, a learner or a crowd of actors, through real sockets, and prints one line of JSON. Rates are
counted after a warm-up, and only acknowledged inserts and delivered batches count.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from apexrl.config.sections import LearningConfig
from apexrl.net import InsertClient, LogAppend, LogBatch, LogClient, LogStart, ReplayClient
from apexrl.types import StreamSpec, Unroll, UnrollHeader
from apexrl.unroll import UnrollCodec
from benchmarks.replay_frames import load

STARTS, N_STEPS, STACK = 64, 3, 4
WARM_UP_SECONDS = 2.0
STREAMS = 32


def spec_of(game: str) -> StreamSpec:
    """Returns the spec of the unrolls of a game."""
    return StreamSpec(game, (84, 84), "uint8", STACK, 18, 4, unroll_starts=STARTS, overlap_steps=N_STEPS)


def unrolls_of(path: Path, spec: StreamSpec) -> list[Unroll]:
    """Returns the streams of a file, cut into unrolls that follow each other."""
    played = load(path)
    num_envs, num_steps = played.actions.shape
    unrolls = []
    for first in range(STACK - 1, num_steps - spec.unroll_steps - 1, spec.unroll_starts):
        for env in range(num_envs):
            stop = first + spec.unroll_steps
            unrolls.append(
                Unroll(
                    played.frames[env, first - STACK + 1 : stop + 1],
                    played.actions[env, first:stop],
                    played.rewards[env, first:stop],
                    1 - played.terminals[env, first:stop].astype(np.float32),
                    np.zeros(spec.unroll_steps + 1, bool),
                )
            )
    return unrolls


class Feeder:
    """Gives the unrolls of a game without end, with random priorities."""

    def __init__(self, frames: Path, compress: bool):
        self.spec = spec_of(frames.stem)
        self._unrolls = unrolls_of(frames, self.spec)
        self._codec = UnrollCodec(self.spec)
        self._blocks = [] if compress else [self._codec.encode(unroll) for unroll in self._unrolls]
        self._priorities = np.random.default_rng(0).exponential(size=(997, STARTS)).astype(np.float32)
        self._valid = np.ones(STARTS, bool)
        self.count = 0

    def next(self) -> tuple[UnrollHeader, bytes]:
        """Returns the next unroll's header and block."""
        n = self.count
        self.count += 1
        header = UnrollHeader(n % STREAMS, n // STREAMS * STARTS, 0, 0.1, self._valid, self._priorities[n % 997], ())
        i = n % len(self._unrolls)
        return header, self._blocks[i] if self._blocks else self._codec.encode(self._unrolls[i])


def insert(
    frames: Path, port: int, seconds: float, compress: bool = False, count: int = 0, host: str = "127.0.0.1"
) -> dict[str, Any]:
    """Inserts as fast as it can: for so many seconds, or exactly `count` unrolls."""
    feeder = Feeder(frames, compress)
    client = InsertClient(f"tcp://{host}:{port}", f"bench-{time.monotonic_ns()}", feeder.spec, STREAMS)
    client.connect(10)

    def run(duration: float, most: int) -> int:
        done, deadline = 0, time.perf_counter() + duration
        while done < most and time.perf_counter() < deadline:
            for _ in range(min(32, most - done)):
                client.insert(*feeder.next(), 30)
            done += min(32, most - done)
        assert client.flush(30), "inserts were not acknowledged in time"
        return done

    if count:
        started = time.perf_counter()
        done = run(1e9, count)
    else:
        run(WARM_UP_SECONDS, 10**12)
        started = time.perf_counter()
        done = run(seconds, 10**12)
    elapsed = time.perf_counter() - started
    client.close()
    rate = done * STARTS / elapsed
    return {"transitions": done * STARTS, "transitions_per_second": rate, "all_unrolls": feeder.count}


def learn(port: int, seconds: float, batch: int, wait: float = 60.0, rate: float = 0.0) -> dict[str, Any]:
    """Follows the log into an unroll store, gathers every batch and sends priorities back, at most `rate` batches/s."""
    import torch

    from apexrl.agents.contract import Transitions, Want
    from apexrl.learning.experience.unroll_store import UnrollStore
    from apexrl.memory import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    name, ahead = f"bench-learner-{time.monotonic_ns()}", LearningConfig().prefetch_batches
    client = LogClient(f"tcp://127.0.0.1:{port}", name, {"transitions": batch}, ahead)
    store, codec = None, None
    rng = np.random.default_rng(0)
    batches = applied = 0
    started, measured_from, cpu = time.perf_counter(), 0.0, 0.0
    next_batch = 0.0
    while True:
        event = client.poll(20)
        now = time.perf_counter()
        if measured_from and now - measured_from >= seconds:
            break
        assert now - started < wait + seconds, f"no batches in time: {client.waits_for}"
        match event:
            case LogStart():
                want = Want("transitions", batch, Transitions(event.spec.overlap_steps, 0.99))
                store = UnrollStore(event.spec, event.ring_unrolls, [want], torch.device("cpu"), 4)
                codec = UnrollCodec(event.spec)
            case LogAppend():
                assert store is not None and codec is not None
                slot = store.begin(event.number)
                store.commit(slot, codec.decode(event.block, slot.frames))
                applied += 1
            case LogBatch():
                assert store is not None
                gathered = store.gather(event.table, event.sample.keys, event.sample.weights)
                client.update_priorities(gathered.keys, rng.exponential(size=batch))
                if rate:
                    next_batch = max(next_batch + 1 / rate, now)
                    while (left := next_batch - time.perf_counter()) > 0:
                        time.sleep(left)
                client.batch_used()
                batches += 1
                if not measured_from and batches >= 20 and now - started > WARM_UP_SECONDS:
                    print("measuring", flush=True)
                    measured_from, batches, applied, cpu = now, 0, 0, time.process_time()
    elapsed = time.perf_counter() - measured_from
    client.close()
    return {
        "batches_per_second": batches / elapsed,
        "transitions_applied_per_second": applied * STARTS / elapsed,
        "learner_cpu": (time.process_time() - cpu) / elapsed,
    }


def keys(port: int, seconds: float, batch: int, updates: bool = False) -> dict[str, Any]:
    """Samples keys, without a replica, and sends priorities back if asked to."""
    client = ReplayClient(f"tcp://127.0.0.1:{port}", f"bench-keys-{time.monotonic_ns()}", {"transitions": batch}, 16)
    priorities = np.random.default_rng(0).exponential(size=batch)
    for _ in range(20):
        client.sample("transitions", 30)
    done, started, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        sample = client.sample("transitions", 30)
        if updates:
            client.update_priorities("transitions", sample.keys, priorities)
        done += 1
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    client.close()
    return {"batches_per_second": done / elapsed, "batches": done, "client_us_per_batch": 1e6 * cpu / done}


class Crowd:
    """Many actors of one environment each, which one process serves in turn, and a reader of the log."""

    def __init__(self, frames: Path, port: int, learner_port: int, actors: int):
        self._feeder = Feeder(frames, compress=False)
        self._name = f"crowd-{time.monotonic_ns()}"
        endpoint = f"tcp://127.0.0.1:{port}"
        self._clients = [InsertClient(endpoint, f"{self._name}-{i}", self._feeder.spec, 1) for i in range(actors)]
        for client in self._clients:
            client.poll()
        for client in self._clients:
            client.connect(30)
        reader = f"tcp://127.0.0.1:{learner_port}"
        self._reader = LogClient(reader, f"{self._name}-reader", {}, 1) if learner_port else None
        self._sent_at: list[dict[int, float]] = [{} for _ in range(actors)]
        self._sequences = [0] * actors
        self._turn = 0
        self.delays: list[float] = []
        self.sent = 0

    def send(self, most: int) -> None:
        """Lets up to 64 actors in turn insert if the server allows it, at most so many unrolls in all."""
        for _ in range(64):
            if most <= 0:
                return
            i = self._turn = (self._turn + 1) % len(self._clients)
            client = self._clients[i]
            client.poll()
            if client.may_insert:
                header, block = self._feeder.next()
                client.insert(header._replace(stream=0), block, 30)
                self._sent_at[i][self._sequences[i]] = time.perf_counter()
                self._sequences[i] += 1
                self.sent += 1
                most -= 1

    def read(self) -> None:
        """Notes the delay of each unroll that has arrived at the reader."""
        while self._reader is not None and (event := self._reader.poll(0)) is not None:
            if isinstance(event, LogAppend):
                i = int(event.insert.actor.rsplit("-", 2)[1])
                sent = self._sent_at[i].pop(event.insert.sequence, None)
                if sent is not None:
                    self.delays.append(time.perf_counter() - sent)

    def close(self) -> None:
        """Closes all clients."""
        for client in self._clients:
            client.close()
        if self._reader is not None:
            self._reader.close()


def crowd(
    frames: Path, port: int, seconds: float, learner_port: int = 0, actors: int = 512, rate: float = 0.0
) -> dict[str, Any]:
    """Measures many actors at `rate` transitions/s together (0: as fast as the server allows).

    The delay is the time from sending an insert to its arrival at a reader of the log, when it can be sampled.
    """
    people = Crowd(frames, port, learner_port, actors)
    started = time.perf_counter()
    measured_from = 0.0
    while not measured_from or time.perf_counter() - measured_from < seconds:
        elapsed = time.perf_counter() - started
        if not measured_from and elapsed > WARM_UP_SECONDS:
            measured_from, people.delays, before = time.perf_counter(), [], people.sent
        people.send(int(elapsed * rate / STARTS) - people.sent if rate else 64)
        people.read()
    inserted = people.sent - before
    people.close()
    found = {"actors": actors, "transitions_per_second": inserted * STARTS / seconds}
    if people.delays:
        found |= {f"delay_p{q}_ms": float(np.percentile(people.delays, q)) * 1e3 for q in (50, 99)}
    return found


if __name__ == "__main__":
    works = {work.__name__: work for work in (insert, learn, keys, crowd)}
    print(json.dumps(tyro.extras.subcommand_cli_from_dict(works)))
