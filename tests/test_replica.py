import numpy as np
import torch

from apexrl.lifecycle import Stop
from apexrl.net import wire
from apexrl.net.replay_client import LogAppend, LogStart
from apexrl.replica import Replica
from apexrl.types import Episode, LogPosition, Sample
from apexrl.unroll import UnrollCodec


class Log:
    """Stands for the connection to a server: gives events, keeps what is said."""

    def __init__(self):
        self.events, self.updates, self.num_taken, self.waits_for = [], [], 0, ""

    def poll(self, timeout_milliseconds):
        return self.events.pop(0) if self.events else None

    def update_priorities(self, keys, priorities):
        self.updates.append((keys, priorities))

    def take(self):
        self.num_taken += 1

    def close(self):
        pass


def append(spec, unroll, number, block=None):
    insert = wire.Insert(
        number, "actor", 0, 8 * number, 5, 0.1, np.ones(8, np.float32).tobytes(), (Episode(1.0, 2, 0.1),)
    )
    return LogAppend(number, insert, UnrollCodec(spec).encode(unroll) if block is None else block)


def follow(log, counted=LogPosition()):  # noqa: B008
    """Runs a replica until all events are taken."""
    stop = Stop()
    replica = Replica(log, 0.99, torch.device("cpu"), 4, counted, stop)
    log.poll, give = (lambda _: give(_) if log.events else stop.set()), log.poll
    replica.run()
    return replica


def test_batches_follow_the_log(spec, make_unroll):
    log = Log()
    keys = np.array([3, 9])
    log.events = [
        LogStart("server", spec, 4, 0, False),
        *(append(spec, make_unroll(spec, n), n) for n in range(2)),
        Sample(keys, np.ones(2), np.ones(2, np.float32)),
    ]
    replica = follow(log)
    batch = replica.next_batch(1.0)
    assert np.array_equal(batch.observation[1], make_unroll(spec, 1).frames[1:4])
    assert replica.counted == LogPosition("server", 2, 16)
    assert len(replica.take_episodes()) == 2 and not replica.take_episodes()


def test_a_learner_that_comes_back_does_not_count_what_it_had_counted(spec, make_unroll):
    log = Log()
    appends = [append(spec, make_unroll(spec, n), n) for n in range(5)]
    log.events = [LogStart("server", spec, 8, 0, False), *appends]
    replica = follow(log, LogPosition("server", 3, 1000))
    assert replica.counted == LogPosition("server", 5, 1016)
    assert len(replica.take_episodes()) == 2
    log.events = [LogStart("another life", spec, 8, 0, False), *appends]
    assert follow(log, LogPosition("server", 3, 1000)).counted == LogPosition("another life", 5, 1040)


def test_an_unroll_that_cannot_be_decoded_is_never_sampled_again(spec, make_unroll):
    log = Log()
    log.events = [
        LogStart("server", spec, 4, 0, False),
        append(spec, make_unroll(spec), 0, block=b"nonsense"),
        append(spec, make_unroll(spec, 1), 1),
        Sample(np.array([3, 9]), np.ones(2), np.array([0.5, 1.0], np.float32)),
        Sample(np.array([3, 4]), np.ones(2), np.ones(2, np.float32)),
    ]
    replica = follow(log)
    keys, priorities = log.updates[0]
    assert keys.tolist() == list(range(8)) and not priorities.any()
    batch = replica.next_batch(1.0)
    assert batch.keys.tolist() == [9] and batch.weight.tolist() == [1.0]
    assert log.num_taken == 1  # the second batch had nothing left: another one is asked for
    assert replica.num_undecodable == 1
