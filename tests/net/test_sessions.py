"""The server's conversations, message by message, without sockets."""

import random

import numpy as np
import pytest

from apexrl.config import ReplayConfig
from apexrl.net import wire
from apexrl.net.sessions import MAX_BATCHES_AHEAD, MAX_UNAPPLIED_UNROLLS, PEER_TIMEOUT_SECONDS, ReplayService
from apexrl.types import StreamSpec


class Peers:
    """Feeds a service and keeps what it answers, by peer."""

    def __init__(self, spec, **changes):
        numbers = {"capacity": 8000, "min_size_to_sample": 16, "samples_per_insert": 0.0}
        self.spec = spec
        self.service = ReplayService(ReplayConfig(**(numbers | changes)), "server", seed=0)
        self.now = 0.0

    def say(self, role, peer, message, *attachments):
        self.raw(role, peer, [wire.encode(message), *attachments])

    def raw(self, role, peer, frames):
        self.service.receive(role, peer, frames, self.now)

    def hello(self, peer, streams=2, first=0, spec=None):
        self.say("actor", peer, wire.Hello(wire.PROTOCOL, peer.decode(), streams, spec or self.spec, first))

    def insert(self, peer, sequence, priorities=None, stream=0):
        priorities = np.ones(8) if priorities is None else priorities
        message = wire.Insert(
            sequence, peer.decode(), stream, 8 * sequence, 0, 0.1, np.asarray(priorities, np.float32).tobytes()
        )
        self.say("actor", peer, message, b"block%d" % sequence)

    def subscribe(self, peer, server="", number=0, batch_size=4):
        self.say("learner", peer, wire.Subscribe(wire.PROTOCOL, peer.decode(), 1, server, number, batch_size))

    def heard(self, peer):
        self.service.advance()
        found = [wire.decode_from_replay(o.frames) for o in self.service.outbox if o.peer == peer]
        self.service.outbox = [o for o in self.service.outbox if o.peer != peer]
        return found


@pytest.fixture
def peers(spec):
    return Peers(spec)


def only(messages, kind):
    return [message for message in messages if isinstance(message, kind)]


def test_an_actor_is_welcomed_and_its_inserts_acknowledged(peers):
    peers.hello(b"a", streams=3)
    assert peers.heard(b"a") == [wire.Welcome("server", (0, 1, 2), 3, 0, 8)]
    peers.insert(b"a", 0)
    peers.insert(b"a", 1)
    assert peers.heard(b"a") == [wire.Acknowledge(2, 10, 3, "")]
    assert peers.service.replay.log.end_number == 2


def test_a_resend_is_stored_once_and_acknowledged_again(peers):
    peers.hello(b"a")
    for sequence in (0, 1, 0, 1, 2):
        peers.insert(b"a", sequence)
    assert peers.service.replay.log.end_number == 3
    assert peers.service.dropped["duplicate"] == 2
    assert peers.heard(b"a")[-1].stored_sequence == 3
    peers.insert(b"a", 2)
    assert peers.heard(b"a") == [wire.Acknowledge(3, 9, 2, "")]


def test_a_gap_is_not_stored_but_asked_for(peers):
    peers.hello(b"a")
    peers.insert(b"a", 0)
    peers.insert(b"a", 2)
    assert wire.Stranger() in peers.heard(b"a")
    assert peers.service.replay.log.end_number == 1
    peers.hello(b"a", first=1)
    assert peers.heard(b"a")[0].stored_sequence == 1


def test_a_late_resend_after_the_session_ended_is_not_stored_twice(peers):
    peers.hello(b"a")
    peers.insert(b"a", 0)
    peers.now = PEER_TIMEOUT_SECONDS + 1
    peers.service.expire(peers.now)
    assert not peers.service.actors
    peers.insert(b"a", 0)
    assert wire.Stranger() in peers.heard(b"a")
    peers.hello(b"a", first=0)
    assert peers.heard(b"a")[-1].stored_sequence == 1
    peers.insert(b"a", 0)
    assert peers.service.replay.log.end_number == 1


def test_a_restarted_server_takes_up_where_the_actor_is(spec):
    peers = Peers(spec)
    peers.insert(b"a", 41)
    assert peers.heard(b"a") == [wire.Stranger()]
    peers.hello(b"a", first=41)
    peers.insert(b"a", 41)
    assert peers.heard(b"a")[-1].stored_sequence == 42


def test_slots_are_dense_and_reused(peers):
    for peer in (b"a", b"b", b"c"):
        peers.hello(peer, streams=2)
    assert peers.heard(b"c")[0].slots == (4, 5)
    peers.say("actor", b"b", wire.Goodbye())
    peers.hello(b"d", streams=3)
    welcome = peers.heard(b"d")[0]
    assert (welcome.slots, welcome.ladder_size) == ((2, 3, 6), 7)
    peers.say("actor", b"d", wire.Goodbye())
    peers.say("actor", b"c", wire.Goodbye())
    peers.say("actor", b"a", wire.Heartbeat())
    assert peers.heard(b"a")[-1].ladder_size == 2


