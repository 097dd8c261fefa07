import os

import pytest

from apexrl.replay.journal import Journal, new_identity
from tests.replay.records import SMALL_FILE_BYTES


@pytest.fixture
def journal(spec, tmp_path):
    return Journal(tmp_path, new_identity(spec))


@pytest.fixture
def journal_of_files(spec, tmp_path):
    """Each file takes a few records."""
    return Journal(tmp_path, new_identity(spec), segment_bytes=SMALL_FILE_BYTES)


@pytest.fixture(autouse=True)
def as_if_the_process_had_ended(tmp_path):
    """Closes what a test left open: its servers crash, and the system closes the files of those that do.

    Journals have bare descriptors. Nothing may be left that closes its own once more.
    """
    yield
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path)):
                os.close(int(descriptor))
        except FileNotFoundError:  # the listing's own
            pass
