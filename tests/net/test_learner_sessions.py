"""The server's conversations with learners and other readers, message by message, without sockets."""

import numpy as np
import pytest

from apexrl.net import wire
from apexrl.net.learner_sessions import MAX_LEARNERS, MAX_UNAPPLIED_UNROLLS
from apexrl.net.protocols import PROTOCOL
from tests.net.peers import TABLE, Peers, block_of, insert_of, only
from tests.replay.records import powers_of


def test_a_learner_gets_every_unroll_in_order_before_the_batches_that_name_it(peers):
    peers.hello(b"a")
    peers.subscribe(b"l")
    held, numbers = set(), []
    for sequence in range(40):
        peers.insert(b"a", sequence)
        peers.demand(b"l", len(numbers), 2 * sequence)
        for message in peers.heard(b"l"):
            if isinstance(message, wire.Append):
                numbers.append(message.number)
                held.add(message.number)
            elif isinstance(message, wire.Batch):
                assert set((message.sample().keys // 8).tolist()) <= held
    assert numbers == list(range(40))


def test_an_unroll_reaches_the_learner_as_the_actor_sent_it(peers, spec):
    peers.hello(b"a")
    peers.subscribe(b"l")
    peers.insert(b"a", 0)
    append = next(f for f in peers.frames(b"l") if isinstance(wire.decode_from_replay(f), wire.Append))
    assert append[1:] == (wire.encode(insert_of(b"a", 0)), block_of(spec, 0))


def test_a_learner_that_comes_before_the_actors_waits_for_them(peers):
    peers.subscribe(b"l", ring=10)
    assert peers.heard(b"l") == [wire.Waiting(0, "actors")]


def test_a_learner_that_finds_no_place_waits_for_one(peers):
    """A refusal is final, and would end a run whose learner starts again."""
    peers.hello(b"a")
    for number in range(MAX_LEARNERS):
        peers.subscribe(b"reader %d" % number)
    peers.subscribe(b"l")
    (dropped,) = peers.heard(b"l")
    assert (
        isinstance(dropped, wire.Dropped)
        and dropped.reason == f"crowded: {MAX_LEARNERS} learners are connected already"
    )
    peers.say("learner", b"reader 0", wire.Goodbye())
    peers.subscribe(b"l")
    assert only(peers.heard(b"l"), wire.Subscribed)


def test_a_slow_learner_is_sent_only_so_much(peers):
    peers.hello(b"a", streams=300)
    peers.subscribe(b"l")
    peers.demand(b"l", 0, 3)
    for sequence in range(MAX_UNAPPLIED_UNROLLS + 50):
        peers.insert(b"a", sequence)
    messages = peers.heard(b"l")
    assert len(only(messages, wire.Append)) == MAX_UNAPPLIED_UNROLLS
    assert not only(messages, wire.Batch)
    peers.demand(b"l", MAX_UNAPPLIED_UNROLLS, 3)
    messages = peers.heard(b"l")
    assert len(only(messages, wire.Append)) == 50
    assert len(only(messages, wire.Batch)) == 3


def test_a_slow_learner_holds_up_neither_the_actors_nor_another_learner(peers):
    peers.hello(b"a", streams=300)
    for learner in (b"slow", b"fast"):
        peers.subscribe(learner)
        peers.demand(learner, 0, 1000)
    numbers, batches = [], 0
    for sequence in range(MAX_UNAPPLIED_UNROLLS + 200):
        peers.store(b"a", sequence)
        messages = peers.heard(b"fast")
        numbers += [message.number for message in only(messages, wire.Append)]
        batches += len(only(messages, wire.Batch))
        peers.demand(b"fast", len(numbers), 1000)
    assert numbers == list(range(MAX_UNAPPLIED_UNROLLS + 200))
    assert batches > 200
    assert peers.acknowledged(b"a") == MAX_UNAPPLIED_UNROLLS + 200
    assert len(only(peers.heard(b"slow"), wire.Append)) == MAX_UNAPPLIED_UNROLLS


def test_two_learners_get_batches_in_turn(spec):
    peers = Peers(spec, samples_per_insert=1.0, min_size_to_sample=8)
    peers.hello(b"a")
    for learner in (b"one", b"two"):
        peers.subscribe(learner)
    counts = {b"one": 0, b"two": 0}
    for sequence in range(100):
        peers.store(b"a", sequence)
        for learner in counts:
            counts[learner] += len(only(peers.heard(learner), wire.Batch))
            peers.demand(learner, sequence + 1, 1000)
    assert sum(counts.values()) > 180  # 100 unrolls of 8, a sample each, batches of 4
    assert abs(counts[b"one"] - counts[b"two"]) <= 8


def test_a_learner_is_sent_only_so_many_bytes(peers, monkeypatch):
    monkeypatch.setattr("apexrl.net.learner_sessions.MAX_UNAPPLIED_BYTES", 1)
    peers.hello(b"a", streams=10)
    for sequence in range(3):
        peers.insert(b"a", sequence)
    peers.subscribe(b"l")
    for number in range(3):
        peers.demand(b"l", number, 0)
        assert [m.number for m in only(peers.heard(b"l"), wire.Append)] == [number]


def test_a_delete_that_is_sent_again_is_answered_again_and_deletes_nothing_more(peers, monkeypatch):
    monkeypatch.setattr("apexrl.net.learner_sessions.KEPT_ANSWERS", 2)
    peers.hello(b"a", streams=10)
    peers.store(b"a", 0)
    peers.subscribe(b"l")

    def deleted(request):
        peers.say("learner", b"l", wire.Delete(request, TABLE, everything=True))
        return only(peers.heard(b"l"), wire.Deleted)

    assert deleted(1) == [wire.Deleted(1, 8)]
    peers.store(b"a", 1)  # over the actors' port, whose messages overtake a late copy
    assert deleted(1) == [wire.Deleted(1, 8)] and len(peers.log) == 2
    peers.subscribe(b"l")  # after a broken connection
    assert deleted(1) == [wire.Deleted(1, 8)]
    assert deleted(2) == [wire.Deleted(2, 8)] and deleted(3) == [wire.Deleted(3, 0)]
    assert deleted(1) == [wire.Deleted(1, 0)]  # so many are remembered


def test_a_learner_that_comes_back_asks_for_what_it_lacks(peers):
    peers.hello(b"a", streams=8)
    for sequence in range(10):
        peers.insert(b"a", sequence)
    peers.service.advance()
    identity = peers.service.open_log.replay.identity
    peers.subscribe(b"l", identity.log, 0, 7)
    messages = peers.heard(b"l")
    assert messages[0].continues and [m.number for m in only(messages, wire.Append)] == [7, 8, 9]
    for other in ({"log": "another log"}, {"log": identity.log, "ring": 5}, {"log": identity.log, "life": 1}):
        peers.subscribe(b"l", number=7, **other)
        messages = peers.heard(b"l")
        assert not messages[0].continues
        assert messages[0].next_number == 0 and len(only(messages, wire.Append)) == 10


def test_a_reader_that_holds_no_replica_gets_batches_and_no_unrolls(peers):
    peers.hello(b"a", streams=8)
    for sequence in range(10):
        peers.insert(b"a", sequence)
    peers.subscribe(b"l", follows=False)
    peers.demand(b"l", 0, 2)
    messages = peers.heard(b"l")
    assert len(only(messages, wire.Batch)) == 2 and not only(messages, wire.Append)


def test_what_was_evicted_before_it_was_sent_is_skipped_aloud(spec):
    peers = Peers(spec, capacity=80)
    peers.hello(b"a", streams=50)
    peers.subscribe(b"l")
    peers.heard(b"l")
    for sequence in range(100):  # the service is not given the time to send
        peers.insert(b"a", sequence)
    messages = peers.heard(b"l")
    first = peers.log.first_number
    assert first > 50
    assert only(messages, wire.Subscribed)[0].next_number == first
    assert [m.number for m in only(messages, wire.Append)] == list(range(first, 100))


def test_a_learner_is_told_where_it_stands(peers):
    peers.hello(b"a")
    for sequence in range(3):
        peers.insert(b"a", sequence)
    peers.subscribe(b"l")
    peers.demand(b"l", 0, 2**53)
    assert len(only(peers.heard(b"l"), wire.Batch)) == wire.MAX_BATCHES_AHEAD
    peers.say("learner", b"l", wire.Heartbeat())
    assert peers.heard(b"l") == [wire.Standing(3, (wire.MAX_BATCHES_AHEAD,), ("",))]


def batches_of(spec, *demands, **changes):
    """All batches of a reader that demands so many in all, each time, of the same ten unrolls."""
    peers = Peers(spec, **changes)
    peers.hello(b"a", streams=8)
    for sequence in range(10):
        peers.insert(b"a", sequence, priorities=np.arange(1, 9) + sequence)
    peers.subscribe(b"l", follows=False)
    batches = []
    for demand in demands:
        peers.demand(b"l", 0, demand)
        batches += only(peers.heard(b"l"), wire.Batch)
        peers.service.open_log.replay.tables[TABLE].check_valid()
    return batches, vars(peers.service.open_log.replay.tables[TABLE].limiter)


@pytest.mark.parametrize("changes", [{}, {"eviction_period_batches": 3}, {"samples_per_insert": 0.3, "capacity": 24}])
def test_batches_demanded_together_are_those_demanded_one_by_one(spec, changes):
    together = batches_of(spec, 20, **changes)
    assert together == batches_of(spec, *range(1, 21), **changes)
    assert [batch.index for batch in together[0]] == list(range(len(together[0])))
    # The limiter has 80 inserts, begins at 16, and its slack is 4 batches of 4.
    assert len(together[0]) == (20 if "samples_per_insert" not in changes else (0.3 * 64 + 16) // 4)


@pytest.mark.parametrize("asks", [False, True])
def test_probabilities_come_only_where_they_were_asked_for(peers, asks):
    peers.hello(b"a")
    peers.insert(b"a", 0, priorities=[1, 0, 0, 0, 0, 0, 0, 0], valid=np.ones(8))
    peers.insert(b"a", 1)
    peers.insert(b"a", 2)
    wants = (wire.Want(TABLE, 4),)
    peers.say("learner", b"l", wire.Subscribe(PROTOCOL, "l", 1, wants, False, "", 0, 0, 0, asks))
    peers.demand(b"l", 0, 2)
    samples = [batch.sample() for batch in only(peers.heard(b"l"), wire.Batch)]
    assert [sample.probabilities.tolist() for sample in samples] == [[1 / 17] * 4 if asks else []] * 2


def test_priorities_are_set_in_the_order_in_which_they_came(peers):
    peers.hello(b"a")
    for sequence in range(3):
        peers.insert(b"a", sequence)
    peers.subscribe(b"l", follows=False)
    peers.demand(b"l", 0, 1)
    peers.heard(b"l")
    for keys, priorities in (([3, 4, 5, 6], [2, 2, 0, 7]), ([4, 5, 4, 6], [3, 9, 5, 0]), ([6, 7], [8, 4])):
        update = np.array(keys).tobytes(), np.array(priorities, np.float32).tobytes()
        peers.say("learner", b"l", wire.UpdatePriorities(0, *update))
    peers.service.advance()
    assert powers_of(peers.service.open_log.replay.tables[TABLE], 8)[0] == pytest.approx(
        np.array([1, 1, 1, 2, 5, 0, 0, 4]) ** 0.6
    )


def test_batches_of_several_tables_come_in_turn_each_numbered(spec):
    peers = Peers(spec, tables=("transitions=priority", "unrolls=uniform:0:1", "queue=fifo:0:1"))
    peers.hello(b"a", streams=10)
    for sequence in range(6):
        peers.insert(b"a", sequence)
    peers.subscribe(b"l", tables=("queue", "unrolls"), batch_size=2)
    peers.demand(b"l", 0, 100, 3)
    batches = only(peers.heard(b"l"), wire.Batch)
    assert [(b.table, b.index) for b in batches] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert np.concatenate([b.sample().keys for b in batches if b.table == 0]).tolist() == list(range(6))
    peers.say("learner", b"l", wire.Heartbeat())
    assert peers.heard(b"l") == [wire.Standing(6, (3, 3), ("actors", ""))]


def test_a_learner_is_told_what_it_waits_for_once(peers):
    peers.hello(b"a")
    peers.subscribe(b"l")
    peers.demand(b"l", 0, 2)
    assert only(peers.heard(b"l"), wire.Waiting) == [wire.Waiting(0, "min_size")]
    peers.demand(b"l", 0, 2)
    assert not peers.heard(b"l")


def test_an_unknown_table_is_refused_with_the_names_of_those_there_are(peers):
    peers.hello(b"a")
    peers.subscribe(b"l", tables=("other",))
    (refused,) = peers.heard(b"l")
    assert "no table other" in refused.reason and "transitions" in refused.reason


def test_a_batch_that_a_table_can_never_give_is_refused_with_the_reason(spec):
    peers = Peers(spec, tables=("recent=uniform:0:1:3",))
    peers.hello(b"a")
    peers.subscribe(b"l", tables=("recent",), batch_size=4)
    (refused,) = peers.heard(b"l")
    assert refused.reason == "table recent holds 3 unrolls, too few for a batch of 4 different ones"
    peers.subscribe(b"l", tables=("recent",), batch_size=3)
    assert only(peers.heard(b"l"), wire.Subscribed)


def test_unrolls_are_fetched_by_number(peers, spec):
    peers.hello(b"a")
    peers.store(b"a", 0)
    peers.subscribe(b"l", follows=False, tables=())
    peers.heard(b"l")
    peers.say("learner", b"l", wire.Fetch(5, (0, 9)))
    found, missing = peers.frames(b"l")
    assert wire.decode_from_replay(found) == wire.Fetched(5, 0, True)
    assert found[1:] == (wire.encode(insert_of(b"a", 0)), block_of(spec, 0))
    assert wire.decode_from_replay(missing) == wire.Fetched(5, 9, False) and missing[1:] == (b"", b"")


def test_a_learners_nonsense_is_dropped_and_counted(peers, spec):
    peers.hello(b"a")
    peers.store(b"a", 0)
    peers.subscribe(b"l")
    for table, keys, priorities in (
        (0, b"\0" * 8, b"\0" * 8),
        (0, b"\0" * 7, b"\0" * 4),
        (0, b"\0" * 8, b"\xff" * 4),
        (1, b"\0" * 8, b"\0" * 4),
    ):
        peers.say("learner", b"l", wire.UpdatePriorities(table, keys, priorities))
    peers.say("learner", b"l", insert_of(b"l", 1), block_of(spec))
    assert peers.dropped == {"malformed": 4, "misplaced": 1}
    peers.demand(b"l", 5)  # fewer tables than wanted
    peers.demand(b"l", 5, 1, 1, 1)
    peers.heard(b"l")


@pytest.mark.parametrize("keys", [(0, 8 * 39), (-1, 8 * 39), (2**62, 8 * 39)])
def test_a_key_that_is_not_held_is_ignored_and_counted(spec, keys):
    peers = Peers(spec, capacity=80)
    peers.hello(b"a", streams=20)
    for sequence in range(40):
        peers.store(b"a", sequence)
    peers.subscribe(b"l")
    update = wire.UpdatePriorities(0, np.array(keys).tobytes(), np.ones(2, np.float32).tobytes())
    peers.say("learner", b"l", update)
    peers.service.advance()
    assert peers.service.statistics(0.0)["table/transitions/stale_priorities"] == 1
    peers.service.open_log.replay.tables["transitions"].check_valid()


def test_the_limiters_fit_the_largest_batch_and_keep_it_while_nobody_is_there(peers):
    peers.hello(b"a")
    limiter = peers.service.open_log.replay.tables["transitions"].limiter
    peers.subscribe(b"small", batch_size=4)
    peers.subscribe(b"large", batch_size=16)
    assert limiter.slack == 64
    peers.say("learner", b"large", wire.Goodbye())
    assert limiter.slack == 16
    peers.say("learner", b"small", wire.Goodbye())
    assert limiter.slack == 16


def test_a_reader_without_a_replica_is_told_what_its_keys_can_name(peers):
    """It says so when it comes back: a log that has lost some of that since is another one to it."""
    peers.hello(b"a", streams=8)
    peers.subscribe(b"l", follows=False)
    for sequence in range(4):
        peers.store(b"a", sequence)
        peers.demand(b"l", 0, sequence + 1)
        peers.say("learner", b"l", wire.Heartbeat())
        messages = peers.heard(b"l")
        told = only(messages, wire.Batch) + only(messages, wire.Standing)
        assert {message.next_number for message in told} == {sequence + 1}
    assert only(messages, wire.Batch)
