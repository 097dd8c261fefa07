"""A sweep: which runs it starts and resumes, alone and with real runs that are killed."""

import contextlib
import shutil
import signal
import sys

import msgspec
import pytest
import torch

from apexrl.errors import ApexError, ConfigError
from apexrl.files import write_json
from apexrl.learning.record.status_file import STATUS_FILE, Status
from apexrl.lifecycle import Stop
from apexrl.networks.checkpoint import save_checkpoint
from apexrl.networks.headers import CheckpointHeader, Counters, latest_path
from apexrl.running.display import summary_of
from apexrl.running.run_directory import SUMMARY_FILE, lock_run
from apexrl.runs import SWEEP_FILE
from apexrl.tools import sweep as module
from apexrl.tools.sweep import Sweep, main
from apexrl.tools.sweep_plan import SweepFile, runs_of
from tests.system.processes import Process, is_gone, read_json, wait_for
from tests.tools.run_directories import write_run

PORTS = ("actor-port", "batch-port", "parameter-port", "metrics-port")


class Launches:
    """Takes the place of the launcher: notes the flags of each start, and leaves the files of a run that ended."""

    def __init__(self, monkeypatch):
        self.starts: list[tuple[str, list[str]]] = []
        self.seconds = 100.0
        self.failing: set[str] = set()
        monkeypatch.setattr(Sweep, "launch", lambda sweep, run, arguments: self.launch(run, arguments))

    def launch(self, run, arguments):
        name = run.directory.name
        self.starts.append((name, arguments[len(run.arguments) :]))
        if name in self.failing:
            raise ApexError("the learner died")
        if not run.has_begun:
            write_run(run.directory, [0, 1])
        write_json(run.directory / SUMMARY_FILE, summary_of(None, "Catch-v0", self.seconds, 0))


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


@pytest.fixture
def make(tmp_path, free_ports):
    """Makes a new sweep over the same directory, of two variants and two seeds."""
    ports = dict(zip(PORTS, free_ports(4), strict=True))

    def make(**flags):
        flags = {"env": "Catch-v0", "max-seconds": 100, "tensorboard": False, **ports, **flags}
        file = SweepFile(str(tmp_path), (0, 1), flags, {"a": {}, "b": {"learning-rate": 0.5}})
        return Sweep(tmp_path, runs_of(file, []), Stop())

    return make


def write_checkpoint(directory, spec, seconds):
    save_checkpoint(
        latest_path(directory),
        CheckpointHeader(spec, "apex-dqn", "{}", Counters(seconds=seconds)),
        {"x": torch.zeros(2)},
    )


ALL = ["a-seed0", "b-seed0", "a-seed1", "b-seed1"]


def test_complete_runs_are_left_out_and_a_removed_one_is_made_again(tmp_path, launches, make):
    assert make().run() == []
    assert [name for name, _ in launches.starts] == ALL
    assert launches.starts[0][1] == ["--max-seconds", "100.0", "--run-dir", str(tmp_path / "a-seed0")]
    shutil.rmtree(tmp_path / "b-seed0")
    assert make().run() == []
    assert [name for name, _ in launches.starts[4:]] == ["b-seed0"]
    assert launches.starts[4][1][-2:] == ["--run-dir", str(tmp_path / "b-seed0")]


def test_a_failing_run_is_named_and_the_others_are_made(launches, make, capsys):
    launches.failing = {"b-seed0"}
    assert make().run() == ["b-seed0"]
    assert [name for name, _ in launches.starts] == ALL
    assert "b-seed0 failed: the learner died" in capsys.readouterr().err
    launches.failing = set()
    assert make().run() == [] and [name for name, _ in launches.starts[4:]] == ["b-seed0"]


def cut_off(launches, make, **flags):
    """Leaves the first run of a sweep begun, and none complete."""
    launches.failing = set(ALL)
    sweep = make(**flags)
    sweep.run()
    write_run(sweep.runs[0].directory, [0, 1])
    launches.starts, launches.failing = [], set()


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_run_that_the_sweep_did_not_begin_is_left_alone(tmp_path, launches, make, capsys, reproducible):
    write_run(tmp_path / "a-seed0", [0, 1])
    before = {path: path.read_bytes() for path in (tmp_path / "a-seed0").iterdir()}
    assert make(reproducible=reproducible).run() == ["a-seed0"]
    assert "a-seed0 is a run that this sweep did not begin: move it" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    assert [name for name, _ in launches.starts] == ALL[1:]


def test_a_run_that_was_cut_off_goes_on_for_the_rest_of_its_time(tmp_path, spec, launches, make):
    cut_off(launches, make)
    write_checkpoint(tmp_path / "a-seed0", spec, 70.5)
    assert make().run() == []
    assert launches.starts[0][1] == ["--max-seconds", "29.5", "--resume", str(tmp_path / "a-seed0")]


