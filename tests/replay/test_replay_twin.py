"""The whole replay against a slow twin in plain Python, under random operations and restarts."""

import dataclasses
import math
import random
from typing import NamedTuple

import numpy as np
import pytest

from apexrl.config.sections import ReplayConfig
from apexrl.replay.journal import SNAPSHOT_FILE, Journal, new_identity
from apexrl.replay.log import LogEntry
from apexrl.replay.recovery import Recovered, recover
from apexrl.replay.replay import RecoveredUnroll, Replay
from apexrl.replay.snapshot import write_snapshot
from apexrl.types import StreamSpec
from tests.replay.records import powers_of

K = 3
SPECS = {
    granularity: StreamSpec(
        *("Known-v0", (2,), "float32", 3, 4, 1),
        unroll_starts=K,
        overlap_steps=2,
        has_unroll_priorities=granularity == "unrolls",
    )
    for granularity in ("transitions", "unrolls")
}
PERIOD = 3
CONFIG = ReplayConfig(
    capacity=12,  # 4 unrolls, and 8 more before they must go
    min_size_to_sample=1,
    samples_per_insert=0.0,
    eviction_period_batches=PERIOD,
    tables=("transitions=priority", "unrolls=uniform:0:1", "recent=uniform:0:1:3", "queue=fifo:0:1"),
)
SOFT, RING, RECENT = 4, 12, 3
TABLES = ("transitions", "unrolls", "recent", "queue")


class Sent(NamedTuple):
    """An unroll as its actor sent it."""

    priorities: list[float]  # P
    valid: list[bool]  # K

    @property
    def items(self):
        """The number of items of the priority table that exist."""
        return sum(self.valid) if len(self.priorities) == K else int(any(self.valid))


