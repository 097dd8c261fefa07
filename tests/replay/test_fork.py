"""A forked log: the same unrolls and the same batches, another name, and no file that one log changes for the other."""

import contextlib
import functools
import os
import shutil

import msgspec
import numpy as np
import pytest

from apexrl.config.sections import ReplayConfig
from apexrl.errors import ConfigError
from apexrl.net import wire
from apexrl.net.service import ReplayService
from apexrl.replay.fork import fork_log
from apexrl.replay.journal import (
    IDENTITY_FILE,
    SNAPSHOT_FILE,
    Journal,
    Lock,
    read_entries,
    read_identity,
    segment_paths,
)
from apexrl.replay.recovery import recover
from apexrl.replay.snapshot import load_snapshot, write_snapshot
from apexrl.types import LogPosition
from tests.net.peers import TABLE, Peers, block_of, insert_of

NUM_UNROLLS = 40


@pytest.fixture
def source(spec, tmp_path, monkeypatch):
    """The journal of a server that was stopped: several files of two lives, and a snapshot of learned priorities."""
    monkeypatch.setattr("apexrl.net.served_log.Journal", functools.partial(Journal, segment_bytes=1500))
    directory = tmp_path / "source"
    peers = Peers(spec, directory)
    peers.hello(b"a", streams=50)
    rng = np.random.default_rng(0)
    for sequence in range(NUM_UNROLLS):
        peers.store(b"a", sequence, rng.random(8) + 0.1)
        if sequence == 25:
            peers.restart()
            peers.hello(b"a", streams=50, first=26)
    peers.subscribe(b"l")
    keys = np.arange(100)
    update = wire.UpdatePriorities(0, keys.tobytes(), (keys % 7 + 0.5).astype(np.float32).tobytes())
    peers.say("learner", b"l", update)
    write_snapshot(directory / SNAPSHOT_FILE, peers.service.open_log.replay.snapshot())
    peers.crash()
    assert len(segment_paths(directory)) > 4
    return directory


def state_of(directory):
    """Everything that a fork must not change."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}


def batches_of(directory, seed=5, count=100):
    """Keys and weights of the first batches of a server over a journal, whose priorities change between them."""
    config = ReplayConfig(capacity=8000, min_size_to_sample=16, samples_per_insert=0.0, tables=(f"{TABLE}=priority",))
    service = ReplayService(config, seed, directory)
    replay = service.open_log.replay
    drawn = []
    for _ in range(count):
        sample = replay.sample(TABLE, 32)
        drawn.append(np.concatenate([sample.keys, sample.weights]))
        replay.tables[TABLE].update_priorities(sample.keys, (sample.keys % 11 + 0.1).astype(np.float32))
    service.close()
    return np.array(drawn)


def test_forks_draw_the_batches_that_the_resumed_original_draws(source, tmp_path):
    shutil.copytree(source, tmp_path / "copy")
    before = state_of(source)
    for name in ("one", "two"):
        fork_log(source, tmp_path / name)
    assert state_of(source) == before
    expected = batches_of(tmp_path / "copy")
    for name in ("one", "two"):
        np.testing.assert_array_equal(batches_of(tmp_path / name), expected)
    fork_log(source, tmp_path / "other")
    assert not np.array_equal(batches_of(tmp_path / "other", seed=6), expected)


TABLES = ("queue=fifo", "uniform=uniform:0", "newest=uniform:0::20", "elite-insertion@20=elite:0::20")


def unrolls_of(directory, count=100):
    """Numbers of the first batches of IMPALA's tables over a journal; a queue hands each unroll out once."""
    config = ReplayConfig(capacity=8000, min_size_to_sample=16, samples_per_insert=0.0, tables=TABLES)
    service = ReplayService(config, 5, directory)
    drawn = {table: [] for table in service.open_log.replay.tables}
    for _ in range(count):
        for table, numbers in drawn.items():
            if service.open_log.replay.tables[table].can_sample(4):  # a queue, only what it had not handed out
                numbers.append(service.open_log.replay.sample(table, 4).keys.tolist())
        worst = np.array(drawn["elite-insertion@20"][-1])
        service.open_log.replay.tables["elite-insertion@20"].update_priorities(
            worst, (worst % 11 + 0.1).astype(np.float32)
        )
    service.close()
    return drawn


def test_forks_draw_the_unrolls_that_the_resumed_original_draws(source, tmp_path):
    shutil.copytree(source, tmp_path / "copy")
    fork_log(source, tmp_path / "fork")
    expected = unrolls_of(tmp_path / "copy")
    assert unrolls_of(tmp_path / "fork") == expected
    assert all(len(set(map(tuple, numbers))) > 50 for table, numbers in expected.items() if table != "queue")