def test_a_run_that_is_cut_off_keeps_the_end_that_its_environment_has(tmp_path, launches, make):
    """The flags that are known for CartPole hold a total. A run that has reached it would not take it up again."""
    cut_off(launches, make, env="CartPole-v1", **{"max-seconds": 0})
    make(env="CartPole-v1", **{"max-seconds": 0}).run()
    assert launches.starts[0][1] == ["--resume", str(tmp_path / "a-seed0"), "--total-frames", "200000"]


def test_a_reproducible_run_that_was_cut_off_starts_anew(tmp_path, launches, make):
    cut_off(launches, make, reproducible=True)
    (tmp_path / "a-seed0" / "of-the-first-start").touch()
    assert make(reproducible=True).run() == []
    assert launches.starts[0][1] == ["--max-seconds", "100.0", "--run-dir", str(tmp_path / "a-seed0")]
    assert not (tmp_path / "a-seed0" / "of-the-first-start").exists()


def test_a_full_disk_under_the_output_ends_no_sweep(launches, make, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert make().run() == [] and [name for name, _ in launches.starts] == ALL
        with contextlib.suppress(OSError):
            full.close()


def test_a_reproducible_run_that_a_killed_sweep_left_half_removed_starts_anew(tmp_path, launches, make):
    cut_off(launches, make, reproducible=True)
    (tmp_path / "a-seed0").rename(tmp_path / "a-seed0.removed")
    assert make(reproducible=True).run() == [] and not (tmp_path / "a-seed0.removed").exists()


def test_a_run_whose_time_was_over_before_the_sweep_was_killed_is_evaluated(tmp_path, spec, launches, make):
    cut_off(launches, make)
    write_checkpoint(tmp_path / "a-seed0", spec, 100.0)
    assert make().run() == [] and [name for name, _ in launches.starts] == ALL
    assert launches.starts[0][1] == ["--max-seconds", "1.0", "--resume", str(tmp_path / "a-seed0")]


def test_a_run_that_was_stopped_with_the_sweep_is_not_complete(launches, make):
    sweep, usual = make(), launches.launch

    def launch(run, arguments):
        usual(run, arguments)
        sweep._stop.set()

    launches.launch = launch
    assert sweep.run() == [] and not any(sweep.is_complete(run) for run in sweep.runs)


@pytest.mark.parametrize("ended_by", ["an evaluation's mean return is at least 0.5", "callback a:B asks for it", ""])
@pytest.mark.parametrize("flags", [{"stop-at-return": 0.5}, {"callback": "tests.running.test_callbacks:Once"}])
def test_a_run_that_a_flag_of_its_own_has_ended_is_complete(launches, make, flags, ended_by):
    """And not one that somebody else ended, although it has such a flag."""
    done = summary_of(None, "Catch-v0", 1, 0, ended_by)

    def launch(run, arguments):
        write_json(write_run(run.directory, [0, 1]) / SUMMARY_FILE, done)

    launches.launch = launch
    assert make(**flags).run() == ([] if ended_by else ALL)


@pytest.mark.parametrize(("flag", "total"), [("total-frames", 500), ("total-updates", 500)])
def test_a_run_without_a_time_limit_ends_with_its_frames_or_updates(tmp_path, launches, make, flag, total):
    sweep = make(**{"max-seconds": 0, flag: total})
    assert sweep.run() == ALL, "the summary says 0 frames and updates"
    assert all("--max-seconds" not in arguments for _, arguments in launches.starts)
    done = msgspec.structs.replace(summary_of(None, "Catch-v0", 1, 0), frames=500, updates=500)
    launches.launch = lambda run, arguments: write_json(run.directory / SUMMARY_FILE, done)
    assert make(**{"max-seconds": 0, flag: total}).run() == []


@pytest.mark.parametrize(("version", "flags", "is_complete"), [
    (7, {}, True), (6, {}, False), (6, {"evaluator": False}, True), (6, {"final-evaluation-seconds": 0}, True),
])  # fmt: skip
def test_a_run_whose_last_network_was_not_evaluated_is_not_complete(
    launches, make, capsys, version, flags, is_complete
):
    def launch(run, arguments):
        directory = write_run(run.directory, [0, 1])
        status = Status("Catch-v0", 10, Counters(updates=7), {"evaluation/params_version": float(version)}, "")
        write_json(directory / STATUS_FILE, status)
        write_json(directory / SUMMARY_FILE, summary_of(status, "Catch-v0", 100, 0))

    launches.launch = launch
    assert make(**flags).run() == ([] if is_complete else ALL)
    assert ("its last network was not evaluated: the next start" in capsys.readouterr().err) != is_complete


def test_a_run_that_somebody_stopped_is_not_complete(launches, make, capsys):
    launches.seconds = 99.9
    assert make().run() == ALL
    assert "it was stopped at 0 frames" in capsys.readouterr().err


def test_a_run_that_was_begun_with_other_flags_is_refused(launches, make):
    make().run()
    with pytest.raises(ConfigError, match=r"a-seed0 was begun with .*--max-seconds 100 .*or another directory"):
        make(**{"max-seconds": 200})


def test_a_damaged_record_is_refused(tmp_path, make):
    (tmp_path / SWEEP_FILE).write_text('{"a-seed0": 3}')
    with pytest.raises(ConfigError, match=r"sweep\.json is damaged .*, or move"):
        make()


def test_a_run_that_still_ends_is_waited_for(tmp_path, launches, make, monkeypatch):
    monkeypatch.setattr(module, "ENDING_SECONDS", 0.0)
    with lock_run(str(tmp_path / "a-seed0")), pytest.raises(ConfigError, match="belongs to a run that goes on"):
        make().run()
    assert not launches.starts
    monkeypatch.setattr(module, "ENDING_SECONDS", 600.0)
    lock = lock_run(str(tmp_path / "a-seed0"))
    lock.__enter__()
    monkeypatch.setattr(Stop, "wait", lambda stop, seconds: lock.__exit__(None, None, None))
    assert make().run() == [] and len(launches.starts) == 4


@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), ([], 2), (["none.toml"], 2)])
def test_the_program_says_what_it_wants(monkeypatch, capsys, words, status):
    monkeypatch.setattr(sys, "argv", ["sweep", *words])
    monkeypatch.setattr(Stop, "on_signals", lambda stop: None)
    assert main() == status
    out, err = capsys.readouterr()
    assert "FILE.toml" in out if "none.toml" not in words else err.startswith("cannot sweep: none.toml")


