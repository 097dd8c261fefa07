"""Hundreds of actors at a real replay server; many of them are killed and replaced while it runs."""

import itertools
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest
import zmq

from apexrl.net import InsertClient, ReplayClient, wire
from apexrl.net.service import PEER_TIMEOUT_SECONDS
from apexrl.replay.recovery import recover
from tests.system.fuzz import BLOCK, HOST, SPEC, K, make_header, resident_mb, scaled, start_replay
from tests.system.processes import wait_for

SPAWN = multiprocessing.get_context("spawn")
NUM_ACTORS = scaled(128, 512)
NUM_GROUPS = 4  # processes; one of them is killed and replaced in each round
NUM_ROUNDS = scaled(1, 8)
ROUND_SECONDS = scaled(1.0, 6.0)
INSERT_SECONDS = 0.2  # between the inserts of one actor
PART_SAFE_SECONDS = PEER_TIMEOUT_SECONDS - 5  # a lease outlives its actor at least so long
SENT, ACKNOWLEDGED = 0, 1


class Group:
    """The actors of one process, and what they have said about themselves in files that a SIGKILL leaves whole."""

    def __init__(self, directory, port, name, size):
        self.path = directory / name
        self.names = [f"{name}-{i}" for i in range(size)]
        np.zeros((size, 2), np.int64).tofile(f"{self.path}.counts")
        self.stop = SPAWN.Event()
        arguments = (str(self.path), port, self.names, self.stop)
        self.process = SPAWN.Process(target=act, args=arguments, daemon=True)
        self.process.start()
        self.killed_seconds = float("inf")

    def kill(self):
        self.process.kill()
        self.process.join()
        self.killed_seconds = time.monotonic()

    def finish(self):
        self.stop.set()
        self.process.join(60)
        assert self.process.exitcode == 0

    def counts(self):
        """Sent and acknowledged inserts by actor."""
        return np.fromfile(f"{self.path}.counts", np.int64).reshape(-1, 2)

    def leases(self):
        """(moment, actor, slots) of each lease that was told to an actor."""
        path = self.path.with_suffix(".leases")
        lines = path.read_text().splitlines() if path.exists() else []
        words = [line.split() for line in lines]
        return [(float(moment), name, tuple(map(int, slots))) for moment, name, *slots in words]


