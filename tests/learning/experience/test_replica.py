import contextlib
import dataclasses
from collections import namedtuple
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import zstandard

from apexrl.agents.contract import Transitions, Unrolls
from apexrl.config.commands import LearnerCommand
from apexrl.config.flags import default_command
from apexrl.errors import ConfigError, PeerError, WireError
from apexrl.learning.experience.decoder import Decoder
from apexrl.learning.experience.keeping import Keeping
from apexrl.learning.experience.replica import Replica
from apexrl.learning.experience.sizes import DEVICE_RESERVE_BYTES, bytes_needed
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.lifecycle import Stop
from apexrl.net import wire
from apexrl.net.log_client import LogAppend, LogBatch, LogStart
from apexrl.networks.device_stream import DeviceStream
from apexrl.types import Episode, LogPosition, Sample
from apexrl.unroll import UnrollCodec
from tests.lockstep import TABLE, want

WANTS = (want(1, Transitions(2, 0.99)),)


class Log:
    """Stands for the connection to a server: gives events, keeps what is said."""

    def __init__(self):
        self.events, self.updates, self.num_used, self.waits_for = [], [], 0, ""

    def poll(self, timeout_milliseconds):
        return self.events.pop(0) if self.events else None

    def update_priorities(self, keys, priorities, table):
        assert table == TABLE
        self.updates.append((keys, priorities))

    def batch_used(self, table):
        assert table == TABLE
        self.num_used += 1

    def close(self):
        pass


def log_of(*events):
    log = Log()
    log.events = list(events)
    return log


def append(spec, unroll, number, block=None, params_version=5):
    insert = wire.Insert(
        number,
        "actor",
        0,
        8 * number,
        params_version,
        0.1,
        b"\xff",
        np.ones(8, np.float32).tobytes(),
        (Episode(1.0, 2, 0.1),),
    )
    return LogAppend(number, insert, UnrollCodec(spec).encode(unroll) if block is None else block)


def start(log, spec, ring_unrolls, next_number, continues, granularity="transitions"):
    return LogStart(log, spec, ring_unrolls, next_number, continues, {TABLE: granularity})


def batch_of(keys, weights):
    return LogBatch(TABLE, Sample(np.asarray(keys), np.ones(len(keys)), np.asarray(weights, np.float32)))


def follow(log, counted=LogPosition()):  # noqa: B008
    """Runs a replica until all events are taken."""
    stop = Stop()
    replica = Replica(log, Keeping(WANTS, DeviceStream(torch.device("cpu")), 4), counted, stop)
    log.poll, give = (lambda _: give(_) if log.events else stop.set()), log.poll
    replica.run()
    return replica


def test_batches_follow_the_log(spec, make_unroll):
    log = Log()
    keys = np.array([3, 9])
    log.events = [
        start("log", spec, 4, 0, False),
        *(append(spec, make_unroll(spec, n), n) for n in range(2)),
        batch_of(keys, [1.0, 1.0]),
    ]
    replica = follow(log)
    batch = replica.next_draw(1.0).batches()[TABLE]
    assert np.array_equal(batch.observation[1], make_unroll(spec, 1).frames[1:4])
    assert replica.counted == LogPosition("log", 2, 16)
    assert len(replica.drain_episodes()) == 2 and not replica.drain_episodes()


def test_a_learner_that_comes_back_does_not_count_what_it_had_counted(spec, make_unroll):
    log = Log()
    appends = [append(spec, make_unroll(spec, n), n) for n in range(5)]
    log.events = [start("log", spec, 8, 0, False), *appends]
    replica = follow(log, LogPosition("log", 3, 1000))
    assert replica.counted == LogPosition("log", 5, 1016)
    assert len(replica.drain_episodes()) == 2
    log.events = [start("another log", spec, 8, 0, False), *appends]
    assert follow(log, LogPosition("log", 3, 1000)).counted == LogPosition("another log", 5, 1040)
    mended = dataclasses.replace(start("mended log", spec, 8, 0, False), ancestors=("oldest", "log"))
    log.events = [mended, *appends]
    assert follow(log, LogPosition("log", 3, 1000)).counted == LogPosition("mended log", 5, 1016)


