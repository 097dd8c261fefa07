"""From a command line to a run that is ready: what is found out before anything is changed."""

import contextlib
from pathlib import Path

import pytest
from rich.console import Console

from apexrl.errors import ConfigError
from apexrl.running.prepare import prepare


def prepared(directory: Path, *flags: str) -> None:
    with contextlib.ExitStack() as held:
        prepare(["--env", "Catch-v0", "--run-dir", str(directory / "run"), *flags], Console(quiet=True), held)


@pytest.mark.parametrize("name", ["log.json", "unrolls-0000000000000000.log", "shard-1/log.json"])
def test_a_new_run_leaves_the_experience_of_another_one_alone(tmp_path, name):
    path = tmp_path / "journal" / name
    path.parent.mkdir(parents=True)
    path.touch()
    shards = ["--shards", "2"] if "shard" in name else []
    with pytest.raises(ConfigError, match=f"--journal-dir {path.parent} holds the experience of another run"):
        prepared(tmp_path, "--journal-dir", str(tmp_path / "journal"), *shards)
    assert path.stat().st_size == 0 and not (tmp_path / "run").exists()


def test_the_directory_of_another_run_is_named_as_such(tmp_path):
    (tmp_path / "run" / "journal").mkdir(parents=True)
    (tmp_path / "run" / "journal" / "log.json").touch()
    with pytest.raises(ConfigError, match=f"^{tmp_path}/run is not empty: give another --run-dir"):
        prepared(tmp_path)


def test_keys_are_missed_before_a_run_begins(tmp_path):
    with pytest.raises(ConfigError, match="typo"):
        prepared(tmp_path, "--keys", str(tmp_path / "typo"))
    assert not (tmp_path / "run").exists()
