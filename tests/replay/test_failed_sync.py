"""After a sync that failed the journal is written again from memory before anything else is taken."""

import random

import pytest

from apexrl.errors import JournalError
from apexrl.replay.journal import Journal, first_number_of, new_identity, segment_paths, sync
from apexrl.replay.log import LogEntry, UnrollLog
from apexrl.replay.recovery import recover
from tests.replay.failing_disk import FailingDisk
from tests.replay.records import SMALL_FILE_BYTES, entries, record

FOR_GOOD = 10**6


@pytest.fixture
def disk(monkeypatch):
    return FailingDisk(monkeypatch)


class Writer:
    """A journal and the log beside it, as a replay server holds them."""

    def __init__(self, spec, directory, ring_unrolls=1000, **options):
        self.directory = directory
        self.journal = Journal(directory, new_identity(spec), segment_bytes=SMALL_FILE_BYTES, **options)
        self.log = UnrollLog(ring_unrolls)

    def insert(self, count=1):
        for _ in range(count):
            number = self.log.end_number
            self.journal.append(number, [record(number)])
            self.log.append(LogEntry(*record(number), 1, 0.0))

    def evict(self, count):
        for _ in range(count):
            self.log.evict()
        self.journal.forget_before(self.log.first_number)

    def sync(self):
        """One sync; whether the disk took it."""
        try:
            sync(self.journal.take_unsynced())
            self.journal.synced()
        except JournalError:
            self.journal.distrust()
            return False
        return True

    def assert_kept(self, disk, first=0):
        """A power cut takes nothing from `first` on, and what it leaves is what was inserted."""
        end = self.log.end_number
        assert self.journal.num_bytes == sum(path.stat().st_size for path in segment_paths(self.directory))
        disk.cut_power(self.directory)
        found = {entry.number: entry for entry in recover(self.directory).entries}
        assert [found.get(number) for number in range(first, end)] == entries(range(first, end))


@pytest.fixture
def writer(spec, tmp_path, disk):
    return Writer(spec, tmp_path)


def write_one(writer):
    """Writes one file again, where one has to be; returns whether that was so."""
    if (rewrite := writer.journal.rewrite(writer.log)) is not None:
        rewrite.write()
        writer.journal.rewritten(rewrite)
    return rewrite is not None


def write_again(writer):
    """All steps to a journal that may be trusted; returns their number."""
    steps = 0
    while write_one(writer):
        steps += 1
    return steps


@pytest.mark.parametrize("before", [0, 1, 7])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_what_a_failed_sync_lost_is_written_again(writer, disk, before, count):
    writer.insert(before)
    assert writer.sync()
    writer.insert(count)
    disk.fails = 1
    assert not writer.sync()
    assert writer.journal.unsynced_bytes > 0
    with pytest.raises(JournalError, match="a sync failed"):
        writer.insert()
    write_again(writer)
    assert writer.journal.unsynced_bytes == 0
    writer.insert(3)
    assert writer.sync()
    writer.assert_kept(disk)


def test_no_file_of_a_failed_sync_is_written_any_more(writer, disk, tmp_path):
    writer.insert(3)
    before = {path: path.stat().st_ino for path in segment_paths(tmp_path)}
    disk.fails = 1
    assert not writer.sync()
    write_again(writer)
    assert all(path.stat().st_ino != inode for path, inode in before.items())
    writer.insert()
    assert len(segment_paths(tmp_path)) == len(before) + 1
    assert writer.sync()
    writer.assert_kept(disk)


def test_the_disk_of_these_tests_is_one_that_shows_the_fault(writer, disk, tmp_path):
    writer.insert(2)
    disk.fails = FOR_GOOD
    with pytest.raises(JournalError, match="Input/output error"):
        sync(writer.journal.take_unsynced())
    disk.fails = 0
    sync(writer.journal.take_unsynced())
    disk.cut_power(tmp_path)
    assert recover(tmp_path).entries == []


def test_nothing_is_taken_while_writing_again_fails(writer, disk):
    writer.insert(3)
    disk.fails = FOR_GOOD
    assert not writer.sync()
    for _ in range(2):
        with pytest.raises(JournalError, match="Input/output error"):
            write_again(writer)
        with pytest.raises(JournalError, match="a sync failed"):
            writer.insert()
    disk.fails = 0
    write_again(writer)
    writer.insert()
    assert writer.sync()
    writer.assert_kept(disk)


