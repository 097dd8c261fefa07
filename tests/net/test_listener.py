"""A port takes little of strangers: few bytes, for few seconds, on so many connections."""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import zmq

from apexrl.config.sections import ReplayConfig
from apexrl.errors import ConfigError
from apexrl.net import InsertClient, ReplayClient, listener, load_keyring, replay_server, sockets
from apexrl.net.keyring import ROLES, make_keys
from apexrl.net.listener import RESERVED_FILES, Listener, most_connections
from apexrl.net.metrics_channel import Evaluation, MetricsClient, MetricsServer, checksum
from apexrl.net.parameter_channel import ParameterPublisher
from apexrl.net.replay_server import EXPIRY_PERIOD_SECONDS
from apexrl.net.sockets import make_socket, receive
from apexrl.types import StreamSpec, Unroll, UnrollHeader
from apexrl.unroll import UnrollCodec
from tests.few_files import no_files_left
from tests.net.peers import TABLE
from tests.net.zmtp import begin_frame, connected, greeted, is_ended
from tests.system.processes import ROOT, wait_for

PORTS = ("actors", "learners", "parameters", "metrics")
FEW_FILES = """
import logging, resource, sys, zmq
from apexrl.net.listener import Listener
from apexrl.net.sockets import make_socket

logging.basicConfig()
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
socket = make_socket(zmq.Context(), zmq.ROUTER)
print(Listener(socket, "127.0.0.1", 0, 1000).endpoint)
socket.close()
"""


@pytest.fixture
def keys(tmp_path):
    make_keys(tmp_path / "keys", ROLES)
    return tmp_path / "keys"


@pytest.fixture
def ports(start_server, keys):
    """Opens all ports of a run; gives their endpoints."""

    @contextlib.contextmanager
    def open_all(is_encrypted=False):
        rings = [load_keyring(str(keys), role) if is_encrypted else None for role in ("replay", "learner")]
        publisher, metrics = ParameterPublisher("127.0.0.1", 0, rings[1]), MetricsServer("127.0.0.1", 0, rings[1])
        threads = [threading.Thread(target=server.run) for server in (publisher, metrics)]
        for thread in threads:
            thread.start()
        try:
            with start_server(keyring=rings[0]) as server:
                endpoints = server.actor_endpoint, server.learner_endpoint, publisher.endpoint, metrics.endpoint
                yield dict(zip(PORTS, endpoints, strict=True))
        finally:
            for server in (publisher, metrics):
                server.close()
            for thread in threads:
                thread.join(100)
            if rings[1] is not None:
                rings[1].close()

    return open_all


@pytest.mark.parametrize("mebibytes", [1, 60])
@pytest.mark.parametrize("port", PORTS)
def test_a_frame_that_no_peer_sends_ends_the_connection_at_its_beginning(ports, port, mebibytes):
    with ports() as endpoints, greeted(endpoints[port], kind=b"PUSH" if port == "metrics" else b"DEALER") as stranger:
        begin_frame(stranger, mebibytes * 2**20)
        assert is_ended(stranger)


@pytest.mark.parametrize("port", PORTS)
def test_a_peer_without_a_key_may_not_begin_a_large_frame(ports, port):
    with ports(is_encrypted=True) as endpoints, greeted(endpoints[port], b"CURVE") as stranger:
        begin_frame(stranger, 2**20, is_command=True)
        assert is_ended(stranger)


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("port", PORTS)
def test_a_connection_that_never_shows_who_it_is_ends(monkeypatch, ports, port, is_encrypted):
    monkeypatch.setattr(sockets, "HANDSHAKE_SECONDS", 0.3)
    with ports(is_encrypted) as endpoints, connected(endpoints[port]) as silent:
        assert is_ended(silent)
        with greeted(endpoints[port], b"CURVE" if is_encrypted else b"PLAIN") as half:
            assert is_ended(half)


def said_by(peer, socket):
    """Sends a message until it arrives; returns what arrived."""

    def arrived():
        with contextlib.suppress(zmq.Again):
            peer.send(b"here", zmq.NOBLOCK)
        return receive(socket, 200)

    return wait_for(arrived, 100, "a message")


def test_connections_beyond_the_bound_are_ended_and_those_within_it_stay(monkeypatch, context, caplog):
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 3)
    socket = make_socket(context, zmq.ROUTER)
    endpoint = Listener(socket, "127.0.0.1", 0, 1000).endpoint
    peers = [make_socket(context, zmq.DEALER) for _ in range(4)]
    with connected(endpoint):
        for peer in peers[:2]:
            peer.connect(endpoint)
            assert said_by(peer, socket)[1] == b"here"
        for _ in range(50):
            with connected(endpoint) as stranger:
                assert is_ended(stranger)
        assert f"{endpoint} has 3 connections and takes no more" in caplog.text
        assert caplog.text.count("takes no more") < 50
        for peer in peers[:2]:
            assert said_by(peer, socket)[1] == b"here"
    peers[0].close()
    for peer in peers[2:]:  # there are two places again
        peer.connect(endpoint)
        assert said_by(peer, socket)[1] == b"here"
    for peer in peers:
        peer.close()
    socket.close()