def test_an_unroll_that_cannot_be_decoded_burns_nothing_in_in_place_of_the_one_before(spec, make_unroll):
    """It took the place of an older one, whose number its row must not have any more."""
    store = UnrollStore(spec, 4, [want(1, Unrolls(1))], torch.device("cpu"), 4)
    decoder = Decoder(store)
    for number in range(5):
        made = append(spec, make_unroll(spec, number), number)
        if number == 4:
            content = bytearray(zstandard.ZstdDecompressor().decompress(made.block))
            content[:4] = np.float32(np.nan).tobytes()
            made = dataclasses.replace(made, block=zstandard.compress(bytes(content)))
        with pytest.raises(WireError, match="not finite") if number == 4 else contextlib.nullcontext():
            decoder.add(made, made.insert.header(8))
        if number >= 3:
            batch = store.gather(TABLE, np.array([1]), np.ones(1, np.float32)).batch
            assert batch.weight.tolist() == [1.0 if number == 3 else 0.0, 1.0]
            assert batch.observation.isfinite().all()


def test_an_unroll_that_cannot_be_decoded_is_never_sampled_again(spec, make_unroll):
    log = Log()
    log.events = [
        start("log", spec, 4, 0, False),
        append(spec, make_unroll(spec), 0, block=b"nonsense"),
        append(spec, make_unroll(spec, 1), 1),
        batch_of([3, 9], [0.5, 1.0]),
        batch_of([3, 4], [1.0, 1.0]),
    ]
    replica = follow(log)
    keys, priorities = log.updates[0]
    assert keys.tolist() == list(range(8)) and not priorities.any()
    sample = replica.next_draw(1.0).samples[TABLE]
    assert sample.keys.tolist() == [9] and sample.batch.weight.tolist() == [1.0]
    assert log.num_used == 1  # the second batch had nothing left: another one is asked for
    assert replica.num_undecodable == 1


def test_a_restarted_server_with_the_same_log_costs_no_batch_and_counts_nothing_twice(spec, make_unroll):
    log = Log()
    appends = [append(spec, make_unroll(spec, n), n) for n in range(4)]
    log.events = [
        start("log", spec, 8, 0, False),
        *appends[:2],
        batch_of([3], [1.0]),
        start("log", spec, 8, 2, True),
        *appends[2:],
        batch_of([9, 25], [1.0, 1.0]),
    ]
    replica = follow(log)
    assert replica.counted == LogPosition("log", 4, 32)
    assert [replica.next_draw(1.0).samples[TABLE].keys.tolist() for _ in range(2)] == [[3], [9, 25]]


def test_a_draw_knows_the_version_that_acted_in_each_of_its_unrolls(spec, make_unroll):
    log, versions = Log(), [7, -1, 2**53, 0, 9, 11]
    appends = [append(spec, make_unroll(spec, n), n, params_version=version) for n, version in enumerate(versions)]
    appends[3] = append(spec, make_unroll(spec), 3, block=b"nonsense", params_version=0)
    log.events = [
        start("log", spec, 4, 0, False),
        *appends[:4],
        batch_of([3, 9, 17, 25, 4], [1.0] * 5),
        *appends[4:],
        batch_of([3, 33, 41], [1.0] * 3),
        start("another log", spec, 8, 0, False),
        append(spec, make_unroll(spec), 0, params_version=3),
        batch_of([1], [1.0]),
    ]
    replica = follow(log)
    draws = [replica.next_draw(1.0) for _ in range(3)]
    assert [draw.samples[TABLE].keys.tolist() for draw in draws] == [[3, 9, 17, 4], [33, 41], [1]]
    assert [draw.versions[TABLE].tolist() for draw in draws] == [[7, -1, 2**53, 7], [9, 11], [3]]


