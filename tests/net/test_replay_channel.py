"""The replay server and its clients over real sockets, in one process."""

import os
import socket
import threading
import time

import msgspec
import numpy as np
import pytest
import zmq

from apexrl.config.sections import ReplayConfig
from apexrl.errors import ConfigError, PeerRefused, PeerTimeout
from apexrl.net import wire
from apexrl.net.insert_client import InsertClient
from apexrl.net.log_client import LogAppend, LogBatch, LogClient, LogStart
from apexrl.net.replay_client import ReplayClient
from apexrl.net.replay_server import ReplayServer
from apexrl.net.sockets import make_socket
from apexrl.replay.journal import SNAPSHOT_FILE
from apexrl.replay.snapshot import load_snapshot, write_snapshot
from apexrl.unroll import UnrollCodec
from tests.net.peers import TABLE, block_of, insert_of
from tests.system.processes import ROOT, wait_for
from tests.system.raw_actor import RawActor


def follow(client, until):
    """Takes events until the condition holds, which sees those of each kind."""
    starts, appends, batches = [], [], []
    kinds = {LogStart: starts, LogAppend: appends, LogBatch: batches}
    deadline = time.monotonic() + 200
    while not until(starts, appends, batches):
        assert time.monotonic() < deadline, (starts, appends, batches)
        event = client.poll(100)
        if event is not None:
            kinds[type(event)].append(event)
        if isinstance(event, LogBatch):
            client.update_priorities(event.sample.keys, np.full(len(event.sample.keys), 2.0), event.table)
            client.batch_used(event.table)
    return starts, appends, batches


def test_inserts_reach_the_learner_in_order_and_priorities_the_server(server, spec, header):
    actor = InsertClient(server.actor_endpoint, "actor", spec, 2)
    actor.connect(10)
    learner = LogClient(server.learner_endpoint, "learner", {TABLE: 4}, 2)
    sent = [block_of(spec, i) for i in range(30)]
    for i, block in enumerate(sent):
        actor.insert(header(8 * i), block, 10)
    assert actor.flush(10) and actor.num_unacknowledged == 0
    starts, appends, batches = follow(learner, lambda _, appends, batches: len(appends) >= 30 and len(batches) >= 50)
    assert [start.spec for start in starts] == [spec] and not starts[0].continues
    assert [append.number for append in appends] == list(range(30))
    assert [bytes(append.block) for append in appends] == sent
    assert all(batch.table == TABLE and len(batch.sample.keys) == 4 for batch in batches)
    wait_for(lambda: server.service.statistics(0)[f"table/{TABLE}/priority_quantile_90"] > 1.5, 10, "new priorities")
    actor.close()
    learner.close()


def test_malformed_messages_are_dropped_and_counted_and_the_server_lives(server, spec, header):
    actor = InsertClient(server.actor_endpoint, "actor", spec, 1)
    actor.connect(10)
    stranger = make_socket(zmq.Context.instance(), zmq.DEALER)
    stranger.connect(server.actor_endpoint)
    for _ in range(200):
        stranger.send_multipart([os.urandom(20)])
        stranger.send_multipart([wire.encode(wire.Heartbeat()), b"one frame too many"])
    wait_for(lambda: server.service.outbox.dropped["malformed"] >= 390, 10, "drops")
    actor.insert(header(), block_of(spec), 10)
    assert actor.flush(10)
    stranger.close()
    actor.close()


def test_who_sent_something_malformed_is_told(server, spec, header):
    actor = RawActor(server.actor_endpoint, "actor", spec, 1)
    actor.insert(header(), b"no block", 10)
    actor.insert(header(8), block_of(spec), 10)
    assert actor.flush(10) and actor.num_dropped == 1
    assert server.service.open_log.replay.log.end_number == 1
    actor.close()


def test_a_refused_actor_is_told_why(server, spec):
    actor = InsertClient(server.actor_endpoint, "first", spec, 1)
    actor.connect(10)
    other = InsertClient(server.actor_endpoint, "other", msgspec.structs.replace(spec, overlap_steps=5), 1)
    with pytest.raises(PeerRefused, match="use the same --env"):
        other.connect(10)
    actor.close()
    other.close()


def test_a_learner_that_wants_an_unknown_table_is_told(server, spec):
    actor = InsertClient(server.actor_endpoint, "actor", spec, 1)
    actor.connect(10)
    learner = LogClient(server.learner_endpoint, "learner", {"other": 4}, 2)
    with pytest.raises(PeerRefused, match="no table other"):
        follow(learner, lambda *_: False)
    actor.close()
    learner.close()


def test_an_actor_gives_up_on_a_server_that_is_not_there(spec, free_ports):
    actor = InsertClient(f"tcp://127.0.0.1:{free_ports(1)[0]}", "actor", spec, 1)
    with pytest.raises(PeerTimeout, match="is it running"):
        actor.connect(0.5)
    assert actor.waited_seconds["replay_connection"] > 0.3
    actor.close()


