"""A replay server whose disk takes its time: nobody waits for it but who asked for that."""

import functools

import pytest

from apexrl.net import InsertClient, ReplayClient, wire
from apexrl.replay.journal import Journal, segment_paths
from apexrl.replay.recovery import recover
from tests.net.peers import TABLE, block_of
from tests.replay.failing_disk import FailingDisk


@pytest.fixture
def disk(monkeypatch):
    """One on which each append begins a file."""
    monkeypatch.setattr("apexrl.net.served_log.Journal", functools.partial(Journal, segment_bytes=1))
    return FailingDisk(monkeypatch)


@pytest.fixture
def server(start_server, tmp_path, disk):
    with start_server(journal_dir=tmp_path, journal_flush_seconds=0.02, min_size_to_sample=1) as server:
        yield server
        disk.go_on()


@pytest.fixture
def client(server, spec):
    with InsertClient(server.actor_endpoint, "a", spec, 10) as client:
        client.connect(60)
        yield client


@pytest.fixture
def insert(client, spec, header):
    """Inserts an unroll of a number."""
    return lambda i: client.insert(header(i * spec.unroll_starts), block_of(spec, i), 60)


def assert_whole(directory, spec, count):
    found = [wire.decode_insert(entry.message).first_step for entry in recover(directory).entries]
    assert found == [i * spec.unroll_starts for i in range(count)]


def test_inserts_are_acknowledged_while_the_sync_of_a_full_file_waits(disk, client, insert, spec, tmp_path):
    insert(0)
    assert client.flush(60)  # the first one waits until the identity of the log is on the disk
    disk.stop()
    for i in range(1, 5):
        insert(i)
        assert client.flush(60)
        assert disk.has_waiter.wait(60)
        assert len(segment_paths(tmp_path)) == i + 1
    disk.go_on()
    assert_whole(tmp_path, spec, 5)


@pytest.mark.parametrize("fault", ["sync", "append"])
def test_readers_go_on_while_a_disk_that_failed_is_tried(disk, server, client, insert, spec, tmp_path, fault):
    for i in range(3):
        insert(i)
    assert client.flush(60)
    if fault == "sync":  # all is written again
        disk.stops_at_fault, disk.fails = True, 1
    else:

        def writev(*_):
            disk.stop()
            patch.undo()
            raise OSError(28, "No space left on device")

        patch = pytest.MonkeyPatch()
        patch.setattr("os.writev", writev)
    insert(3)
    assert disk.has_waiter.wait(60)
    with ReplayClient(server.learner_endpoint, "reader", {TABLE: 2}) as reader:
        assert len(reader.fetch(range(3), 60)) == 3 and len(reader.sample(TABLE, 60).keys) == 2
    disk.go_on()
    insert(4)
    assert client.flush(60)
    assert_whole(tmp_path, spec, 5)
