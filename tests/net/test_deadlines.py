"""Calls of the clients end in the time that their callers give, before servers that answer and do not serve."""

import subprocess
import sys
import threading
import time

import pytest
import zmq

from apexrl.errors import ApexError, PeerRefused, PeerTimeout
from apexrl.net import InsertClient, LogClient, RecordClient, ReplayClient, ShardedReplayClient, wire
from tests.net.peers import TABLE, block_of
from tests.system.processes import ROOT

MOST_GREETINGS = 20  # in some seconds; at full speed there are thousands in one


class Answering:
    """A server in a thread, which gives one list of messages for every message of a kind, or again and again."""

    def __init__(self, answers, to=object, is_endless=False):
        self.heard = []
        self._to, self._is_endless = to, is_endless
        self._answers = [wire.encode(answer) for answer in answers]
        self._ended = threading.Event()
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join(100)
        self._socket.close()

    def _run(self):
        peer = None
        while not self._ended.is_set():
            if self._socket.poll(0 if self._is_endless and peer else 20):
                peer, *frames = self._socket.recv_multipart()
                self.heard.append(wire.decode_to_replay(frames))
            elif not (self._is_endless and peer):
                continue
            for answer in self._answers if isinstance(self.heard[-1], self._to) else ():
                self._socket.send_multipart([peer, answer])


def count(messages, kind):
    return sum(isinstance(message, kind) for message in messages)


def test_a_client_at_the_other_port_is_told_which_one_is_its_own(server, spec):
    actor = InsertClient(server.learner_endpoint, "actor", spec, 1)
    with pytest.raises(PeerRefused, match=r"port for learners.*--actor-port"):
        actor.connect(100)
    actor.close()
    reader = ReplayClient(server.actor_endpoint, "reader", {TABLE: 4})
    with pytest.raises(PeerRefused, match=r"port for actors.*--batch-port"):
        reader.sample(TABLE, 100)
    reader.close()
    follower = LogClient(server.actor_endpoint, "follower", {}, 1)
    with pytest.raises(PeerRefused, match=r"port for actors.*--batch-port"):
        for _ in range(1000):
            follower.poll(100)
    follower.close()


def test_a_server_that_knows_nobody_is_greeted_now_and_then_until_the_time_is_up(spec):
    with Answering([wire.Stranger()]) as server:
        actor = InsertClient(server.endpoint, "actor", spec, 1)
        with pytest.raises(PeerTimeout, match="its port for actors"):
            actor.connect(2.5)
        actor.close()
    assert 0 < count(server.heard, wire.Hello) < MOST_GREETINGS


def test_a_server_that_forgets_a_learner_at_once_is_asked_now_and_then(spec):
    subscribed = [wire.Subscribed(number, "log", 0, True, spec, 10, 0, (0,), ("transitions",)) for number in range(99)]
    with Answering([*subscribed, wire.Stranger()], to=wire.Subscribe) as server:
        reader = ReplayClient(server.endpoint, "reader", {TABLE: 4})
        with pytest.raises(PeerTimeout, match="no batch"):
            reader.sample(TABLE, 2.5)
        reader.close()
    assert 0 < count(server.heard, wire.Subscribe) < MOST_GREETINGS


def test_a_greeting_that_the_server_cannot_read_ends_the_connection_with_its_reason(spec):
    with Answering([wire.Dropped("malformed: a malformed message: Object missing `salt`")]) as server:
        actor, reader = InsertClient(server.endpoint, "actor", spec, 1), ReplayClient(server.endpoint, "reader", {})
        with pytest.raises(PeerRefused, match="missing `salt`"):
            actor.connect(100)
        for call in (reader.statistics, lambda seconds: reader.fetch([1], seconds)):
            with pytest.raises(PeerRefused, match="missing `salt`"):
                call(100)
        actor.close()
        reader.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (wire.Dropped("crowded: 4096 actors at most"), "4096 actors"),
        (wire.Welcome((0,), 1, 0, 0, "journal"), "journal"),
    ],
)
def test_a_server_that_lets_an_actor_wait_does_so_until_the_time_is_up(spec, header, answer, reason):
    with Answering([answer] * 50) as server:
        actor, enough = InsertClient(server.endpoint, "actor", spec, 1), time.monotonic() + 100
        with pytest.raises(PeerTimeout, match=reason):
            actor.insert(header(), block_of(spec), 1.5, lambda: time.monotonic() > enough)
        actor.close()