@pytest.mark.long("whole sweeps")
@pytest.mark.timeout(1800)
def test_real_runs_go_on_after_a_kill_and_after_ctrl_c_and_are_compared(tmp_path, free_ports):
    """The sweep is killed in its first run and interrupted in its third; two directories belong to somebody else."""
    directory = tmp_path / "sweep"
    ports = "".join(f"{name} = {port}\n" for name, port in zip(PORTS, free_ports(4), strict=True))
    (tmp_path / "s.toml").write_text(
        f'directory = "{directory}"\nseeds = [0, 1]\nthreshold = 0.5\n[flags]\nenv = "Catch-v0"\ntensorboard = false\n'
        f"total-updates = 1000\nevaluation-period-seconds = 1\ncheckpoint-period-seconds = 1\nepisodes = 2\n{ports}"
        "[variants.good]\n[variants.bad]\n"
    )
    for seed in (0, 1):
        (directory / f"bad-seed{seed}" / "stranger").mkdir(parents=True)

    def sweep(name):
        return Process(["-m", "apexrl", "sweep", tmp_path / "s.toml"], tmp_path / name)

    def learns(name):
        status = read_json(directory / name / "status.json")
        return status is not None and status["counters"]["updates"] > 0 and latest_path(directory / name).exists()

    with sweep("killed.txt") as process:
        wait_for(lambda: learns("good-seed0"), 300, "updates of the first run")
        process.kill()
        with sweep("interrupted.txt") as again:  # while the run of the killed one may still be ending
            wait_for(lambda: learns("good-seed1"), 300, "updates of the second run")
            descendants = again.descendants()
            again.signal(signal.SIGINT)
            assert again.popen.wait(600) == 1, again.text()
            assert all(is_gone(role.pid) for role in descendants)
    assert "stopped: the same command goes on" in again.text()
    assert "good-seed0: complete" in again.text() and "good-seed1: complete" not in again.text()
    first = (directory / "good-seed0.log").read_text()
    assert "the supervisor is gone" in first and "continuing" in first, "it ended with its sweep, and was resumed"
    assert (directory / "good-seed1" / SUMMARY_FILE).exists(), "the run ended cleanly"
    with sweep("last.txt") as last:
        assert last.popen.wait(1200) == 1, last.text()
    assert "good-seed0: complete" not in last.text() and "good-seed1: complete" in last.text()
    assert last.text().count("is not empty: give another --run-dir") == 2
    assert last.text().endswith("failed: bad-seed0, bad-seed1; the same command tries again\n")
    table = [line for line in last.text().splitlines() if line.startswith("| good")]
    assert len(table) == 1 and table[0].split("|")[3].strip() == "2"
    assert {path.name for path in directory.glob("comparison.*")} == {"comparison.csv", "comparison.png"}
