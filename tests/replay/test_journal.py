import os
import resource
import stat

import pytest

from apexrl.errors import ConfigError, JournalError
from apexrl.replay import journal as journals
from apexrl.replay.journal import IDENTITY_FILE, PROBE_BYTES, Journal, Lock, LogIdentity, new_identity, sync
from apexrl.replay.recovery import recover
from apexrl.replay.segment import FORMAT
from tests.few_files import no_files_left
from tests.replay.records import SMALL_FILE_BYTES, entries, failing, fill, names, open_again, record


def test_what_is_appended_is_recovered_without_a_close(journal, spec, tmp_path):
    fill(journal, range(5))
    journal.append(5, [record(number) for number in range(5, 9)])
    recovered = recover(tmp_path)
    assert recovered.entries == entries(range(9)) and recovered.end_number == 9
    assert (recovered.identity.spec, recovered.identity.lives) == (spec, (0, 9))
    assert names(tmp_path) == [IDENTITY_FILE, "unrolls-0000000000000000.log"]


def test_an_empty_directory_holds_no_journal(tmp_path):
    assert recover(tmp_path) is None


def test_a_life_in_which_nothing_was_stored_leaves_no_trace(journal, tmp_path):
    assert recover(tmp_path) is None
    fill(journal, range(3))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    first = recover(tmp_path)
    assert recover(tmp_path) == first and first.identity.lives == (0, 3)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_each_life_begins_where_the_last_ended(journal, tmp_path):
    fill(journal, range(3))
    for life in range(1, 4):
        journal = open_again(tmp_path)
        fill(journal, range(3 * life, 3 * life + 3))
    recovered = recover(tmp_path)
    assert recovered.entries == entries(range(12))
    assert recovered.identity.lives == (0, 3, 6, 9, 12)
    assert len(list(tmp_path.glob("unrolls-*.log"))) == 4


def test_files_are_rotated_and_forgotten_whole(journal_of_files, tmp_path):
    fill(journal_of_files, range(12))
    files = sorted(tmp_path.glob("unrolls-*.log"))
    assert len(files) >= 4
    firsts = [journals.first_number_of(path) for path in files]
    for number in range(13):
        journal_of_files.forget_before(number)
        kept = sorted(tmp_path.glob("unrolls-*.log"))
        # A file goes when the next one begins at or before the number; the last one stays.
        assert kept == [p for i, p in enumerate(files) if i == len(files) - 1 or firsts[i + 1] > number]
        assert journal_of_files.num_bytes == sum(path.stat().st_size for path in kept)
    fill(journal_of_files, range(12, 20))
    recovered = recover(tmp_path)
    assert recovered.entries == entries(range(firsts[-1], 20)) and recovered.end_number == 20


def test_the_files_of_earlier_lives_are_forgotten_too(journal_of_files, tmp_path):
    fill(journal_of_files, range(6))
    journal = open_again(tmp_path, segment_bytes=SMALL_FILE_BYTES)
    fill(journal, range(6, 12))
    assert journal.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("unrolls-*.log"))
    journal.forget_before(8)
    assert recover(tmp_path).entries[0].number == 8


def test_a_replica_is_continued_as_long_as_its_numbers_mean_the_same(spec):
    identity = LogIdentity(FORMAT, "log", (0, 100, 80), spec)
    assert identity.life == 2
    assert identity.continues("log", 2, 1000)
    assert not identity.continues("another", 2, 0)
    assert not identity.continues("log", 3, 0)
    # The power went in life 1: the numbers from 80 on were lost, and given to others.
    assert identity.continues("log", 1, 80) and not identity.continues("log", 1, 81)
    assert identity.continues("log", 0, 80) and not identity.continues("log", 0, 81)


