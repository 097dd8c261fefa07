import asyncio
import contextlib

import numpy as np
import pytest

from apexrl.errors import PeerError, PeerRefused
from apexrl.net import InsertClient, ShardedReplayClient
from tests.net.peers import TABLE, block_of
from tests.system.processes import wait_for

SHARDS = 3


def test_shards_are_read_as_one(start_server, spec, header, context):
    with start_server() as a, start_server() as b, start_server() as c:
        servers = [a, b, c]
        for shard, server in enumerate(servers):
            actor = InsertClient(server.actor_endpoint, f"actor-{shard}", spec, 4, context=context)
            actor.connect(10)
            for i in range(10):
                actor.insert(header(1000 * shard + 8 * i), block_of(spec, i), 10)
            assert actor.flush(10)
            actor.close()
        endpoints = [server.learner_endpoint for server in servers]
        client = ShardedReplayClient(endpoints, "reader", {TABLE: 16}, context=context)
        wait_for(lambda: all(shard.has_batch(TABLE) for shard in client.shards), 10, "batches of all shards")
        samples = [client.sample(TABLE, 10) for _ in range(3)]
        wait_for(lambda: all(shard.has_batch(TABLE) for shard in client.shards), 10, "more of them")
        keys = np.concatenate([sample.keys for sample in samples + [client.sample(TABLE, 10) for _ in range(3)]])
        assert np.bincount(keys % SHARDS, minlength=SHARDS).tolist() == [32] * SHARDS
        assert (keys // SHARDS < 80).all()
        numbers = {int(key) // SHARDS // 8 * SHARDS + int(key) % SHARDS for key in keys[:64]}
        fetched = client.fetch(numbers, 10)
        assert fetched.keys() == numbers
        for number, stored in fetched.items():
            assert stored.header.first_step == 1000 * (number % SHARDS) + 8 * (number // SHARDS)
        client.update_priorities(TABLE, np.array([0, 1, 2, 4]), np.array([1.0, 50.0, 1.0, 50.0]))

        def is_told():
            client.shards[1].has_batch(TABLE)  # keeps the client going
            return b.service.open_log.replay.tables[TABLE].priority_quantiles((1.0,))[0] > 40

        wait_for(is_told, 10, "priorities at the second shard")
        assert a.service.open_log.replay.tables[TABLE].priority_quantiles((1.0,))[0] == pytest.approx(1.0)
        assert [answer.metrics["size"] for answer in client.statistics(10)] == [80] * SHARDS
        client.close()


def test_a_shard_that_is_away_does_not_hold_up_the_others(start_server, free_ports, spec, header, context):
    away = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    with start_server() as server:
        actor = InsertClient(server.actor_endpoint, "actor", spec, 4, context=context)
        actor.connect(10)
        for i in range(10):
            actor.insert(header(8 * i), block_of(spec, i), 10)
        client = ShardedReplayClient([away, server.learner_endpoint], "reader", {TABLE: 4}, context=context)
        for _ in range(5):
            assert (client.sample(TABLE, 10).keys % 2 == 1).all()
        assert client.fetch([1, 3, 5], 10).keys() == {1, 3, 5}
        client.close()
        actor.close()
    client = ShardedReplayClient([away, away], "reader", {TABLE: 4}, context=context)
    with pytest.raises(PeerError, match=rf"{away}.*; .*{away}"):
        client.sample(TABLE, 0.4)
    client.close()


@pytest.fixture
def filled(start_server, spec, header, context):
    """Gives three servers of two tables, each with ten unrolls, which tell their shard by their first steps."""
    tables = (f"{TABLE}=priority:0:1", "any=uniform:0:1")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(start_server(tables=tables)) for _ in range(SHARDS)]
        for shard, server in enumerate(servers):
            with InsertClient(server.actor_endpoint, f"actor-{shard}", spec, 4, context=context) as actor:
                for i in range(10):
                    actor.insert(header(1000 * shard + 8 * i), block_of(spec, i), 100)
                assert actor.flush(100)
        yield [server.learner_endpoint for server in servers]


@pytest.mark.parametrize("with_unrolls", [True, False])
def test_unrolls_of_all_shards_come_with_their_keys(filled, context, with_unrolls):
    sizes, unrolls_of = {TABLE: 16, "any": 4}, {TABLE: 8, "any": 1}
    with ShardedReplayClient(filled, "reader", sizes, context=context, with_unrolls=with_unrolls) as client:
        assert client.spec is None
        for table, size in sizes.items():
            found = [batch for batch, _ in zip(client.unroll_batches(table, 100), range(12), strict=False)]
            assert {number % SHARDS for batch in found for number in batch.unrolls} == {0, 1, 2}
            for sample, numbers, starts, unrolls in found:
                shards, keys = sample.keys % SHARDS, sample.keys // SHARDS
                assert len(keys) == size and len(set(shards)) == 1 and unrolls.keys() == set(numbers.tolist())
                assert (numbers == keys // unrolls_of[table] * SHARDS + shards).all()
                assert (starts == keys % unrolls_of[table]).all()
                for number, stored in unrolls.items():
                    assert stored.header.first_step == 1000 * (number % SHARDS) + 8 * (number // SHARDS)
        assert client.spec == client.shards[2].spec is not None and client.has_batch("any")


def test_items_are_taken_out_of_the_tables_of_all_shards(filled, context):
    with ShardedReplayClient(filled, "reader", context=context) as client:
        assert client.delete("any", np.arange(SHARDS * 9), 100) == SHARDS * 9
        assert client.delete("any", [0, 27, 29, 400], 100) == 2
        with ShardedReplayClient(filled, "reader", {"any": 1}, context=context) as reader:
            assert reader.sample("any", 100).keys.tolist() == [28]
        assert client.reset("any", 100) == 1 and client.reset(TABLE, 100) == SHARDS * 80
        assert client.reset(TABLE, 100) == 0
        with pytest.raises(PeerRefused, match="there is no table nope"):
            client.reset("nope", 100)
        with pytest.raises(KeyError, match="not named"):
            client.sample("any", 100)


def test_calls_to_shards_are_awaited_while_others_go_on(filled, context):
    with ShardedReplayClient(filled, "reader", {"any": 10}, context=context) as client:

        async def read():
            sample = await client.sampling("any", 100)
            found = await client.fetching(sample.keys, 100)
            assert found.keys() == set(sample.keys.tolist())
            return sample.keys % SHARDS, await client.sampling_unrolls("any", 100)

        async def both():
            with ShardedReplayClient(filled, "other", context=context) as other:
                return await asyncio.gather(read(), other.deleting(TABLE, [0, 1], 100), other.resetting(TABLE, 100))

        (shards, batch), deleted, emptied = asyncio.run(both())
        assert len(set(shards)) == 1 and len(batch.unrolls) == 10 and deleted + emptied == SHARDS * 80
