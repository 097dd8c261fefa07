"""From a command line to a run that is ready: what is found out before anything is changed."""

import contextlib
from pathlib import Path

import pytest
import torch
from rich.console import Console

from apexrl.errors import ConfigError
from apexrl.files import write_json
from apexrl.learning.record.status_file import STATUS_FILE, Status
from apexrl.networks.checkpoint import save_checkpoint
from apexrl.networks.headers import CheckpointHeader, Counters, latest_path, load_header
from apexrl.replay.journal import Journal, new_identity, read_identity
from apexrl.running.plan import Plan
from apexrl.running.prepare import prepare
from apexrl.types import LogPosition


def started(*flags: str) -> Plan:
    with contextlib.ExitStack() as held:
        return prepare(flags, Console(quiet=True), held)


def prepared(directory: Path, *flags: str) -> Plan:
    return started("--env", "Catch-v0", "--run-dir", str(directory / "run"), *flags)


@pytest.fixture
def run(tmp_path):
    """The directory of a run with a checkpoint and a journal, which is outside of it and holds unrolls from the 9th on;
    and the plan of it."""
    plan = prepared(tmp_path, "--journal-dir", str(tmp_path / "journal"))
    log = journal_of(tmp_path / "journal", plan)
    counters = Counters(updates=7, logs=(LogPosition(log, 9, 100),))
    header = CheckpointHeader(plan.spec, "apex-dqn", "{}", counters)
    save_checkpoint(latest_path(tmp_path / "run"), header, {"x": torch.zeros(2)})
    return tmp_path / "run", plan


def journal_of(directory: Path, plan: Plan) -> str:
    """Makes a journal that holds one unroll. Returns the name of its log."""
    directory.mkdir()
    identity = new_identity(plan.spec)
    journal = Journal(directory, identity)
    journal.append(9, [(b"", b"")])
    journal.close()
    return identity.log


@pytest.mark.parametrize("name", ["log.json", "unrolls-0000000000000000.log", "shard-1/log.json"])
def test_a_new_run_leaves_the_experience_of_another_one_alone(tmp_path, name):
    path = tmp_path / "journal" / name
    path.parent.mkdir(parents=True)
    path.touch()
    shards = ["--shards", "2"] if "shard" in name else []
    with pytest.raises(ConfigError, match=f"--journal-dir {path.parent} holds the experience of another run"):
        prepared(tmp_path, "--journal-dir", str(tmp_path / "journal"), *shards)
    assert path.stat().st_size == 0 and not (tmp_path / "run").exists()


def test_a_run_goes_on_with_its_journal_that_was_moved_and_with_no_other(tmp_path, run):
    directory, plan = run
    journal_of(tmp_path / "others", plan)
    (tmp_path / "journal").rename(tmp_path / "moved")
    before = (directory / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=f"--journal-dir {tmp_path}/others holds the experience of another run"):
        started("--resume", str(directory), "--journal-dir", str(tmp_path / "others"))
    assert (directory / "config.json").read_bytes() == before
    moved = started("--resume", str(directory), "--journal-dir", str(tmp_path / "moved"))
    assert moved.command.replay.journal_dir == str(tmp_path / "moved")
    assert started("--resume", str(directory)).command == moved.command
    (tmp_path / "moved").rename(tmp_path / "again")
    counters = load_header(latest_path(directory)).counters
    write_json(directory / STATUS_FILE, Status("Catch-v0", 100, counters, {}, ""))
    latest_path(directory).write_bytes(b"damaged")
    again = started("--resume", str(directory), "--from-scratch", "--journal-dir", str(tmp_path / "again"))
    assert again.command.replay.journal_dir == str(tmp_path / "again")


def test_a_fork_that_cannot_be_made_leaves_nothing(tmp_path, run):
    """So the same command may be given again, and nobody takes what is left for a run."""
    directory, _ = run
    with pytest.raises(ConfigError, match="holds nothing from before unroll 9 any more: fork a newer checkpoint"):
        started("--fork", str(directory), "--at", "7", "--run-dir", str(tmp_path / "fork"))
    assert not (tmp_path / "fork").exists()
    started("--fork", str(directory), "--run-dir", str(tmp_path / "fork"))
    assert read_identity(tmp_path / "fork" / "journal") is not None


def test_the_directory_of_another_run_is_named_as_such(tmp_path):
    (tmp_path / "run" / "journal").mkdir(parents=True)
    (tmp_path / "run" / "journal" / "log.json").touch()
    with pytest.raises(ConfigError, match=f"^{tmp_path}/run is not empty: give another --run-dir"):
        prepared(tmp_path)


def test_keys_are_missed_before_a_run_begins(tmp_path):
    with pytest.raises(ConfigError, match="typo"):
        prepared(tmp_path, "--keys", str(tmp_path / "typo"))
    assert not (tmp_path / "run").exists()
