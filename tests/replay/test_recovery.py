import json
import os

import pytest

from apexrl.errors import ConfigError
from apexrl.replay import journal as journals
from apexrl.replay.journal import IDENTITY_FILE, Journal, identity_of, new_identity, segment_paths
from apexrl.replay.recovery import recover
from apexrl.replay.segment import FORMAT, pack, pack_header, scan
from tests.replay.failing_disk import FailingDisk
from tests.replay.records import SMALL_FILE_BYTES, entries, fill, header_of, last_file, open_again


def test_a_torn_end_is_cut_off_and_appends_go_on_behind_it(journal, tmp_path):
    fill(journal, range(4))
    path = last_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    journal = open_again(tmp_path)
    fill(journal, range(3, 6))
    recovered = recover(tmp_path)
    assert recovered.entries == entries(range(6))
    assert recovered.identity.lives == (0, 3, 6)
    assert not list(tmp_path.glob("*.damaged"))


@pytest.mark.parametrize("lost", ["record", "header", "file", "header and record"])
def test_damage_in_the_middle_costs_what_it_hits(journal_of_files, tmp_path, lost):
    fill(journal_of_files, range(8))
    path = sorted(tmp_path.glob("unrolls-*.log"))[1]
    data = bytearray(path.read_bytes())
    inside = [entry.number for entry in scan(path.read_bytes()).entries]
    position = data.index(b"message")
    if "header" in lost:
        data[0] ^= 1
    if "record" in lost:
        data[position] ^= 1
    before = bytes(data)
    path.write_bytes(data)
    if lost == "file":
        path.unlink()
    gone = inside[: {"header": 0, "file": None}.get(lost, 1)]
    left = entries(number for number in range(8) if number not in gone)
    recovered = recover(tmp_path)
    assert recovered.entries == left and recovered.end_number == 8
    aside = path.with_name(path.name + ".damaged")
    assert aside.exists() == (lost != "file") and (lost == "file" or aside.read_bytes() == before)
    journal = Journal(tmp_path, recovered.identity)
    fill(journal, range(8, 10))
    aside.unlink(missing_ok=True)
    recovered = recover(tmp_path)  # the mended journal is whole now
    assert recovered.entries == left + entries([8, 9]) and not aside.exists()


def test_a_file_without_a_whole_record_ends_none_that_is_written_later(journal_of_files, tmp_path):
    """A power cut took the unsynced end of a file and of the next one's first record."""
    fill(journal_of_files, range(3))
    *_, older, newest = sorted(tmp_path.glob("unrolls-*.log"))
    first = scan(newest.read_bytes()).entries[0].number
    assert first == 2 and scan(older.read_bytes()).entries[-1].number == 1
    for path in (older, newest):
        path.write_bytes(path.read_bytes()[:-3])
    journal = open_again(tmp_path)
    fill(journal, range(1, 8))
    recovered = recover(tmp_path)
    assert recovered.entries == entries(range(8)) and recovered.end_number == 8


def test_records_that_an_actor_made_up_replace_no_file(spec, tmp_path):
    """Its record was torn, and its block looks like one of an older file."""
    journal = Journal(tmp_path, new_identity(spec), segment_bytes=SMALL_FILE_BYTES)
    fill(journal, range(4))
    journal.append(4, [(b"torn", b"".join(pack(0, b"forged", b"")))])
    path = last_file(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"torn", b"TORN"))
    assert recover(tmp_path).entries == entries(range(4))
    assert recover(tmp_path).entries == entries(range(4)), "and none is lost at the next start"


def test_a_damaged_end_of_the_last_file_gives_its_numbers_to_others(journal, tmp_path):
    fill(journal, range(4))
    path = last_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(b"message 1")] ^= 1
    data[data.index(b"message 3")] ^= 1
    path.write_bytes(data)
    journal = open_again(tmp_path)
    fill(journal, [3])
    recovered = recover(tmp_path)
    assert recovered.entries == entries([0, 2, 3])
    assert recovered.identity.lives == (0, 3, 4)


