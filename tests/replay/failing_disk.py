"""A disk that loses what it was to write, as Linux tells of it: once. Later syncs of the file succeed without it.

It may be slow, too: syncs wait until they are let go.
"""

import os
import stat
import threading

MOST_SECONDS = 100  # that a sync waits


class FailingDisk:
    """Stands between the programs of this process and their syncs; `cut_power` leaves what the disk has."""

    def __init__(self, monkeypatch):
        self.fails = 0  # so many syncs of files from now on
        self.stops_at_fault = False
        self.has_waiter = threading.Event()  # a sync waits
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._held = {}  # descriptors by inode, so that no other file gets its number
        self._sizes = {}  # bytes of the file that are no longer waiting to be written
        self._lost = {}  # ranges of bytes that the disk never got
        monkeypatch.setattr("os.fsync", self._sync)
        monkeypatch.setattr("os.fdatasync", self._sync)

    def stop(self):
        """Lets all syncs wait until it goes on."""
        self._goes_on.clear()

    def go_on(self):
        self._goes_on.set()

    def _sync(self, descriptor):
        if not self._goes_on.is_set():
            self.has_waiter.set()
            assert self._goes_on.wait(MOST_SECONDS)
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            return
        inode = found.st_ino
        if inode not in self._held:
            self._held[inode] = os.dup(descriptor)
        began, self._sizes[inode] = self._sizes.get(inode, 0), found.st_size
        if self.fails:
            self.fails -= 1
            if self.stops_at_fault:
                self.stop()
            self._lost.setdefault(inode, []).append((began, found.st_size))
            raise OSError(5, "Input/output error")

    def cut_power(self, directory):
        """Leaves of the files in a directory the bytes that the disk has got."""
        for path in directory.iterdir():
            inode, data = path.stat().st_ino, bytearray(path.read_bytes())
            for first, end in self._lost.get(inode, []):
                data[first:end] = bytes(end - first)
            path.write_bytes(data[: self._sizes.get(inode, 0)])
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held = {}
