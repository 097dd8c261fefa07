"""More connections than file descriptors, of strangers that say nothing or greet: whole processes go on."""

import contextlib
import resource
import signal

import pytest

from apexrl.net import InsertClient, load_keyring
from apexrl.net.keyring import ROLES, make_keys
from tests.net.zmtp import connected, greeted
from tests.system.fuzz import BLOCK, HOST, SPEC, make_header
from tests.system.processes import Process, read_json, updates_of, wait_for

LIMITED = """
import os, resource, sys
soft, hard = int(sys.argv[1]), int(sys.argv[2]) or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""
NUM_STRANGERS = 400


def limited(arguments, log, soft, hard=0):
    """A process that may open so many files; 0: as many as ours."""
    return Process(["-c", LIMITED, soft, hard, *arguments], log)


@contextlib.contextmanager
def strangers(connect, *ports, count=NUM_STRANGERS):
    """Holds so many connections to each port, as many of them as the servers take."""
    with contextlib.ExitStack() as held:
        for port in ports:
            for _ in range(count):
                held.enter_context(connect(f"tcp://{HOST}:{port}"))
        yield


def replay(ports, *flags):
    wires = "--actor-port", ports[0], "--batch-port", ports[1], "--min-size-to-sample", 8, "--samples-per-insert", 0
    return ["replay.py", *wires, *flags]


def insert_some(port, keyring=None):
    """An honest actor comes and is served."""
    client = InsertClient(f"tcp://{HOST}:{port}", "honest", SPEC, 1, keyring)
    client.connect(300)
    for i in range(10):
        client.insert(make_header(i), BLOCK, 300)
    assert client.flush(300)
    client.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_silent_connections_end_no_server_and_make_room_for_actors(tmp_path, free_ports, is_encrypted):
    flags, keyring, ports = (), None, free_ports(2)
    if is_encrypted:
        make_keys(tmp_path / "keys", ROLES)
        flags, keyring = ("--keys", tmp_path / "keys"), load_keyring(str(tmp_path / "keys"), "actor")
    with limited(replay(ports, *flags), tmp_path / "replay.txt", 512, 512) as server:
        wait_for(lambda: "learners at" in server.text(), 60, "the server")
        with strangers(connected, *ports):
            insert_some(ports[0], keyring)
        assert "takes no more" in server.text() and "connections at most" in server.text()
        server.signal(signal.SIGTERM)
        assert server.popen.wait(60) == 0 and "Traceback" not in server.text(), server.text()


def test_more_peers_than_the_soft_limit_are_served(tmp_path, free_ports):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4 * NUM_STRANGERS:
        pytest.skip("a hard limit that is higher is not permitted here")
    ports = free_ports(2)
    with limited(replay(ports), tmp_path / "replay.txt", 256) as server:
        wait_for(lambda: "learners at" in server.text(), 60, "the server")
        with strangers(greeted, ports[0]):
            insert_some(ports[0])
        assert "takes no more" not in server.text() and "Traceback" not in server.text()


def test_connections_to_every_port_end_no_run(tmp_path, free_ports):
    ports, directory = free_ports(4), tmp_path / "run"
    names = ("--actor-port", "--batch-port", "--parameter-port", "--metrics-port")
    wires = [text for pair in zip(names, ports, strict=True) for text in pair]
    flags = ("--env", "CartPole-v1", "--preset", "small", "--no-tensorboard", "--no-evaluator", "--run-dir", directory)
    with limited(["-m", "apexrl.running.launch", *flags, *wires], tmp_path / "run.txt", 512, 512) as run:
        wait_for(lambda: updates_of(directory), 120, "updates")
        with strangers(greeted, *ports[:2]), strangers(connected, *ports[2:]):
            before = updates_of(directory)
            wait_for(lambda: updates_of(directory) > before + 200, 120, "more updates")
        run.signal(signal.SIGINT)
        assert run.popen.wait(200) == 0, run.text()
    assert read_json(directory / "summary.json")["roles_restarted"] == 0, run.text()
    assert not any("Traceback" in log.read_text() for log in (directory / "logs").iterdir())