@pytest.mark.parametrize("hit", [(0,), (3,), (1, 2), (0, 2, 5)])
def test_a_kill_while_a_file_is_mended_loses_nothing(journal, tmp_path, monkeypatch, hit):
    fill(journal, range(8))
    path = last_file(tmp_path)
    data = bytearray(path.read_bytes())
    for number in hit:
        data[data.index(b"message %d" % number)] ^= 1
    left = entries(number for number in range(8) if number not in hit)
    for num_steps in range(20):  # changes of the directory until the kill
        path.write_bytes(data)
        with monkeypatch.context() as patch:
            steps = iter(range(num_steps))
            for name in ("link", "rename", "replace", "unlink"):
                patch.setattr(os, name, killed_after(steps, getattr(os, name)))
            try:
                recover(tmp_path)
                return
            except Killed:
                pass
        assert recover(tmp_path).entries == left
        assert path.with_name(path.name + ".damaged").read_bytes() == data
        for other in tmp_path.glob("unrolls-*"):
            other.unlink()
    pytest.fail("it never ended")


class Killed(BaseException):
    pass


def killed_after(steps, function):
    """The function, until the steps are used up."""

    def call(*args, **options):
        if next(steps, None) is None:
            raise Killed
        return function(*args, **options)

    return call


@pytest.mark.parametrize(("bounds", "wanted"), [((8 * 5,), 5), ((8 * 5 - 7,), 5), ((10**6, 150), 5), ((1, 1), 1)])
def test_files_that_are_older_than_what_is_wanted_stay_unread(journal_of_files, tmp_path, bounds, wanted):
    """An unroll has 8 starts, and about 30 bytes."""
    fill(journal_of_files, range(40))
    oldest = min(tmp_path.glob("unrolls-*.log"))
    oldest.write_bytes(oldest.read_bytes()[:-3])
    found = recover(tmp_path, *bounds)
    assert wanted <= len(found.entries) < wanted + 8 and found.end_number == 40
    assert found.entries == entries(range(40 - len(found.entries), 40))
    assert oldest.exists() and not list(tmp_path.glob("*.damaged"))
    assert len(recover(tmp_path).entries) == 39 and list(tmp_path.glob("*.damaged"))


def test_numbers_that_an_actor_made_up_move_no_others(spec, tmp_path):
    """Its record was torn, and its block looks like records: one in the place of its own, and one far away."""
    for forged in (0, 1, 2, 7, 10**12, 2**64 - 2):
        directory = tmp_path / str(forged)
        directory.mkdir()
        journal = Journal(directory, new_identity(spec), segment_bytes=SMALL_FILE_BYTES)
        fill(journal, [0])
        journal.append(1, [(b"torn", b"".join(pack(forged, b"forged", b"") + pack(forged + 1, b"forged", b"")))])
        fill(journal, range(2, 6))
        for path in directory.glob("unrolls-*.log"):
            path.write_bytes(path.read_bytes().replace(b"torn", b"TORN"))
        recovered = recover(directory)
        assert [entry for entry in recovered.entries if entry.message != b"forged"] == entries([0, 2, 3, 4, 5])
        assert {entry.number for entry in recovered.entries} <= set(range(6)) and recovered.end_number == 6
        assert recover(directory).entries == recovered.entries


def test_a_file_of_a_newer_version_is_refused(journal, tmp_path, spec):
    fill(journal, range(2))
    header = journals.pack_header(journals.SegmentHeader(FORMAT + 1, "log", 0, 2, spec))
    (tmp_path / "unrolls-0000000000000002.log").write_bytes(header)
    with pytest.raises(ConfigError, match=f"has format {FORMAT + 1}, this version reads format {FORMAT}"):
        recover(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"{", b"{}", b'{"format":2}'])
def test_a_lost_log_file_costs_no_unroll_but_the_identity(journal, spec, tmp_path, content):
    fill(journal, range(4))
    before = recover(tmp_path).identity
    path = tmp_path / IDENTITY_FILE
    path.unlink() if content is None else path.write_bytes(content)
    recovered = recover(tmp_path)
    assert recovered.entries == entries(range(4))
    assert recovered.identity.spec == spec and recovered.identity.log != before.log
    assert (recovered.identity.lives, recovered.identity.ancestors) == ((0, 4), (before.log,))
    fill(Journal(tmp_path, recovered.identity), [4])
    again = recover(tmp_path)
    assert (again.identity.log, again.identity.lives) == (recovered.identity.log, (0, 4, 5))
    assert again.entries == entries(range(5))


