"""Records through a real server: inserted, sampled with their data, taken out, and awaited."""

import asyncio
import os
import selectors
import sys
import threading
import time

import numpy as np
import pytest

from apexrl.config.sections import ReplayConfig
from apexrl.errors import ApexError, ConfigError, PeerRefused, PeerTimeout
from apexrl.net import InsertClient, RecordClient, ReplayClient, log_client, service
from apexrl.net import learner_sessions as sessions
from apexrl.net.records import layout_of, spec_of
from apexrl.net.replay_server import ReplayServer
from tests.system.processes import wait_for

FIELDS = {"id": "int64", "x": ("float32", 3), "name": "U8"}
TABLES = ("hard=priority:0:1", "any=uniform:0:1", "queue=fifo:0:1", "stack=lifo:0:1", "once=uniform:0:1::1")


@pytest.fixture
def server():
    with ReplayServer(ReplayConfig(capacity=1000, tables=TABLES)) as server:
        yield server


@pytest.fixture
def make(server):
    """Makes clients of the server, and closes them."""
    clients = []

    def make(batch_sizes=None, fields=FIELDS, **options):
        clients.append(RecordClient(server.endpoints, "records", fields, batch_sizes, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def record(i):
    return {"id": 2**40 + i, "x": np.arange(3) + i, "name": f"n{i}"}


def fill(client, count, priority=1.0):
    for i in range(count):
        client.insert(record(i), priority, 100)
    assert client.flush(100)


def check(batch, size):
    assert len(batch.keys) == len(batch.weights) == len(batch.probabilities) == size
    for row, key in enumerate(batch.keys.tolist()):
        found = {name: values[row] for name, values in batch.data.items()}
        assert (found["id"], found["name"]) == (2**40 + key, f"n{key}") and (found["x"] == np.arange(3) + key).all()


def test_what_is_inserted_is_sampled_and_priorities_come_back(make):
    client = make({"hard": 8, "any": 20})
    fill(client, 20)
    check(client.sample("hard", 100), 8)
    batch = client.sample("any", 100)
    check(batch, 20)
    assert sorted(batch.keys) == list(range(20)) and (batch.probabilities == 1 / 20).all()
    client.update_priorities("hard", np.arange(1, 20), np.zeros(19))
    for batch in client.batches("hard", 100):
        if set(batch.keys) == {0}:
            break
    check(batch, 8)
    assert (batch.probabilities == 1).all()


def test_queue_and_stack_give_each_record_once(make):
    fill(make(), 6)
    reader = make({"queue": 2, "stack": 2}, fields=None)  # learns the fields from the log
    assert np.concatenate([reader.sample("queue", 100).keys for _ in range(3)]).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.concatenate([reader.sample("stack", 100).keys for _ in range(3)]).tolist() == [5, 4, 3, 2, 1, 0]
    for table in ("queue", "stack"):
        with pytest.raises(PeerTimeout, match=table):
            reader.sample(table, 0.05)


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_queue_gives_each_record_once_to_a_reader_that_was_silent_for_long(make, server, monkeypatch, is_forgotten):
    client = make({"queue": 2})
    fill(client, 40)
    found = [client.sample("queue", 100).keys.tolist()]
    wait_for(lambda: server.service.open_log.replay.tables["queue"].limiter.sampled == 8, 20, "batches ahead")
    monkeypatch.setattr(log_client, "MAX_SILENCE_SECONDS", -1)  # of the next call
    if is_forgotten:
        monkeypatch.setattr(service, "PEER_TIMEOUT_SECONDS", -1)
        wait_for(lambda: not server.service.open_log.learners.sessions, 20, "the server to forget it")
    client.has_batch("queue")
    monkeypatch.undo()
    found += [client.sample("queue", 100).keys.tolist() for _ in range(19)]
    assert found == [[i, i + 1] for i in range(0, 40, 2)]


def test_an_item_leaves_after_so_many_draws(make):
    fill(make(), 6)
    reader = make({"once": 2})
    assert sorted(np.concatenate([reader.sample("once", 100).keys for _ in range(3)])) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(PeerTimeout, match="once"):
        reader.sample("once", 0.05)


@pytest.mark.parametrize("table", [text.partition("=")[0] for text in TABLES])
def test_records_are_taken_out_of_a_table_for_ever(make, table):
    client = make()
    fill(client, 10)
    assert client.delete(table, [0, 1, 2, 3, 3, 400], 100) == 4 and client.delete(table, np.arange(4), 100) == 0
    reader = make({table: 6}, prefetch_batches=1)
    assert set(reader.sample(table, 100).keys) <= set(range(4, 10))
    client.reset(table, 100)
    assert client.reset(table, 100) == 0
    fill(client, 6)
    stale = reader.sample(table, 100) if table in ("hard", "any") else None  # was on the way
    assert set(reader.sample(table, 100).keys) <= set(range(10, 16)), stale


@pytest.mark.parametrize("endpoints", ["tcp://127.0.0.1:51001", ("tcp://127.0.0.1:51001",)])
def test_a_client_of_records_has_two_endpoints(endpoints):
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:51001.*: give two, that for actors and that for learners"):
        RecordClient(endpoints, "records", FIELDS)


def test_a_table_that_is_not_there_and_keys_that_are_none_are_refused(make):
    client = make()
    with pytest.raises(PeerTimeout, match="no log"):
        client.delete("any", [1], 0.05)
    fill(client, 1)
    with pytest.raises(PeerRefused, match="there is no table nope, only hard, any"):
        client.reset("nope", 100)
    for keys in ([0.5], [-1], [[1]]):
        with pytest.raises(ValueError, match="keys"):
            client.delete("any", keys, 100)
    with pytest.raises(KeyError, match="not named"):
        client.sample("any", 100)


@pytest.mark.parametrize("priority", [-1.0, float("nan"), float("inf"), 1e39])
def test_a_priority_that_no_server_takes_is_refused_and_nothing_sent(make, priority):
    client = make()
    with pytest.raises(ValueError, match="priority"):
        client.insert(record(0), priority, 100)
    with pytest.raises(ValueError, match="id"):
        client.insert(record(0) | {"id": 2**63}, 1.0, 100)
    assert client.flush(100)
    with pytest.raises(ApexError, match="without fields"):
        make(fields=None).insert(record(0))


def test_other_records_are_refused(make, spec, server):
    fill(make(), 1)
    with pytest.raises(PeerRefused, match=r"variant.*: give the fields that its records have"):
        make(fields={"id": "int32"}).insert({"id": 1}, 1.0, 100)
    with pytest.raises(ApexError, match="this client has"):
        make({"any": 1}, fields={"id": "int32"}).sample("any", 100)


def test_a_reader_of_other_records_empties_no_queue(make):
    fill(make(), 20)
    wrong = make({"queue": 2}, {"y": "int8"})
    for _ in range(8):
        with pytest.raises(ApexError, match="the log holds records of"):
            wrong.sample("queue", 100)
    wrong.close()
    assert make({"queue": 2}).sample("queue", 100).keys[0] <= 8, "what was on the way to it"


@pytest.mark.parametrize("seconds", [np.nan, None, "1"])
def test_a_deadline_that_is_none_is_refused(make, seconds):
    client = make({"any": 2})
    for wait in (client.flush, lambda s: client.sample("any", s), lambda s: client.delete("any", [0], s)):
        with pytest.raises(ValueError, match=r"timeout_seconds .*: give the seconds to wait"):
            wait(seconds)
    assert client.flush(np.float32(100))


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"capacity": 1.5}, "--capacity 1.5 makes no sense: it has to be a whole number"),
    ({"capacity": 10**13}, "--capacity 10,000,000,000,000 does not fit"),
    ({"max_gb": np.nan}, "--max-gb nan makes no sense"), ({"max_gb": -1.0}, "--max-gb -1.0 makes no sense"),
    ({"eviction_period_batches": 0}, "--eviction-period-batches 0 makes no sense"),
    ({"priority_exponent": -1.0}, "--priority-exponent -1.0 makes no sense"),
    ({"importance_exponent": np.nan}, "--importance-exponent nan makes no sense"),
])  # fmt: skip
def test_a_server_in_a_program_checks_its_numbers(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ReplayServer(ReplayConfig(tables=TABLES, **changes))


@pytest.mark.parametrize("port", [70_000, -1, 1.5])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(ConfigError, match=f"port {port}: give a whole number up to 65535"):
        ReplayServer(ReplayConfig(tables=TABLES), actor_port=port)


def test_what_is_too_large_to_come_along_is_fetched(make, monkeypatch):
    fill(make(), 10)
    monkeypatch.setattr(sessions, "MAX_BATCH_BYTES", 300)
    check(make({"any": 10}).sample("any", 100), 10)


def test_unrolls_come_with_their_batch(server, make):
    fill(make(), 10)
    for with_unrolls in (True, False):
        with ReplayClient(server.learner_endpoint, "reader", {"hard": 4}, with_unrolls=with_unrolls) as reader:
            sample, numbers, starts, unrolls = next(reader.unroll_batches("hard", 100))
            assert (numbers == sample.keys).all() and not starts.any() and unrolls.keys() == set(numbers.tolist())
            assert all(unroll.header.first_step == number for number, unroll in unrolls.items())


def test_calls_are_awaited_while_others_go_on(make):
    client = make({"any": 2, "queue": 1})

    async def learn():
        first = await client.sampling("queue", 100)
        return [first.keys.tolist(), *[(await client.sampling("any", 100)).keys.tolist() for _ in range(3)]]

    async def insert():
        for i in range(4):
            await client.inserting(record(i), 1.0, 100)
            await asyncio.sleep(0.01)
        assert await client.flushing(100)

    async def both():
        found = await asyncio.gather(learn(), client.sampling("queue", 100), insert())
        assert await client.deleting("any", [0], 100) == 1 and await client.resetting("any", 100) == 3
        rest = [(await client.sampling("queue", 100)).keys.tolist() for _ in range(2)]
        with pytest.raises(PeerTimeout):
            await client.sampling("queue", 0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.sampling("queue", 100), 0.05)
        return found, rest

    ((first, *batches), second, _), rest = asyncio.run(both())
    assert sorted([first, second.keys.tolist(), *rest]) == [[0], [1], [2], [3]]
    assert all(len(batch) == 2 for batch in batches)


def test_tasks_that_wait_to_insert_are_all_stored(server):
    client = RecordClient(server.endpoints, "records", FIELDS)

    async def insert_all():
        await asyncio.gather(*(client.inserting(record(i), 1.0, 100) for i in range(20)))  # before any welcome
        return await client.flushing(100)

    with client:
        assert asyncio.run(insert_all())
        with ReplayClient(server.learner_endpoint, "reader") as reader:
            assert len(reader.fetch(range(30), 100)) == 20


def test_a_server_that_starts_anew_gets_all_that_a_client_inserts_meanwhile(tmp_path):
    config, ends = ReplayConfig(capacity=1000, tables=TABLES), (0, 0)
    for start in range(3):
        with ReplayServer(config, "127.0.0.1", *ends, journal_dir=tmp_path) as server:
            if not start:
                ends = [int(endpoint.rpartition(":")[2]) for endpoint in server.endpoints]
                client = RecordClient(server.endpoints, "records", FIELDS, {"any": 60})
            for i in range(20 * start, 20 * start + 20):
                client.insert(record(i), 1.0, 100)
            assert client.flush(100)
    with client, ReplayServer(config, "127.0.0.1", *ends, journal_dir=tmp_path):
        check(client.sample("any", 100), 60)


def test_a_descriptor_says_when_a_batch_has_come(make):
    client = make({"any": 1})
    assert not client.has_batch("any")
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ)
        fill(make(), 1)
        end = time.monotonic() + 100
        while not client.has_batch("any") and time.monotonic() < end:
            selector.select(1)
    check(client.sample("any", 0), 1)


