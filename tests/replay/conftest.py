import pytest

from apexrl.replay import journal as journals
from apexrl.replay.journal import Journal, new_identity


@pytest.fixture
def journal(spec, tmp_path):
    return Journal(tmp_path, new_identity(spec))


@pytest.fixture
def small_files(monkeypatch):
    """Each file takes a few records."""
    monkeypatch.setattr(journals, "SEGMENT_BYTES", 240)