def test_a_log_file_of_an_impossible_stream_says_nothing(journal, spec, tmp_path):
    """Where no header tells another one."""
    fill(journal, range(1))
    journal.close()
    path = tmp_path / IDENTITY_FILE
    found = json.loads(path.read_bytes())
    found["spec"]["unroll_starts"] = 0
    path.write_text(json.dumps(found))
    for file in segment_paths(tmp_path):
        file.unlink()
    assert recover(tmp_path) is None


@pytest.mark.parametrize("field", ["unroll_starts", "log"])
def test_a_log_file_that_is_not_that_of_the_headers_costs_no_unroll(journal, spec, tmp_path, field):
    """It has no checksum, and they have. One wrong character in it had all unrolls rejected, and deleted."""
    fill(journal, range(4))
    path = tmp_path / IDENTITY_FILE
    found = json.loads(path.read_bytes())
    if field == "log":
        found["log"] = found["log"][:-1] + ("0" if found["log"][-1] != "0" else "1")
    else:
        found["spec"][field] += 1
    path.write_text(json.dumps(found))
    recovered = recover(tmp_path)
    assert recovered.entries == entries(range(4)) and recovered.identity.spec == spec
    assert identity_of(tmp_path).spec == spec and len(list(tmp_path.glob("log.json*.damaged"))) == 1


def test_the_journal_of_a_newer_version_is_refused(journal, tmp_path):
    fill(journal, range(2))
    path = tmp_path / IDENTITY_FILE
    path.write_bytes(path.read_bytes().replace(b'"format":2', b'"format":3'))
    with pytest.raises(ConfigError, match=f"has format {FORMAT + 1}, this version reads format {FORMAT}"):
        recover(tmp_path)


def test_a_power_cut_that_takes_the_newest_unrolls_ends_the_replicas_that_had_them(journal, tmp_path):
    fill(journal, range(6))
    size = last_file(tmp_path).stat().st_size
    fill(journal, range(6, 10))
    os.truncate(last_file(tmp_path), size)
    identity = recover(tmp_path).identity
    assert identity.lives == (0, 6)
    assert identity.continues(identity.log, 0, 6) and not identity.continues(identity.log, 0, 7)


def test_unrolls_of_an_unknown_log_are_not_written_over(journal, tmp_path):
    fill(journal, range(6))
    journal.close()
    (tmp_path / "log.json").unlink()
    damaged = bytearray(last_file(tmp_path).read_bytes())
    damaged[30] ^= 255
    last_file(tmp_path).write_bytes(damaged)
    with pytest.raises(ConfigError, match="holds unrolls, but not whose"):
        recover(tmp_path)
    assert last_file(tmp_path).read_bytes() == damaged


def test_a_file_without_unrolls_is_removed(journal, tmp_path):
    fill(journal, range(6))
    journal.close()
    (tmp_path / "unrolls-0000000000000009.log").write_bytes(pack_header(header_of(last_file(tmp_path))))
    assert recover(tmp_path).end_number == 6
    assert [path.name for path in tmp_path.glob("unrolls-*")] == ["unrolls-0000000000000000.log"]


def test_each_damage_of_a_file_is_kept_under_a_name_of_its_own(journal, tmp_path):
    fill(journal, range(9))
    (path,), kept = tmp_path.glob("unrolls-*.log"), []
    for number in (6, 4, 2):
        path.write_bytes(path.read_bytes().replace(b"message %d" % number, b"massage %d" % number))
        kept.append(path.read_bytes())
        recovered = recover(tmp_path)
    assert recovered.entries == entries([0, 1, 3, 5, 7, 8])
    assert sorted(aside.read_bytes() for aside in tmp_path.glob("*.damaged")) == sorted(kept)


def test_a_file_that_cannot_be_synced_is_written_anew(journal, tmp_path, monkeypatch, caplog):
    fill(journal, range(4))
    disk = FailingDisk(monkeypatch)
    disk.fails = 1
    recover(tmp_path)
    assert "cannot be synced (Input/output error)" in caplog.text
    recover(tmp_path)
    disk.cut_power(tmp_path)
    assert recover(tmp_path).entries == entries(range(4))
