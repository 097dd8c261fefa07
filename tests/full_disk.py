"""A disk that takes so many more bytes and then none: for code that writes with os.pwrite, or whole files."""

import contextlib
import errno
import os
from pathlib import Path

import safetensors.torch


@contextlib.contextmanager
def full_disk(monkeypatch, free_bytes=0):
    """Lets no file grow by more than `free_bytes`, as ENOSPC does: a part may have been written."""
    error = OSError(errno.ENOSPC, "No space left on device")

    def pwrite(descriptor, data, offset):
        if not free_bytes:
            raise error
        return write(descriptor, bytes(data[:free_bytes]), offset)

    def write_bytes(path, data):
        write_whole(path, data[:free_bytes])
        raise error

    def save_file(tensors, path, metadata):
        Path(path).touch()
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    write, write_whole = os.pwrite, Path.write_bytes
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(Path, "write_bytes", write_bytes)
        patch.setattr(safetensors.torch, "save_file", save_file)
        yield
