"""Clients before a server of our own making, which loses and repeats what it likes."""

import numpy as np
import pytest

from apexrl.net import connection, log_client, wire
from apexrl.net.insert_client import InsertClient
from apexrl.net.log_client import LogBatch, LogClient, LogStart
from tests.net.peers import TABLE, block_of, hear
from tests.system.processes import wait_for


@pytest.fixture
def without_clock(monkeypatch):
    """Clients that say nothing because time has passed, but a first heartbeat: machines may be slow."""
    for module, name in (
        (connection, "HEARTBEAT_SECONDS"),
        (connection, "MAX_ASK_SECONDS"),
        (log_client, "MAX_UPDATE_DELAY_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 3600)


def batch_of(index, next_number=0):
    return wire.Batch(0, index, next_number, np.arange(4).tobytes(), np.ones(4, "f4").tobytes(), 1.0)


def subscribed(by_hand, client, spec, num_batches=0, next_number=0, request=None):
    """Answers a subscription, and gives the client batches; returns the number of the request."""
    request = request or hear(by_hand, client, wire.Subscribe).request
    by_hand.say(wire.Subscribed(request, "log", 0, True, spec, 10, next_number, (0,), ("transitions",)))
    assert isinstance(client.poll(100_000), LogStart)
    for index in range(num_batches):
        by_hand.say(batch_of(index, next_number))
        assert isinstance(client.poll(100_000), LogBatch)
    return request


def test_a_batch_of_unrolls_that_were_lost_is_not_handed_out(by_hand, spec, context):
    client = LogClient(by_hand.endpoint, "reader", {TABLE: 4}, 2, context=context)

    def batch(request, next_number):
        by_hand.say(wire.Subscribed(request, "log", 0, True, spec, 10, 0, (0,), ("transitions",)))
        by_hand.say(batch_of(0, next_number))
        events = [client.poll(100_000), client.poll(100_000)]
        assert isinstance(events[0], LogStart)
        return events[1]

    assert batch(hear(by_hand, client, wire.Subscribe).request, next_number=1) is None  # an Append was lost before it
    assert isinstance(batch(hear(by_hand, client, wire.Subscribe).request, next_number=0), LogBatch)
    client.close()


@pytest.mark.usefixtures("without_clock")
def test_a_learner_asks_and_tells_of_several_batches_at_once(by_hand, spec, context):
    client = LogClient(by_hand.endpoint, "reader", {TABLE: 4}, 8, context=context)
    subscribed(by_hand, client, spec)
    assert hear(by_hand, client, wire.Demand).batches == (8,)
    for index in range(8):
        by_hand.say(batch_of(index))
    priorities = np.ones(4)
    for index in range(8):
        assert isinstance(client.poll(100_000), LogBatch)
        priorities[:] = index  # the learner uses the memory again
        client.update_priorities(np.arange(4), priorities)
        client.batch_used()
    sent = [m for m in by_hand.heard(4) if isinstance(m, wire.UpdatePriorities | wire.Demand)]
    asked = [place for place, message in enumerate(sent) if isinstance(message, wire.Demand)]
    assert [sent[place].batches for place in asked] == [(12,), (16,)]
    for place, told in zip(asked, (4, 8), strict=True):  # in as many messages as batches, where the machine is slow
        updates = [message for message in sent[:place] if isinstance(message, wire.UpdatePriorities)]
        keys, priorities = (b"".join(getattr(update, name) for update in updates) for name in ("keys", "priorities"))
        assert wire.array_from(keys, np.int64).tolist() == [0, 1, 2, 3] * told
        assert wire.array_from(priorities, np.float32).tolist() == np.repeat(np.arange(told), 4).tolist()
    client.close()


def test_priorities_go_together_as_far_as_they_fit_into_one_message(by_hand, spec, context):
    client = LogClient(by_hand.endpoint, "reader", {TABLE: 4}, 8, context=context)
    subscribed(by_hand, client, spec, num_batches=1)  # it is at hand, and its priorities will follow
    by_hand.heard()
    for count in (3, wire.MAX_BATCH - 3, wire.MAX_BATCH + 1):
        client.update_priorities(np.zeros(count), np.ones(count))
    client.close()
    assert [len(m.keys) for m in by_hand.heard(3) if isinstance(m, wire.UpdatePriorities)] == [
        8 * wire.MAX_BATCH,
        8 * wire.MAX_BATCH,
        8,
    ]


@pytest.mark.usefixtures("without_clock")
def test_priorities_wait_for_the_demand_while_batches_are_at_hand(by_hand, spec, context):
    client = LogClient(by_hand.endpoint, "reader", {TABLE: 4}, 4, context=context)
    subscribed(by_hand, client, spec, num_batches=3)
    by_hand.heard()
    for index in range(2):
        client.update_priorities(np.array([index]), np.ones(1))
        for _ in range(3):
            client.poll(5)
        assert not [m for m in by_hand.heard() if isinstance(m, wire.UpdatePriorities)]
        client.batch_used()
    updates, demands = by_hand.heard(2)[-2:]
    assert wire.array_from(updates.keys, np.int64).tolist() == [0, 1]
    assert isinstance(demands, wire.Demand)
    client.close()


@pytest.mark.parametrize("at_hand", [0, 1])
def test_priorities_do_not_wait_for_a_demand_that_does_not_come(by_hand, spec, context, at_hand):
    client = LogClient(by_hand.endpoint, "reader", {TABLE: 4}, 8, context=context)
    subscribed(by_hand, client, spec, num_batches=at_hand)
    client.update_priorities(np.arange(4), np.ones(4))
    assert hear(by_hand, client, wire.UpdatePriorities).keys == np.arange(4).tobytes()
    client.close()


@pytest.mark.usefixtures("without_clock")
def test_the_last_inserts_are_acknowledged_because_the_client_asks(by_hand, spec, header, context):
    client = InsertClient(by_hand.endpoint, "actor", spec, 2, context=context)
    hear(by_hand, client, wire.Hello)
    by_hand.say(wire.Welcome((0, 1), 2, 0, 6, ""))
    client.insert(header(0), block_of(spec, 0), 10)
    assert not client.flush(0.2)
    assert [type(m) for m in by_hand.heard(2)] == [wire.Insert, wire.Heartbeat]
    by_hand.say(wire.Acknowledge(1, 7, 2, ""))
    assert client.flush(10)
    client.close()


def test_of_several_answers_to_a_greeting_only_the_first_is_followed_by_a_resend(by_hand, spec, header, context):
    client = InsertClient(by_hand.endpoint, "actor", spec, 2, context=context)
    hear(by_hand, client, wire.Hello)
    by_hand.say(wire.Welcome((0, 1), 2, 0, 6, ""))
    for i in range(3):
        client.insert(header(8 * i), block_of(spec, i), 10)
    assert [m.sequence for m in by_hand.heard(3) if isinstance(m, wire.Insert)] == [0, 1, 2]
    by_hand.say(wire.Stranger())
    hear(by_hand, client, wire.Hello)
    for _ in range(5):
        by_hand.say(wire.Welcome((0, 1), 2, 1, 6, ""))
    sent = []

    def resent():
        client.poll()
        sent.extend(m.sequence for m in by_hand.heard() if isinstance(m, wire.Insert))
        return len(sent) >= 2

    wait_for(resent, 10, "the inserts again")
    resent()
    assert sent == [1, 2]
    client.close()


def test_what_was_held_back_is_sent_when_it_is_allowed(by_hand, spec, header, context):
    client = InsertClient(by_hand.endpoint, "actor", spec, 2, context=context)
    hear(by_hand, client, wire.Hello)
    by_hand.say(wire.Welcome((0, 1), 2, 0, 6, ""))
    for i in range(3):
        client.insert(header(8 * i), block_of(spec, i), 10)
    by_hand.heard()
    by_hand.say(wire.Stranger())
    hear(by_hand, client, wire.Hello)
    by_hand.say(wire.Welcome((0, 1), 2, 1, 1, "journal"))

    def come():
        client.poll()
        sent.extend(m.sequence for m in by_hand.heard() if isinstance(m, wire.Insert))
        return len(sent) >= len(expected)

    for allowed, expected in ((1, []), (2, [1]), (6, [2])):
        by_hand.say(wire.Acknowledge(1, allowed, 2, ""))
        sent = []
        wait_for(come, 10, "what is allowed")
        come()
        assert sent == expected
    client.close()


@pytest.mark.usefixtures("without_clock")
def test_nothing_is_demanded_between_a_subscription_and_its_answer(by_hand, spec, context):
    """The server counts from 0 again: what is demanded by the old count would allow any number of batches."""
    client = LogClient(by_hand.endpoint, "reader", {TABLE: 4}, 2, context=context)

    subscribed(by_hand, client, spec)
    assert hear(by_hand, client, wire.Demand).batches == (2,)
    for index in range(2):
        by_hand.say(batch_of(index))
        assert isinstance(client.poll(100_000), LogBatch)
    client.update_priorities(np.arange(4), np.ones(4))
    by_hand.say(wire.Stranger())
    wait_for(lambda: client.poll(100) or client.waits_for == "replay_connection", 10, "the server's answer")
    for _ in range(2):
        client.batch_used()  # updates go on meanwhile
    client.poll(1)
    (asked,) = by_hand.heard(1)  # priorities may be of another log
    assert isinstance(asked, wire.Subscribe)
    subscribed(by_hand, client, spec, request=asked.request)
    assert hear(by_hand, client, wire.Demand).batches == (2,)
    client.close()


def test_a_reader_without_a_replica_says_how_far_its_keys_went(by_hand, spec, context):
    client = LogClient(by_hand.endpoint, "reader", {TABLE: 4}, 2, follows_log=False, context=context)
    subscribed(by_hand, client, spec, next_number=3)
    by_hand.say(batch_of(0, 7))
    assert isinstance(client.poll(100_000), LogBatch)
    by_hand.say(wire.Stranger())
    assert hear(by_hand, client, wire.Subscribe).next_number == 7
    client.close()


def test_more_batches_than_were_demanded_are_not_handed_out(by_hand, spec, context):
    client = LogClient(by_hand.endpoint, "reader", {TABLE: 4}, 2, context=context)
    request = subscribed(by_hand, client, spec, num_batches=2)
    by_hand.say(batch_of(2))
    assert client.poll(500) is None
    assert hear(by_hand, client, wire.Subscribe).request > request
    client.close()


def after_silence(client, monkeypatch):
    """Calls the client as if nobody had for long; nothing that it says but a heartbeat is for a stranger."""
    with monkeypatch.context() as patch:
        patch.setattr(log_client, "MAX_SILENCE_SECONDS", -1)
        client.batch_used()
    client.update_priorities(np.arange(4), np.ones(4))


@pytest.mark.parametrize("is_forgotten", [False, True])
@pytest.mark.parametrize("follows_log", [False, True])
def test_after_a_long_silence_priorities_wait_until_the_server_knows_the_learner(
    by_hand, spec, context, monkeypatch, is_forgotten, follows_log
):
    client = LogClient(by_hand.endpoint, "reader", {TABLE: 4}, 4, follows_log, context=context)
    subscribed(by_hand, client, spec, num_batches=1)
    hear(by_hand, client, wire.Demand)
    hear(by_hand, client, wire.Heartbeat)
    by_hand.say(wire.Standing(0, (1,), ("",)))  # it lies unread, and says nothing about now
    for index in range(1, 4):
        by_hand.say(batch_of(index))
    after_silence(client, monkeypatch)
    assert [type(message) for message in by_hand.heard(1)] == [wire.Heartbeat]
    events = [client.poll(100_000) for _ in range(4)]
    assert events[0] is None and all(isinstance(event, LogBatch) for event in events[1:])
    assert {type(message) for message in by_hand.heard()} <= {wire.Heartbeat}
    if is_forgotten:
        by_hand.say(wire.Stranger())
        request = hear(by_hand, client, wire.Subscribe).request
        by_hand.say(wire.Subscribed(request, "log", 0, True, spec, 10, 0, (0,), ("transitions",)))
    else:
        for _ in range(client._doubts):
            by_hand.say(wire.Standing(0, (4,), ("",)))
    assert hear(by_hand, client, wire.UpdatePriorities).keys == np.arange(4).tobytes()
    client.close()


def test_a_client_that_ends_after_a_long_silence_says_its_priorities(by_hand, spec, context, monkeypatch):
    client = LogClient(by_hand.endpoint, "reader", {TABLE: 4}, 4, context=context)
    subscribed(by_hand, client, spec, num_batches=1)
    by_hand.heard()
    after_silence(client, monkeypatch)
    client.close()
    assert [type(message) for message in by_hand.heard(3)] == [wire.Heartbeat, wire.UpdatePriorities, wire.Goodbye]


def test_priorities_that_nobody_takes_are_bounded_and_the_newest_are_kept(by_hand, spec, context):
    client = LogClient(by_hand.endpoint, "reader", {TABLE: 4}, 8, context=context)
    for first in (0, wire.MAX_BATCH):
        client.update_priorities(np.arange(first, first + wire.MAX_BATCH), np.ones(wire.MAX_BATCH))
    by_hand.say(wire.Subscribed(hear(by_hand, client, wire.Subscribe).request, "log", 0, True, spec, 10, 0, (0,),
                                ("transitions",)))  # fmt: skip
    updates = hear(by_hand, client, wire.UpdatePriorities)
    assert wire.array_from(updates.keys, np.int64).tolist() == list(range(wire.MAX_BATCH, 2 * wire.MAX_BATCH))
    client.close()


def test_more_batches_ahead_than_a_server_sends_are_refused():
    with pytest.raises(ValueError, match="prefetch_batches 65: a server sends 1 to 64 ahead"):
        LogClient("tcp://127.0.0.1:1", "reader", {TABLE: 4}, 65)