class SlowReplay:
    """Dictionaries and scans; knows what may be drawn, with which probability."""

    def __init__(self, exponent, num_priorities, max_bytes):
        self.exponent = exponent
        self.p = num_priorities
        self.max_bytes = max_bytes
        self.first = self.end = self.num_batches = 0
        self.inserted = dict.fromkeys(TABLES, 0)
        self.sampled = dict(self.inserted)
        self.sent = {}  # by number
        self.powers = {}  # by key of the priority table
        self.drawn = set()  # by the queue

    def power(self, priority):
        return priority**self.exponent if priority > 0 else 0.0

    def insert(self, unrolls):
        for sent in unrolls:
            if self.end - self.first == RING:
                self.evict()
            self.hold(self.end, sent)
            self.end += 1
            self.count([sent])
        self.fit()

    def count(self, unrolls):
        for table in TABLES:
            self.inserted[table] += sum(sent.items if table == "transitions" else 1 for sent in unrolls)

    def hold(self, number, sent):
        self.sent[number] = sent
        for k, priority in enumerate(sent.priorities):
            self.powers[number * self.p + k] = self.power(priority)

    def evict(self):
        while self.end - self.first > SOFT:
            self.drop()

    def fit(self):
        """Drops the oldest until the bytes fit."""
        while sum(entry_of(n, self.sent[n]).num_bytes for n in range(self.first, self.end)) > self.max_bytes:
            self.drop()

    def drop(self):
        for k in range(self.p):
            del self.powers[self.first * self.p + k]
        self.first += 1

    def update(self, keys, priorities):
        for key, priority in zip(keys, priorities, strict=True):
            if self.powers.get(key, 0) > 0:
                self.powers[key] = self.power(priority)

    def may_sample(self, table, batch_size):
        if self.inserted[table] < 1:
            return False
        if table == "queue":
            return len(self.undrawn()) >= batch_size
        if table == "transitions":
            return any(power > 0 for power in self.powers.values())
        return len(self.held(table)) >= batch_size

    def held(self, table):
        """The numbers in a uniform table."""
        return range(max(self.first, self.end - RECENT) if table == "recent" else self.first, self.end)

    def undrawn(self):
        return [number for number in range(self.first, self.end) if number not in self.drawn]

    def check(self, table, sample):
        """Whether the sample could be drawn now."""
        keys, probabilities = sample.keys.tolist(), sample.probabilities
        if table == "queue":
            return keys == self.undrawn()[: len(keys)] and (probabilities == 1).all()
        if table != "transitions":
            held = self.held(table)
            is_distinct = len(set(keys)) == len(keys)
            return is_distinct and set(keys) <= set(held) and np.allclose(probabilities, 1 / len(held))
        total = sum(self.powers.values())
        size = sum(self.sent[n].items for n in range(self.first, self.end))
        if total == 0 or not all(self.powers.get(key, 0) > 0 for key in keys):
            return False
        expected = np.array([self.powers[key] / total for key in keys])
        weights = (size * expected) ** -CONFIG.importance_exponent
        return np.allclose(probabilities, expected, rtol=1e-6) and np.allclose(
            sample.weights, weights / weights.max(), rtol=1e-5
        )

    def take(self, table, sample):
        """Checks a sample; an eviction that is due comes after it."""
        assert self.check(table, sample), (table, sample)
        if table == "queue":
            self.drawn.update(sample.keys.tolist())
        self.sampled[table] += len(sample.keys)
        self.num_batches += 1
        if self.num_batches % PERIOD == 0:
            self.evict()

    def snapshot(self):
        return (self.first, self.end, dict(self.powers), dict(self.inserted), dict(self.sampled), set(self.drawn))

    def restart(self, snapshot, exponent, oldest):
        self.num_batches = 0
        self.first = max(self.end - SOFT, oldest)
        held = range(self.first, self.end)
        old = self.exponent
        self.exponent, self.powers = exponent, {}
        for number in held:
            self.hold(number, self.sent[number])
        if snapshot is None:
            self.inserted = dict.fromkeys(TABLES, 0)
            self.sampled, self.drawn, since = dict(self.inserted), set(), held
        else:
            first, end, powers, inserted, sampled, drawn = snapshot
            self.inserted, self.sampled, self.drawn = dict(inserted), dict(sampled), set(drawn)
            for key in self.powers:
                if first * self.p <= key < end * self.p and self.powers[key] > 0:
                    self.powers[key] = self.power(powers[key] ** (1 / old))
            since = range(max(end, self.first), self.end)
        self.count([self.sent[n] for n in since])
        self.fit()


def entry_of(number, sent):
    return LogEntry(b"message %d" % number, b"block" * (number % 7), sum(sent.valid), 0.0)


