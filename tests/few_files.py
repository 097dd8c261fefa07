"""A process that has no file descriptor left, for a while."""

import contextlib
import os
import resource

FILES = 64


@contextlib.contextmanager
def no_files_left():
    """Nothing can be opened inside of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)
