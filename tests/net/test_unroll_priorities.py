"""One priority an unroll, through real sockets and through a restart."""

import msgspec
import numpy as np
import pytest

from apexrl.net import InsertClient, LogBatch, LogClient, LogStart, ReplayClient, wire
from apexrl.replay.journal import SNAPSHOT_FILE
from apexrl.replay.snapshot import write_snapshot
from apexrl.types import Field, UnrollHeader
from apexrl.unroll import UnrollCodec
from tests.fields import random_unroll, slow_arrays
from tests.net.peers import TABLE, Peers, insert_of, only
from tests.replay.records import powers_of
from tests.system.processes import wait_for

TABLES = ("unrolls=priority:0:4", "queue=fifo:0:1")
KEEP = np.ones(8, bool)


@pytest.fixture
def unroll_spec(spec):
    """Unrolls with one priority, a recurrent state and vectors of actions."""
    extras = Field("state", "first", "float16", (4,)), Field("log_prob", "step", "float32")
    bounds = ((-1.0, 1.0), (0.0, 3.0))
    return msgspec.structs.replace(spec, num_actions=0, action_bounds=bounds, extras=extras, has_unroll_priorities=True)


def header_of(i, priority):
    return UnrollHeader(0, 8 * i, 0, 0.5, KEEP, np.array([priority], np.float32), ())


def test_unrolls_are_inserted_sampled_fetched_and_given_priorities(start_server, unroll_spec):
    codec, unrolls = UnrollCodec(unroll_spec), [random_unroll(unroll_spec, seed) for seed in range(6)]
    with start_server(tables=TABLES) as server:
        actor = InsertClient(server.actor_endpoint, "actor", unroll_spec, 4)
        actor.connect(10)
        for i, unroll in enumerate(unrolls):
            actor.insert(header_of(i, float(i == 2)), codec.encode(unroll), 10)
        assert actor.flush(10)
        reader = ReplayClient(server.learner_endpoint, "reader", {"unrolls": 8, "queue": 2}, 1)
        sample = reader.sample("unrolls", 10)
        assert sample.keys.tolist() == [2] * 8 and (sample.weights == 1).all()
        assert reader.granularity == {"unrolls": "unrolls", "queue": "unrolls"}
        found = reader.fetch(range(6), 10)
        for i, unroll in enumerate(unrolls):
            assert found[i].header.valid.all() and found[i].header.priorities.tolist() == [float(i == 2)]
            for name, array in slow_arrays(unroll).items():
                assert np.array_equal(slow_arrays(found[i].unroll)[name], array), name
        reader.update_priorities("unrolls", np.array([2, 3]), np.array([5.0, 9.0]))

        def is_told():
            return reader.statistics(10).metrics["table/unrolls/priority_quantile_90"] == pytest.approx(5)

        wait_for(is_told, 10, "the new priority")
        metrics = server.service.statistics
        assert (metrics(0)["table/unrolls/inserted"], metrics(0)["transitions_inserted"]) == (6, 48)
        assert set(reader.sample("unrolls", 10).keys.tolist()) == {2}  # 3 was 0, and cannot be drawn
        actor.close()
        reader.close()


def test_a_learner_is_told_what_the_keys_of_its_tables_name(start_server, spec, header):
    with start_server(tables=(f"{TABLE}=priority", "any=uniform:0:1")) as server:
        actor = InsertClient(server.actor_endpoint, "actor", spec, 2)
        actor.connect(10)
        block = UnrollCodec(spec).encode(random_unroll(spec, 0))
        for i in range(5):
            actor.insert(header(8 * i), block, 10)
        learner = LogClient(server.learner_endpoint, "learner", {"any": 4, TABLE: 4}, 1)
        starts, keys = [], {}

        def hears_both():
            event = learner.poll(100)
            if isinstance(event, LogStart):
                starts.append(event)
            elif isinstance(event, LogBatch):
                keys[event.table] = event.sample.keys
                learner.batch_used(event.table)
            return len(keys) == 2

        wait_for(hears_both, 20, "a batch of each table")
        assert starts[0].granularity == {"any": "unrolls", TABLE: "transitions"}
        assert keys["any"].max() < 5
        actor.close()
        learner.close()


def unroll_insert(peer, sequence, priority, valid=None):
    valid = np.packbits(np.ones(8, bool) if valid is None else np.array(valid, bool)).tobytes()
    priorities = np.array([priority], np.float32).tobytes()
    return msgspec.structs.replace(insert_of(peer, sequence), valid=valid, priorities=priorities)


def test_priorities_of_unrolls_outlive_a_restart(unroll_spec, tmp_path):
    peers = Peers(unroll_spec, tmp_path, tables=("unrolls=priority:0:1",))
    block = UnrollCodec(unroll_spec).encode(random_unroll(unroll_spec, 0))
    peers.hello(b"a", streams=10)
    for i in range(4):
        peers.say("actor", b"a", unroll_insert(b"a", i, i), block)
    peers.service.advance()
    table = peers.service.open_log.replay.tables["unrolls"]
    assert (table.limiter.inserted, peers.log.num_transitions) == (4, 32)
    table.update_priorities(np.array([0, 1, 2]), np.array([7.0, 7.0, 0.0]))  # 0 cannot be drawn and stays so
    write_snapshot(tmp_path / SNAPSHOT_FILE, peers.service.open_log.replay.snapshot())
    peers.say("actor", b"a", unroll_insert(b"a", 4, 2), block)
    peers.service.advance()
    peers.restart()
    table = peers.service.open_log.replay.tables["unrolls"]
    assert powers_of(table, 1)[:, 0] == pytest.approx(np.array([0, 7, 0, 3, 2]) ** 0.6 * [0, 1, 0, 1, 1], rel=1e-6)
    assert table.limiter.inserted == 5
    table.check_valid()


@pytest.mark.parametrize("change", [{"priorities": b"\0" * 32}, {"priorities": b""}, {"valid": b""}, {"valid": b"ab"}])
def test_arrays_of_another_size_are_malformed(unroll_spec, change):
    peers = Peers(unroll_spec, tables=("unrolls=priority:0:1",))
    block = UnrollCodec(unroll_spec).encode(random_unroll(unroll_spec, 0))
    peers.hello(b"a")
    peers.say("actor", b"a", msgspec.structs.replace(unroll_insert(b"a", 0, 1), **change), block)
    peers.say("actor", b"a", unroll_insert(b"a", 1, 1), block)
    messages = peers.heard(b"a")
    assert "insert 0" in only(messages, wire.Dropped)[0].reason and peers.dropped["malformed"] == 1
    assert peers.log.end_number == 1


def test_an_unroll_without_transitions_has_no_priority(unroll_spec):
    peers = Peers(unroll_spec, tables=("unrolls=priority:0:1",))
    block = UnrollCodec(unroll_spec).encode(random_unroll(unroll_spec, 0))
    peers.hello(b"a")
    peers.say("actor", b"a", unroll_insert(b"a", 0, 1, [0] * 8), block)
    peers.say("actor", b"a", unroll_insert(b"a", 1, 0, [0] * 8), block)
    assert "where nothing is valid" in only(peers.heard(b"a"), wire.Dropped)[0].reason
    assert (peers.log.end_number, peers.service.open_log.replay.tables["unrolls"].limiter.inserted) == (1, 0)