def test_leases_never_overlap_while_actors_come_and_go(peers):
    rng = random.Random(0)
    for step in range(500):
        peers.now += 1.0
        peer = b"actor%d" % rng.randrange(12)
        if rng.random() < 0.5:
            peers.hello(peer, streams=rng.randrange(1, 5))
        elif peer in peers.service.actors:
            peers.say("actor", peer, wire.Goodbye() if rng.random() < 0.5 else wire.Heartbeat())
        if step % 10 == 0:
            peers.service.expire(peers.now)
        slots = [slot for session in peers.service.actors.values() for slot in session.slots]
        assert len(slots) == len(set(slots))
        assert peers.service.statistics(peers.now)["slots"] == max(slots, default=-1) + 1


def test_actors_wait_for_the_learner_when_it_is_behind(spec):
    peers = Peers(spec, samples_per_insert=1.0)
    peers.hello(b"a", streams=1)
    sequence = 0
    for _ in range(100):
        told = only(peers.heard(b"a"), (wire.Acknowledge, wire.Welcome))
        if told:
            allowed = told[-1].allowed_sequence
        if sequence == allowed:
            break
        peers.insert(b"a", sequence)
        sequence += 1
    assert sequence < 20
    peers.say("actor", b"a", wire.Heartbeat())
    assert peers.heard(b"a") == [wire.Acknowledge(sequence, allowed, 1, "learner")]
    peers.subscribe(b"l", batch_size=8)
    peers.say("learner", b"l", wire.Demand(0, 100))
    peers.say("learner", b"l", wire.Demand(sequence, 100))
    assert only(peers.heard(b"l"), wire.Batch)
    assert peers.heard(b"a")[-1].allowed_sequence > allowed


def test_a_learner_gets_every_unroll_in_order_before_the_batches_that_name_it(peers):
    peers.hello(b"a")
    peers.subscribe(b"l")
    held, numbers = set(), []
    for sequence in range(40):
        peers.insert(b"a", sequence)
        peers.say("learner", b"l", wire.Demand(len(numbers), 2 * sequence))
        for message in peers.heard(b"l"):
            if isinstance(message, wire.Append):
                numbers.append(message.number)
                held.add(message.number)
            elif isinstance(message, wire.Batch):
                assert set((message.sample().keys // 8).tolist()) <= held
    assert numbers == list(range(40))


def test_a_slow_learner_is_sent_only_so_much(peers):
    peers.hello(b"a", streams=300)
    peers.subscribe(b"l")
    peers.say("learner", b"l", wire.Demand(0, 3))
    for sequence in range(MAX_UNAPPLIED_UNROLLS + 50):
        peers.insert(b"a", sequence)
    messages = peers.heard(b"l")
    assert len(only(messages, wire.Append)) == MAX_UNAPPLIED_UNROLLS
    assert not only(messages, wire.Batch)
    peers.say("learner", b"l", wire.Demand(MAX_UNAPPLIED_UNROLLS, 3))
    messages = peers.heard(b"l")
    assert len(only(messages, wire.Append)) == 50
    assert len(only(messages, wire.Batch)) == 3


def test_a_learner_that_comes_back_asks_for_what_it_lacks(peers):
    peers.hello(b"a", streams=8)
    for sequence in range(10):
        peers.insert(b"a", sequence)
    peers.subscribe(b"l", "server", 7)
    assert [m.number for m in only(peers.heard(b"l"), wire.Append)] == [7, 8, 9]
    peers.subscribe(b"l", "another life of the server", 7)
    messages = peers.heard(b"l")
    assert messages[0].next_number == 0 and len(only(messages, wire.Append)) == 10


def test_what_was_evicted_before_it_was_sent_is_skipped_aloud(spec):
    peers = Peers(spec, capacity=80)
    peers.hello(b"a", streams=50)
    peers.subscribe(b"l")
    peers.heard(b"l")
    for sequence in range(100):  # the service is not given the time to send
        peers.insert(b"a", sequence)
    messages = peers.heard(b"l")
    first = peers.service.replay.log.first_number
    assert first > 50
    assert only(messages, wire.Subscribed)[0].next_number == first
    assert [m.number for m in only(messages, wire.Append)] == list(range(first, 100))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"env": "Other-v0"}, "use the same --env"),
        ({"n_steps": 5}, "use the same --env"),
    ],
)
def test_another_spec_is_refused(peers, spec, change, complaint):
    peers.hello(b"a")
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    peers.hello(b"b", spec=StreamSpec(**(fields | change)))
    refused = peers.heard(b"b")[0]
    assert isinstance(refused, wire.Refused) and complaint in refused.reason
    assert len(peers.service.actors) == 1


def test_an_unroll_larger_than_a_message_is_refused(peers):
    peers.hello(b"a", spec=StreamSpec("Huge-v0", (10**6,), "uint8", 4, 4, 1))
    assert "lower --unroll-starts" in peers.heard(b"a")[0].reason
    assert peers.service.replay is None


