"""The server's conversations with actors, message by message, without sockets."""

import random

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.net import wire
from apexrl.net.identity import marked
from apexrl.net.leases import Leases
from apexrl.net.protocols import PROTOCOL
from apexrl.net.service import PEER_TIMEOUT_SECONDS
from apexrl.types import StreamSpec
from tests.net.peers import TABLE, Peers, block_of, insert_of, name_of, only, routing_id_of


def test_an_actor_is_welcomed_and_its_inserts_acknowledged(peers):
    peers.hello(b"a", streams=3)
    assert peers.heard(b"a")[0] == wire.Welcome((0, 1, 2), 3, 0, 8, "")
    for sequence in range(5):
        peers.store(b"a", sequence)
    assert peers.heard(b"a") == [wire.Acknowledge(4, 12, 3, "")]  # half of the 8 that it may send
    assert peers.log.end_number == 5
    peers.say("actor", b"a", wire.Heartbeat())
    assert peers.heard(b"a") == [wire.Acknowledge(5, 13, 3, "")]


def test_a_resend_is_stored_once_and_acknowledged_again(peers):
    peers.hello(b"a")
    for sequence in (0, 1, 0, 1, 2):
        peers.insert(b"a", sequence)
    assert peers.acknowledged(b"a") == 3
    assert peers.log.end_number == 3
    assert peers.dropped["duplicate"] == 2
    peers.insert(b"a", 2)
    assert peers.heard(b"a") == [wire.Acknowledge(3, 9, 2, "")]


def test_a_gap_is_not_stored_but_asked_for(peers):
    peers.hello(b"a")
    peers.insert(b"a", 0)
    peers.insert(b"a", 2)
    assert wire.Stranger() in peers.heard(b"a")
    assert peers.log.end_number == 1
    peers.hello(b"a", first=1)
    assert peers.heard(b"a")[0].stored_sequence == 1


def test_a_late_resend_after_the_session_ended_is_not_stored_twice(peers):
    peers.hello(b"a")
    peers.store(b"a", 0)
    while peers.now <= PEER_TIMEOUT_SECONDS:
        assert peers.service.open_log.actors.sessions
        peers.now += 1
        peers.service.expire(peers.now)
    assert not peers.service.open_log.actors.sessions
    peers.insert(b"a", 0)
    assert wire.Stranger() in peers.heard(b"a")
    peers.hello(b"a", first=0)
    assert peers.heard(b"a")[0].stored_sequence == 1
    peers.store(b"a", 0)
    assert peers.log.end_number == 1


def test_an_insert_that_arrived_before_a_new_greeting_is_stored_once(peers):
    peers.hello(b"a")
    peers.insert(b"a", 0)
    peers.hello(b"a", first=0)  # came in one go: the first was not stored yet when the actor was welcomed
    peers.insert(b"a", 0)
    assert peers.acknowledged(b"a") == 1
    assert peers.log.end_number == 1


def test_a_server_without_journal_takes_up_where_the_actor_is(peers):
    peers.insert(b"a", 41)
    assert peers.heard(b"a") == [wire.Stranger()]
    peers.hello(b"a", first=41)
    peers.insert(b"a", 41)
    assert peers.acknowledged(b"a") == 42


@pytest.mark.parametrize("routing_id", [b"x" * 16, b"a", b"\0abcd"])
def test_a_name_is_welcome_only_from_the_connection_whose_mark_it_ends_in(peers, spec, routing_id):
    own = name_of(b"a")
    peers.service.receive("actor", routing_id, [wire.encode(wire.Hello(PROTOCOL, own, 2, spec, 0))], 0.0)
    (outgoing,) = peers.service.outbox.drain()
    assert isinstance(wire.decode_from_replay(outgoing.frames), wire.Refused)
    assert not peers.service.open_log.actors.sessions


