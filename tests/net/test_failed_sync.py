"""A replay server whose disk loses a sync: what it has acknowledged is on the disk before it takes more."""

import contextlib
import errno
from pathlib import Path

import pytest

from apexrl.net import InsertClient, wire
from apexrl.replay.recovery import recover
from tests.net.peers import Peers, block_of, only
from tests.replay.failing_disk import FailingDisk
from tests.system.processes import wait_for


@pytest.fixture
def disk(monkeypatch):
    return FailingDisk(monkeypatch)


def sequences_in(directory):
    return [wire.decode_insert(entry.message).sequence for entry in recover(directory).entries]


def insert_all(client, header, spec, numbers):
    for i in numbers:
        client.insert(header(i * spec.unroll_starts), block_of(spec, i), 60)
    assert client.flush(60)


def test_what_was_acknowledged_before_a_failed_sync_is_on_the_disk_before_more_is_taken(
    spec, tmp_path, disk, header, start_server, caplog
):
    with start_server(journal_dir=tmp_path, journal_flush_seconds=0.05) as server:
        client = InsertClient(server.actor_endpoint, "a", spec, 1)
        with contextlib.closing(client):
            client.connect(60)
            insert_all(client, header, spec, range(3))
            disk.fails = 2
            insert_all(client, header, spec, [3])
            wait_for(lambda: "inserts are refused" in caplog.text, 60, "a sync that fails")
            insert_all(client, header, spec, range(4, 8))
            wait_for(lambda: server.service.open_log.replay.journal.unsynced_bytes == 0, 60, "a sync")
            disk.cut_power(tmp_path)
            assert sequences_in(tmp_path) == list(range(8))
    assert caplog.text.count("can be written again") == 1


@pytest.mark.parametrize("seconds", [0.05, 1000.0])
def test_a_server_that_is_stopped_after_a_failed_sync_leaves_everything_on_the_disk(
    spec, tmp_path, disk, header, start_server, seconds
):
    with start_server(journal_dir=tmp_path, journal_flush_seconds=seconds) as server:
        client = InsertClient(server.actor_endpoint, "a", spec, 1)
        with contextlib.closing(client):
            client.connect(60)
            insert_all(client, header, spec, range(3))
            disk.fails = 1
    disk.cut_power(tmp_path)
    assert sequences_in(tmp_path) == list(range(3))


def test_a_disk_that_does_not_even_tell_sizes_is_tried_again(spec, tmp_path, monkeypatch):
    """As a file system does that has shut itself down, or whose server is gone."""
    peers = Peers(spec, tmp_path)
    peers.hello(b"a", streams=10)
    peers.store(b"a", 0)
    peers.service.open_log.journal_failed("the disk did not take the journal")
    looked, stat = [], Path.stat

    def fail(path, **options):
        if path.name.startswith("unrolls-"):
            looked.append(path)
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", fail)
        peers.try_journal()
    assert looked and "Input/output error" in peers.service.open_log.actors.journal_fault
    peers.try_journal()
    peers.store(b"a", 1)
    assert peers.log.end_number == 2


def test_inserts_are_refused_while_the_disk_does_not_take_the_old_ones(spec, tmp_path, disk):
    peers = Peers(spec, tmp_path)
    peers.hello(b"a", streams=10)
    for sequence in range(3):
        peers.store(b"a", sequence)
    peers.service.open_log.journal_failed("the disk did not take the journal")
    disk.fails = 2
    for _ in range(2):
        peers.try_journal()
        peers.insert(b"a", 3)
        peers.say("actor", b"a", wire.Heartbeat())
        assert only(peers.heard(b"a"), wire.Acknowledge)[-1].waits_for == "journal"
    assert peers.log.end_number == 3
    peers.try_journal()
    assert wire.Stranger() in peers.heard(b"a")
    peers.hello(b"a", streams=10, first=3)
    peers.store(b"a", 3)
    assert peers.acknowledged(b"a") == 4