def test_priorities_of_another_log_are_not_sent(spec, make_unroll):
    log = Log()
    log.events = [start("log", spec, 8, 0, False), append(spec, make_unroll(spec), 0), batch_of([3], [1.0])]
    replica = follow(log)
    draw = replica.next_draw(1.0)
    log.events = [start("another", spec, 8, 0, False)]
    replica.follow(0)
    replica.update_priorities(draw.generation, TABLE, draw.samples[TABLE].keys, np.ones(1))
    replica.follow(0)
    assert log.updates == [] and log.num_used == 1
    assert not replica.store.holds(TABLE, np.array([3])).any()


def test_a_server_that_holds_something_else_ends_the_learner(spec, make_unroll):
    log = Log()
    other = msgspec.structs.replace(spec, overlap_steps=4)
    log.events = [start("log", spec, 8, 0, False), start("another", other, 8, 0, False)]
    with pytest.raises(PeerError, match="restart the learner"):
        follow(log)


@pytest.mark.parametrize(("missing", "is_taken", "place"), [(0, False, "cuda"), (0, True, "cpu"), (1, False, "cpu")])
def test_frames_that_do_not_fit_the_gpu_go_to_host_memory(monkeypatch, spec, missing, is_taken, place):
    """The memory may also be taken by another process, after we have seen that it is free."""
    device_stream = DeviceStream(torch.device("cpu"))
    device_stream.device = torch.device("cuda")
    needed = bytes_needed(spec, 8, WANTS) + int(DEVICE_RESERVE_BYTES)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (needed - missing, 10 * needed))

    def make(spec, ring_unrolls, wants, device, num_batches, device_stream, normalizer):
        if is_taken and device.type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(device=device, device_stream=device_stream, num_bytes=needed)

    monkeypatch.setattr("apexrl.learning.experience.keeping.UnrollStore", make)
    store = Keeping(WANTS, device_stream, 4).make_store(spec, 8)
    assert (store.device.type, store.device_stream) == (place, device_stream)


def test_frames_that_fit_nowhere_are_refused(monkeypatch, spec):
    free = namedtuple("memory", "available")(bytes_needed(spec, 8, WANTS) - 1)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    with pytest.raises(ConfigError, match="smaller --capacity"):
        follow(log_of(start("log", spec, 8, 0, False)))


@pytest.mark.parametrize(
    ("given", "learners", "shards", "each"), [(0, 1, 1, 0), (6, 1, 1, 6), (0, 1, 2, 4), (6, 1, 2, 3), (0, 2, 2, 2)]
)
def test_the_stores_of_a_host_share_its_memory(monkeypatch, given, learners, shards, each):
    """Each takes it as it fills, so the first ones would leave too little for the others only hours later."""
    monkeypatch.setattr("apexrl.memory._left_by_groups", lambda process: [8 * 10**9])
    monkeypatch.setattr("psutil.virtual_memory", lambda: namedtuple("memory", "available")(9 * 10**9))
    command = default_command(LearnerCommand)
    learning = dataclasses.replace(command.learning, num_learners=learners, memory_gb=float(given))
    stream = DeviceStream(torch.device("cpu"))
    assert Keeping.of(dataclasses.replace(command, learning=learning), stream, shards).memory_gb == each


def test_a_server_with_another_capacity_gets_another_store(spec, make_unroll):
    log = Log()
    log.events = [
        start("log", spec, 4, 0, False),
        append(spec, make_unroll(spec, 0), 0),
        start("log", spec, 8, 0, False),
        append(spec, make_unroll(spec, 0), 0),
        batch_of([3], [1.0]),
    ]
    replica = follow(log)
    assert replica.store.ring_unrolls == 8
    assert replica.next_draw(1.0).samples[TABLE].keys.tolist() == [3]