def test_the_bound_follows_from_frames_and_file_descriptors():
    usual = most_connections(1000)
    assert usual <= listener.MAX_CONNECTIONS
    assert most_connections(32 * 2**20) * 32 * 2**20 <= listener.MAX_BEGUN_BYTES
    with no_files_left():
        assert most_connections(1000) == 1
    # A process of its own has no descriptors of the tests before.
    ended = subprocess.run([sys.executable, "-c", FEW_FILES, str(RESERVED_FILES + 100)], cwd=ROOT, text=True,
                           capture_output=True, timeout=300, check=True)  # fmt: skip
    assert f"{ended.stdout.strip()} takes 50 connections at most" in ended.stderr and "ulimit -Hn" in ended.stderr


@pytest.mark.parametrize("made", range(4))
def test_a_server_that_finds_no_descriptor_lets_its_journal_go(tmp_path, monkeypatch, made):
    """For one of its two sockets, or of what watches their connections."""
    config, counts = ReplayConfig(tables=(f"{TABLE}=priority",)), itertools.count()

    def make(*words, **options):
        if next(counts) >= made:
            raise ConfigError("no socket can be made")
        return make_socket(*words, **options)

    with monkeypatch.context() as patch:
        for module in (replay_server, listener):
            patch.setattr(module, "make_socket", make)
        with pytest.raises(ConfigError, match="no socket can be made"):
            replay_server.ReplayServer(config, journal_dir=tmp_path)
    assert next(counts) == made + 1
    replay_server.ReplayServer(config, journal_dir=tmp_path).close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_the_port_of_the_actors_takes_the_unrolls_of_its_log(start_server, keys, is_encrypted):
    """Unrolls of some megabytes, of a server that heard of them from its first actor, and of one that has a journal."""
    spec = StreamSpec("Large-v0", (512, 512, 3), "uint8", 1, 4, 1, unroll_starts=8, overlap_steps=1)
    rng, ones, journal = np.random.default_rng(0), np.ones(8), keys.parent / "journal"
    header = UnrollHeader(0, 0, 0, 0.1, ones.astype(bool), ones.astype(np.float32), ())
    codec = UnrollCodec(spec)
    rings = {role: load_keyring(str(keys), role) if is_encrypted else None for role in ROLES}
    for life in range(2):
        keyring = load_keyring(str(keys), "replay") if is_encrypted else None
        with start_server(journal_dir=journal, keyring=keyring, min_size_to_sample=8) as server:
            clients = [InsertClient(server.actor_endpoint, f"a{i}", spec, 1, rings["actor"]) for i in range(2)]
            for client in clients:
                client.connect(100)
                client.insert(header, codec.encode(noise(spec, rng)), 100)
                assert client.flush(100)
                client.close()
            reader = ReplayClient(server.learner_endpoint, "reader", {TABLE: 4}, keyring=rings["learner"])
            assert reader.statistics(100).metrics["transitions_inserted"] == 16 * (life + 1)
            reader.close()


def noise(spec, rng):
    """An unroll that does not compress."""
    steps = spec.unroll_steps
    frames = rng.integers(0, 256, (spec.unroll_frames, *spec.frame_shape)).astype(np.uint8)
    zeros = np.zeros(steps, np.float32)
    return Unroll(frames, np.zeros(steps, np.int32), zeros, np.ones_like(zeros), np.zeros(steps + 1, bool))


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_an_evaluation_brings_a_large_network_back(keys, is_encrypted):
    rings = {role: load_keyring(str(keys), role) if is_encrypted else None for role in ("learner", "actor")}
    server = MetricsServer("127.0.0.1", 0, rings["learner"])
    server.runs = frozenset({"run"})
    thread = threading.Thread(target=server.run)
    thread.start()
    client = MetricsClient(server.endpoint, "evaluator", rings["actor"])
    network = os.urandom(20_000_000)
    server.published(3, network)
    evaluation = Evaluation(3, 0.0, (1.0,), (5,), 1.0, "run", checksum(network), network)
    client.evaluation(evaluation)
    assert wait_for(server.evaluations, 100, "the evaluation") == [evaluation]
    client.close()
    server.close()
    thread.join(100)
    if rings["learner"] is not None:
        rings["learner"].close()


def test_a_server_without_a_file_descriptor_goes_on(start_server, spec, make_unroll, header, tmp_path):
    with start_server(journal_dir=tmp_path / "journal", journal_flush_seconds=0.1) as server:
        client = InsertClient(server.actor_endpoint, "actor", spec, 1)
        client.connect(100)
        block = UnrollCodec(spec).encode(make_unroll(spec))
        client.insert(header(), block, 100)
        assert client.flush(100)
        with no_files_left():
            client.insert(header(8), block, 100)
            client.flush(2.5 * EXPIRY_PERIOD_SECONDS)
            time.sleep(2.5 * EXPIRY_PERIOD_SECONDS)  # it measures its memory, and syncs its journal
        assert client.flush(100)
        client.insert(header(16), block, 100)
        assert client.flush(100)
        client.close()