def test_a_second_owner_is_refused_until_the_first_leaves(tmp_path):
    directory = tmp_path / "a" / "journal"
    lock = Lock(directory)
    with pytest.raises(ConfigError, match=f"--journal-dir {directory} belongs to a replay server that runs"):
        Lock(directory)
    lock.close()
    Lock(directory).close()


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path, spec):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Lock(tmp_path / "file" / "journal")
    with pytest.raises(JournalError, match="cannot be written"):
        fill(Journal(tmp_path / "file", new_identity(spec)), [0])


class FullDisk:
    """Takes so many writes, then half of one, and nothing any more."""

    def __init__(self, monkeypatch, num_writes=0):
        self.num_writes, self.write = num_writes, os.write
        monkeypatch.setattr("os.write", self)
        monkeypatch.setattr("os.writev", lambda descriptor, pieces: self(descriptor, b"".join(pieces)))

    def __call__(self, descriptor, data):
        self.num_writes -= 1
        if self.num_writes >= 0:
            return self.write(descriptor, data)
        if self.num_writes == -1 and len(data) > 1:
            return self.write(descriptor, data[: len(data) // 2])
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("num_records", [1, 2, 5])
@pytest.mark.parametrize("before", [0, 3])
def test_nothing_is_left_of_an_append_that_failed(journal, tmp_path, monkeypatch, num_records, before):
    fill(journal, range(before))
    with monkeypatch.context() as patch:
        FullDisk(patch)
        for _ in range(3):
            with pytest.raises(JournalError, match="No space left"):
                journal.append(before, [(b"failed", b"failed" * 20)] * num_records)
    assert journal.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("unrolls-*.log"))
    fill(journal, range(before, before + 3))
    assert recover(tmp_path).entries == entries(range(before + 3))
    assert not list(tmp_path.glob("*.damaged"))


def test_nothing_is_left_of_a_file_that_could_not_be_begun(journal_of_files, tmp_path, monkeypatch):
    fill(journal_of_files, range(2))
    for num_writes in range(2):
        with monkeypatch.context() as patch:
            FullDisk(patch, num_writes)
            with pytest.raises(JournalError):
                fill(journal_of_files, range(2, 9))
    recovered = recover(tmp_path)
    assert recovered.entries == entries(range(2)) and recovered.end_number == 2
    fill(open_again(tmp_path), range(2, 9))
    assert recover(tmp_path).entries == entries(range(9))


def test_a_life_that_cannot_be_written_down_stores_nothing(journal, tmp_path, monkeypatch):
    fill(journal, range(2))
    journal = open_again(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(journals, "write_durably", failing(28, "No space left on device"))
        with pytest.raises(JournalError, match="No space left"):
            fill(journal, [2])
        assert recover(tmp_path).entries == entries(range(2))
    fill(journal, range(2, 4))
    recovered = recover(tmp_path)
    assert recovered.entries == entries(range(4)) and recovered.identity.lives == (0, 2, 4)


@pytest.mark.parametrize("num_records", [1, 2, 4])
def test_a_failed_append_that_cannot_be_taken_back_never_hides_what_was_stored(
    journal, tmp_path, monkeypatch, num_records
):
    fill(journal, range(3))
    with monkeypatch.context() as patch:
        FullDisk(patch)
        patch.setattr("os.ftruncate", failing(5, "Input/output error"))
        with pytest.raises(JournalError):
            journal.append(3, [(b"failed", b"failed" * 20)] * num_records)
    fill(journal, range(3, 8))
    recovered = recover(tmp_path)
    assert recovered.entries == entries(range(8))


def test_an_append_that_begins_a_file_waits_for_no_disk(journal_of_files, monkeypatch, tmp_path):
    fill(journal_of_files, range(1))  # the first one of a life writes log.json
    before = len(names(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", failing(5, "Input/output error"))
        patch.setattr("os.fdatasync", failing(5, "Input/output error"))
        fill(journal_of_files, range(1, 12))
    assert len(names(tmp_path)) > before + 1
    sync(journal_of_files.take_unsynced())
    journal_of_files.synced()
    assert journal_of_files.unsynced_bytes == 0


def test_a_disk_that_fails_under_a_sync_is_an_error(journal, monkeypatch):
    fill(journal, range(2))
    descriptors = journal.take_unsynced()
    assert len(descriptors) == 2  # the file, and the directory with its name
    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", failing(5, "Input/output error"))
        with pytest.raises(JournalError, match="Input/output error"):
            sync(descriptors)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])


def test_a_sync_for_which_no_file_is_left_is_an_error_and_comes_later(journal):
    fill(journal, range(3))
    with no_files_left():
        with pytest.raises(JournalError, match=r"cannot be synced \(Too many open files\)"):
            journal.take_unsynced()
        assert journal.unsynced_bytes > 0
    synced = journal.take_unsynced()
    assert len(synced) == 2  # the file, and the directory with its name
    sync(synced)
    journal.synced()
    fill(journal, range(3, 6))
    with no_files_left():
        journal.close()


def test_what_is_to_be_synced_is_given_until_the_disk_has_it(journal_of_files):
    assert journal_of_files.take_unsynced() == []
    fill(journal_of_files, range(7))
    assert journal_of_files.unsynced_bytes > 0
    descriptors = journal_of_files.take_unsynced()
    assert len(descriptors) >= 3
    fill(journal_of_files, range(7, 8))
    sync(descriptors)  # in any thread: the journal has gone on meanwhile
    journal_of_files.synced()
    assert journal_of_files.unsynced_bytes > 0
    sync(journal_of_files.take_unsynced())
    journal_of_files.synced()
    assert journal_of_files.unsynced_bytes == 0 and journal_of_files.take_unsynced() == []


def test_an_append_may_be_made_to_wait_for_the_disk(spec, tmp_path, monkeypatch):
    journal = Journal(tmp_path, new_identity(spec), sync_at_once=True)
    synced = []
    fdatasync = os.fdatasync
    monkeypatch.setattr("os.fdatasync", lambda descriptor: synced.append(fdatasync(descriptor)))
    fill(journal, range(3))
    assert len(synced) == 3 and journal.unsynced_bytes == 0
    monkeypatch.setattr("os.fdatasync", failing(5, "Input/output error"))
    with pytest.raises(JournalError):
        fill(journal, [3])
    monkeypatch.undo()
    assert recover(tmp_path).entries == entries(range(3))


@pytest.mark.parametrize("call", ["os.fsync", "os.open", "pathlib.Path.replace"])
def test_a_disk_is_asked_whether_it_takes_something_again(journal, tmp_path, monkeypatch, call):
    before = names(tmp_path)
    assert journal.is_writable()
    with monkeypatch.context() as patch:
        patch.setattr(call, failing(28, "No space left on device"))
        assert not journal.is_writable()
    assert names(tmp_path) == before


def test_a_disk_is_not_writable_while_its_directory_takes_no_new_name(journal, tmp_path, monkeypatch):
    def fail_at_directories(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail_at_directories)
        with pytest.raises(JournalError, match="Input/output error"):
            fill(journal, [0])
        assert not journal.is_writable()
    assert journal.is_writable()
    fill(journal, [0])


def test_a_disk_is_asked_for_as_much_as_it_refused(journal, monkeypatch):
    free_bytes = 3 * PROBE_BYTES
    with monkeypatch.context() as patch:
        FullDisk(patch)
        with pytest.raises(JournalError):
            journal.append(0, [(b"message", bytes(free_bytes))])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, limit[1]))  # a write beyond it fails, as on a full disk
    try:
        assert not journal.is_writable()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert journal.is_writable()


def test_a_close_syncs(journal, tmp_path):
    fill(journal, range(2))
    journal.close()
    assert journal.unsynced_bytes == 0
    journal.close()


def test_a_file_that_cannot_be_deleted_holds_nothing_up(journal_of_files, tmp_path, monkeypatch):
    fill(journal_of_files, range(6))
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", failing(1, "Operation not permitted"))
        journal_of_files.forget_before(4)
    fill(journal_of_files, range(6, 9))
    assert recover(tmp_path).end_number == 9
