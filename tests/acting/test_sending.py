import collections
import threading

import numpy as np
import pytest

from apexrl.acting.player import Round
from apexrl.acting.sending import MAX_QUEUED, UnrollSender, patiently
from apexrl.errors import PeerError, PeerRefused, PeerTimeout
from apexrl.lifecycle import Stop
from apexrl.types import Episode, StreamUnrolls
from apexrl.unroll import UnrollCodec
from tests.system.processes import wait_for


class Client:
    """Takes inserts while its gate is open, like an InsertClient whose server may say wait."""

    def __init__(self):
        self.slots, self.ladder_size = (4, 5), 8
        self.waited_seconds = collections.defaultdict(float)
        self.bytes_sent = 0
        self.num_unacknowledged = 0
        self.away_seconds = 0.0
        self.num_waits = 0  # calls that end because their time is up
        self.gate = threading.Event()
        self.inserted = []
        self.error = None
        self.closed = False

    def poll(self):
        if self.error is not None:
            raise self.error

    def insert(self, header, block, timeout_seconds, stopped):
        if self.num_waits:
            self.num_waits -= 1
            raise PeerTimeout("the replay server lets us wait: it waits for learner")
        while not self.gate.wait(0.01):
            if stopped():
                self.gate.set()  # the server allows more a moment later
                return False
        self.inserted.append((header, block))
        self.bytes_sent += len(block)
        return True

    def flush(self, timeout_seconds):
        return True

    def close(self):
        self.closed = True


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def sending(client, spec):
    """A sender with its thread."""
    stop = Stop()
    sender = UnrollSender(client, UnrollCodec(spec), 5.0, stop)
    thread = stop.thread(sender.run, "sender")
    yield sender, stop, thread
    stop.set()
    thread.join(100)
    assert not thread.is_alive() and client.closed


def round_of(spec, make_unroll, number):
    unrolls = [make_unroll(spec, 2 * number + i) for i in range(2)]
    both = StreamUnrolls(*(np.stack(arrays, axis=1) for arrays in list(zip(*unrolls, strict=True))[:5]))
    priorities = np.full((spec.unroll_starts, 2), number, np.float32)
    valid = np.arange(spec.unroll_starts)[:, None] % 2 == [0, 1]
    episodes = [(Episode(1.0, 5, 0.1),), ()]
    first_step, exploration = number * spec.unroll_starts, np.array([0.1, 0.2])
    return Round(6, first_step, number, exploration, valid, priorities, episodes, both), unrolls


def test_every_stream_is_sent_in_order_with_its_own_header(client, sending, spec, make_unroll):
    sender, stop, thread = sending
    client.gate.set()
    rounds = [round_of(spec, make_unroll, number) for number in range(5)]
    for round_, _ in rounds:
        while not sender.offer(round_):
            pass
    stop.set()
    thread.join(100)
    assert len(client.inserted) == 10
    for i, (header, block) in enumerate(client.inserted):
        number, stream = divmod(i, 2)
        assert (header.stream, header.first_step) == (6 + stream, number * spec.unroll_starts)
        assert header.params_version == number and (header.priorities == number).all()
        assert header.exploration == pytest.approx((0.1, 0.2)[stream]) and len(header.episodes) == 1 - stream
        assert header.valid.tolist() == [k % 2 == stream for k in range(spec.unroll_starts)]
        decoded = UnrollCodec(spec).decode(block)
        for sent, expected in zip(decoded[:5], rounds[number][1][stream][:5], strict=True):
            assert np.array_equal(sent, expected)
    assert sender.bytes_sent == sum(len(block) for _, block in client.inserted)


def test_no_more_is_queued_than_the_bound_while_the_replay_takes_nothing(client, sending, spec, make_unroll):
    sender, *_ = sending
    unrolls, _ = round_of(spec, make_unroll, 0)
    assert sender.offer(unrolls)
    wait_for(sender._queue.empty, 100, "the first ones, which are being sent")
    taken = [sender.offer(unrolls) for _ in range(MAX_QUEUED + 3)]
    assert sum(taken) == MAX_QUEUED
    assert taken == sorted(taken, reverse=True)
    client.gate.set()
    while not sender.offer(unrolls):
        pass


def test_nothing_is_sent_behind_an_unroll_that_a_stopped_actor_could_not_send(client, sending, spec, make_unroll):
    sender, stop, thread = sending
    for number in range(2):
        while not sender.offer(round_of(spec, make_unroll, number)[0]):
            pass
    stop.set()
    thread.join(100)
    assert client.gate.is_set() and not client.inserted  # else a stream would have a gap


def test_a_replay_that_is_silent_for_too_long_ends_the_actor(client, sending):
    _, stop, thread = sending
    client.error = PeerError("the replay server is silent")
    thread.join(100)
    assert stop.is_set() and isinstance(stop.error, PeerError)


def test_an_actor_waits_for_a_learner_as_long_as_the_replay_tells_it_to(client, sending, spec, make_unroll):
    sender, stop, thread = sending
    client.num_waits = 1000  # far more seconds than the sender's patience with a server that is away
    client.gate.set()
    assert sender.offer(round_of(spec, make_unroll, 0)[0])
    stop.set()
    thread.join(100)
    assert (client.num_waits, len(client.inserted), stop.error) == (0, 2, None)


def test_an_actor_gives_up_a_replay_that_is_away_for_longer_than_its_patience(client, sending, spec, make_unroll):
    sender, stop, thread = sending
    client.num_waits, client.away_seconds = 2, 6.0
    assert sender.offer(round_of(spec, make_unroll, 0)[0])
    thread.join(100)
    assert isinstance(stop.error, PeerTimeout) and not client.inserted


def test_a_refusal_is_not_waited_for(client):
    def refuse(seconds):
        raise PeerRefused("this is the port for learners")

    with pytest.raises(PeerRefused):
        patiently(client, 600.0, refuse)


def test_an_actor_whose_last_inserts_were_refused_closes_its_connection(client, sending):
    _, stop, thread = sending

    def refuse(seconds):
        raise PeerRefused("the replay server dropped an insert of ours")

    client.flush = refuse
    stop.set()
    thread.join(100)
    assert client.closed and stop.error is None
