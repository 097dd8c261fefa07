"""A disk that loses what it was to write, as Linux tells of it: once. Later syncs of the file succeed without it."""

import os
import stat


class FailingDisk:
    """Stands between the programs of this process and their syncs; `cut_power` leaves what the disk has."""

    def __init__(self, monkeypatch):
        self.fails = 0  # so many syncs of files from now on
        self._held = {}  # descriptors by inode, so that no other file gets its number
        self._sizes = {}  # bytes of the file that are no longer waiting to be written
        self._lost = {}  # ranges of bytes that the disk never got
        monkeypatch.setattr("os.fsync", self._sync)
        monkeypatch.setattr("os.fdatasync", self._sync)

    def _sync(self, descriptor):
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            return
        inode = found.st_ino
        if inode not in self._held:
            self._held[inode] = os.dup(descriptor)
        began, self._sizes[inode] = self._sizes.get(inode, 0), found.st_size
        if self.fails:
            self.fails -= 1
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