def test_who_knows_a_live_name_can_neither_take_it_nor_number_its_inserts(spec, tmp_path):
    peers = Peers(spec, tmp_path)
    for life in range(2):
        peers.hello(b"victim", first=3 * life)
        for sequence in range(3 * life, 3 * life + 3):
            for thief in (b"thief", b"victim-", name_of(b"victim").encode()):
                hello = wire.Hello(PROTOCOL, name_of(b"victim"), 2, spec, 2**53)
                peers.say("actor", thief, hello)
                peers.say("actor", thief, insert_of(b"victim", 2**53), block_of(spec))
                peers.hello(thief, first=7)
                peers.say("actor", thief, insert_of(b"victim", 7), block_of(spec))
            peers.store(b"victim", sequence)
        assert peers.acknowledged(b"victim") == 3 * life + 3
        peers.restart()
    inserts = [wire.decode_insert(peers.log.get(number).message) for number in range(peers.log.end_number)]
    assert [(i.actor, i.sequence) for i in inserts] == [(name_of(b"victim"), n) for n in range(6)]


@pytest.mark.parametrize("leaves", [False, True])
def test_numbers_do_not_jump_within_a_life_of_the_server(peers, leaves):
    peers.hello(b"a", first=5)
    peers.store(b"a", 5)
    if leaves:
        peers.say("actor", b"a", wire.Goodbye())
    peers.heard(b"a")
    peers.hello(b"a", first=7)
    assert "only at 6" in only(peers.heard(b"a"), wire.Refused)[0].reason
    peers.hello(b"a", first=5)
    assert peers.heard(b"a")[0].stored_sequence == 6


def test_numbers_that_a_power_cut_took_may_be_left_out_once(spec, tmp_path):
    peers = Peers(spec, tmp_path)
    peers.hello(b"a")
    peers.store(b"a", 0)
    peers.restart()
    peers.hello(b"a", first=4)  # 1..3 were acknowledged, and lost with the end of the journal
    assert peers.heard(b"a")[0].stored_sequence == 4
    peers.hello(b"a", first=5)
    assert isinstance(peers.heard(b"a")[0], wire.Refused)


@pytest.mark.parametrize("streams", [2, 3])
def test_an_insert_that_came_just_before_a_goodbye_is_stored_once(peers, streams):
    peers.hello(b"a")
    peers.insert(b"a", 0)
    peers.say("actor", b"a", wire.Goodbye())
    peers.hello(b"a", streams=streams)
    peers.insert(b"a", 0)
    assert peers.acknowledged(b"a") == 1
    assert peers.log.end_number == 1


def test_one_connection_has_one_name_at_a_time(peers, spec):
    peers.hello(b"a")
    other = marked("other", routing_id_of(b"a"))
    peers.say("actor", b"a", wire.Hello(PROTOCOL, other, 2, spec, 0))
    assert [session.actor for session in peers.service.open_log.actors.sessions.values()] == [other]
    assert peers.service.open_log.actors.leases.ladder_size == 2


def test_what_is_remembered_is_bounded_and_the_newest_stay(peers, monkeypatch):
    monkeypatch.setattr("apexrl.net.actor_sessions.REMEMBERED_ACTORS", 3)
    for i in range(6):
        peers.hello(b"%d" % i)
        peers.store(b"%d" % i, 0)
        peers.say("actor", b"%d" % i, wire.Goodbye())
    for i in (5, 4, 3):
        peers.hello(b"%d" % i)
        assert only(peers.heard(b"%d" % i), wire.Welcome)[-1].stored_sequence == 1
    peers.hello(b"2")
    assert only(peers.heard(b"2"), wire.Welcome)[-1].stored_sequence == 0, "it is forgotten"


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
    assert peers.heard(b"a")[-1].ladder_size == 2  # told without being asked


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_leases_equal_a_slow_twin(operations):
    leases, held = Leases(20), []
    for takes, number in operations:
        taken = {slot for slots in held for slot in slots}
        if takes and number <= 20 - len(taken):
            held.append(leases.lease(number))
            assert held[-1] == tuple(sorted(set(range(20)) - taken)[:number])
        elif not takes and held:
            leases.give_back(held.pop(number % len(held)))
        taken = {slot for slots in held for slot in slots}
        assert leases.num_free == 20 - len(taken)
        assert leases.ladder_size == max(taken, default=-1) + 1


