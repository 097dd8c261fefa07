"""A real replay server among enemies: malformed messages, floods, strangers. Good peers beside them lose nothing."""

import multiprocessing
import random
import socket
import struct
import time

import numpy as np
import pytest
import zmq

from apexrl.errors import WireError
from apexrl.net import ReplayClient, sockets, wire
from apexrl.net.protocols import PROTOCOL
from tests.net.peers import greeting_of, name_of, routing_id_of
from tests.system.fuzz import (
    BLOCK,
    HOST,
    SPEC,
    TABLE,
    VALID,
    Enemy,
    GoodPeers,
    K,
    dealer,
    make_bombs,
    make_header,
    resident_mb,
    scaled,
    start_replay,
)
from tests.system.processes import wait_for
from tests.system.raw_actor import RawActor

SPAWN = multiprocessing.get_context("spawn")
GROWTH_MB = 30
FLOOD_MB = 500  # a peer that never reads costs its queue at the server: 1024 of the largest batches are 336 MB
FLOOD_SECONDS = scaled(1, 60)
FLOODS = scaled(("demand", "fetch"), ("hello", "beat", "follow", "demand", "fetch", "statistics"))
UNROLLS = 4000


def endpoint(port):
    return f"tcp://{HOST}:{port}"


def attack(role, port, seed, count, counter, go):
    """A process of two enemies that send so many messages; waits for `go` when a fifth is sent."""
    context = zmq.Context()
    enemies = [Enemy(context, role, port, seed + i) for i in range(2)]
    for i in range(count):
        if i == count // 5:
            counter.value += i
            go.wait()
        enemies[i % 2].step(time.monotonic() + 60)
    counter.value += count - count // 5
    for enemy in enemies:
        enemy.close()
    context.destroy(linger=0)


def settled_mb(server):
    """Resident memory when it does not change any more."""
    last = [resident_mb(server)]

    def is_settled():
        time.sleep(0.3)
        last.append(resident_mb(server))
        return abs(last[-1] - last[-2]) < 0.5

    wait_for(is_settled, 30, "memory that does not change")
    return last[-1]