class Machine:
    """A replay with its journal, and the twin, doing the same."""

    def __init__(self, directory, spec, max_bytes):
        self.directory = directory
        self.spec = spec
        self.slow = SlowReplay(0.6, spec.num_priorities, max_bytes)
        self.snapshot = None  # the twin's, of when one was written
        self.config = dataclasses.replace(CONFIG, max_gb=0.0 if max_bytes == math.inf else max_bytes / 1e9)
        identity = new_identity(spec)
        self.fast = Replay(self.config, identity, 0, Journal(directory, identity, segment_bytes=300))

    def insert(self, unrolls):
        first = self.slow.end
        entries = [entry_of(first + i, sent) for i, sent in enumerate(unrolls)]
        priorities = np.array([sent.priorities for sent in unrolls], np.float32)
        assert self.fast.insert(entries, priorities, np.array([sent.valid for sent in unrolls])) == first
        self.slow.insert(unrolls)

    def sample(self, table, batch_size, most):
        """Draws up to `most` batches. The twin takes each as if it was drawn alone; none is drawn past an eviction."""
        assert (self.fast.why_no_sample(table, batch_size) == "") == self.slow.may_sample(table, batch_size)
        samples = self.fast.samples(table, batch_size, most)
        for sample in samples:
            assert self.slow.may_sample(table, batch_size)
            self.slow.take(table, sample)
        is_evicted = bool(samples) and self.slow.num_batches % PERIOD == 0
        assert len(samples) == most or is_evicted or not self.slow.may_sample(table, batch_size)

    def update(self, keys, priorities):
        self.fast.tables["transitions"].update_priorities(np.array(keys), np.array(priorities, np.float32))
        self.slow.update(keys, priorities)

    def write(self):
        write_snapshot(self.directory / SNAPSHOT_FILE, self.fast.snapshot())
        self.snapshot = (self.slow.snapshot(), self.slow.exponent)

    def restart(self, exponent):
        """As after a kill: nothing is closed."""
        recovered = recover(self.directory)
        if recovered is None:  # nothing was ever stored: another log begins
            identity, self.snapshot = new_identity(self.spec), None
            recovered = Recovered(identity, [], 0)
        journal = Journal(self.directory, recovered.identity, segment_bytes=300)
        config = dataclasses.replace(self.config, priority_exponent=exponent)
        self.fast = Replay(config, recovered.identity, 0, journal)
        unrolls = [
            RecoveredUnroll(
                number,
                LogEntry(message, block, sum(sent.valid), 0.0),
                np.array(sent.priorities, np.float32),
                np.array(sent.valid),
            )
            for number, message, block in recovered.entries
            for sent in [self.slow.sent[number]]
        ]
        self.fast.restore(unrolls, recovered.end_number, self.directory)
        snapshot, written = self.snapshot or (None, exponent)
        self.slow.exponent = written
        self.slow.restart(snapshot, exponent, min((unroll.number for unroll in unrolls), default=0))

    def check(self):
        fast, slow, log = self.fast, self.slow, self.fast.log
        assert (log.first_number, log.end_number) == (slow.first, slow.end)
        held = range(slow.first, slow.end)
        entries = [entry_of(number, slow.sent[number]) for number in held]
        assert [log.get(number) for number in held] == entries
        assert log.num_bytes == sum(entry.num_bytes for entry in entries)
        assert log.num_transitions == sum(entry.transitions for entry in entries)
        for name, table in fast.tables.items():
            assert (table.limiter.inserted, table.limiter.sampled) == (slow.inserted[name], slow.sampled[name])
        table = fast.tables["transitions"]
        table.check_valid()
        p = slow.p
        powers = powers_of(table, p).ravel()
        assert powers == pytest.approx([slow.powers[key] for n in held for key in range(n * p, n * p + p)], rel=1e-5)


PRIORITIES = [0.0, 0.25, 1.0, 3.0, 1000.0]
WEIGHTS = {"insert": 4, "sample": 8, "update": 3, "write": 1, "restart": 0.7}


def random_unroll(rng, num_priorities):
    valid = [rng.random() < 0.8 for _ in range(K)]
    exists = valid if num_priorities == K else [any(valid)]
    return Sent([rng.choice(PRIORITIES) if there else 0.0 for there in exists], valid)


def step(machine, rng):
    """One random operation, and what has to be true after it."""
    match rng.choices(list(WEIGHTS), WEIGHTS.values())[0]:
        case "insert":
            machine.insert([random_unroll(rng, machine.slow.p) for _ in range(rng.choice([1, 1, 2, 5, 30]))])
        case "sample":
            machine.sample(rng.choice(list(machine.fast.tables)), rng.randrange(1, 9), rng.choice([1, 1, 2, 4]))
        case "update":
            end = machine.slow.end * machine.slow.p
            keys = rng.choices(range(end - 40, end + 10), k=8)
            machine.update(keys, rng.choices(PRIORITIES, k=8))
        case "write":
            machine.write()
        case "restart":
            machine.restart(rng.choice([0.6, 0.6, 1.0]))
    machine.check()


@pytest.mark.parametrize("granularity", SPECS)
@pytest.mark.parametrize(
    ("seed", "max_bytes"), [*((seed, math.inf) for seed in range(10)), (0, 100), (1, 200), (2, 200)]
)
def test_equals_the_slow_twin_under_random_operations_and_restarts(seed, max_bytes, granularity, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    rng = random.Random(seed)
    machine = Machine(tmp_path, SPECS[granularity], max_bytes)
    for _ in range(500):
        step(machine, rng)
