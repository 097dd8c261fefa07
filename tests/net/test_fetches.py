"""Unrolls that are fetched: what a call leaves behind when its time is up, and when it asks again."""

import asyncio
import types

import numpy as np
import pytest

from apexrl.errors import PeerTimeout
from apexrl.net import InsertClient, ReplayClient, calls, replay_client, wire
from apexrl.unroll import UnrollCodec
from tests.net.peers import TABLE, hear
from tests.system.processes import wait_for


@pytest.fixture
def queue(start_server, spec, header, make_unroll):
    """A server with a queue of 12 unrolls."""
    with start_server(tables=("queue=fifo:0:1",)) as server, InsertClient(server.actor_endpoint, "a", spec, 1) as actor:
        actor.connect(20)
        for i in range(12):
            actor.insert(header(8 * i), UnrollCodec(spec).encode(make_unroll(spec)), 20)
        assert actor.flush(20)
        yield server


def test_a_batch_whose_time_is_up_is_the_next_one_with_what_has_come(queue):
    found = []

    def has_come():
        try:
            found.append(reader.sample_unrolls("queue", 0))
        except PeerTimeout:
            return False
        return True

    with ReplayClient(queue.learner_endpoint, "reader", {"queue": 2}) as reader:
        for _ in range(6):
            wait_for(has_come, 20, "a batch")
    assert np.concatenate([batch.numbers for batch in found]).tolist() == list(range(12))
    assert all(set(batch.unrolls) == set(batch.numbers.tolist()) for batch in found)


def test_a_batch_for_which_nobody_waits_any_more_is_the_next_one(queue):
    with ReplayClient(queue.learner_endpoint, "reader", {"queue": 2}) as reader:
        steps = iter(reader.sampling_unrolls("queue", 20))
        wait_for(lambda: next(steps) and reader._fetches, 20, "a question for unrolls")
        steps.close()  # as the cancelling of a task does
        found = [reader.sample_unrolls("queue", 20).numbers.tolist() for _ in range(6)]
    assert found == [[i, i + 1] for i in range(0, 12, 2)] and not reader._fetches


def test_a_flush_without_time_comes_to_its_end(start_server, spec, header, make_unroll):
    with start_server() as server, InsertClient(server.actor_endpoint, "a", spec, 1) as actor:
        actor.connect(20)
        actor.insert(header(), UnrollCodec(spec).encode(make_unroll(spec)), 20)
        wait_for(lambda: actor.flush(0), 20, "the acknowledgement")


def test_an_awaited_call_leaves_the_programs_own_reader_of_the_descriptor(queue):
    async def use():
        loop = asyncio.get_running_loop()
        with ReplayClient(queue.learner_endpoint, "reader", {"queue": 2}) as reader:
            loop.add_reader(reader.fileno(), lambda: None)
            await reader.deleting("queue", [11], 20)
            assert loop.remove_reader(reader.fileno())

    asyncio.run(use())


def subscribed(by_hand, client, spec, log="log", continues=False):
    request = hear(by_hand, client._client, wire.Subscribe).request
    by_hand.say(wire.Subscribed(request, log, 0, continues, spec, 10, 9, (0,), ("transitions",)))


def test_nothing_is_asked_again_while_answers_come(by_hand, spec, context, monkeypatch):
    now = [0.0]
    for module in (replay_client, calls):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    client = ReplayClient(by_hand.endpoint, "reader", {TABLE: 4}, context=context)
    subscribed(by_hand, client, spec)
    steps, asked = iter(client.fetching(range(5), 100)), []

    def step_until(is_done, seconds=0.0):
        def step():
            next(steps)
            asked.extend(m.numbers for m in by_hand.heard() if isinstance(m, wire.Fetch))
            return is_done()

        now[0] += seconds
        wait_for(step, 20, "a question or an answer")

    step_until(lambda: asked)
    for number in range(4):
        by_hand.say(wire.Fetched(0, number, False), b"", b"")
        step_until(lambda: client._fetches[0].heard_seconds == now[0], 1.5)
    assert asked == [(0, 1, 2, 3, 4)]
    step_until(lambda: len(asked) > 1, 2.5)
    assert asked == [(0, 1, 2, 3, 4), (4,)]
    steps.close()
    client.close()
