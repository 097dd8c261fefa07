"""Batches that came ahead: what a client takes out of a table is in none of those that it hands out afterwards."""

import contextlib

import numpy as np
import pytest

from apexrl.config.sections import ReplayConfig
from apexrl.net import InsertClient, RecordClient, ReplayClient
from apexrl.net.replay_server import ReplayServer
from apexrl.unroll import UnrollCodec
from tests.system.processes import wait_for

TABLES = ("hard=priority:0:1", "queue=fifo:0:1")


@contextlib.contextmanager
def reading(table, **options):
    """A reader of 12 records, which has taken a batch of 4, and has the next one."""
    config = ReplayConfig(capacity=1000, tables=TABLES)
    with ReplayServer(config) as server, RecordClient(server.endpoints, "r", {"id": "int64"}, {table: 4}) as client:
        fill(client, 0, 12)
        yield client, client.sample(table, 100).keys.tolist()


def fill(client, first, count):
    for i in range(first, first + count):
        client.insert({"id": i}, 1.0, 100)
    assert client.flush(100)


def sampled(client, table, count):
    """The keys of so many batches, one after the other."""
    keys = []
    for _ in range(count):
        batch = client.sample(table, 100)
        assert batch.data["id"].tolist() == batch.keys.tolist()
        assert len(batch.keys) == len(batch.weights) == len(batch.probabilities) > 0
        keys.append(batch.keys.tolist())
    return keys


def test_those_of_a_reset_are_dropped():
    with reading("hard") as (client, _):
        client.reset("hard", 100)
        fill(client, 12, 6)
        assert set(np.concatenate(sampled(client, "hard", 6))) <= set(range(12, 18))


@pytest.mark.parametrize("table", ["hard", "queue"])
def test_those_of_deleted_records_are_without_them(table):
    with reading(table) as (client, first):
        wait_for(lambda: client.has_batch(table), 20, "the next batch")
        gone = {*first, 5, 6, 7}
        assert client.delete(table, sorted(gone), 100) >= 3 - 3 * (table == "queue")
        assert not gone & set(np.concatenate(sampled(client, table, 2)))


def test_what_a_queue_has_handed_out_comes_but_for_what_was_deleted():
    with reading("queue") as (client, first):
        wait_for(lambda: client.has_batch("queue"), 20, "the next batch")
        assert first == [0, 1, 2, 3] and client.delete("queue", [5, 6, 7], 100) == 0
        assert sampled(client, "queue", 2) == [[4], [8, 9, 10, 11]]


@contextlib.contextmanager
def reading_unrolls(start_server, spec, header, unrolls, **options):
    """A reader of these unrolls in a queue, which has the batch of the first four."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(start_server(tables=("queue=fifo:0:1",)))
        actor = stack.enter_context(InsertClient(server.actor_endpoint, "a", spec, 1))
        actor.connect(20)
        for i, unroll in enumerate(unrolls):
            actor.insert(header(8 * i), UnrollCodec(spec).encode(unroll), 20)
        assert actor.flush(20)
        reader = stack.enter_context(ReplayClient(server.learner_endpoint, "r", {"queue": 4}, **options))
        wait_for(lambda: reader.has_batch("queue"), 20, "a batch")
        yield reader


@pytest.mark.parametrize("with_unrolls", [True, False])
def test_unrolls_come_with_the_keys_that_are_left(start_server, spec, header, make_unroll, with_unrolls):
    unrolls = [make_unroll(spec) for _ in range(8)]
    with reading_unrolls(start_server, spec, header, unrolls, with_unrolls=with_unrolls) as reader:
        reader.delete("queue", [0, 2], 20)
        batch = reader.sample_unrolls("queue", 20)
        assert batch.numbers.tolist() == [1, 3] == sorted(batch.unrolls)
        for number, found in batch.unrolls.items():
            assert found.header.first_step == 8 * number
            assert (found.unroll.frames == unrolls[number].frames).all()
        assert reader.sample_unrolls("queue", 20).numbers.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize(("gone", "left"), [([0, 2], [1, 3]), ([0, 1, 2, 3], [4, 5, 6, 7])])
def test_what_is_deleted_while_a_call_waits_for_unrolls_is_in_no_batch(
    start_server, spec, header, make_unroll, gone, left, is_cancelled
):
    with reading_unrolls(start_server, spec, header, [make_unroll(spec) for _ in range(8)]) as reader:
        sampling = iter(reader.sampling_unrolls("queue", 20))
        wait_for(lambda: next(sampling) and reader._fetches, 20, "a question for unrolls")
        reader.delete("queue", gone, 20)
        if is_cancelled:
            sampling.close()  # as the cancelling of a task does
        batch = reader.sample_unrolls("queue", 20) if is_cancelled else finished(sampling)
        assert batch.numbers.tolist() == left == sorted(batch.unrolls)
        assert not reader._fetches and not reader._taken


def test_a_reset_takes_the_batch_of_a_call_that_waits_for_unrolls(start_server, spec, header, make_unroll):
    with reading_unrolls(start_server, spec, header, [make_unroll(spec) for _ in range(8)]) as reader:
        sampling = iter(reader.sampling_unrolls("queue", 20))
        wait_for(lambda: next(sampling) and reader._fetches, 20, "a question for unrolls")
        reader.reset("queue", 20)
        sampling.close()
        assert not reader.has_batch("queue") and not reader._fetches


def finished(steps):
    """The result of a call that has begun."""
    try:
        while True:
            connection, seconds = next(steps)
            connection.wait(seconds)
    except StopIteration as end:
        return end.value