def test_a_server_that_stood_still_gives_nobody_up(peers):
    peers.hello(b"a")
    peers.now = 2 * PEER_TIMEOUT_SECONDS
    peers.service.expire(peers.now)
    assert peers.service.open_log.actors.sessions
    peers.now += 1
    peers.service.expire(peers.now)
    assert not peers.service.open_log.actors.sessions


def test_leases_never_overlap_while_actors_come_and_go(peers):
    rng = random.Random(0)
    peers.hello(b"actor0")
    for _ in range(500):
        peers.now += 1.0
        peer = b"actor%d" % rng.randrange(12)
        if rng.random() < 0.5:
            peers.hello(peer, streams=rng.randrange(1, 5))
        elif peer in peers.service.open_log.actors.sessions:
            peers.say("actor", peer, wire.Goodbye() if rng.random() < 0.5 else wire.Heartbeat())
        peers.service.expire(peers.now)
        slots = [slot for session in peers.service.open_log.actors.sessions.values() for slot in session.slots]
        assert len(slots) == len(set(slots))
        assert peers.service.statistics(peers.now)["slots"] == max(slots, default=-1) + 1


def test_actors_wait_for_the_learner_when_it_is_behind(spec):
    peers = Peers(spec, samples_per_insert=1.0)
    peers.hello(b"a", streams=1)
    sequence = allowed = 0
    for _ in range(100):
        told = only(peers.heard(b"a"), (wire.Acknowledge, wire.Welcome))
        if told:
            allowed = told[-1].allowed_sequence
        if sequence == allowed:
            break
        peers.insert(b"a", sequence)
        sequence += 1
    assert 0 < sequence < 20
    peers.say("actor", b"a", wire.Heartbeat())
    has_stalled = peers.service.advance().has_stalled
    assert peers.heard(b"a") == [wire.Acknowledge(sequence, allowed, 1, "learner")]
    assert not has_stalled, "it waits for the learner, and not for an acknowledgement"
    peers.subscribe(b"l", batch_size=8)
    peers.demand(b"l", 0, 100)
    assert only(peers.heard(b"l"), wire.Batch)
    assert peers.heard(b"a")[-1].allowed_sequence > allowed


def test_the_error_ends_at_the_slack_and_the_windows_of_all_actors(spec):
    peers = Peers(spec, samples_per_insert=4.0)
    names, allowed, sent = [b"%d" % i for i in range(12)], {}, dict.fromkeys([b"%d" % i for i in range(12)], 0)
    for i, name in enumerate(names):
        peers.hello(name, streams=1 + i % 3)
    for turn in range(200):  # nobody samples; all actors send what they may, by turns in another order
        for name in random.Random(turn).sample(names, len(names)):
            for told in only(peers.heard(name), (wire.Welcome, wire.Acknowledge)):
                allowed[name] = told.allowed_sequence
            if sent[name] < allowed[name]:
                peers.insert(name, sent[name])
                sent[name] += 1
    assert sent == allowed
    limiter = peers.service.open_log.replay.tables[TABLE].limiter
    windows = sum(session.window for session in peers.service.open_log.actors.sessions.values())
    assert windows == 12 * (2 * 2 + 2)
    width = 4.0 * 8 * windows
    assert limiter.slack + 0.5 * width < limiter.error <= limiter.slack + width


@pytest.mark.parametrize("change", [{"env": "Other-v0"}, {"variant": '{"resize": [84]}'}, {"overlap_steps": 5}])
def test_another_spec_is_refused(peers, spec, change):
    peers.hello(b"a")
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    peers.hello(b"b", spec=StreamSpec(**(fields | change)))
    refused = peers.heard(b"b")[0]
    assert isinstance(refused, wire.Refused) and "use the same --env" in refused.reason
    ((name, value),) = change.items()
    assert f"({name} is {fields[name] or 'none'}, not {value})" in refused.reason
    assert "--journal-dir" not in refused.reason  # there is none
    assert len(peers.service.open_log.actors.sessions) == 1 and peers.dropped["refused"] == 1


