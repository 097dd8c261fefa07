"""Bad links: a proxy that delays, cuts, reorders and swallows, and a network interface that goes down."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from apexrl.net import ReplayClient
from tests.system.faults import DEADLINE_SECONDS, TIMEOUT_SECONDS, World, scaled
from tests.system.processes import wait_for
from tests.system.proxy import Proxy

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

SERVER_ADDRESS, CLIENT_ADDRESS = "10.201.77.1", "10.201.77.2"


def test_connections_that_are_delayed_cut_reordered_and_swallowed_lose_and_double_nothing(tmp_path, free_ports):
    rounds = scaled(1, 20)
    *ports, actor_port, reader_port = free_ports(5)
    with (
        Proxy(actor_port, ports[0], 1, rounds) as actor_proxy,
        Proxy(reader_port, ports[1], 2, rounds) as reader_proxy,
        World(tmp_path, ports) as world,
    ):
        world.actor_port, world.reader_port = actor_port, reader_port
        world.start_server()
        world.start_actor(2)
        world.start_actor(4)
        world.start_reader()
        world.wait_for_progress()
        actor_proxy.begin()
        reader_proxy.begin()
        for proxy in (actor_proxy, reader_proxy):
            wait_for(
                lambda: world.is_alive() and proxy.is_healed, rounds * 15 + DEADLINE_SECONDS, "the end of the plan"
            )
            assert all(proxy.counts[kind] for kind in ("delay", "cut", "linger", "swallow")), proxy.counts
        world.wait_for_progress()
        client = ReplayClient(f"tcp://127.0.0.1:{ports[1]}", "watcher")
        metrics = client.statistics(20).metrics
        client.close()
        resent = {name: int(metrics.get(f"dropped_{name}", 0)) for name in ("duplicate", "gap")}
        counts = actor_proxy.counts + reader_proxy.counts
        times = sum(counts[kind] for kind in ("cut", "linger", "swallow"))
        world.finish("bad connections", times, f"{dict(counts)} {resent}")


@pytest.fixture
def namespaces():
    """The names of two network namespaces with a link between them, for the server and for its clients."""
    server, clients = f"apx{os.getpid()}s", f"apx{os.getpid()}c"
    try:
        link(server, clients)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        remove(server, clients)
        pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', error)}")
    yield server, clients
    remove(server, clients)


def remove(*names: str) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
            ip("netns", "delete", name)


def link(server: str, clients: str) -> None:
    ip("netns", "add", server)
    ip("netns", "add", clients)
    ip("link", "add", f"{server}v", "netns", server, "type", "veth", "peer", "name", f"{clients}v", "netns", clients)
    for name, address in ((server, SERVER_ADDRESS), (clients, CLIENT_ADDRESS)):
        ip("-n", name, "address", "add", f"{address}/24", "dev", f"{name}v")
        for device in ("lo", f"{name}v"):
            ip("-n", name, "link", "set", device, "up")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=200)


def inside(namespace: str) -> list[str]:
    """Arguments with which Python becomes another Python, with the arguments that follow, in a namespace."""
    become = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
    return ["-c", become, "ip", "netns", "exec", namespace, sys.executable]


@pytest.mark.parametrize("side", ["server", "clients"][: scaled(1, 2)])
def test_a_link_down_for_longer_than_every_deadline_loses_and_doubles_nothing(tmp_path, namespaces, free_ports, side):
    server, clients = namespaces
    name = {"server": server, "clients": clients}[side]
    seconds = scaled(6.0, 40.0)
    with World(tmp_path, free_ports(3)) as world:
        world.host = SERVER_ADDRESS
        world.server_inside, world.clients_inside = inside(server), inside(clients)
        world.start_server()
        world.start_actor(2)
        world.start_actor(3)
        world.start_reader()
        world.wait_for_progress()
        ip("-n", name, "link", "set", f"{name}v", "down")
        time.sleep(seconds)
        ip("-n", name, "link", "set", f"{name}v", "up")
        world.wait_for_progress()
        world.finish(f"link down on the side of the {side}", 1)