def test_an_insert_waits_no_longer_than_its_caller_says_and_names_for_whom(start_server, spec, header):
    with start_server(tables=(f"{TABLE}=priority:1:1",)) as server:
        actor, enough = InsertClient(server.actor_endpoint, "actor", spec, 1), time.monotonic() + 100
        actor.connect(10)
        num_sent, reason = 0, ""
        while "it waits for learner" not in reason:
            try:
                assert actor.insert(header(8 * num_sent), block_of(spec), 1.5, lambda: time.monotonic() > enough)
                num_sent += 1
            except PeerTimeout as error:
                reason = str(error)
        assert actor.waited_seconds["learner"] > 1
        assert actor.flush(10) and server.service.open_log.replay.log.end_number == num_sent
        reader = ReplayClient(server.learner_endpoint, "reader", {TABLE: 8}, 1)
        for _ in range(num_sent):
            reader.sample(TABLE, 10)
        assert actor.insert(header(8 * num_sent), block_of(spec), 100)  # nothing is lost but time
        assert actor.flush(10) and server.service.open_log.replay.log.end_number == num_sent + 1
        actor.close()
        reader.close()


@pytest.mark.parametrize("taken", [0, 1])
def test_a_server_that_cannot_listen_gives_everything_back(free_ports, tmp_path, taken):
    ports = free_ports(2)
    with socket.create_server(("127.0.0.1", ports[taken])), pytest.raises(ConfigError, match=str(ports[taken])):
        ReplayServer(ReplayConfig(tables=(f"{TABLE}=priority",)), "127.0.0.1", *ports, 0, tmp_path)
    ReplayServer(ReplayConfig(tables=(f"{TABLE}=priority",)), "127.0.0.1", *ports, 0, tmp_path).close()


