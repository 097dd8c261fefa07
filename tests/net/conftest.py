import contextlib
import threading

import numpy as np
import pytest
import zmq

from apexrl.config.sections import ReplayConfig
from apexrl.net.keyring import ROLES, make_keys
from apexrl.net.metrics_channel import MetricsServer
from apexrl.net.replay_server import ReplayServer
from apexrl.types import UnrollHeader
from tests.net.peers import TABLE, HandServer, Peers


@pytest.fixture
def peers(spec):
    return Peers(spec)


@pytest.fixture
def header(spec):
    """Makes the header of an unroll of stream 0."""
    ones = np.ones(spec.unroll_starts)
    return lambda first_step=0: UnrollHeader(0, first_step, 0, 0.1, ones.astype(bool), ones.astype(np.float32), ())


@contextlib.contextmanager
def run_server(actor_port=0, learner_port=0, journal_dir=None, keyring=None, **changes):
    """A replay server in a thread; gives it once it listens."""
    numbers = {"capacity": 8000, "min_size_to_sample": 32, "samples_per_insert": 0.0}
    numbers["tables"] = (f"{TABLE}=priority",)
    config = ReplayConfig(**(numbers | changes))
    with ReplayServer(config, "127.0.0.1", actor_port, learner_port, 0, journal_dir, keyring) as server:
        yield server


@pytest.fixture
def start_server():
    """Starts replay servers in threads of this process."""
    return run_server


@pytest.fixture
def server():
    with run_server() as server:
        yield server


@pytest.fixture
def context():
    """A context of its own, which ends only when every socket in it was closed."""
    context = zmq.Context()
    yield context
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    ending.join(50)
    assert not ending.is_alive(), "a socket was left open"


@pytest.fixture
def by_hand(context):
    """A server that is served by hand."""
    server = HandServer(context)
    yield server
    server.socket.close()


@pytest.fixture
def now():
    """The time of `metrics`, which a test sets."""
    return [0.0]


@pytest.fixture
def metrics(now):
    """A server of metrics that takes reports of run-1 by its method `take`."""
    server = MetricsServer("127.0.0.1", 0, clock=lambda: now[0])
    server.runs = frozenset({"run-1"})
    yield server
    server.close()
    server.run()  # closes the socket


@pytest.fixture
def keys(tmp_path):
    """A directory with the keys of a run."""
    make_keys(tmp_path / "keys", ROLES)
    return tmp_path / "keys"


@pytest.fixture
def strange(tmp_path):
    """A directory with keys that nobody knows."""
    make_keys(tmp_path / "strange", ROLES)
    return tmp_path / "strange"