def test_threads_that_share_a_client_are_told_and_lose_nothing(make):
    client, told = make(), []

    def insert():
        for i in range(200):
            try:
                client.insert(record(i), 1.0, 100)
            except ApexError as error:
                told.append(str(error))

    threads = [threading.Thread(target=insert) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    finally:
        sys.setswitchinterval(0.005)
    assert client.flush(100)
    assert all("in use by another thread: make a client for each thread" in fault for fault in told), told
    assert client.reset("any", 100) == 800 - len(told)


def test_a_thread_is_told_that_another_one_waits_with_the_client(make):
    client, told = make({"any": 1}), []

    def use(call):
        try:
            call()
        except ApexError as error:
            told.append(str(error))
        return told

    waiting = threading.Thread(target=use, args=[lambda: client.sample("any", 100)])
    waiting.start()
    wait_for(lambda: use(lambda: client.has_batch("any")), 10, "an error")
    fill(make(), 1)
    waiting.join(100)
    assert all("in use by another thread" in fault for fault in told), told


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # which Python 3.12 says to a fork
def test_clients_and_servers_close_once_and_not_in_a_fork(server):
    spec = spec_of(layout_of(FIELDS))
    with (
        RecordClient(server.endpoints, "records", FIELDS, {"any": 1}) as client,
        InsertClient(server.actor_endpoint, "actor", spec, 1) as actor,
    ):
        actor.connect(100)
        fill(client, 1)
        child = os.fork()
        if not child:
            try:
                client.insert(record(1))
            except ApexError as error:
                os._exit(0 if "make another client after the fork" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        fill(client, 1)
    client.close()
    with pytest.raises(ApexError, match="was closed"):
        client.insert(record(1))
    server.close()
    server.close()


def test_a_server_in_a_program_ends_with_its_block_and_keeps_its_journal(tmp_path):
    config = ReplayConfig(capacity=1000, tables=("once=uniform:0:1::1", "stack=lifo:0:1", "any=uniform:0:1"))
    with ReplayServer(config, journal_dir=tmp_path) as server, pytest.raises(ConfigError, match="cannot listen"):
        ReplayServer(config, actor_port=int(server.actor_endpoint.rpartition(":")[2]))
    for i in range(3):
        with ReplayServer(config, journal_dir=tmp_path) as server:
            sizes = ({}, {"once": 6}, {"stack": 4, "any": 5})[i]
            with RecordClient(server.endpoints, "records", FIELDS, sizes, prefetch_batches=1) as client:
                if i == 0:
                    fill(client, 6)
                    client.delete("stack", [0, 5], 100)
                    client.delete("any", [3], 100)
                elif i == 1:
                    check(client.sample("once", 100), 6)
                else:
                    assert client.sample("stack", 100).keys.tolist() == [4, 3, 2, 1]
                    assert sorted(client.sample("any", 100).keys) == [0, 1, 2, 4, 5]
                    assert client.reset("once", 100) == 0


def test_a_server_keeps_as_many_bytes_as_it_was_given():
    config = ReplayConfig(capacity=1000, max_gb=20e-6, tables=("any=uniform:0:1",))
    with ReplayServer(config) as server, RecordClient(server.endpoints, "records", FIELDS, {"any": 4}) as client:
        fill(client, 300)
        with ReplayClient(server.learner_endpoint, "reader") as reader:
            metrics = reader.statistics(100).metrics
        assert 15_000 < metrics["log_bytes"] <= 20_000 and 0.75 < metrics["fill"] <= 1 and metrics["size"] < 300
        client.reset("any", 100)
        fill(client, 4)
        assert sorted(client.sample("any", 100).keys.tolist()) is not None


def test_too_few_bytes_for_a_batch_are_told_with_the_flag_and_a_value():
    config = ReplayConfig(capacity=1000, max_gb=2e-6, tables=("any=uniform:0:1",))
    with ReplayServer(config) as server, RecordClient(server.endpoints, "records", FIELDS, {"any": 64}) as client:
        with pytest.raises(PeerTimeout):
            client.sample("any", 0.05)
        fill(client, 100)
        with pytest.raises(PeerRefused, match=r"any: --max-gb 2e-06 holds \d+ unrolls, .* 64 .*: give .* or more"):
            client.sample("any", 100)
