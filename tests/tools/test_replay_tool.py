"""The journal tool over journals that the real classes wrote, whole, damaged and while one is written."""

import errno
import os
import shutil
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest

from apexrl.net import wire
from apexrl.replay import journal as journals
from apexrl.replay import segment
from apexrl.replay.journal import Journal, new_identity
from apexrl.replay.recovery import recover
from apexrl.replay.snapshot import Snapshot, write_snapshot
from apexrl.replay.table import TableState
from apexrl.tools import replay_tool
from apexrl.types import Episode, Field
from apexrl.unroll import UnrollCodec
from tests.system.processes import ROOT, call, wait_for

SMALL_FILE_BYTES = 2000


def tool(*arguments):
    """Returns the exit status and what was printed."""
    return call(replay_tool.main, *arguments)


def tool_beside(*arguments):
    """The same in a process of its own, beside what this one does."""
    command = [sys.executable, "-m", "apexrl", "inspect", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def make_record(spec, make_unroll):
    """Makes the message and the block of unroll i: priorities i + 1 but for one start that is none, and one game."""

    def make(i):
        priorities = np.full(spec.unroll_starts, i + 1, np.float32)
        priorities[3] = 0
        valid = np.packbits(priorities > 0).tobytes()
        game = Episode(float(i), 10, 0.1 if i % 2 else 0.4)
        insert = wire.Insert(i // 2, f"actor-{i % 2}", 0, 8 * (i // 2), i, 0.4, valid, priorities.tobytes(), (game,))
        return wire.encode(insert), UnrollCodec(spec).encode(make_unroll(spec, i))

    return make


@pytest.fixture
def written(tmp_path, spec, make_record):
    """A journal of 20 unrolls in several files, with a snapshot of its table after 10 of them."""
    directory = tmp_path / "journal"
    directory.mkdir()
    identity = new_identity(spec)
    journal = Journal(directory, identity, segment_bytes=SMALL_FILE_BYTES)
    for i in range(20):
        journal.append(i, [make_record(i)])
    journal.close()
    powers = np.repeat(np.arange(1, 11, dtype=np.float32) ** 0.5, spec.unroll_starts)
    state = TableState(70, 32, 0, 0.5, powers.astype(np.float32).tobytes())
    write_snapshot(directory / "priorities.bin", Snapshot(identity.log, 0, 0, 10, {"transitions": state}))
    assert len(files_of(directory)) > 3
    return directory


def files_of(directory):
    return sorted(directory.glob("unrolls-*.log"))


def content_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_inspect_tells_log_files_and_snapshot(written):
    status, text = tool("inspect", written)
    assert status == 0
    identity = journals.read_identity(written)
    for expected in (
        identity.log,
        "Known-v0",
        "field     frame: float32 [13, 2]",
        "field     action: int32 [10]",
        "0 from unroll 0",
        "log 0:10",
        "transitions: 70 transitions inserted, 32 sampled",
    ):
        assert expected in text
    for path in files_of(written):
        assert f"{path.name}  unrolls {int(path.name[8:24])}.." in text and f"{path.stat().st_size} bytes" in text


def test_a_whole_journal_is_well_and_nothing_is_changed(written):
    before = content_of(written)
    status, text = tool("verify", written, "--decode")
    assert (status, text) == (0, f"{len(files_of(written))} files, 20 unrolls, a snapshot: 0 damages\n")
    assert content_of(written) == before


def test_a_table_that_keeps_few_unrolls_is_well(written, spec):
    identity = journals.read_identity(written)
    kept = np.array([1, 4], np.int64)
    state = TableState(10, 6, priorities=np.ones(2, np.float32).tobytes(), numbers=kept.tobytes())
    write_snapshot(written / "priorities.bin", Snapshot(identity.log, 0, 0, 10, {"elite": state}))
    assert tool("verify", written)[0] == 0
    assert "elite: 10 unrolls inserted, 6 sampled" in tool("inspect", written)[1]
    broken = msgspec.structs.replace(state, numbers=kept[:1].tobytes())
    write_snapshot(written / "priorities.bin", Snapshot(identity.log, 0, 0, 10, {"elite": broken}))
    status, text = tool("verify", written)
    assert status == 1 and "table elite with 8 bytes of priorities, not 4" in text


def test_each_damage_is_named_and_nothing_is_mended(written):
    first, second, third = files_of(written)[:3]
    flipped = bytearray(first.read_bytes())
    flipped[-5] ^= 1
    first.write_bytes(flipped)
    second.unlink()
    snapshot = bytearray((written / "priorities.bin").read_bytes())
    snapshot[-1] ^= 1
    (written / "priorities.bin").write_bytes(snapshot)
    before = content_of(written)
    status, text = tool("verify", written)
    assert status == 1 and content_of(written) == before
    entries = segment.scan(bytes(flipped))
    offset, size = entries.damages[0]
    number = int(third.name[8:24])
    assert f"{first.name}: offset {offset}: {size} bytes are no record\n" in text
    assert f"unroll {number}: it comes where unroll {entries.entries[-1].number + 1} belongs\n" in text
    assert f"{third.name}: offset " in text
    assert "priorities.bin: offset 0: " in text and "3 damages" in text


def test_a_file_under_another_name_or_of_another_log_is_damaged(written, spec):
    first, second = files_of(written)[:2]
    first.rename(first.with_name("unrolls-0000000000000001.log"))
    other = segment.SegmentHeader(segment.FORMAT, "another", 0, int(second.name[8:24]), spec)
    header = segment.pack_header(segment.scan(second.read_bytes()).header)
    second.write_bytes(segment.pack_header(other) + second.read_bytes()[len(header) :])
    status, text = tool("verify", written)
    assert status == 1 and "2 damages" in text
    assert "unrolls-0000000000000001.log: offset 0: its header has another first unroll than log.json" in text
    assert f"{second.name}: offset 0: its header has another log than log.json" in text


def test_what_is_no_file_of_unrolls_is_named_and_left_out(written, tmp_path):
    os.mkfifo(written / "unrolls-pipe.log")
    (written / "unrolls-notes.log").write_text("notes")
    shutil.copy(files_of(written)[0], written / "unrolls-copy.log")
    status, text = tool("inspect", written)
    assert status == 0 and "left out  unrolls-notes.log" in text and "left out  unrolls-pipe.log" in text
    status, text = tool("verify", written)
    assert status == 1 and "unrolls-pipe.log: offset 0: this is no file of unrolls" in text
    assert "20 unrolls," in tool("summary", written)[1]
    assert "20 unrolls to" in tool("export", written, "--out", tmp_path / "out.npz")[1]


@pytest.mark.parametrize("cut", [1, 30, 5000])
def test_a_last_record_without_its_end_is_being_written(written, make_record, cut):
    record = b"".join(segment.pack(20, *make_record(20)))
    with files_of(written)[-1].open("ab") as file:
        file.write(record[: min(cut, len(record) - 1)])
    status, text = tool("verify", written)
    assert status == 0 and "being written" in text and "20 unrolls" in text


def test_a_last_record_that_is_wrong_is_damaged(written, make_record):
    record = bytearray(b"".join(segment.pack(20, *make_record(20))))
    record[-1] ^= 1
    with files_of(written)[-1].open("ab") as file:
        file.write(record)
    status, text = tool("verify", written)
    assert status == 1 and f"{len(record)} bytes are no record" in text


def test_a_block_that_does_not_decode_is_found_only_when_asked(written, make_record):
    message, block = make_record(20)
    with files_of(written)[-1].open("ab") as file:
        file.write(b"".join(segment.pack(20, message, block[:-4])))
    assert tool("verify", written)[0] == 0
    status, text = tool("verify", written, "--decode")
    assert status == 1 and "unroll 20: " in text


def test_what_cannot_be_read_is_left_out_of_exports_and_sums(written, make_record, tmp_path):
    message, block = make_record(20)
    with files_of(written)[-1].open("ab") as file:
        file.write(b"".join(segment.pack(20, message, block[:-4])))
        file.write(b"".join(segment.pack(21, b"no insert", block)))
        file.write(b"".join(segment.pack(22, *make_record(22))))
    status, text = tool("export", written, "--numbers", "19:", "--out", tmp_path / "some.npz")
    assert status == 0 and "unroll 20 is left out: " in text and "unroll 21 is left out: " in text
    with np.load(tmp_path / "some.npz") as some:
        assert some["number"].tolist() == [19, 22]
    status, text = tool("summary", written)
    assert status == 0 and "unroll 21 is left out: " in text and "22 unrolls" in text


def test_a_missing_identity_is_a_damage_until_a_server_mends_it(written, make_record):
    (written / "log.json").unlink()
    assert tool("inspect", written)[0] == 0
    status, text = tool("verify", written)
    assert status == 1 and "log.json: " in text
    mended = Journal(written, recover(written).identity)
    mended.append(20, [make_record(20)])  # as the next server does, which replaces the snapshot too
    mended.close()
    (written / "priorities.bin").unlink()
    status, text = tool("verify", written)
    assert status == 0, text


def test_export_gives_back_what_was_inserted(written, tmp_path, spec, make_unroll):
    status, text = tool("export", written, "--numbers", "5:9", "--out", tmp_path / "some.npz")
    assert status == 0, text
    status, text = tool("export", written, "--numbers", "18:", "--out", tmp_path / "each")
    assert status == 0, text
    with np.load(tmp_path / "some.npz") as some:
        assert some["number"].tolist() == [5, 6, 7, 8]
        for i, number in enumerate(some["number"]):
            for name in ("frames", "actions", "rewards", "discounts", "starts"):
                assert np.array_equal(some[name][i], getattr(make_unroll(spec, number), name)), name
        assert some["priorities"][:, 0].tolist() == [6, 7, 8, 9] and some["priorities"][:, 3].tolist() == [0] * 4
        assert (some["valid"] == (some["priorities"] > 0)).all()
        assert some["actor"].tolist() == ["actor-1", "actor-0", "actor-1", "actor-0"]
        assert some["first_step"].tolist() == [16, 24, 24, 32] and some["params_version"].tolist() == [5, 6, 7, 8]
        assert some["episodes"].tolist()[0] == [5, 5, 10, 0.1]
    assert len(list((tmp_path / "each").iterdir())) == 2
    with np.load(tmp_path / "each" / "unroll-0000000000000019.npz") as one:
        assert np.array_equal(one["frames"][0], make_unroll(spec, 19).frames)


def test_a_full_disk_leaves_an_earlier_export_alone(written, tmp_path, monkeypatch):
    out = tmp_path / "out.npz"
    assert tool("export", written, "--out", out)[0] == 0
    before = out.read_bytes()

    def fails(file, **arrays):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", fails)
    status, text = tool("export", written, "--out", out)
    assert status == 75 and f"--out {out} cannot be written (No space left on device): give another" in text
    assert out.read_bytes() == before and [path.name for path in tmp_path.glob("out*")] == ["out.npz"]


def test_one_file_of_more_than_the_memory_holds_is_refused(written, tmp_path, monkeypatch):
    monkeypatch.setattr("apexrl.tools.replay_tool.free_memory_bytes", lambda: 1)
    status, text = tool("export", written, "--out", tmp_path / "all.npz")
    assert status == 2 and "20 unrolls in one file need 0.0 GB of memory" in text and "give a directory, or" in text
    assert tool("export", written, "--out", tmp_path / "each")[0] == 0


def test_a_mistyped_command_is_told_from_a_directory(written, tmp_path, monkeypatch):
    status, text = tool("verfy", written)
    assert status == 2 and "no verfy, neither a command nor a directory: did you mean verify?" in text
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verfy").symlink_to(written)
    assert tool("verfy")[0] == 0
    status, text = tool("export", written, "--out", "/proc/x.npz")
    assert status == 2 and "--out /proc/x.npz cannot be written" in text


def test_a_dataset_that_is_imported_needs_no_env(tmp_path):
    status, text = tool("import", tmp_path / "nothing-v0", "--out", tmp_path / "journal")
    assert status == 2 and "--env" not in text


def test_export_gives_the_extras_and_the_priority_of_an_unroll(tmp_path, spec, make_unroll):
    extras = (Field("log_prob", "step", "float32"), Field("state", "first", "float16", (2,)))
    spec = msgspec.structs.replace(spec, extras=extras, has_unroll_priorities=True)
    identity = new_identity(spec)
    (tmp_path / "journal").mkdir()
    journal = Journal(tmp_path / "journal", identity)
    given = {"log_prob": np.arange(10, dtype=np.float32), "state": np.array([[0.5, -2]], np.float16)}
    block = UnrollCodec(spec).encode(make_unroll(spec)._replace(extras=given))
    insert = wire.Insert(0, "actor", 0, 0, 0, -3.5, b"\xff", np.array([7], np.float32).tobytes())
    journal.append(0, [(wire.encode(insert), block)])
    journal.close()
    assert tool("verify", tmp_path / "journal", "--decode")[0] == 0
    status, text = tool("inspect", tmp_path / "journal")
    assert status == 0 and "field     state: float16 [1, 2], an extra" in text and "1 priorities" in text
    assert tool("export", tmp_path / "journal", "--out", tmp_path / "all.npz")[0] == 0
    with np.load(tmp_path / "all.npz") as found:
        for name, array in given.items():
            assert np.array_equal(found[f"extra_{name}"], array[None]) and found[f"extra_{name}"].dtype == array.dtype
        assert found["priorities"].tolist() == [[7.0]] and found["exploration"].tolist() == [-3.5]


def test_the_summary_is_that_of_what_was_inserted(written, spec, make_record):
    status, text = tool("summary", written)
    records = [make_record(i) for i in range(20)]
    num_bytes, block_bytes = sum(len(m) + len(b) for m, b in records), sum(len(b) for _, b in records)
    assert status == 0
    for line in (
        "20 unrolls, 140 transitions, 2 actors",
        f"{num_bytes / 140:.1f} bytes per transition, compression ratio {20 * spec.unroll_bytes / block_bytes:.2f}",
        "params_version 0..19",
        "episodes in all: 20, mean return 9.5",
        "episodes at exploration 0.1: 10, mean return 10",
        "episodes at exploration 0.4: 10, mean return 9",
        "priorities of transitions: 0 % 1, 10 % 1.9, 50 % 5.5, 90 % 9.1, 100 % 10",
    ):
        assert line in text.splitlines()


def test_what_is_no_journal_is_told(written, tmp_path):
    for arguments in (
        ("inspect", tmp_path),
        ("verify", tmp_path / "nothing"),
        ("summary", files_of(written)[0]),
        ("export", written, "--numbers", "100:", "--out", tmp_path / "x.npz"),
        ("export", written, "--numbers", "1-2", "--out", tmp_path / "x.npz"),
        ("export", written, "--numbers", "\u00b2:", "--out", tmp_path / "x.npz"),
    ):
        status, text = tool(*arguments)
        assert status == 2 and len(text.splitlines()) == 1, text
    assert not (tmp_path / "x.npz").exists()
    identity = msgspec.structs.replace(journals.read_identity(written), format=99)
    (written / "log.json").write_bytes(msgspec.json.encode(identity))
    status, text = tool("verify", written)
    assert status == 2 and "format 99" in text


def test_a_journal_that_is_written_and_evicted_meanwhile_is_well(tmp_path, spec, make_record):
    stopped = threading.Event()
    identity = new_identity(spec)
    journal = Journal(tmp_path, identity, segment_bytes=SMALL_FILE_BYTES)
    records = [make_record(i) for i in range(8)]

    def write():
        number = 0
        while not stopped.is_set():
            journal.append(number, records)
            number += len(records)
            journal.forget_before(number - 200)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_for(lambda: journals.segment_paths(tmp_path), 60, "a file of the journal")
        for command in (["verify", "--decode"], ["inspect"], ["summary"], ["verify"]):
            status, text = tool_beside(command[0], tmp_path, *command[1:])
            assert status == 0, text
    finally:
        stopped.set()
        writer.join()
        journal.close()


def test_a_held_lock_is_not_asked_for(written):
    lock = journals.Lock(written)
    assert tool("verify", written)[0] == 0
    lock.close()


def test_torch_is_not_imported():
    code = "import sys, apexrl.tools.replay_tool; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip() == "False"


def test_a_file_that_vanishes_while_it_is_read_leaves_no_gap(written, monkeypatch, capsys):
    paths = journals.segment_paths(written)
    monkeypatch.setattr(replay_tool, "segment_paths", lambda _: paths)
    for path in paths[:2]:
        path.unlink()
    assert replay_tool.verify(written) == 0
    paths.insert(0, paths[2])  # was read before it and the next one vanished
    assert replay_tool.verify(written) == 0, capsys.readouterr().out


def test_offsets_behind_a_damage_are_right(written):
    path = files_of(written)[0]
    data = bytearray(path.read_bytes())
    found = segment.scan(bytes(data))
    records = [segment.pack_header(found.header), *(b"".join(segment.pack(*entry)) for entry in found.entries)]
    ends = np.cumsum([len(record) for record in records])
    data[ends[1] + 50] ^= 1  # in unroll 1
    path.write_bytes(data)
    status, text = tool("verify", written)
    assert status == 1
    assert text.splitlines()[:2] == [
        f"{path.name}: offset {ends[1]}: {ends[2] - ends[1]} bytes are no record",
        f"{path.name}: offset {ends[2]}: unroll 2: it comes where unroll 1 belongs",
    ]