def test_a_fork_shares_all_files_but_the_newest_and_has_a_name_of_its_own(source, tmp_path):
    old_name, name = fork_log(source, tmp_path / "fork")
    *shared, newest = segment_paths(source)
    assert all(path.samefile(tmp_path / "fork" / path.name) for path in shared)
    copy = tmp_path / "fork" / newest.name
    assert not newest.samefile(copy) and copy.read_bytes() == newest.read_bytes()
    original, forked = read_identity(source), read_identity(tmp_path / "fork")
    assert (old_name, name) == (original.log, forked.log) and old_name != name
    assert forked == msgspec.structs.replace(original, log=name, ancestors=(old_name,))
    assert not forked.continues(old_name, 0, 1) and not original.continues(name, 0, 1)
    assert load_snapshot(tmp_path / "fork" / SNAPSHOT_FILE).log == name
    fork_log(tmp_path / "fork", tmp_path / "again")
    assert read_identity(tmp_path / "again").ancestors == (old_name, name)


def test_a_checkpoint_from_before_the_log_was_mended_can_be_forked(source, tmp_path):
    """A lost log.json costs a log its name, and no unroll its number."""
    before = read_identity(source).log
    (source / IDENTITY_FILE).write_bytes(b"{")
    with contextlib.closing(Journal(source, recover(source).identity)) as journal:
        end = recover(source).end_number
        journal.append(end, [(b"", b"")])
    assert read_identity(source).log != before
    fork_log(source, tmp_path / "fork", LogPosition(before, 5))
    assert recover(tmp_path / "fork").end_number == 5


def test_a_file_system_without_links_gets_copies(source, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    fork_log(source, tmp_path / "fork")
    for path in segment_paths(source):
        copy = tmp_path / "fork" / path.name
        assert not path.samefile(copy) and copy.read_bytes() == path.read_bytes()


def go_on(directory, spec, number):
    """A server's next life: it mends the journal, adds unrolls and evicts the oldest half."""
    recovered = recover(directory)
    journal = Journal(directory, recovered.identity)
    for i in range(recovered.end_number, number):
        journal.append(i, [(wire.encode(insert_of(b"z", i)), block_of(spec, i))])
    journal.forget_before(20)
    journal.close()


def test_neither_log_sees_what_becomes_of_the_other(source, spec, tmp_path):
    with segment_paths(source)[-1].open("ab") as file:
        file.write(b"apxU unfinished")
    fork_log(source, tmp_path / "fork")
    before = state_of(tmp_path / "fork")
    held = [entry.number for entry in read_entries(tmp_path / "fork")]
    assert held == list(range(NUM_UNROLLS))
    go_on(source, spec, 60)
    assert state_of(tmp_path / "fork") == before
    assert max(entry.number for entry in read_entries(source)) == 59
    shared = state_of(source)
    go_on(tmp_path / "fork", spec, 50)
    assert state_of(source) == shared
    assert max(entry.number for entry in read_entries(tmp_path / "fork")) == 49


@pytest.mark.parametrize("end", [1, 17, 26, 33])
def test_a_fork_of_an_earlier_time_ends_there(source, tmp_path, end):
    log = read_identity(source).log
    before = state_of(source)
    fork_log(source, tmp_path / "fork", LogPosition(log, end, 8 * end))
    assert state_of(source) == before
    assert [entry.number for entry in read_entries(tmp_path / "fork")] == list(range(end))
    assert not (tmp_path / "fork" / SNAPSHOT_FILE).exists()
    recovered = recover(tmp_path / "fork")
    assert recovered.end_number == end
    assert recovered.identity.lives == (*(life for life in (0, 26) if life < end), end)


@pytest.mark.parametrize("position", [LogPosition("another", 30), LogPosition("", 0)])
def test_a_time_of_which_nothing_is_left_is_refused(source, tmp_path, position):
    with pytest.raises(ConfigError, match="holds nothing from before unroll 0 any more"):
        fork_log(source, tmp_path / "fork", position)


def test_a_journal_that_is_written_or_has_no_name_is_refused(source, tmp_path):
    lock = Lock(source)
    with pytest.raises(ConfigError, match="belongs to a replay server that runs"):
        fork_log(source, tmp_path / "fork")
    lock.close()
    (source / IDENTITY_FILE).write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"log\.json is missing or damaged: resume that run first"):
        fork_log(source, tmp_path / "fork")
    assert not (tmp_path / "fork").exists()


def test_a_damaged_snapshot_is_left_out(source, tmp_path):
    (source / SNAPSHOT_FILE).write_bytes(b"apxS broken")
    fork_log(source, tmp_path / "fork")
    assert not (tmp_path / "fork" / SNAPSHOT_FILE).exists()
