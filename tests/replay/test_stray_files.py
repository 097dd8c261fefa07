"""Files that a person left in a journal's directory: they cost no unroll, and none of them is lost."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from apexrl.replay.fork import fork_log
from apexrl.replay.journal import IDENTITY_FILE, Journal, held_numbers, new_identity, read_entries, read_identity
from apexrl.replay.recovery import recover
from apexrl.replay.segment import SegmentHeader, pack_header, scan
from apexrl.types import LogPosition
from tests.replay.records import entries, fill, open_again

NUM_UNROLLS = 16
FILE_BYTES = 420  # a header and a few records


def backup_copy(files, outside):
    shutil.copy(files[2], files[2].with_name("unrolls-copy.log"))


def backup_copies_of_all(files, outside):
    for i, path in enumerate(files):
        shutil.copy(path, path.with_name(f"unrolls-{i}.log"))


def backup_cut_short(files, outside):
    files[2].with_name("unrolls-copy.log").write_bytes(files[2].read_bytes()[:-20])


def swapped_names(files, outside):
    files[1].rename(files[1].with_suffix(".tmp"))
    files[3].rename(files[1])
    files[1].with_suffix(".tmp").rename(files[3])


def names_in_a_ring(files, outside):
    held = [path.read_bytes() for path in files]
    for path, data in zip(files, held[1:] + held[:1], strict=True):
        path.write_bytes(data)


def renamed(name):
    def rename(files, outside):
        files[2].rename(files[2].with_name(name))

    return rename


def copied(name):
    def copy(files, outside):
        shutil.copy(files[2], files[2].with_name(name))

    return copy


def hard_link(files, outside):
    os.link(files[-1], files[-1].with_name("unrolls-backup.log"))


def links_to_elsewhere(files, outside):
    for path in (files[1], files[-1]):
        path.rename(outside / path.name)
        path.symlink_to(outside / path.name)


def directories(files, outside):
    for name in ("unrolls-old.log", "unrolls-0000000000000016.log"):
        (files[0].with_name(name) / "notes").mkdir(parents=True)


def pipes(files, outside):
    for name in ("unrolls-pipe.log", "unrolls-0000000000000016.log"):
        os.mkfifo(files[0].with_name(name))


def dangling_links(files, outside):
    for name in ("unrolls-gone.log", "unrolls-0000000000000016.log"):
        files[0].with_name(name).symlink_to(outside / "nothing")


def endless_device(files, outside):
    for name in ("unrolls-zero.log", "unrolls-0000000000000016.log"):
        files[0].with_name(name).symlink_to("/dev/zero")


def notes_of_a_person(files, outside):
    for name in ("unrolls-notes.log", "unrolls-0000000000000016.log", "unrolls-0000000000000001.log"):
        files[0].with_name(name).write_text("which of these may I delete?\n")


def terabytes(files, outside):
    with files[0].with_name("unrolls-big.log").open("wb") as file:
        file.truncate(2**40)


def renamed_beside_notes(files, outside):
    files[0].rename(files[0].with_name("unrolls-old (1).log"))
    files[0].with_name("unrolls-0000000000000001.log").write_text("notes")


def of_another_log(files, outside):
    for name in ("unrolls-other.log", "unrolls-0000000000000016.log", "unrolls-0000000000000001.log"):
        header = scan(files[0].read_bytes()).header
        other = msgspec.structs.replace(header, log="another", first_number=5)
        whole = files[2].read_bytes()
        records = whole[len(pack_header(scan(whole).header)) :]
        files[0].with_name(name).write_bytes(pack_header(other) + records.replace(b"message", b"foreign"))


STRAYS = {
    function.__name__: function
    for function in (
        *(backup_copy, backup_copies_of_all, backup_cut_short, swapped_names, names_in_a_ring, hard_link),
        *(links_to_elsewhere, directories, pipes, dangling_links, endless_device, notes_of_a_person, of_another_log),
        *(terabytes, renamed_beside_notes),
    )
} | {
    "renamed to 0": renamed("unrolls-0.log"),
    "renamed to another number": renamed("unrolls-0000000000000999.log"),
    "renamed by a person": renamed("unrolls-keep this.log"),
    "digits of another script": copied("unrolls-²³.log"),
    "digits of a fullwidth": renamed("unrolls-\uff10\uff10\uff10\uff10.log"),
    "a number too large": renamed("unrolls-99999999999999999999999999.log"),
    "longer zeros": copied("unrolls-00000000000000000000.log"),
}


@pytest.fixture
def journal(spec, tmp_path):
    """Each file takes a few records."""
    return Journal(tmp_path, new_identity(spec), segment_bytes=FILE_BYTES)


@pytest.fixture(params=STRAYS)
def strayed(request, journal, tmp_path):
    """A journal of many files, with others between them."""
    fill(journal, range(NUM_UNROLLS))
    journal.close()
    files = sorted(tmp_path.glob("unrolls-*.log"))
    assert len(files) > 4
    (tmp_path / "outside").mkdir()
    STRAYS[request.param](files, tmp_path / "outside")
    return tmp_path


def contents(directory: Path):
    """The bytes of all files but the one that each life writes anew, and the kinds of what is none."""
    found = set()
    for path in {*directory.rglob("*")} - {directory / IDENTITY_FILE}:
        small = path.is_file() and path.stat().st_size < 10**6
        found.add(path.read_bytes() if small else (path.is_symlink(), path.is_fifo(), path.is_dir()))
    return found


def test_no_unroll_and_no_file_is_lost(strayed):
    before = contents(strayed)
    for life in range(2):
        recovered = recover(strayed)
        assert recovered.entries == entries(range(NUM_UNROLLS)) and recovered.end_number == NUM_UNROLLS, life
        assert before <= contents(strayed)
    journal = open_again(strayed, segment_bytes=FILE_BYTES)
    fill(journal, range(NUM_UNROLLS, 2 * NUM_UNROLLS))
    assert recover(strayed).entries == entries(range(2 * NUM_UNROLLS))
    assert before <= contents(strayed)


def test_files_are_forgotten_by_the_numbers_that_they_hold(strayed):
    journal = open_again(strayed, segment_bytes=FILE_BYTES)
    fill(journal, range(NUM_UNROLLS, NUM_UNROLLS + 4))
    journal.forget_before(9)
    held = [entry.number for entry in recover(strayed).entries]
    assert held == list(range(held[0], NUM_UNROLLS + 4)) and 4 < held[0] <= 9


def test_readers_see_each_unroll_once_and_change_nothing(strayed):
    before = {path: path.lstat().st_mtime_ns for path in strayed.iterdir()}
    assert list(read_entries(strayed)) == entries(range(NUM_UNROLLS))
    assert held_numbers(strayed) == range(NUM_UNROLLS)
    assert {path: path.lstat().st_mtime_ns for path in strayed.iterdir()} == before


@pytest.mark.parametrize("end", [6, None])
def test_a_fork_has_the_unrolls_of_its_time(strayed, tmp_path_factory, end):
    before, fork = contents(strayed), tmp_path_factory.mktemp("fork")
    until = None if end is None else LogPosition(read_identity(strayed).log, end)
    fork_log(strayed, fork, until)
    assert contents(strayed) - {b""} == before - {b""}  # the lock
    expected = entries(range(NUM_UNROLLS if end is None else end))
    assert list(read_entries(fork)) == expected and recover(fork).entries == expected


def test_a_copy_gives_what_damage_took(journal, tmp_path):
    fill(journal, range(NUM_UNROLLS))
    path = sorted(tmp_path.glob("unrolls-*.log"))[2]
    whole = path.read_bytes()
    numbers = [entry.number for entry in scan(whole).entries]
    for hit in numbers:
        path.with_name("unrolls-copy.log").write_bytes(whole)
        path.write_bytes(whole.replace(b"message %d" % hit, b"massage %d" % hit))
        for _ in range(2):
            assert recover(tmp_path).entries == entries(range(NUM_UNROLLS))
        for other in tmp_path.glob("unrolls-*"):
            if set(entry.number for entry in scan(other.read_bytes()).entries) & set(numbers):
                other.unlink()
        path.write_bytes(whole)


def test_a_file_that_takes_the_name_of_the_next_one_is_kept(journal, tmp_path):
    fill(journal, range(4))
    for number in range(4, 12):
        (tmp_path / f"unrolls-{number:016d}.log").write_text(f"note {number}")
    fill(journal, range(4, 12))
    journal.close()
    assert recover(tmp_path).entries == entries(range(12))
    kept = {path.read_text(errors="replace") for path in tmp_path.iterdir()}
    assert {f"note {number}" for number in range(4, 12)} <= kept


def test_each_damaged_identity_is_kept(journal, tmp_path):
    fill(journal, range(4))
    for content in (b"{", b'{"format":2}', b"[" * 100_000, b"\xff"):
        (tmp_path / IDENTITY_FILE).write_bytes(content)
        fill(open_again(tmp_path), [recover(tmp_path).end_number])
    kept = {path.read_bytes() for path in tmp_path.glob("log.json*.damaged")}
    assert kept == {b"{", b'{"format":2}', b"[" * 100_000, b"\xff"}


def test_without_its_identity_a_log_is_that_of_the_files_in_their_places(journal, spec, tmp_path):
    fill(journal, range(6))
    other = SegmentHeader(2, "another", 0, 90, msgspec.structs.replace(spec, env="Other-v0"))
    (tmp_path / "unrolls-other.log").write_bytes(pack_header(other))
    (tmp_path / IDENTITY_FILE).unlink()
    recovered = recover(tmp_path)
    assert recovered.identity.spec == spec and recovered.entries == entries(range(6))
    assert (tmp_path / "unrolls-other.log").read_bytes() == pack_header(other)
