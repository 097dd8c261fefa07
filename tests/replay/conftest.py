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