def test_syncs_while_nothing_is_trusted_do_not_make_it_trusted(writer, disk):
    writer.insert(3)
    disk.fails = 1
    assert not writer.sync()
    assert writer.sync()
    write_again(writer)
    writer.assert_kept(disk)


def test_each_step_writes_one_file(writer, disk, tmp_path):
    writer.insert(12)
    num_files = len(segment_paths(tmp_path))
    disk.fails = 1
    assert not writer.sync()
    assert write_again(writer) == num_files >= 4


def test_what_was_evicted_meanwhile_is_not_written_again(writer, disk, tmp_path):
    writer.insert(12)
    disk.fails = 1
    assert not writer.sync()
    writer.evict(8)
    write_again(writer)
    assert first_number_of(segment_paths(tmp_path)[0]) == 8
    writer.insert()
    assert writer.sync()
    writer.assert_kept(disk, first=8)


@pytest.mark.parametrize("evicted", [1, 3, 8, 11])
@pytest.mark.parametrize("is_written", [True, False])
def test_what_is_evicted_while_it_is_written_again_is_gone(writer, disk, tmp_path, evicted, is_written):
    """The log goes on to let unrolls go while another thread writes a file."""
    writer.insert(12)
    disk.fails = 1
    assert not writer.sync()
    rewrite = writer.journal.rewrite(writer.log)
    if is_written:
        rewrite.write()
    writer.evict(evicted)
    if not is_written:
        rewrite.write()
    writer.journal.rewritten(rewrite)
    write_again(writer)
    writer.insert(5)
    assert writer.sync()
    assert first_number_of(segment_paths(tmp_path)[0]) <= evicted < first_number_of(segment_paths(tmp_path)[1])
    writer.assert_kept(disk, first=evicted)


def test_an_append_that_waits_for_the_disk_trusts_no_failed_sync_either(spec, tmp_path, disk):
    writer = Writer(spec, tmp_path, sync_at_once=True)
    writer.insert(2)
    disk.fails = 1
    with pytest.raises(JournalError, match="Input/output error"):
        writer.insert()
    with pytest.raises(JournalError, match="a sync failed"):
        writer.insert()
    write_again(writer)
    writer.insert(2)
    writer.assert_kept(disk)


def test_a_server_that_ends_after_a_failed_sync_saves_everything(writer, disk):
    writer.insert(7)
    disk.fails = FOR_GOOD
    assert not writer.sync()
    with pytest.raises(JournalError, match="Input/output error"):
        writer.journal.save(writer.log)
    disk.fails = 0
    writer.journal.save(writer.log)
    writer.journal.close()
    writer.assert_kept(disk)


def test_a_sync_whose_outcome_was_not_told_is_not_believed(writer, disk):
    writer.insert(7)
    disk.fails = 1
    with pytest.raises(JournalError):
        sync(writer.journal.take_unsynced())
    writer.journal.save(writer.log)
    writer.assert_kept(disk)


def test_no_descriptor_left_is_an_error_that_loses_nothing(writer, disk, monkeypatch):
    writer.insert(3)
    with monkeypatch.context() as patch:

        def dup(_):
            raise OSError(24, "Too many open files")

        patch.setattr("os.dup", dup)
        with pytest.raises(JournalError, match="Too many open files"):
            writer.journal.take_unsynced()
    writer.journal.distrust()
    write_again(writer)
    writer.assert_kept(disk)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_a_journal_that_takes_appends_again_has_lost_nothing(spec, tmp_path, disk, seed):
    rng, writer = random.Random(seed), Writer(spec, tmp_path, sync_at_once=seed % 3 == 0)
    for _ in range(60):
        disk.fails = int(rng.random() < 0.3)
        try:
            match rng.randrange(5):
                case 0 | 1:
                    writer.insert(rng.randrange(1, 5))
                case 2:
                    writer.sync()
                case 3:
                    writer.evict(rng.randrange(len(writer.log) // 2 + 1))
                case 4:
                    write_one(writer)
        except JournalError:
            writer.journal.distrust()
    disk.fails = 0
    write_again(writer)
    assert writer.sync()
    writer.assert_kept(disk, writer.log.first_number)
