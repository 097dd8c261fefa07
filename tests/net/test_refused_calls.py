"""Arguments that a server would drop are refused at the call, alone and before anything is sent."""

import re

import msgspec
import numpy as np
import pytest

from apexrl.errors import PeerRefused, WireError
from apexrl.net import InsertClient, LogClient, ReplayClient, ShardedReplayClient, wire
from apexrl.types import Episode, Field
from tests.net.peers import TABLE, block_of, hear
from tests.system.processes import wait_for

NOWHERE = "tcp://127.0.0.1:1"
HUGE = np.full(8, 1e300)
ONES = np.ones(8)
NAN = np.where(np.arange(8) == 3, np.nan, 1.0)

changed = msgspec.structs.replace


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"extras": (Field("id", "step", "int64"),)}, "'int64'"),
        ({"extras": (Field("done", "step", "bool"),)}, "'bool'"),
        ({"extras": (Field("id", "episode", "int32"),)}, "'episode'"),
        ({"extras": (Field("reward", "step", "int32"),)}, "distinct"),
        ({"frame_dtype": "float64"}, "'float64'"),
        ({"frame_shape": (0, 2)}, "which are no numbers at all"),
        ({"frame_shape": (2**20, 2**10)}, "lower --unroll-starts"),
        ({"num_actions": 0}, "num_actions"),
        ({"num_actions": -1}, "num_actions"),
        ({"unroll_starts": 0}, "counts below 1"),
        ({"env": "x" * 300}, "env"),
    ],
)
def test_a_stream_that_no_server_holds_is_refused_when_the_client_is_made(spec, context, changes, reason):
    with pytest.raises(WireError, match=reason):
        InsertClient(NOWHERE, "actor", changed(spec, **changes), 1, context=context)


@pytest.mark.parametrize("name", ["two\nlines", "x" * 200])
def test_a_name_that_no_server_takes_is_refused_when_the_client_is_made(spec, context, name):
    with pytest.raises(WireError, match="actor"):
        InsertClient(NOWHERE, name, spec, 1, context=context)
    with pytest.raises(ValueError, match="learner"):
        ReplayClient(NOWHERE, name + "x", context=context)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"priorities": NAN}, "negative or not finite"),
        ({"priorities": -ONES}, "negative or not finite"),
        ({"priorities": HUGE}, "negative or not finite"),
        ({"priorities": np.ones(7)}, r"\(7,\)"),
        ({"priorities": np.ones((8, 1))}, r"\(8, 1\)"),
        ({"valid": np.ones(7, bool)}, r"\(7,\)"),
        ({"valid": np.zeros(8, bool)}, "above 0 where nothing is valid"),
        ({"stream": 2}, "stream 2 of 2"),
        ({"stream": -1}, "stream"),
        ({"first_step": 2**53 + 1}, "first_step"),
        ({"exploration": float("nan")}, "exploration"),
        ({"episodes": (Episode(float("inf"), 1, 0.0),)}, "episodes"),
        ({"episodes": (Episode(1.0, 1, 0.0),) * 2000}, "bytes, at most"),
    ],
)
def test_an_insert_that_no_server_takes_is_refused_and_the_next_one_stored(server, spec, header, changes, reason):
    actor = InsertClient(server.actor_endpoint, "actor", spec, 2)
    actor.connect(100)
    with pytest.raises(WireError, match=reason):
        actor.insert(header()._replace(**changes), block_of(spec), 100)
    for block in (b"", b"no block", block_of(changed(spec, overlap_steps=3))):
        with pytest.raises(WireError, match="block"):
            actor.insert(header(), block, 100)
    assert actor.insert(header(), block_of(spec), 100) and actor.flush(100)
    assert (actor.num_dropped, server.service.open_log.replay.log.end_number) == (0, 1)
    actor.close()


def test_lists_are_as_good_as_arrays(server, spec, header):
    actor = InsertClient(server.actor_endpoint, "actor", spec, 2)
    actor.connect(100)
    for i in range(8):
        actor.insert(header(8 * i)._replace(valid=[True] * 8, priorities=[1.0] * 8), block_of(spec), 100)
    assert actor.flush(100)
    reader = ReplayClient(server.learner_endpoint, "reader", {TABLE: np.int64(4)})
    reader.sample(TABLE, 100)
    reader.update_priorities(TABLE, [0, 1], [50, 60.0])
    reader.update_priorities(TABLE, [], [])
    table = server.service.open_log.replay.tables[TABLE]
    wait_for(lambda: reader.has_batch(TABLE) and table.priority_quantiles((1.0,))[0] > 50, 100, "new priorities")
    assert sorted(reader.fetch({1, np.int64(2), 2.0}, 100)) == [1, 2]
    actor.close()
    reader.close()