@pytest.mark.timeout(18000)
def test_a_million_malformed_messages_neither_crash_nor_grow_the_server(tmp_path, free_ports):
    ports = free_ports(2)
    count = scaled(20_000, 1_000_000) // 2
    counter, go = SPAWN.Value("q", 0), SPAWN.Event()
    with start_replay(tmp_path, ports, "--capacity", UNROLLS * K) as server, GoodPeers(ports) as good:
        started = time.monotonic()
        processes = [
            SPAWN.Process(target=attack, args=(role, port, 100 * i, count, counter, go), daemon=True)
            for i, (role, port) in enumerate(zip(("actor", "learner"), ports, strict=True))
        ]
        for process in processes:
            process.start()
        wait_for(lambda: counter.value >= 2 * (count // 5) or server.popen.poll() is not None, 600, "the warm-up")
        before = settled_mb(server)
        go.set()
        for process in processes:
            process.join(1200)
        seconds = time.monotonic() - started
        assert [process.exitcode for process in processes] == [0, 0]
        good.finish()
        after = settled_mb(server)
        assert server.popen.poll() is None
        lines = len(server.text().splitlines())
        assert "Traceback" not in server.text()
        print(
            f"\nfuzz: {counter.value} messages in {seconds:.0f} s; good inserts {good.num_inserts}, lost 0, doubled 0, "
            f"batches {good.num_samples}; memory {before:.0f} -> {after:.0f} MB; {lines} log lines"
        )
    assert counter.value == 2 * count
    assert good.num_samples > 0
    assert after < before + GROWTH_MB


def flood(kind, ports, seconds):
    """A process that sends as fast as it can and never reads."""
    context = zmq.Context()
    name = f"flood-{kind}"
    role = "actor" if kind in ("hello", "beat") else "learner"
    subscribe = wire.Subscribe(PROTOCOL, name, 0, (wire.Want(TABLE, wire.MAX_BATCH),), kind == "follow", "", 0, 8, 0)
    link = dealer(context, ports[role == "learner"], routing_id_of(name.encode()), rcvhwm=1, rcvbuf=8192)
    hello = greeting_of(name.encode(), 2, SPEC)
    greeting = hello if role == "actor" else subscribe
    messages = {
        "hello": [hello],
        "beat": [wire.Heartbeat()],
        "follow": [subscribe, wire.Heartbeat()],
        "demand": [wire.Demand(2**50, (2**50,))],
        "fetch": [wire.Fetch(1, tuple(range(wire.MAX_FETCH)))],
        "statistics": [wire.AskStatistics(1)],
    }
    frames = [wire.encode(message) for message in messages[kind]]
    link.send(wire.encode(greeting))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for frame in frames:
            try:
                link.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.001)
    context.destroy(linger=0)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", FLOODS)
def test_a_peer_that_floods_and_never_reads_costs_bounded_memory(tmp_path, free_ports, kind):
    ports = free_ports(2)
    with start_replay(tmp_path, ports, "--capacity", UNROLLS * K) as server, GoodPeers(ports) as good:
        wait_for(lambda: len(good.seen) > 100 or good.errors, 60, "a log to read")
        before = resident_mb(server)
        process = SPAWN.Process(target=flood, args=(kind, ports, FLOOD_SECONDS), daemon=True)
        process.start()
        peak = before
        while process.is_alive():
            peak = max(peak, resident_mb(server))
            assert peak < before + 20 * FLOOD_MB, f"{kind}: {before:.0f} -> {peak:.0f} MB, and growing"
            process.join(0.05)
        good.finish()
        after = settled_mb(server)
        print(
            f"\nflood of {kind}, never read: good inserts {good.num_inserts}, lost 0, doubled 0, batches "
            f"{good.num_samples}; memory {before:.0f}, at most {peak:.0f}, then {after:.0f} MB"
        )
        assert process.exitcode == 0
    assert peak < before + FLOOD_MB


def serve_unread(port, monitor_seconds, is_bound):
    """A process with a server's socket that is never read."""
    sockets.HEARTBEAT_SECONDS = 1
    server = sockets.make_socket(zmq.Context(), zmq.ROUTER)
    server.rcvhwm = 10
    sockets.bind(server, HOST, port)
    is_bound.set()
    time.sleep(monitor_seconds)


def test_a_peer_that_dies_with_its_queue_full_does_not_take_the_server_along(free_ports):
    port, is_bound, num_full = free_ports(1)[0], SPAWN.Event(), 0
    server = SPAWN.Process(target=serve_unread, args=(port, 4, is_bound), daemon=True)
    server.start()
    assert is_bound.wait(300)
    context = zmq.Context()
    link = dealer(context, port, b"doomed", sndhwm=10)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        try:
            link.send(bytes(100_000), zmq.NOBLOCK)
        except zmq.Again:
            num_full += 1
            time.sleep(0.01)
    context.destroy(linger=0)
    server.join(300)
    print(f"\na peer dies with its queue full: the server's process ended with {server.exitcode}")
    assert num_full and server.exitcode == 0


def test_an_insert_far_larger_than_its_unroll_is_not_stored(tmp_path, free_ports):
    ports = free_ports(2)
    with start_replay(tmp_path, ports, "--capacity", 8000) as server, GoodPeers(ports) as good:
        wait_for(lambda: good.seen or good.errors, 30, "a first insert")
        before = settled_mb(server)
        context = zmq.Context()
        link = dealer(context, ports[0], routing_id_of(b"fat"))
        link.send(wire.encode(greeting_of(b"fat", 30, SPEC)))
        assert link.poll(10_000)
        for i in range(30):
            insert = wire.Insert(i, name_of(b"fat"), 0, 0, 0, 0.1, VALID, np.ones(K, np.float32).tobytes())
            message = wire.encode(insert)
            fat = bytes([message[0] + 1]) + message[1:] + b"\xa1x\xc6" + (2**22).to_bytes(4, "big") + bytes(2**22)
            assert wire.decode_insert(message) == insert
            link.send_multipart([fat, BLOCK])
        link.send(wire.encode(greeting_of(b"fat", 31, SPEC)))

        def is_read():
            message = wire.decode_from_replay(link.recv_multipart())
            return isinstance(message, wire.Welcome) and len(message.slots) == 31

        wait_for(is_read, 20, "all inserts read")
        reader = ReplayClient(endpoint(ports[1]), "teller")
        log_bytes = reader.statistics(10).metrics["log_bytes"]
        reader.close()
        after = resident_mb(server)
        good.finish()
        context.destroy(linger=0)
        print(
            f"\n30 inserts of 4 MB under a foreign key: the log holds {log_bytes / 1e6:.1f} MB; "
            f"memory {before:.0f} -> {after:.0f} MB"
        )
    assert log_bytes < 2**22


def test_a_bomb_in_the_log_is_an_error_for_who_fetches_it(tmp_path, free_ports):
    ports = free_ports(2)
    with start_replay(tmp_path, ports, "--capacity", 8000) as server:
        actor = RawActor(endpoint(ports[0]), "bomber", SPEC, 20)
        for i, bomb in enumerate(make_bombs()):
            actor.insert(make_header(i), bomb, 10)
        actor.insert(make_header(99), BLOCK, 10)
        assert actor.flush(10)
        reader = ReplayClient(endpoint(ports[1]), "reader")
        with pytest.raises(WireError, match="does not decompress"):
            reader.fetch([0], 10)
        assert reader.fetch([1], 10)[1].header.first_step == 99 * K
        metrics = reader.statistics(10).metrics
        print(f"\nbombs: {actor.num_dropped} of {len(make_bombs())} dropped; memory {resident_mb(server):.0f} MB")
        assert metrics["dropped_malformed"] == actor.num_dropped == len(make_bombs()) - 1
        reader.close()
        actor.close()


def throw_garbage(port, rng):
    """Connections that speak no ZMTP, or stop speaking it at a bad moment."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    ready = b"\x04\x19\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    ready = bytes([4, len(ready) - 2]) + ready[2:]
    endings = (
        rng.randbytes(rng.randrange(1, 5000)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        greeting[: rng.randrange(64)],
        greeting + rng.randbytes(500),
        greeting + ready + b"\x02" + struct.pack(">Q", 2**62),  # a frame of 4 exabytes follows
        greeting + ready + b"\x02" + struct.pack(">Q", 2**25) + bytes(1000),
        greeting + ready + b"\x01\x00" * 2000,  # frames of a message that never ends
        greeting + ready + b"\x04\xff" + rng.randbytes(255),
    )
    try:
        with socket.create_connection((HOST, port), timeout=5) as link:
            link.sendall(rng.choice(endings))
            if rng.random() < 0.1:
                time.sleep(0.02)
    except ConnectionError:
        pass


@pytest.mark.timeout(3000)
def test_garbage_without_any_protocol_is_ignored(tmp_path, free_ports):
    ports = free_ports(2)
    rng = random.Random(5)
    with start_replay(tmp_path, ports, "--capacity", UNROLLS * K) as server, GoodPeers(ports) as good:
        count = scaled(400, 20_000)
        for i in range(count):
            if i == count // 4:
                before = resident_mb(server)
            throw_garbage(ports[i % 2], rng)
        good.finish()
        after = settled_mb(server)
        assert server.popen.poll() is None
        print(
            f"\ngarbage: {count} connections; good inserts {good.num_inserts}, lost 0, doubled 0; "
            f"memory {before:.0f} -> {after:.0f} MB"
        )
    assert after < before + GROWTH_MB


@pytest.mark.timeout(3000)
def test_many_strangers_cannot_take_the_lease_of_a_good_actor(tmp_path, free_ports):
    ports = free_ports(2)
    count = scaled(1_000, 10_000)
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2000)
    with start_replay(tmp_path, ports, "--capacity", UNROLLS * K) as server, GoodPeers(ports) as good:
        wait_for(lambda: good.seen or good.errors, 30, "a first insert")
        reader = ReplayClient(endpoint(ports[1]), "counter")
        before = resident_mb(server)
        answers = {wire.Welcome: 0, wire.Dropped: 0}
        most = 0
        for start in range(0, count, 500):
            names = [b"stranger-%d" % i for i in range(start, start + 500)]
            links = [dealer(context, ports[0], routing_id_of(name)) for name in names]
            for link, name in zip(links, names, strict=True):
                link.send(wire.encode(greeting_of(name, 1, SPEC)))
            for link in links:
                assert link.poll(30_000), "no answer to a greeting"
                answers[type(wire.decode_from_replay(link.recv_multipart()))] += 1
                link.close()
            most = max(most, int(reader.statistics(10).metrics["actors"]))
        reader.close()
        peak = resident_mb(server)
        good.finish()
        print(
            f"\nstrangers: {count} greetings, {answers[wire.Welcome]} welcome, {answers[wire.Dropped]} turned away, "
            f"at most {most} leases; good inserts {good.num_inserts}, lost 0, doubled 0; "
            f"memory {before:.0f} -> {peak:.0f} MB"
        )
    context.destroy(linger=0)
    assert most <= 4096
    assert answers[wire.Dropped] > 0 or count < 4096
    assert len(good.slots) == 1, "the good actor lost its lease"
    assert peak < before + 3 * GROWTH_MB