def test_another_protocol_is_refused(peers, spec):
    peers.say("actor", b"a", wire.Hello(99, "a", 1, spec, 0))
    assert "protocol" in peers.heard(b"a")[0].reason


@pytest.mark.parametrize("priorities", [[1] * 7, [np.nan] * 8, [np.inf] + [1] * 7, [-1] + [1] * 7])
def test_priorities_that_cannot_be_are_dropped_and_counted(peers, priorities):
    peers.hello(b"a")
    peers.insert(b"a", 0, priorities)
    assert peers.service.dropped["malformed"] == 1
    assert peers.service.replay.log.end_number == 0


def test_an_unroll_that_cannot_be_stored_does_not_hold_up_those_behind_it(peers):
    peers.hello(b"a")
    peers.insert(b"a", 0, [np.nan] * 8)
    peers.insert(b"a", 1)
    assert peers.heard(b"a")[-1].stored_sequence == 2
    assert peers.service.replay.log.end_number == 1


def test_a_lost_permission_is_told_again_with_the_next_heartbeat(peers):
    peers.hello(b"a")
    peers.insert(b"a", 0)
    lost = peers.heard(b"a")[-1]
    assert peers.heard(b"a") == []
    peers.say("actor", b"a", wire.Heartbeat())
    assert peers.heard(b"a") == [lost]


def test_what_was_not_allowed_is_dropped(peers):
    peers.hello(b"a", streams=1)
    for sequence in range(10):
        peers.insert(b"a", sequence)
    assert peers.service.replay.log.end_number == 4 and peers.service.dropped["not allowed"] == 1
    assert peers.service.dropped["gap"] == 5


def test_a_block_larger_than_its_unroll_is_dropped(peers, spec):
    peers.hello(b"a")
    message = wire.Insert(0, "a", 0, 0, 0, 0.1, np.ones(8, np.float32).tobytes())
    peers.say("actor", b"a", message, bytes(2 * spec.unroll_bytes + 2000))
    assert peers.service.dropped["malformed"] == 1 and peers.service.replay.log.end_number == 0


def test_a_learner_is_told_where_it_stands(peers):
    peers.hello(b"a")
    for sequence in range(3):
        peers.insert(b"a", sequence)
    peers.subscribe(b"l")
    peers.say("learner", b"l", wire.Demand(0, 2**62))
    assert len(only(peers.heard(b"l"), wire.Batch)) == MAX_BATCHES_AHEAD
    peers.say("learner", b"l", wire.Heartbeat())
    assert peers.heard(b"l") == [wire.Standing(3, MAX_BATCHES_AHEAD, "")]


def test_a_learners_nonsense_is_dropped_and_counted(peers):
    peers.hello(b"a")
    peers.insert(b"a", 0)
    peers.subscribe(b"l")
    for keys, priorities in ((b"\0" * 8, b"\0" * 8), (b"\0" * 7, b"\0" * 4), (b"\0" * 8, b"\xff" * 4)):
        peers.say("learner", b"l", wire.UpdatePriorities(keys, priorities))
    peers.say("learner", b"l", wire.Insert(1, "l", 0, 0, 0, 0.1, b""), b"block")
    assert peers.service.dropped == {"malformed": 3, "misplaced": 1}


def test_a_stale_key_is_ignored_and_counted(spec):
    peers = Peers(spec, capacity=80)
    peers.hello(b"a", streams=20)
    for sequence in range(40):
        peers.insert(b"a", sequence)
    peers.subscribe(b"l")
    keys = np.array([0, 8 * 39])
    peers.say("learner", b"l", wire.UpdatePriorities(keys.tobytes(), np.ones(2, np.float32).tobytes()))
    assert peers.service.statistics(0.0)["stale_priorities"] == 1


def test_garbage_from_strangers_and_friends_does_no_harm(peers):
    rng = random.Random(0)
    peers.hello(b"a")
    peers.insert(b"a", 0)
    peers.subscribe(b"l")
    valid = [wire.encode(wire.Demand(0, 3)), wire.encode(wire.Heartbeat())]
    for _ in range(3000):
        data = bytearray(rng.choice([*valid, rng.randbytes(rng.randrange(60))]))
        if data and rng.random() < 0.7:
            data[rng.randrange(len(data))] = rng.randrange(256)
        frames = [bytes(data)] + [rng.randbytes(5)] * rng.randrange(3)
        peers.raw(rng.choice(["actor", "learner"]), rng.choice([b"a", b"l", b"x"]), frames)
        peers.heard(b"a"), peers.heard(b"l"), peers.heard(b"x")
    assert sum(peers.service.dropped.values()) > 1000
    if b"a" not in peers.service.actors:
        peers.hello(b"a", first=1)
    peers.insert(b"a", 1)
    assert peers.service.replay.log.end_number == 2
