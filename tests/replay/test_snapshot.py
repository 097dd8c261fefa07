import os

import pytest

from apexrl.errors import WireError
from apexrl.replay.snapshot import Snapshot, load_snapshot, recover_snapshot, write_snapshot
from apexrl.replay.table import TableState

SNAPSHOT = Snapshot("log", 2, 3, 9, {"a": TableState(70, 50, 0, 0.6, b"\1\2\3\4" * 12), "b": TableState(7, 5, 4)})


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "priorities.bin"
    assert recover_snapshot(path, "log") is None
    for snapshot in (SNAPSHOT, Snapshot("log", 0, 0, 0, {})):
        write_snapshot(path, snapshot)
        assert recover_snapshot(path, "log") == load_snapshot(path) == snapshot
    assert [p.name for p in tmp_path.iterdir()] == ["priorities.bin"]


def damaged(data):
    for position in range(len(data)):
        yield data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :]
        yield data[:position]


def test_a_damaged_snapshot_is_set_aside_and_not_used(tmp_path):
    path = tmp_path / "priorities.bin"
    write_snapshot(path, SNAPSHOT)
    for data in damaged(path.read_bytes()):
        path.write_bytes(data)
        with pytest.raises(WireError, match=r"priorities\.bin"):
            load_snapshot(path)
        assert recover_snapshot(path, "log") is None
        assert not path.exists() and (tmp_path / "priorities.bin.damaged").read_bytes() == data
        (tmp_path / "priorities.bin.damaged").unlink()


def test_each_damaged_snapshot_is_kept(tmp_path):
    path = tmp_path / "priorities.bin"
    for data in (b"first", b"second", b"", b"third"):
        path.write_bytes(data)
        assert recover_snapshot(path, "log") is None
    os.mkfifo(path)
    assert recover_snapshot(path, "log") is None and not path.exists()
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == 5 and {kept.read_bytes() for kept in kept if kept.is_file()} == {
        b"first", b"second", b"", b"third",
    }  # fmt: skip


def test_the_snapshot_of_another_log_is_not_used(tmp_path):
    path = tmp_path / "priorities.bin"
    write_snapshot(path, SNAPSHOT)
    assert recover_snapshot(path, "another") is None


def test_a_snapshot_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "priorities.bin"
    write_snapshot(path, SNAPSHOT)

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_snapshot(path, Snapshot("log", 0, 0, 0, {}))
    monkeypatch.undo()
    assert recover_snapshot(path, "log") == SNAPSHOT
