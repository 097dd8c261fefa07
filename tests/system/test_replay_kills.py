"""Kills, stops and clock jumps: every acknowledged insert is there, once and in order, and everybody goes on."""

import itertools
import random
import signal
import time

import pytest

from apexrl.net import ReplayClient
from tests.system.faults import TIMEOUT_SECONDS, World, scaled

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

# The moments of a kill: soon after the server's start, while it stores, and before a journalled write is acknowledged.
MOMENTS = ("written", "starting", "written", "storing")

# Found by Python when it starts. The clock of the day is hours off, differently every fifth of a second.
JUMPING_CLOCK = """
import os, random, sys, time

_time = time.time

def jumping():
    hours = random.Random(os.getpid() + int(5 * time.monotonic())).uniform(-30, 30)
    caller = sys._getframe(1).f_globals["__name__"]
    with open({path!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{hours}} {{caller}}\\n")
    return _time() + 3600 * hours

time.time, time.time_ns = jumping, lambda: int(1e9 * jumping())
time.time()
"""


def test_a_server_killed_at_any_moment_loses_and_doubles_nothing(tmp_path, free_ports):
    rng, times = random.Random(1), scaled(4, 50)
    with World(tmp_path, free_ports(3)) as world:
        world.start_server()
        world.start_actor(2)
        world.start_actor(4)
        world.start_reader()
        world.wait_for_progress()
        for i in range(times):
            moment = MOMENTS[i % len(MOMENTS)]
            if moment != "starting":
                world.wait_until_storing()
            time.sleep(rng.uniform(0.05, 1.5))
            if moment == "written":
                world.wait_until_written()
            world.kill("server")
            world.start_server()
        world.wait_for_progress()
        world.start_reader()  # one that reads all of it at the end
        world.finish("server killed", times)


def test_roles_killed_and_replaced_in_any_order_go_on(tmp_path, free_ports):
    rng = random.Random(2)
    orders = list(itertools.permutations(("actors", "server", "readers")))
    rng.shuffle(orders)
    times = scaled(2, len(orders))
    with World(tmp_path, free_ports(3), "--samples-per-insert", 1) as world:
        world.start_server()
        world.start_actor(3)
        world.start_reader()
        for order in orders[:times]:
            world.wait_for_progress()
            dead = []
            for role in order:
                world.kill(role)
                dead.append(role)
                time.sleep(rng.uniform(0, 0.4))
                while dead and rng.random() < 0.5:  # some come back before the next one dies, some after
                    world.replace(dead.pop(0))
            for role in dead:
                world.replace(role)
        world.wait_for_progress()
        world.finish("roles killed in every order", times)


def test_processes_stopped_for_longer_than_every_deadline_lose_and_double_nothing(tmp_path, free_ports):
    roles = ("server", "actor", "reader")[: scaled(1, 3)]
    with World(tmp_path, free_ports(3)) as world:
        world.start_server()
        world.start_actor(2)
        world.start_actor(3)
        world.start_reader()
        for role in roles:
            world.wait_for_progress()
            process = {
                "server": world.server,
                "actor": world.actors[0].process,
                "reader": world.readers[0].process,
            }[role]
            process.signal(signal.SIGSTOP)
            time.sleep(scaled(5.5, 20.0))
            process.signal(signal.SIGCONT)
        world.wait_for_progress()
        world.finish("processes stopped", len(roles))


def test_jumps_of_the_clock_have_no_effect(tmp_path, free_ports):
    clock, jumps = tmp_path / "clock", tmp_path / "jumps.txt"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(JUMPING_CLOCK.format(path=str(jumps)))
    ports = free_ports(3)
    with World(tmp_path, ports, environment={"PYTHONPATH": str(clock)}) as world:
        world.start_server()
        world.start_actor(2)
        world.start_reader()
        world.wait_for_progress()
        client = ReplayClient(f"tcp://127.0.0.1:{ports[1]}", "watcher")
        for _ in range(scaled(3, 60)):
            time.sleep(0.5)
            statistics = client.statistics(20)
            assert {peer.role for peer in statistics.peers} == {"actor", "learner"}
            assert all(0 <= peer.silent_seconds < 15 for peer in statistics.peers)
            assert 0 <= statistics.metrics["age_seconds"] < 600
        world.wait_for_progress()
        assert " left" not in world.server.text()
        client.close()
        processes = [world.server, world.actors[0].process, world.readers[0].process]
        told = [line.split() for line in jumps.read_text().splitlines()]
        assert {str(process.popen.pid) for process in processes} <= {pid for pid, *_ in told}
        hours = [float(value) for pid, value, _ in told if pid == str(world.server.popen.pid)]
        assert max(hours) - min(hours) > 1
        assert not [caller for *_, caller in told if caller.startswith("apexrl")]
        world.finish("clock jumps seen", len({value for _, value, _ in told}))
    assert len(world.notes[world.readers[0].path].starts) == 1
