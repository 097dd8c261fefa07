"""A counting environment through the real actor and replay processes; the test itself is the learner."""

import threading
import time

import numpy as np
import psutil
import pytest

from apexrl.net.log_client import LogAppend, LogBatch, LogClient, LogStart
from apexrl.net.parameter_channel import ParameterPublisher
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import encode_parameters
from apexrl.types import StreamSpec
from apexrl.unroll import UnrollCodec
from tests.lockstep import ALGORITHM, identity_of, make_updater
from tests.system.processes import ROOT, Process, wait_for

ENV = "tests.system.counting_env:Counting-v0"
K = 8
NUM_ENVS = 3


class Reader:
    """Follows the log like a learner and keeps every unroll, by log."""

    def __init__(self, port):
        self.client = LogClient(f"tcp://127.0.0.1:{port}", f"reader-{time.monotonic_ns()}", {"transitions": 16}, 2)
        self.logs = []
        self.num_batches = 0
        self.codec = None

    def close(self):
        self.client.close()

    def follow(self):
        """Takes some of what is there."""
        for _ in range(500):
            event = self.client.poll(20)
            if event is None:
                break
            if isinstance(event, LogStart):
                self.codec = UnrollCodec(event.spec)
                if not event.continues:
                    self.logs.append({})
            elif isinstance(event, LogAppend):
                assert event.number not in self.logs[-1]
                self.logs[-1][event.number] = (event.insert, self.codec.decode(event.block))
            elif isinstance(event, LogBatch):
                keys = event.sample.keys
                assert set((keys // K).tolist()) <= self.logs[-1].keys()
                self.num_batches += 1
                self.client.update_priorities(keys, np.ones(len(keys)))
                self.client.batch_used()
        return self.num_unrolls

    def has_read(self, count, log):
        """Whether so many unrolls of that log have come."""
        self.follow()
        return len(self.logs) > log and len(self.logs[log]) > count

    @property
    def num_unrolls(self):
        return sum(len(log) for log in self.logs)

    def streams(self, logs=None):
        """The unrolls of each stream in the order of the log, of all lives or of some."""
        found = {}
        for log in self.logs if logs is None else logs:
            for number in sorted(log):
                insert, unroll = log[number]
                found.setdefault((insert.actor, insert.stream), []).append((insert, unroll))
        return found


def check(unrolls, gaps_allowed, first_step=0):
    """Every step from the first on is there once, in order; returns the number of steps that are missing."""
    missing, expected = 0, first_step
    for insert, unroll in unrolls:
        assert insert.first_step >= expected, "a step came twice, or late"
        missing += insert.first_step - expected
        expected = insert.first_step + K
        counts = unroll.frames[:, 1]
        assert (counts == insert.first_step + 1 + np.arange(len(counts))).all()
        # The frame that begins an episode says so itself, and the step that gave it is no transition.
        assert (unroll.frames[:, 0] == unroll.starts).all()
        header = insert.header(K)
        assert (header.valid == ~unroll.starts[1 : K + 1]).all() and ((header.priorities > 0) == header.valid).all()
    assert gaps_allowed or not missing
    return missing


@pytest.fixture
def world(tmp_path, free_ports):
    """Parameters are published; the ports, and ways to start a replay and an actor."""
    actor_port, batch_port, parameter_port, metrics_port = free_ports(4)
    spec = StreamSpec(ENV, (2,), "float32", 1, 2, 1, unroll_starts=K, overlap_steps=ALGORITHM.n_steps)
    publisher = ParameterPublisher("127.0.0.1", parameter_port)
    thread = threading.Thread(target=publisher.run)
    thread.start()
    header = ParametersHeader(0, *identity_of(spec))
    publisher.publish(encode_parameters(header, make_updater(spec).parameters()[0]))
    wires = [
        *("--actor-port", actor_port, "--batch-port", batch_port),
        *("--parameter-port", parameter_port, "--metrics-port", metrics_port),
    ]

    class World:
        @staticmethod
        def replay(journal_dir="off"):
            flags = ["--journal-dir", journal_dir]
            flags += ["--capacity", 10**6, "--min-size-to-sample", 100, "--samples-per-insert", 1]
            return Process([ROOT / "replay.py", *wires, *flags], tmp_path / "replay.txt")

        @staticmethod
        def actor():
            flags = ["--env", ENV, "--unroll-starts", K, "--num-workers", 1, "--environments-per-worker", NUM_ENVS]
            path = {"PYTHONPATH": str(ROOT)}
            return Process([ROOT / "actor.py", *wires, *flags], tmp_path / "actor.txt", path)

        reader = Reader(batch_port)

        learner = publisher

    yield World
    World.reader.close()
    publisher.close()
    thread.join()


def test_no_step_is_doubled_reordered_or_lost(world):
    reader = world.reader
    with world.actor() as actor, world.replay():  # the actor comes before the server
        wait_for(lambda: reader.follow() > 300 and reader.num_batches > 20, 60, "unrolls and batches")
        actor.signal(15)
        actor.popen.wait(200)
        reader.follow()
        streams = reader.streams()
        assert len(streams) == NUM_ENVS
        for unrolls in streams.values():
            check(unrolls, gaps_allowed=False)
        assert actor.popen.returncode == 0
        assert "not acknowledged" not in actor.text()


def test_a_killed_replay_costs_what_was_in_flight_and_nothing_else(world):
    reader = world.reader
    with world.actor() as actor:
        for life in range(3):
            with world.replay() as replay:
                wait_for(lambda: reader.has_read(100, life), 60, f"unrolls of life {life}")
                replay.kill()
        with world.replay():
            wait_for(lambda: reader.has_read(100, 3), 60, "unrolls of the last life")
            actor.signal(15)
            actor.popen.wait(200)
            reader.follow()
    assert len(reader.logs) == 4
    streams = reader.streams()
    assert len(streams) == NUM_ENVS  # the actor lived through it all
    for log in reader.logs:
        for unrolls in reader.streams([log]).values():
            check(unrolls, gaps_allowed=False, first_step=unrolls[0][0].first_step)
    for unrolls in streams.values():
        # Memory only: each kill loses some unrolls that the server had acknowledged but not yet sent on. Unrolls that
        # it had sent on but not acknowledged are in the log of the next life too.
        steps = {insert.first_step for insert, _ in unrolls}
        assert max(steps) + K - K * len(steps) <= 3 * 64 * K


def test_a_killed_replay_with_a_journal_loses_nothing(world, tmp_path):
    reader = world.reader
    with world.actor() as actor:
        for life in range(3):
            with world.replay(tmp_path / "journal") as replay:
                wait_for(lambda: reader.has_read(100 * (life + 1), 0), 60, f"unrolls of life {life}")
                replay.kill()
        with world.replay(tmp_path / "journal"):
            wait_for(lambda: reader.has_read(400, 0), 60, "unrolls of the last life")
            actor.signal(15)
            actor.popen.wait(200)
            reader.follow()
    assert len(reader.logs) == 1  # the same log in all lives: nothing had to be read again
    (log,) = reader.logs
    assert sorted(log) == list(range(len(log)))
    streams = reader.streams()
    assert len(streams) == NUM_ENVS
    for unrolls in streams.values():
        check(unrolls, gaps_allowed=False)
    assert "not acknowledged" not in actor.text()


def test_a_killed_actor_loses_only_what_it_had_not_sent(world):
    reader = world.reader
    with world.replay():
        for life in range(2):
            with world.actor() as actor:
                wait_for(lambda: reader.follow() and len(reader.streams()) == NUM_ENVS * (life + 1), 60, "its streams")
                before = reader.num_unrolls
                wait_for(lambda: reader.follow() > before + 100, 60, "unrolls")
                actor.kill()
        reader.follow()
    streams = reader.streams()
    assert len(streams) == 2 * NUM_ENVS
    for unrolls in streams.values():
        check(unrolls, gaps_allowed=False)


@pytest.mark.timeout(2000)
def test_an_actor_that_lost_replay_and_learner_neither_spins_nor_floods_its_log(world):
    with world.actor() as actor:
        with world.replay() as replay:
            wait_for(lambda: world.reader.has_read(10, log=0), 60, "unrolls")
            world.learner.close()
            replay.kill()
        process = psutil.Process(actor.popen.pid)

        def is_quiet():
            """For 4 seconds, once everything that may wait unsent does."""
            used, lines = sum(process.cpu_times()[:2]), actor.text().count("\n")
            time.sleep(4)
            return sum(process.cpu_times()[:2]) - used < 0.8 and actor.text().count("\n") - lines <= 1

        wait_for(is_quiet, 60, "an actor that waits")
        with world.replay():
            wait_for(lambda: world.reader.has_read(10, log=1), 60, "unrolls after the restart")
        assert actor.popen.poll() is None