class ByHand:
    """A learner whose server is the test."""

    def __init__(self, spec):
        self.spec = spec
        self.socket = make_socket(zmq.Context.instance(), zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.learner = LogClient(f"tcp://127.0.0.1:{port}", "learner", {TABLE: 4}, 2)
        self.requests = []

    def has_asked(self, times):
        """Whether so many subscriptions have come."""
        self.learner.poll(10)
        while self.socket.poll(0):
            message = wire.decode_to_replay(self.socket.recv_multipart()[1:])
            self.requests.extend([message] * isinstance(message, wire.Subscribe))
        return len(self.requests) >= times

    def answer(self, message, *attachments):
        self.socket.send_multipart([self.learner.connection.routing_id, wire.encode(message), *attachments])
        return self.learner.poll(2000)

    def subscribed(self, request):
        return self.answer(wire.Subscribed(request, "log", 0, False, self.spec, 10, 0, (0,), ("transitions",)))

    def append(self, number):
        return self.answer(wire.Append(number), wire.encode(insert_of(b"actor", number)), b"block")

    def batch(self, index, next_number):
        arrays = np.zeros(4, np.int64), np.ones(4, np.float32)
        return self.answer(wire.Batch(0, index, next_number, *(array.tobytes() for array in arrays), 1.0))


@pytest.fixture
def by_hand(spec):
    by_hand = ByHand(spec)
    yield by_hand
    by_hand.learner.close()
    by_hand.socket.close()


def test_a_learner_takes_only_the_answer_to_its_last_subscription(by_hand, spec):
    wait_for(lambda: by_hand.has_asked(2), 20, "two subscriptions")
    first, last = by_hand.requests[0].request, by_hand.requests[-1].request
    assert last > first
    assert by_hand.subscribed(first) is None
    assert by_hand.append(0) is None
    assert by_hand.subscribed(last) == LogStart("log", spec, 10, 0, False, {TABLE: "transitions"})
    assert by_hand.append(0).number == 0


@pytest.mark.parametrize("lost", ["an unroll", "a batch", "an unroll before a batch"])
def test_a_learner_that_lost_something_asks_again_from_there(by_hand, lost):
    wait_for(lambda: by_hand.has_asked(1), 20, "a subscription")
    by_hand.subscribed(by_hand.requests[-1].request)
    assert by_hand.append(0).number == 0 and by_hand.batch(0, 1).table == TABLE
    num_asked = len(by_hand.requests)
    arrives = {
        "an unroll": lambda: by_hand.append(2),
        "a batch": lambda: by_hand.batch(2, 1),
        "an unroll before a batch": lambda: by_hand.batch(1, 2),
    }[lost]
    assert arrives() is None
    wait_for(lambda: by_hand.has_asked(num_asked + 1), 20, "another subscription")
    again = by_hand.requests[-1]
    assert (again.log, again.next_number) == ("log", 1)


def test_a_snapshot_that_is_late_does_not_replace_the_last_one(
    start_server, free_ports, spec, header, tmp_path, monkeypatch
):
    ports, begun, ending = free_ports(2), threading.Event(), threading.Event()

    def write(path, snapshot):
        if not begun.is_set():  # the first one, in the second thread
            begun.set()
            ending.wait(100)
            time.sleep(0.5)  # the server ends meanwhile
        write_snapshot(path, snapshot)

    monkeypatch.setattr("apexrl.net.replay_server.write_snapshot", write)
    with start_server(*ports, tmp_path, journal_snapshot_seconds=0.1):
        actor = InsertClient(f"tcp://127.0.0.1:{ports[0]}", "actor", spec, 2)
        actor.connect(10)
        actor.insert(header(0), block_of(spec, 0), 10)
        assert begun.wait(100)
        for i in range(1, 10):
            actor.insert(header(8 * i), block_of(spec, i), 10)
        assert actor.flush(10)
        ending.set()
    assert load_snapshot(tmp_path / SNAPSHOT_FILE).end_number == 10
    actor.close()


def test_a_restarted_server_is_followed_without_a_loss(start_server, free_ports, spec, header, tmp_path):
    ports = free_ports(2)
    actor = InsertClient(f"tcp://127.0.0.1:{ports[0]}", "actor", spec, 2)
    learner = LogClient(f"tcp://127.0.0.1:{ports[1]}", "learner", {TABLE: 4}, 2)
    numbers, continued = [], []
    for life in range(3):
        with start_server(*ports, tmp_path):
            actor.connect(10)
            for i in range(10 * life, 10 * life + 10):
                actor.insert(header(8 * i), block_of(spec, i), 10)
            assert actor.flush(10)
            starts, appends, _ = follow(learner, lambda starts, appends, _: len(appends) == 10)
            numbers += [(append.number, append.insert.sequence) for append in appends]
            continued += [start.continues for start in starts]
    assert numbers == [(i, i) for i in range(30)]
    assert continued == [False, True, True]
    actor.close()
    learner.close()


def test_who_holds_no_replica_samples_fetches_and_sets_priorities(start_server, spec, header, make_unroll):
    tables = ("transitions=priority", "queue=fifo:0:1")
    codec, unrolls = UnrollCodec(spec), [make_unroll(spec, seed) for seed in range(8)]
    with start_server(tables=tables) as server:
        actor = InsertClient(server.actor_endpoint, "actor", spec, 4)
        actor.connect(10)
        for i, unroll in enumerate(unrolls):
            actor.insert(header(8 * i), codec.encode(unroll), 10)
        assert actor.flush(10)
        reader = ReplayClient(server.learner_endpoint, "reader", {"transitions": 16, "queue": 3}, 1)
        assert [reader.sample("queue", 10).keys.tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
        assert set((reader.sample("transitions", 10).keys // 8).tolist()) <= set(range(8))
        found = reader.fetch([5, 2, 99], 10)
        assert sorted(found) == [2, 5] and found[5].header.first_step == 40
        assert all((a == b).all() for a, b in zip(found[2].unroll[:5], unrolls[2][:5], strict=True))
        reader.update_priorities("transitions", np.arange(64), np.where(np.arange(64) == 9, 5.0, 0.0))
        # Batches drawn before come first: one that waits here, and one on the way.
        wait_for(lambda: set(reader.sample("transitions", 10).keys) == {9}, 10, "batches of the new priorities")
        metrics = reader.statistics(10)
        assert metrics.metrics["size"] == 64
        assert {(peer.role, peer.name) for peer in metrics.peers} == {("actor", actor.actor), ("learner", "reader")}
        with pytest.raises(PeerTimeout, match="it waits for actors"):
            reader.sample("queue", 3.0)
        actor.close()
        reader.close()


def test_a_batch_of_another_size_is_dropped_and_another_one_demanded(by_hand):
    wait_for(lambda: by_hand.has_asked(1), 10, "the subscription")
    by_hand.subscribed(1)
    for index, size in enumerate((3, 5, 0)):
        arrays = np.zeros(size, np.int64), np.ones(size, np.float32)
        assert by_hand.answer(wire.Batch(0, index, 0, *(array.tobytes() for array in arrays), 1.0)) is None
    assert isinstance(by_hand.batch(3, 0), LogBatch)


def test_the_selection_of_the_documentation_keeps_the_smallest_distances(start_server, spec, header, make_unroll):
    code = (ROOT / "docs" / "selection.md").read_text().partition("```python\n")[2].partition("```")[0]
    learned, codec = [], UnrollCodec(spec)

    def learn_from(unrolls):
        """Takes the first number of an unroll for its distance."""
        learned.append([float(unroll.rewards[0]) for unroll in unrolls])
        return np.array(learned[-1], np.float32)

    with start_server(tables=("old=uniform:0:128",)) as server:
        actor = InsertClient(server.actor_endpoint, "actor", spec, 4)
        actor.connect(10)
        distances = np.random.default_rng(0).permutation(160).astype(np.float32)
        for i, distance in enumerate(distances):
            rewards = np.full(spec.unroll_steps, distance, np.float32)
            actor.insert(header(8 * i), codec.encode(make_unroll(spec, i)._replace(rewards=rewards)), 10)
        assert actor.flush(10)
        exec(code, {"endpoint": server.learner_endpoint, "num_updates": 30, "learn_from": learn_from})
        actor.close()
    assert all(len(set(batch)) == 32 for batch in learned)
    # Each unroll is used once, unknown ones first; from then on those that are known to be near.
    assert {number for batch in learned for number in batch} == set(range(160))
    assert max(learned[-1]) < 60 < max(learned[0])
