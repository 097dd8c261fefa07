import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from apexrl.errors import ConfigError
from apexrl.runs import (
    CONFIG_FILE,
    CURVE_FILE,
    STATUS_FILE,
    evaluation_of,
    found_checkpoint,
    found_runs,
    made_run,
    network_words,
    new_run,
    newest_run,
    read_evaluations,
    read_found,
)
from apexrl.tools.runs import list_runs


def make_run(directory, started_at, env="Catch-v0", status=None, files=()):
    """The files of a run that its list reads."""
    directory.mkdir(parents=True)
    config = {"command": {"env": {"env": env, "noop_max": 3}, "agent": "impala", "seed": 1}, "revision": "x"}
    (directory / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
    os.utime(directory / CONFIG_FILE, (started_at, started_at))
    if status is not None:
        (directory / STATUS_FILE).write_bytes(msgspec.json.encode(status))
        os.utime(directory / STATUS_FILE, (started_at + 50, started_at + 50))
    for name in files:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).touch()
    return directory


def test_runs_are_found_the_newest_start_first(tmp_path, capsys):
    counters = {"best_evaluation_return": 19.25, "last_evaluation_return": -3.0, "updates": 5}
    old = make_run(tmp_path / "old", 1e9, status={"frames": 1_200_000, "counters": counters, "waits_for": ""})
    new = make_run(tmp_path / "new", 1.1e9)
    swept = make_run(tmp_path / "sweep" / "a-seed1", 1.05e9, env="CartPole-v1")
    faults = []
    assert [run.directory for run in found_runs(tmp_path, faults)] == [new, swept, old] and not faults
    assert read_found(old) == (old, "Catch-v0", "impala", 1_200_000, 19.25, -3.0, 1e9, 1e9 + 50)
    assert list_runs(tmp_path) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "environment", "agent", "frames", "best", "last", "when"]
    assert [row.split()[1:6] for row in rows] == [
        ["Catch-v0", "impala", "0", "-", "-"],
        ["CartPole-v1", "impala", "0", "-", "-"],
        ["Catch-v0", "impala", "1,200,000", "19.2", "-3.0"],
    ]


def test_runs_that_begin_in_one_second_have_directories_of_their_own(tmp_path):
    """Of threads, programs and hosts that share a disk: the file system gives a name once."""
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(made_run, [str(tmp_path / "runs" / "Catch-v0-20261125-134451")] * 8))
    assert {Path(directory).name.removeprefix("Catch-v0-20261125-134451") for directory in made} == {
        "", *(f"-{number}" for number in range(2, 9))
    }  # fmt: skip
    assert all(Path(directory).is_dir() for directory in made)