def test_what_the_server_dropped_was_not_flushed(by_hand, spec, header, context):
    client = InsertClient(by_hand.endpoint, "actor", spec, 2, context=context)
    hear(by_hand, client, wire.Hello)
    by_hand.say(wire.Welcome((0, 1), 2, 0, 6, ""))
    for i in range(2):
        client.insert(header(8 * i), block_of(spec, i), 100)
    by_hand.heard()
    by_hand.say(wire.Dropped("malformed: insert 0: a fault that this client does not know"))
    by_hand.say(wire.Acknowledge(2, 8, 2, ""))
    with pytest.raises(PeerRefused, match="insert 0: a fault"):
        client.flush(100)
    assert client.num_unacknowledged == 0 and client.num_dropped == 1
    client.insert(header(16), block_of(spec, 2), 100)
    by_hand.heard()
    by_hand.say(wire.Dropped("journal: the disk is full"))  # it will be asked for again
    by_hand.say(wire.Acknowledge(3, 9, 2, ""))
    assert client.flush(100)
    client.close()


WRONG_UPDATES = [
    ([1, 2], [1.0, np.nan], "nan of key 2"),
    ([1, 2], [np.inf, 1.0], "inf of key 1"),
    ([1, 2], [1.0, -1e-9], "-1e-09 of key 2"),
    ([1, 2], [1.0, 1e39], "1e.39 of key 2"),
    ([1, 2], [1.0], "shape"),
    ([[1, 2]], [[1.0, 1.0]], "shape"),
    ([1, -2], [1.0, 1.0], "-2 among keys"),
    ([1, 0.5], [1.0, 1.0], "keys of 0.5"),
    ([1, np.nan], [1.0, 1.0], "keys of nan"),
    ([1, 2**63], [1.0, 1.0], "keys of"),
    (["1", "2"], [1.0, 1.0], "keys of an array"),
    ([1, 2], ["1", "2"], "priorities of an array"),
    ([1, 2], [1j, 1.0], "priorities of an array"),
]


@pytest.mark.parametrize(("keys", "priorities", "reason"), WRONG_UPDATES)
def test_a_wrong_priority_is_refused_alone(by_hand, spec, context, keys, priorities, reason):
    client = LogClient(by_hand.endpoint, "reader", {TABLE: 4}, 8, context=context)
    request = hear(by_hand, client, wire.Subscribe).request
    by_hand.say(wire.Subscribed(request, "log", 0, True, spec, 10, 0, (0,), ("transitions",)))
    hear(by_hand, client, wire.Demand)
    client.update_priorities(np.arange(100), np.zeros(100))
    with pytest.raises(ValueError, match=reason):
        client.update_priorities(keys, priorities)
    client.update_priorities(np.arange(2**53, 2**53 + 2), np.ones(2))
    keys = []

    def all_have_come():
        client.poll(10)
        updates = [message for message in by_hand.heard() if isinstance(message, wire.UpdatePriorities)]
        keys.extend(key for update in updates for key in wire.array_from(update.keys, np.int64).tolist())
        return len(keys) >= 102

    wait_for(all_have_come, 100, "the good priorities")
    assert keys == [*range(100), 2**53, 2**53 + 1]
    client.close()


@pytest.mark.parametrize(("keys", "priorities", "reason"), WRONG_UPDATES)
def test_a_wrong_priority_reaches_no_shard(context, keys, priorities, reason):
    client = ShardedReplayClient([NOWHERE, NOWHERE], "reader", {TABLE: 4}, context=context)
    with pytest.raises(ValueError, match=reason):
        client.update_priorities(TABLE, keys, priorities)
    client.close()


@pytest.mark.parametrize("size", [0, -1, wire.MAX_BATCH + 1, 2.5, "4", None])
def test_a_batch_size_that_no_server_draws_is_refused_when_the_client_is_made(context, size):
    for make in (ReplayClient, lambda endpoint, *rest, **others: ShardedReplayClient([endpoint], *rest, **others)):
        with pytest.raises(ValueError, match=f"batch size {size!r} of table other: give"):
            make(NOWHERE, "reader", {TABLE: 4, "other": size}, context=context)
    with pytest.raises(ValueError, match="wants"):
        ReplayClient(NOWHERE, "reader", {f"table-{i}": 4 for i in range(17)}, context=context)


@pytest.mark.parametrize("wrong", [-3, 0.5, 2**53 + 1, float("nan"), "1"])
def test_an_unroll_number_that_no_log_has_is_refused(context, wrong):
    reader = ReplayClient(NOWHERE, "reader", context=context)
    sharded = ShardedReplayClient([NOWHERE, NOWHERE], "reader", context=context)
    for client in (reader, sharded):
        with pytest.raises(ValueError, match="unroll number"):
            client.fetch([1, wrong], 100)
        client.close()


def test_a_table_that_was_not_named_is_named_in_the_error(context):
    reader = ReplayClient(NOWHERE, "reader", {TABLE: 4}, context=context)
    sharded = ShardedReplayClient([NOWHERE], "reader", {TABLE: 4}, context=context)
    said = re.escape(f"table 'nope' was not named when the client was made, only ['{TABLE}']")
    for client in (reader, sharded):
        for call in (
            lambda client: client.sample("nope", 100),
            lambda client: getattr(client, "shards", [client])[0].has_batch("nope"),
            lambda client: client.update_priorities("nope", np.arange(2), np.ones(2)),
        ):
            with pytest.raises(KeyError, match=said):
                call(client)
        client.close()
