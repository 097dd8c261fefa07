"""Real clients of a real server never hold each other up: a learner's demands tell when it has used up a table."""

import threading
import time

import pytest

from apexrl.net.insert_client import InsertClient
from apexrl.net.log_client import LogBatch, LogClient
from apexrl.net.replay_client import ReplayClient
from apexrl.unroll import UnrollCodec

DEADLINE_SECONDS = 1000.0  # ends only what hangs


def act_until(stopped, server, spec, header, make_unroll):
    """The body of an actor's thread."""
    actor, block = InsertClient(server.actor_endpoint, "actor", spec, 4), UnrollCodec(spec).encode(make_unroll(spec))
    actor.connect(10, stopped)
    number = 0
    while not stopped():
        number += actor.insert(header(8 * number), block, 1000, stopped)
    actor.close()


def update(client, held, count, meanwhile=lambda: None):
    """Makes so many updates, each with a batch of every table."""
    deadline, done = time.monotonic() + DEADLINE_SECONDS, 0
    while done < count:
        assert time.monotonic() < deadline, f"{done} of {count} updates, waits for {client.waits_for}"
        event = client.poll(20)
        if isinstance(event, LogBatch):
            held[event.table] += 1
        while all(held.values()) and done < count:
            done += 1
            for table in held:
                held[table] -= 1
                client.batch_used(table)
        meanwhile()


@pytest.mark.parametrize("prefetch", [1, 3, 8])
def test_a_learner_goes_on_after_a_reader_of_its_queue_has_left(start_server, spec, header, make_unroll, prefetch):
    with start_server(tables=("queue=fifo", "old=uniform:1:4")) as server:
        ended = threading.Event()
        arguments = ended.is_set, server, spec, header, make_unroll
        acting = threading.Thread(target=act_until, args=arguments)
        acting.start()
        held = {"queue": 0, "old": 0}
        learner = LogClient(server.learner_endpoint, "l", {"queue": 2, "old": 2}, prefetch)
        try:
            update(learner, held, 10)
            thief, taken = ReplayClient(server.learner_endpoint, "thief", {"queue": 1}), []

            def steal():
                while thief.has_batch("queue"):
                    taken.extend(thief.sample("queue", 10).keys)

            while len(taken) < 60:
                update(learner, held, 1, steal)
            thief.close()
            update(learner, held, 100)
        finally:
            ended.set()
            acting.join(DEADLINE_SECONDS)
            learner.close()
