"""A real publisher of parameters among strangers: their messages cost no memory, and subscribers hear all."""

import contextlib
import multiprocessing
import socket
import struct
import threading
import time

import psutil
import pytest
import zmq

from apexrl.net.parameter_channel import ParameterPublisher, ParameterSubscriber
from tests.system.processes import wait_for

SPAWN = multiprocessing.get_context("spawn")
HOST = "127.0.0.1"
GROWTH_BYTES = 30 * 2**20
VALUE_BYTES = 2**20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
LONG, SHORT = [2**22] * 4, [65] * 100_000


def publish(port, stop):
    """A process that publishes a new value ten times a second, and ends when it is told to."""
    context = zmq.Context()
    publisher = ParameterPublisher(HOST, port, context=context)
    thread = threading.Thread(target=publisher.run)
    thread.start()
    number = 0
    while not stop.wait(0.1):
        number += 1
        publisher.publish(struct.pack("<Q", number) + bytes(VALUE_BYTES))
    publisher.close()
    thread.join()
    context.term()  # libzmq's threads may not meet the end of the process


def ready(kind):
    """The command of a peer after the greeting, as if it were a socket of this kind."""
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return bytes([4, len(body)]) + body


def topics(sizes):
    """Subscriptions to different topics, as they look on a connection."""
    for number, size in enumerate(sizes):
        yield b"\x02" + struct.pack(">Q", size) + b"\x01" + struct.pack(">Q", number)[: size - 1].ljust(size - 1, b"x")


def swallow(link):
    with contextlib.suppress(OSError):
        while link.recv(2**20):
            pass


def attack(port, kind, sizes):
    """Subscribes to all topics over one connection, or over as many as it takes because they are closed."""
    left = topics(sizes)
    connections = 0
    message = next(left, None)
    while message is not None and connections < 20:
        connections += 1
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=5) as link:
            link.sendall(GREETING + ready(kind))
            reading = threading.Thread(target=swallow, args=(link,))
            reading.start()
            with contextlib.suppress(OSError):
                while message is not None:
                    link.sendall(message)
                    message = next(left, None)
                link.sendall(b"\x00\x02\x01x")
                time.sleep(0.5)
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            reading.join()
        if len(sizes) < 100:
            message = next(left, None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [b"SUB", b"DEALER"])
@pytest.mark.parametrize("sizes", [LONG, SHORT], ids=["long", "short"])
def test_subscriptions_of_a_stranger_cost_no_memory(free_ports, kind, sizes):
    (port,) = free_ports(1)
    stop = SPAWN.Event()
    process = SPAWN.Process(target=publish, args=(port, stop), daemon=True)
    process.start()
    subscriber = ParameterSubscriber(f"tcp://{HOST}:{port}")

    def newest():
        encoded = subscriber.fetch_encoded(100)
        return encoded and struct.unpack_from("<Q", encoded)[0]

    first = wait_for(newest, 120, "a first value")
    memory = psutil.Process(process.pid)
    before = peak = memory.memory_info().rss
    stranger = threading.Thread(target=attack, args=(port, kind, sizes))
    stranger.start()
    while stranger.is_alive():
        peak = max(peak, memory.memory_info().rss)
        assert peak < before + 10 * GROWTH_BYTES, f"{peak / 1e6:.0f} MB, and growing"
        stranger.join(0.05)
    during = wait_for(newest, 120, "a value beside the stranger")
    wait_for(lambda: (newest() or 0) > max(during, first), 120, "a newer value")
    peak = max(peak, memory.memory_info().rss)
    stop.set()
    process.join(120)
    subscriber.close()
    print(f"\n{len(sizes)} subscriptions as {kind.decode()}: {before / 1e6:.0f} MB, at most {peak / 1e6:.0f} MB")
    assert process.exitcode == 0
    assert peak < before + GROWTH_BYTES