def test_a_server_that_lets_a_reader_wait_for_a_place_does_so_until_the_time_is_up():
    with Answering([wire.Dropped("crowded: 256 learners are connected already")] * 50, to=wire.Subscribe) as server:
        reader = ReplayClient(server.endpoint, "reader", {TABLE: 4})
        with pytest.raises(PeerTimeout, match="it waits for crowded"):
            reader.sample(TABLE, 2.5)
        reader.close()


def test_a_server_that_never_stops_talking_holds_no_call(spec, header):
    said = [wire.Welcome((0,), 1, 0, 0, "learner"), *[wire.Acknowledge(0, 0, 1, "learner")] * 100]
    with Answering(said, is_endless=True) as server:
        actor, enough = InsertClient(server.endpoint, "actor", spec, 1), time.monotonic() + 100
        with pytest.raises(PeerTimeout, match="learner"):
            actor.insert(header(), block_of(spec), 1.5, lambda: time.monotonic() > enough)
        actor.poll()
        actor.close()


def test_the_shards_share_the_time_of_a_call(free_ports, context):
    away = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    client = ShardedReplayClient(away, "reader", {TABLE: 4}, context=context)
    for call in (client.statistics, lambda seconds: client.fetch([0, 1], seconds), lambda s: client.sample(TABLE, s)):
        with pytest.raises(PeerTimeout, match="no "):
            call(0.3)
    client.close()


FORKED = """
import os, sys
import numpy as np
from apexrl.errors import ApexError
from apexrl.net import InsertClient, LogClient, ReplayClient
from tests.system.fuzz import BLOCK, SPEC, TABLE, make_header

actor = InsertClient(sys.argv[1], "actor", SPEC, 1)
actor.connect(60)
for i in range(20):
    actor.insert(make_header(i), BLOCK, 60)
assert actor.flush(60)
reader, follower = ReplayClient(sys.argv[2], "reader", {TABLE: 4}), LogClient(sys.argv[2], "follower", {}, 1)
reader.sample(TABLE, 60)
while not reader.has_batch(TABLE):
    pass
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    actor.insert(make_header(20), BLOCK, 60)
    assert actor.flush(60) and len(reader.sample(TABLE, 60).keys) == 4
    sys.exit("the parent goes on")
for name, call in {
    "connect": lambda: actor.connect(5),
    "insert": lambda: actor.insert(make_header(20), BLOCK, 5),
    "poll": actor.poll,
    "has_batch": lambda: reader.has_batch(TABLE),
    "sample": lambda: reader.sample(TABLE, 5),
    "fetch": lambda: reader.fetch([1], 5),
    "update": lambda: reader.update_priorities(TABLE, np.arange(2), np.ones(2)),
    "statistics": lambda: reader.statistics(5),
    "follow": lambda: follower.poll(100),
}.items():
    try:
        call()
        print(name, "did not fail", flush=True)
    except ApexError as error:
        assert "make another client after the fork" in str(error), error
for client in (actor, reader, follower):
    client.close()  # the parent's stay open
own = ReplayClient(sys.argv[2], "own", {TABLE: 4})
own.sample(TABLE, 60)
own.close()
os._exit(0)
"""
"""A program whose child uses the clients of its parent, and then one of its own."""


def test_a_forked_child_cannot_use_the_clients_of_its_parent(server):
    command = [sys.executable, "-W", "ignore", "-c", FORKED, server.actor_endpoint, server.learner_endpoint]
    program = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (program.stdout, program.stderr.splitlines()[-1]) == ("", "the parent goes on"), program.stderr


def test_a_client_that_was_closed_says_so(server, spec):
    actor, reader = (
        InsertClient(server.actor_endpoint, "actor", spec, 1),
        ReplayClient(server.learner_endpoint, "r", {}),
    )
    for client in (actor, reader):
        client.close()
        client.close()
    for call in (lambda: actor.connect(10), actor.poll, lambda: reader.statistics(10), lambda: reader.fetch([1], 10)):
        with pytest.raises(ApexError, match="was closed: make another one"):
            call()


@pytest.mark.parametrize(
    ("client", "name", "sample"),
    [
        (RecordClient, "batches", "sample"),
        (ReplayClient, "unroll_batches", "sample_unrolls"),
        (ShardedReplayClient, "unroll_batches", "sample_unrolls"),
    ],
)
def test_batches_without_end_go_on_where_one_did_not_come_in_time(client, name, sample, monkeypatch):
    outcomes = iter([PeerTimeout("no batch"), "a batch"])

    def give(*_):
        if isinstance(outcome := next(outcomes), PeerTimeout):
            raise outcome
        return outcome

    monkeypatch.setattr(client, sample, give)
    batches = getattr(client.__new__(client), name)(TABLE, 1.0)
    with pytest.raises(PeerTimeout):
        next(batches)
    assert next(batches) == "a batch"