def test_an_unroll_larger_than_a_message_is_refused(peers):
    peers.hello(b"a", spec=StreamSpec("Huge-v0", (10**6,), "uint8", 4, 4, 1))
    assert "lower --unroll-starts" in peers.heard(b"a")[0].reason
    assert peers.service.open_log is None


def test_an_actor_with_no_or_too_many_environments_is_refused(peers):
    for streams in (0, 5000):
        peers.hello(b"a", streams=streams)
        assert isinstance(peers.heard(b"a")[0], wire.Refused)
    assert not peers.service.open_log.actors.sessions


@pytest.mark.parametrize("priorities", [[1] * 7, [np.nan] * 8, [np.inf] + [1] * 7, [-1] + [1] * 7])
def test_priorities_that_cannot_be_are_dropped_and_counted(peers, priorities):
    peers.hello(b"a")
    peers.store(b"a", 0, priorities)
    assert peers.dropped["malformed"] == 1
    assert peers.log.end_number == 0
    assert "insert 0" in only(peers.heard(b"a"), wire.Dropped)[0].reason


def test_an_unroll_that_cannot_be_stored_does_not_hold_up_those_around_it(peers):
    peers.hello(b"a", streams=5)
    for sequence, priorities in enumerate([None, [np.nan] * 8, [1] * 7, None]):
        peers.insert(b"a", sequence, priorities)
    assert peers.acknowledged(b"a") == 4
    assert [wire.decode_insert(peers.log.get(n).message).sequence for n in range(2)] == [0, 3]
    assert peers.log.end_number == 2


def malformed_blocks(spec):
    return {
        "no zstd": b"block",
        "empty": b"",
        "another size": zstandard.compress(bytes(spec.unroll_bytes + 1)),
        "size unknown": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(spec.unroll_bytes)),
        "too large": block_of(spec) + bytes(2 * spec.unroll_bytes + 2000),
    }


@pytest.mark.parametrize("kind", ["no zstd", "empty", "another size", "size unknown", "too large"])
def test_a_block_of_another_size_than_the_spec_says_is_dropped(peers, spec, kind):
    peers.hello(b"a")
    peers.say("actor", b"a", insert_of(b"a", 0), malformed_blocks(spec)[kind])
    peers.store(b"a", 1)
    assert peers.dropped["malformed"] == 1 and peers.log.end_number == 1


def test_inserts_of_another_actor_or_stream_are_dropped(peers, spec):
    peers.hello(b"a", streams=2)
    peers.say("actor", b"a", insert_of(b"b", 0), block_of(spec))
    peers.insert(b"a", 1, stream=2)
    peers.store(b"a", 2, stream=1)
    assert peers.dropped["malformed"] == 2 and peers.log.end_number == 1


def test_a_lost_permission_is_told_again_with_the_next_heartbeat(peers):
    peers.hello(b"a")
    peers.insert(b"a", 0)
    lost = peers.heard(b"a")[-1]
    assert peers.heard(b"a") == []
    peers.say("actor", b"a", wire.Heartbeat())
    assert peers.heard(b"a") == [lost]


def test_an_actor_that_stands_still_until_it_is_acknowledged_is_noticed(peers):
    peers.hello(b"a", streams=1)
    for sequence in range(3):
        peers.insert(b"a", sequence)
    assert not peers.service.advance().has_stalled
    assert peers.heard(b"a")[-1].allowed_sequence == 7
    for sequence in range(3, 7):
        peers.insert(b"a", sequence)
    assert peers.service.advance().has_stalled


def test_what_was_not_allowed_is_dropped(peers):
    peers.hello(b"a", streams=1)
    for sequence in range(10):
        peers.insert(b"a", sequence)
    peers.service.advance()
    assert peers.log.end_number == 4 and peers.dropped["not allowed"] == 1
    assert peers.dropped["gap"] == 5