def test_a_place_without_room_for_runs_is_named(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/runs/x cannot be made .Not a directory.: give a --run-dir"):
        made_run(str(tmp_path / "runs" / "x"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot be made"):
        made_run(str(tmp_path / "link" / "x"))
    with pytest.raises(ConfigError, match=r"File name too long.: give a --run-dir"):
        made_run(str(tmp_path / ("x" * 300)))


def test_a_run_that_cannot_be_read_is_named_and_left_out(tmp_path, capsys):
    make_run(tmp_path / "good", 1e9)
    path = make_run(tmp_path / "bad", 2e9) / CONFIG_FILE
    path.write_text("{")
    assert list_runs(tmp_path) == 0
    printed = capsys.readouterr()
    assert f"left out: {path} cannot be read" in printed.err and "good" in printed.out and "bad" not in printed.out


def test_a_newer_run_that_cannot_be_read_is_named_where_an_older_one_is_taken(tmp_path, capsys):
    old = make_run(tmp_path / "old", 1e9)
    (make_run(tmp_path / "new", 2e9) / CONFIG_FILE).write_text("{")
    assert newest_run(tmp_path) == old and f"left out: {tmp_path / 'new' / CONFIG_FILE}" in capsys.readouterr().err


def test_the_newest_run_may_need_a_checkpoint(tmp_path):
    best = "checkpoints/best.safetensors"
    old = make_run(tmp_path / "old", 1e9, files=[best])
    new = make_run(tmp_path / "new", 2e9)
    assert newest_run(tmp_path) == new and newest_run(tmp_path, [best, "other"]) == old
    with pytest.raises(ConfigError, match="has no run with other: begin one"):
        newest_run(tmp_path, ["other"])
    with pytest.raises(ConfigError, match="has no run: begin one"):
        newest_run(tmp_path / "nothing")
    assert list_runs(tmp_path / "nothing") == 1


def test_a_checkpoint_is_of_a_run_where_runs_have_theirs(tmp_path):
    """Other directories have a config.json, too; results that were set aside have none."""
    best = "checkpoints/best.safetensors"
    run = make_run(tmp_path / "run", 1e9, files=[best, "copies/best.safetensors", CURVE_FILE])
    assert found_checkpoint(run / best) == (run, run / best)
    assert found_checkpoint(run / "copies/best.safetensors")[0] == run / "copies"
    (run / CONFIG_FILE).unlink()
    assert found_checkpoint(run / best)[0] == run
    (run / CURVE_FILE).unlink()
    assert found_checkpoint(run / best)[0] == run / "checkpoints"


def test_nothing_in_a_run_controls_the_terminal_that_lists_it(tmp_path, capsys):
    strange = "\x1b]0;title\x07"
    make_run(tmp_path / f"good{strange}", 1e9)
    make_run(tmp_path / "env", 2e9, env=f"Catch{strange}")
    status = {"frames": 3, "counters": {strange: 1, "best_evaluation_return": strange}}
    make_run(tmp_path / f"status{strange}", 3e9, status=status)
    assert list_runs(tmp_path) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "good\\x1b]0;title\\x07" in printed.out and printed.err.count("left out") == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], ""),
        (["--env", "Catch-v0", "--total-frames", "60k", "--actor-port", "5", "--no-tensorboard"], ""),
        (["--agent", "impala", "--learning-rate=3e-4", "--no-lstm"], "agent-impala-learning-rate-3e-4-no-lstm-"),
        (["--mix", "queue=1/2", "recent=1/2", "--env-kwargs", '{"a": -1}'], "mix-queue=1-2-recent=1-2-env-kwargs-a-1-"),
        (["--seed", "2", "--name", "my run/2"], "my-run-2-"),
        (["--name", "a" * 200], "a" * 80 + "-"),
        (["--name", "字" * 80], "字" * 26 + "-"),
    ],
)  # fmt: skip
def test_a_run_is_named_by_what_was_given(words, named):
    directory = Path(new_run("ALE/Pong-v5", words))
    assert directory.parent == Path("runs")
    begin, day, second = directory.name.rsplit("-", 2)
    assert f"{begin}-" == f"ALE-Pong-v5-{named}" and len(day + second) == 14


def test_the_evaluation_of_a_best_network_is_found_behind_a_kill(tmp_path):
    """A run that goes on from an earlier checkpoint keeps the best network of the time that was lost."""
    lines = ["60,1000,100,20,10,10,10,10,0", "150,2500,250,20,50,50,50,50,0", "125,2050,205,20,15,15,15,15,0"]
    (tmp_path / CURVE_FILE).write_text(
        "\n".join(["seconds,frames,updates,episodes,mean,median,min,max,exploration", *lines, ""])
    )
    assert [point.updates for point in read_evaluations(tmp_path / CURVE_FILE)] == [100, 205]
    assert evaluation_of(tmp_path, 250).mean == 50
    assert network_words(tmp_path, 250) == "update 250, mean 50.00 over 20 games with exploration 0"
    (tmp_path / CURVE_FILE).write_text("seconds,frames,updates,episodes,mean,median,min,max\n1,2,3,20,4,4,0,6\n")
    assert network_words(tmp_path, 3) == "update 3, mean 4.00 over 20 games"  # of a version that did not tell it
