"""A run's experience in other runs: forked, and learned from without actors. Real processes."""

import signal

import pytest
from minari import MinariDataset

from apexrl.lifecycle import PERMANENT_STATUS, TEMPORARY_STATUS
from apexrl.net import wire
from apexrl.networks.headers import latest_path, load_header
from apexrl.replay.journal import read_entries, read_identity
from tests.system.processes import ROOT, Process, launch, play_on, read_json, refuse, updates_of, wait_for, wires_of

pytestmark = pytest.mark.timeout(1800)  # to end what hangs: whole runs, also on a machine with much else to do


def state_of(directory):
    """Everything that other runs must not change."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_run_is_forked_and_feeds_a_learner_without_actors(tmp_path, free_ports):
    ports, directory = free_ports(4), tmp_path / "run"
    with launch(tmp_path, ports, "--env", "Catch-v0") as run:
        wait_for(lambda: updates_of(directory) > 30, 300, "updates")
        status, text = refuse("--fork", directory, "--run-dir", tmp_path / "early")
        assert status == TEMPORARY_STATUS and f"{directory} belongs to a run that goes on" in text, text
        run.signal(signal.SIGINT)
        assert run.popen.wait(300) == 0
    assert not (tmp_path / "early").exists()
    before = state_of(directory)
    fork_and_check(tmp_path, ports, directory)
    learn_and_check(tmp_path, ports, directory)
    mix_and_check(tmp_path, ports, directory)
    export_and_check(tmp_path, directory)
    assert state_of(directory) == before


def fork_and_check(tmp_path, ports, directory):
    status, text = refuse("--fork", directory, "--at", 1, "--run-dir", tmp_path / "nowhere", *wires_of(ports))
    assert status == PERMANENT_STATUS and "--at 1" in text, text
    assert not (tmp_path / "nowhere").exists()
    summary, fork = read_json(directory / "summary.json"), tmp_path / "fork"
    with launch(tmp_path, ports, "--fork", directory, "--learning-rate", "0.0005", name="fork") as run:
        play_on(run, fork, summary)
        assert f"continuing {latest_path(fork)} at update {summary['updates']:,}" in run.text()
    forked = read_json(fork / "summary.json")
    assert forked["updates"] > summary["updates"] and forked["frames"] > summary["frames"]
    assert f"up to number {read_identity(fork / 'journal').lives[-1]}" in (fork / "logs" / "replay.log").read_text()
    headers = [load_header(latest_path(path)) for path in (directory, fork)]
    assert headers[0].run != headers[1].run and headers[0].identity == headers[1].identity
    logs = [read_identity(path / "journal").log for path in (directory, fork)]
    assert [header.counters.logs[0].log for header in headers] == logs and logs[0] != logs[1]
    config = read_json(fork / "config.json")["command"]
    assert (config["fork"], config["update"]["learning_rate"]) == (str(directory), 0.0005)


def learn_and_check(tmp_path, ports, directory):
    """Learns from unrolls of other lengths than the agent asks for, with the launcher and by hand."""
    own, journal = tmp_path / "offline", directory / "journal"
    flags = ("--from-journal", journal, "--n-steps", "5", "--unroll-starts", "33", "--evaluation-period-seconds", "1")
    with launch(tmp_path, ports, *flags, name="offline") as run:
        wait_for(lambda: len(rows_of(own)) > 2, 300, "evaluations")
        run.signal(signal.SIGINT)
        assert run.popen.wait(300) == 0, run.text()
    assert {path.stem for path in (own / "logs").iterdir()} == {"learner", "evaluator"}
    counters = read_json(own / "status.json")["counters"]
    recorded = read_json(directory / "summary.json")["transitions_inserted"]
    assert 0.8 * recorded < counters["logs"][0]["transitions"] <= recorded and not (own / "journal").exists()
    arguments = ["--from-journal", journal, "--run-dir", tmp_path / "hand", "--preset", "small"]
    wires = ["--parameter-port", ports[2], "--metrics-port", ports[3]]
    with Process([ROOT / "learner.py", *arguments, "--total-updates", "20", *wires], tmp_path / "hand.txt") as learner:
        assert learner.popen.wait(300) == 0, learner.text()
    assert updates_of(tmp_path / "hand") == 20
    with Process([ROOT / "learner.py", "--from-journal", tmp_path, *wires], tmp_path / "refused.txt") as learner:
        assert learner.popen.wait(300) == PERMANENT_STATUS
        assert learner.text().splitlines()[-1].endswith("give the --journal-dir of a replay server (journal/ of a run)")


def mix_and_check(tmp_path, ports, directory):
    """Plays, and learns from a journal beside that; goes on so when it is resumed."""
    mixed, share = tmp_path / "mixed", "learner/selection/transitions/journal_share"
    flags = ("--env", "Catch-v0", "--mix-journal", f"{directory / 'journal'}=1/4", "--min-size-to-sample", "100")
    with launch(tmp_path, ports, *flags, name="mixed") as run:
        wait_for(lambda: updates_of(mixed) > 30, 300, "updates")
        wait_for(lambda: share in read_json(mixed / "status.json")["metrics"], 300, "the metric of the share")
        run.signal(signal.SIGINT)
        assert run.popen.wait(300) == 0, run.text()
    assert read_json(mixed / "status.json")["metrics"][share] == 0.25
    before = read_json(mixed / "summary.json")
    held = sum(wire.decode_insert(e.message).header(80).valid.sum() for e in read_entries(mixed / "journal"))
    assert 0 < before["transitions_inserted"] <= held, "transitions of the other journal are counted"
    with launch(tmp_path, ports, "--resume", mixed, name="resumed") as run:
        play_on(run, mixed, before)


def export_and_check(tmp_path, directory):
    """The returns of the games that Minari reads are those that the actors reported: Catch's rewards are whole."""
    arguments = ["-m", "apexrl", "inspect", "export", "--format", "minari", directory / "journal"]
    with Process([*arguments, "--out", tmp_path / "catch-v0"], tmp_path / "export.txt") as export:
        assert export.popen.wait(300) == 0, export.text()
    inserts = [wire.decode_insert(entry.message) for entry in read_entries(directory / "journal")]
    reported = sorted((game.episode_return, game.steps) for insert in inserts for game in insert.episodes)
    episodes = MinariDataset(tmp_path / "catch-v0" / "data").iterate_episodes()
    assert sorted((float(episode.rewards.sum()), len(episode)) for episode in episodes) == reported
    assert len(reported) > 100


def rows_of(directory):
    """The rows of the curve, its title included."""
    path = directory / "evaluations.csv"
    return path.read_text().splitlines() if path.exists() else []