def act(path, port, names, stop):
    """The process of a group: each actor inserts as it may, at its own pace."""
    rng = random.Random(names[0])
    counts = np.memmap(f"{path}.counts", np.int64, "r+", shape=(len(names), 2))
    leases = os.open(f"{path}.leases", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    context = zmq.Context()
    clients = [
        InsertClient(f"tcp://{HOST}:{port}", name, SPEC, 1 + i % 3, None, context) for i, name in enumerate(names)
    ]
    told = [()] * len(names)
    due = [0.0] * len(names)
    while not stop.is_set():
        for i, client in enumerate(clients):
            client.poll()
            if client.slots != told[i]:
                told[i] = client.slots
                os.write(leases, f"{time.monotonic()} {names[i]} {' '.join(map(str, client.slots))}\n".encode())
            now = time.monotonic()
            if now >= due[i]:
                due[i] = now + INSERT_SECONDS * rng.uniform(0.5, 1.5)
                before = client.bytes_sent
                counts[i, SENT] += 1  # said before it is done: a kill in between does not count as a loss
                client.insert(make_header(int(counts[i, SENT])), BLOCK, 60, stopped=lambda: True)
                counts[i, SENT] -= client.bytes_sent == before
            counts[i, ACKNOWLEDGED] = counts[i, SENT] - client.num_unacknowledged
        time.sleep(0.002)
    for i, client in enumerate(clients):
        assert client.flush(30)
        counts[i, ACKNOWLEDGED] = counts[i, SENT]
        client.close()
    context.destroy(linger=500)


def assert_no_slot_doubled(groups):
    """No slot was held by two at a time: until its actor was killed, and for a while after."""
    held = {}
    for group in groups:
        leases = group.leases()
        assert len({name for _, name, _ in leases}) == len(group.names), f"{group.path.name}: a lease was lost"
        for moment, name, slots in leases:
            for slot in slots:
                held.setdefault(slot, []).append((moment, group.killed_seconds + PART_SAFE_SECONDS, name))
    for slot, intervals in held.items():
        intervals.sort()
        for (_, end, name), (begin, _, other) in itertools.pairwise(intervals):
            assert end <= begin, f"slot {slot} of {name} was given to {other} as well"
    return len(held)


def assert_each_stored_once(groups, directory):
    """Reads the journal: each actor's inserts in order, none doubled, none missing that was acknowledged."""
    recovered = recover(directory)
    stored = {}
    for entry in recovered.entries:
        insert = wire.decode_insert(entry.message)
        stored.setdefault(insert.actor.rpartition("-")[0], []).append(insert.sequence)
    unacknowledged = 0
    for group in groups:
        for name, (sent, acknowledged) in zip(group.names, group.counts().tolist(), strict=True):
            sequences = stored.pop(name, [])
            assert sequences == list(range(len(sequences))), f"{name}: doubled, missing or out of order"
            assert acknowledged <= len(sequences) <= sent, f"{name}: {acknowledged} <= {len(sequences)} <= {sent}"
            unacknowledged += sent - acknowledged
    assert not stored
    return len(recovered.entries), unacknowledged


def actors_of(reader):
    """The actors that the server's statistics list, without their marks."""
    return {peer.name.rpartition("-")[0] for peer in reader.statistics(30).peers if peer.role == "actor"}


def names_of(groups):
    return {name for group in groups for name in group.names}


def kill_and_replace(directory, port, reader):
    """Runs the crowd through all rounds; returns its groups, those that live at the end last."""
    size = NUM_ACTORS // NUM_GROUPS
    groups = [Group(directory, port, f"group-{i}", size) for i in range(NUM_GROUPS)]
    wait_for(lambda: actors_of(reader) == names_of(groups), 60, "all actors")
    for i in range(NUM_ROUNDS):
        time.sleep(ROUND_SECONDS)
        groups[i].kill()
        groups.append(Group(directory, port, f"group-{NUM_GROUPS + i}", size))
        wait_for(lambda: names_of(groups[i + 1 :]) <= actors_of(reader), 60, "the new actors")
    living = groups[NUM_ROUNDS:]
    wait_for(lambda: actors_of(reader) == names_of(living), PEER_TIMEOUT_SECONDS + 30, "the dead are forgotten")
    return groups


def assert_ladder_fits(reader, port, living):
    """The ladder ends behind the last slot held, and a newcomer gets the lowest free ones."""
    slots = {slot for group in living for _, _, slots in group.leases() for slot in slots}
    assert int(reader.statistics(30).metrics["slots"]) == max(slots) + 1
    newcomer = InsertClient(f"tcp://{HOST}:{port}", "newcomer", SPEC, 50)
    newcomer.connect(30)
    newcomer.close()
    assert list(newcomer.slots) == [slot for slot in range(len(slots) + 50) if slot not in slots][:50]


@pytest.mark.long("chaos")
@pytest.mark.timeout(4000)
def test_a_crowd_that_is_killed_and_replaced_loses_nothing_that_was_acknowledged(tmp_path, free_ports):
    ports = free_ports(2)
    flags = ["--journal-dir", tmp_path / "journal", "--capacity", K * 1_000_000]
    started = time.monotonic()
    with start_replay(tmp_path, ports, *flags) as server:
        reader = ReplayClient(f"tcp://{HOST}:{ports[1]}", "reader")
        before = resident_mb(server)
        groups = kill_and_replace(tmp_path, ports[0], reader)
        after = resident_mb(server)
        assert_ladder_fits(reader, ports[0], groups[NUM_ROUNDS:])
        for group in groups[NUM_ROUNDS:]:
            group.finish()
        wait_for(lambda: reader.statistics(30).metrics["slots"] == 0, 30, "an empty ladder")
        reader.close()
        server.signal(signal.SIGTERM)
        assert server.popen.wait(600) == 0
    seconds = time.monotonic() - started
    num_slots = assert_no_slot_doubled(groups)
    num_stored, unacknowledged = assert_each_stored_once(groups, tmp_path / "journal")
    print(
        f"\ncrowd: {NUM_ACTORS} actors at once, {len(names_of(groups))} in all, {len(names_of(groups[:NUM_ROUNDS]))} "
        f"killed, in {seconds:.0f} s; {num_stored} inserts stored, acknowledged and missing 0, doubled 0, "
        f"unacknowledged at a kill {unacknowledged}; {num_slots} slots, none doubled; "
        f"memory {before:.0f} -> {after:.0f} MB"
    )
