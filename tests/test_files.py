"""Durable files and locks, also on file systems that lack a call."""

import contextlib
import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from apexrl.errors import ConfigError
from apexrl.files import give_second_name, locked, write_durably, write_json
from apexrl.lifecycle import PERMANENT_STATUS, exit_status
from apexrl.replay.journal import Lock


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


LACKS_LOCKS = pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO])


@LACKS_LOCKS
def test_a_file_system_without_locks_is_named_and_nobody_is_blamed(tmp_path, monkeypatch, number):
    monkeypatch.setattr("fcntl.flock", failing(number))
    for lock in (lambda: locked(tmp_path / "lock", "a run that goes on").__enter__(), lambda: Lock(tmp_path)):
        with pytest.raises(ConfigError, match=f"{tmp_path} cannot be locked") as fault:
            lock()
        assert os.strerror(number) in str(fault.value) and "belongs to" not in str(fault.value)
        assert exit_status(fault.value) == PERMANENT_STATUS


def test_a_run_that_may_only_be_read_can_be_shared(tmp_path, monkeypatch):
    """A fork leaves its source as it is, which may be a snapshot."""
    path, opened = tmp_path / "lock", os.open

    def read_only(name, flags, *mode):
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(name, flags, *mode)

    path.touch()
    monkeypatch.setattr("os.open", read_only)
    monkeypatch.setattr("os.access", lambda *_: False)
    with locked(path, "x", is_shared=True), locked(path, "y", is_shared=True):
        pass
    with pytest.raises(ConfigError, match="cannot be written"), locked(path, "x"):
        pass


def test_a_text_that_no_file_can_hold_is_named(tmp_path):
    with pytest.raises(ConfigError, match="is not UTF-8"):
        write_json(tmp_path / "config.json", {"run_dir": os.fsdecode(b"run\xff")})
    assert not list(tmp_path.iterdir())


def test_a_lock_may_be_waited_for(tmp_path):
    with contextlib.ExitStack() as held:
        held.enter_context(locked(tmp_path / "lock", "x"))
        threading.Timer(0.3, held.pop_all().close).start()
        with locked(tmp_path / "lock", "y", patience_seconds=100.0):
            pass


def test_no_descriptor_is_left_of_a_lock_that_was_refused(tmp_path):
    with locked(tmp_path / "lock", "x"):
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with pytest.raises(ConfigError, match="belongs to x: end it first"), locked(tmp_path / "lock", "x"):
                pass
        assert os.listdir("/proc/self/fd") == before


@pytest.fixture
def directory_sync(monkeypatch):
    """Lets syncs of directories fail with an error, those of files not."""
    sync = os.fsync

    def choose(number):
        def fsync(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            sync(descriptor)

        monkeypatch.setattr("os.fsync", fsync)

    return choose


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS])
def test_where_directories_take_no_sync_files_are_replaced_and_it_is_said_once(
    tmp_path, directory_sync, number, caplog
):
    directory_sync(number)
    for i in range(3):
        write_durably(tmp_path / "file", b"%d" % i)
        assert (tmp_path / "file").read_bytes() == b"%d" % i
    assert caplog.text.count("a power cut may take the names of new files") == 1
    assert f"{tmp_path} cannot be synced ({os.strerror(number)})" in caplog.text


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_directory_whose_sync_fails_is_an_error(tmp_path, directory_sync, number):
    directory_sync(number)
    with pytest.raises(OSError, match=os.strerror(number)):
        write_durably(tmp_path / "file", b"")


def test_a_directory_that_cannot_be_read_is_written_all_the_same(tmp_path, monkeypatch):
    opened = os.open

    def refusing(path, flags, *rest):
        if Path(path) == tmp_path:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, flags, *rest)

    monkeypatch.setattr("os.open", refusing)
    write_durably(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_a_second_name_is_a_copy_where_there_are_no_links(tmp_path, monkeypatch):
    monkeypatch.setattr("os.link", failing(errno.EPERM))
    (tmp_path / "file").write_bytes(b"whole")
    give_second_name(tmp_path / "file", tmp_path / "second")
    assert (tmp_path / "second").read_bytes() == b"whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "second"]
