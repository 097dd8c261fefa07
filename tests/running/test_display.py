"""The screen that shows a run."""

import contextlib
import dataclasses
import io
import logging
import os
import re
from collections import namedtuple
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from apexrl.config.commands import RunCommand
from apexrl.config.flags import parse
from apexrl.files import write_json
from apexrl.learning.record.status_file import LAST_EVALUATION, STATUS_FILE, Status, read_status
from apexrl.lines import log_to, printable
from apexrl.networks.headers import Counters
from apexrl.running.display import (
    STALE_SECONDS,
    ConsoleHandler,
    Display,
    Pace,
    RunConsole,
    Targets,
    bar,
    probabilities_of,
    progress_rows,
    redraws,
    table_of,
    targets_of,
)
from apexrl.running.supervise import Supervisor
from apexrl.types import LogPosition
from tests.system.processes import wait_for

METRICS = {
    "actor/frames_per_second": 3000.4,
    "learner/updates_per_second": 12.34,
    "replay/fill": 0.5,
    "replay/samples_per_insert": 7.9,
    "actor/waits_for/learner": 1.013,
    "learner/waits_for/[red]min_size": 0.25,
    "actor/waits_for/nothing": 0.001,
}


def status_with(metrics):
    return Status("Catch-v0", 4000, Counters(updates=70), metrics, "")


class Terminal(io.StringIO):
    """A terminal of which a test reads all that was written."""

    def isatty(self):
        return True


@pytest.fixture
def console(monkeypatch):
    """A console at which a person may look, wherever the tests run."""
    for name in ("CI", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return Console(file=Terminal(), width=200, markup=False, highlight=False)


@pytest.fixture
def shown(console, tmp_path):
    """A display of a run, and the supervisor whose roles it shows."""
    supervisor = Supervisor(10)
    return Display(console, tmp_path, supervisor), supervisor


def write_status(directory: Path, status):
    write_json(directory / STATUS_FILE, status)


def test_rates_and_waits():
    rows = dict(progress_rows(status_with(METRICS)))
    assert rows["frames"] == "4,000 (3,000/s)" and rows["updates"] == "70 (12.3/s)"
    numbers = {"learner/learning_rate": 1e-4, "learner/scheduled/entropy_cost": 0.0312}
    assert dict(progress_rows(status_with(METRICS | numbers)))["updates"] == (
        "70 (12.3/s), rate 0.0001, entropy cost 0.0312"
    )
    assert rows["replay"] == "50% full, 7.90 samples an insert"
    assert rows["waits"] == "actor for learner 100% (as planned), learner for [red]min_size 25%"


def test_what_nobody_reports_is_a_dash():
    rows = dict(progress_rows(status_with({})))
    assert rows["frames"] == "4,000 (-/s)" and rows["updates"] == "70 (-/s)" and rows["waits"] == "-"
    assert dict(progress_rows(status_with({"replay/fill": 1.0})))["waits"] == "nobody"


def test_a_replay_is_never_more_than_full():
    assert dict(progress_rows(status_with({"replay/fill": 1.05})))["replay"] == "at capacity, - samples an insert"
    assert dict(progress_rows(status_with({"replay/fill": 0.994})))["replay"].startswith("99% full")


def test_the_time_of_a_long_run_counts_on_beyond_a_day(console, tmp_path):
    now = [100.0]
    display = Display(console, tmp_path, Supervisor(10), clock=lambda: now[0])
    now[0] += 25 * 3600 + 61
    assert dict(display.rows())["time"] == "25:01:01"


def test_a_run_of_limited_time_says_it_and_promises_no_more(console, tmp_path):
    now = [0.0]
    display = Display(console, tmp_path, Supervisor(10), Targets(total_frames=8000, seconds=3600), lambda: now[0])

    def shown(seconds, frames):
        now[0] = seconds
        write_status(tmp_path, Status("Catch-v0", frames, Counters(updates=1), {}, ""))
        rows = dict(display.rows())
        return rows["time"], rows["progress"].split("%")[1]

    assert shown(0, 100) == ("0:00:00 of 1:00:00", " of 8,000 frames")
    assert shown(50, 200) == ("0:00:50 of 1:00:00", " of 8,000 frames"), "3,900 s are more than are left"
    assert shown(100, 400) == ("0:01:40 of 1:00:00", " of 8,000 frames, about 0:31:40 left")


def test_the_way_to_the_first_update_and_to_the_end(console, tmp_path):
    now, targets = [0.0], Targets(warm_up_transitions=2000, total_frames=8000, total_updates=0)
    display = Display(console, tmp_path, Supervisor(10), targets, lambda: now[0])

    def way(transitions, updates=0):
        counters = Counters(updates=updates, logs=(LogPosition(transitions=transitions),))
        write_status(tmp_path, Status("Catch-v0", 4 * transitions, counters, {}, ""))
        return {name: text for name, text in display.rows() if name in ("warm-up", "progress")}

    bars = ["█" * 6 + "░" * 18, "█" * 12 + "░" * 12]
    assert way(500) == {"warm-up": f"{bars[0]} 25% of 2,000 transitions", "progress": f"{bars[0]} 25% of 8,000 frames"}
    now[0] += 10
    assert way(1000) == {
        "warm-up": f"{bars[1]} 50% of 2,000 transitions, about 0:00:20 left",
        "progress": f"{bars[1]} 50% of 8,000 frames, about 0:00:20 left",
    }
    assert way(1000, updates=1).keys() == {"progress"}, "learning has begun"
    now[0] += 10
    assert way(3000) == {"progress": "█" * 24 + " 100% of 8,000 frames"}


def test_steps_that_are_played_are_shown_before_the_first_unroll_arrives(console, tmp_path):
    display = Display(console, tmp_path, Supervisor(10), Targets(warm_up_transitions=2000))

    def playing(steps, updates=0, arrived=0):
        counters = Counters(updates=updates, logs=(LogPosition(transitions=arrived),))
        status = Status("Catch-v0", arrived, counters, {"actor/agent_steps_total": steps}, "")
        write_status(tmp_path, status)
        return dict(display.rows()).get("playing", "")

    assert playing(1280.0).startswith("1,280 steps;")
    assert not playing(0.0) and not playing(1280.0, arrived=1280) and not playing(1280.0, updates=1)


def test_a_bar_has_characters_that_the_terminal_knows():
    assert bar(0.25, "UTF-8") == "█" * 6 + "░" * 18 and bar(0.25, "latin-1") == "#" * 6 + "." * 18


def test_the_time_that_is_left_follows_from_the_last_minute():
    pace = Pace()
    assert pace.seconds_left(0, 1000, 0.0) is None
    assert pace.seconds_left(0, 1000, 5.0) is None
    assert pace.seconds_left(500, 1000, 10.0) == 10.0
    slow = [pace.seconds_left(500 + 2 * second, 1000, 10.0 + second) for second in range(1, 101)]
    assert slow[0] < 20 and slow[-1] == 300 / 2


def test_the_wait_for_the_last_evaluation_is_said(console, tmp_path):
    display = Display(console, tmp_path, Supervisor(10), Targets(total_frames=8000))
    write_status(tmp_path, Status("Catch-v0", 8000, Counters(updates=70), {}, LAST_EVALUATION))
    rows = dict(display.rows())
    assert rows["state"] == f"waiting for {LAST_EVALUATION}; Ctrl-C ends the run without it" and "progress" not in rows


@pytest.mark.parametrize(
    ("flags", "least"),
    [
        (("--min-size-to-sample", "3k"), 3000),
        (("--agent", "impala", "--unroll-starts", "20"), 20),
        (("--agent", "impala", "--mix", "queue=1/2", "uniform=1/2", "--unroll-starts", "20"), 2000),
    ],
)
def test_the_targets_of_a_run_are_those_of_its_tables(spec, flags, least):
    spec = msgspec.structs.replace(spec, unroll_starts=20)
    command = parse(RunCommand, ["--preset", "small", "--total-frames", "7", "--min-size-to-sample", "2000", *flags])
    assert targets_of(command, spec) == Targets(least, 7, 0, 10)
    assert targets_of(dataclasses.replace(command, max_seconds=9.0), spec).seconds == 9
    assert not targets_of(dataclasses.replace(command, max_seconds=9.0, smoke=True), spec).seconds


def test_a_full_disk_is_said(shown, tmp_path, monkeypatch):
    display, _ = shown
    assert "disk" not in dict(display.rows())
    monkeypatch.setattr("shutil.disk_usage", lambda path: namedtuple("Usage", "free")(5 * 2**20))
    assert dict(display.rows())["disk"].startswith(f"5 MiB are free for {tmp_path}")


def test_games_of_an_evaluation_that_goes_on():
    metrics = {"evaluation/games_finished": 3.0, "evaluation/return_so_far": 7.25}
    assert dict(progress_rows(status_with(metrics)))["evaluating"] == "3 games, mean 7.2 so far"
    ten = Targets(games=10)
    assert dict(progress_rows(status_with(metrics), ten))["evaluating"] == "3 of 10 games, mean 7.2 so far"
    assert dict(progress_rows(status_with({"evaluation/games_finished": 0.0}), ten))["evaluating"] == "0 of 10 games"
    assert "evaluating" not in dict(progress_rows(status_with(METRICS)))


def test_a_policy_of_at_most_three_actions_is_shown():
    left, stay, right = ({f"learner/probability_{name}": p} for name, p in [("left", 0.4), ("stay", 0), ("right", 0.6)])
    assert dict(progress_rows(status_with(METRICS | left | right)))["policy"] == "left 0.400, right 0.600"
    assert dict(progress_rows(status_with(left | stay | right)))["policy"] == "left 0.400, stay 0.000, right 0.600"
    assert "policy" not in dict(progress_rows(status_with(METRICS)))
    four = {f"learner/probability_{i}": 0.25 for i in range(4)}
    assert "policy" not in dict(progress_rows(status_with(four)))
    assert probabilities_of(status_with(four | METRICS)) == {f"probability_{i}": 0.25 for i in range(4)}
    assert probabilities_of(None) == {}


def test_a_run_starts_until_its_learner_reports(console, tmp_path):
    """Whatever clocks say: that of a file server may be late, and ours set back."""
    write_status(tmp_path, status_with(METRICS))  # of an earlier start
    supervisor = Supervisor(10)
    display = Display(console, tmp_path, supervisor)
    program = "import sys, time; print('12:00:00 replay: actors at [here]', file=sys.stderr); time.sleep(100)"
    supervisor.start("replay", ["-c", program], log=tmp_path / "replay.log")
    supervisor.start("actors", ["-c", "import time; time.sleep(100)"], log=tmp_path / "actors.log")
    supervisor.start("tensorboard", ["-c", "import time; time.sleep(100)"], False, log=tmp_path / "board.log")
    wait_for(lambda: supervisor.children["replay"].newest_line, 10, "the first line")
    starting = [("state", "starting"), ("replay", "actors at [here]"), ("actors", "loading")]
    assert display.rows()[1:] == starting
    supervisor.stop(list(supervisor.children), 0.1)
    write_status(tmp_path, status_with(METRICS))
    os.utime(tmp_path / STATUS_FILE, (1000.0, 1000.0))
    assert dict(display.rows())["frames"] == "4,000 (3,000/s)"


def test_metrics_that_are_old_are_not_shown_as_if_they_were_new(console, tmp_path):
    now = [0.0]
    display = Display(console, tmp_path, Supervisor(10), clock=lambda: now[0])
    write_status(tmp_path, status_with(METRICS))
    assert "stale" not in dict(display.rows())
    now[0] = STALE_SECONDS + 20
    rows = dict(display.rows())
    assert rows["stale"] == "the learner has reported nothing for 35 s"
    assert rows["frames"] == "4,000 (-/s)" and rows["waits"] == "-"


def test_roles_that_are_down(shown, tmp_path):
    display, supervisor = shown
    for name in ("actors", "evaluator", "replay"):
        supervisor.start(name, ["-c", "raise SystemExit(1)"], log=tmp_path / f"{name}.log")
        supervisor.children[name].process.wait(100)
    for name in ("actors", "evaluator"):
        supervisor.children[name].process = None
    supervisor.children["actors"].restarts = 2
    supervisor.children["evaluator"].is_given_up = True
    rows = dict(display.rows())
    assert (rows["restarting"], rows["restarted"], rows["given up"]) == ("actors", "actors 2x", "evaluator")


def test_a_table_has_no_padding_behind_its_rows():
    """A terminal that becomes narrower would wrap it into lines that nothing overwrites."""
    console = RunConsole(file=io.StringIO(), force_terminal=True, width=40)
    rows = [("time", "0:01:01"), ("waits", "actor for learner 100%, learner for actors 3%")]
    wrapped = [" time   0:01:01", " waits  actor for learner 100%, learner", "        for actors 3%"]
    assert str(table_of(rows, console)).splitlines() == wrapped
    path = "runs/" + 60 * "x" + "-20260101-120000"
    assert str(table_of([("run", path)], console)).replace("\n", "").replace(" ", "") == "run" + path, "told whole"
    console.print(table_of(rows, console), soft_wrap=True)
    assert console.file.getvalue().splitlines() == wrapped


@pytest.mark.parametrize(
    ("file", "variables", "expected"),
    [
        (Terminal, {}, True),
        (Terminal, {"TERM": "dumb"}, False),
        (Terminal, {"CI": "true"}, False),
        (Terminal, {"CI": "false"}, True),
        (io.StringIO, {}, False),
        (io.StringIO, {"FORCE_COLOR": "1"}, False),  # ipykernel sets it for the processes that a notebook starts
        (io.StringIO, {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}, False),
    ],
)
@pytest.mark.usefixtures("console")
def test_a_table_is_redrawn_on_a_terminal_alone(file, variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert redraws(Console(file=file())) is expected


def test_a_notebook_gets_a_line_each_ten_seconds(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    now = [0.0]
    with Display(RunConsole(), tmp_path, Supervisor(10), clock=lambda: now[0]) as display:
        for second in range(25):
            now[0] = float(second)
            display.update()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in printed] == ["time 0:00:10", "time 0:00:20"]


def test_a_full_disk_under_the_output_ends_nothing(tmp_path):
    with open("/dev/full", "w") as file:
        console = RunConsole(file=file)
        now = [0.0]
        with Display(console, tmp_path, Supervisor(10), clock=lambda: now[0]) as display:
            now[0] = 100.0
            display.update()
        console.print("the end")
        with contextlib.suppress(OSError):
            file.close()


def test_names_of_others_are_no_markup(shown, console, tmp_path):
    display, _ = shown
    write_status(tmp_path, status_with(METRICS))
    with display:
        display.update()
    assert "[red]min_size" in console.file.getvalue()


class Terminal(io.StringIO):
    """A terminal that keeps what it shows."""

    def isatty(self):
        return True


def test_no_text_of_others_controls_the_terminal(tmp_path):
    """Texts of peers and files, and the name of the directory."""
    strange = "\x1b]0;title\x07\r\x9b2J"
    file = Terminal()
    console = RunConsole(file=file, force_terminal=True, width=200)
    directory = tmp_path / strange
    directory.mkdir()
    metrics = {f"actor/waits_for/{strange}": 1.0, f"learner/probability_{strange}": 1.0}
    log_to(handler := ConsoleHandler(console))
    with Display(console, directory, Supervisor(10)) as display:
        write_status(directory, status_with(metrics))
        display.update()
        handler.handle(logging.makeLogRecord({"msg": f"logged {strange}", "levelno": logging.WARNING}))
        console.print(f"printed {strange}", Text(f"text {strange}"), soft_wrap=True)
    said = file.getvalue()
    assert said.count("\\x1b]0;title") >= 5 and "actor for" in said
    without_rich = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]|\r", "", said)
    assert without_rich == printable(without_rich)


def test_what_is_logged_stays_above_the_live_table(shown, console):
    """A terminal shows the record, then the table again; a record on stderr would be overwritten by it."""
    display, _ = shown
    logger = logging.Logger("role")
    logger.addHandler(ConsoleHandler(console))
    with display:
        display.update()
        logger.warning("the [robot] arm is stuck")
    printed = console.file.getvalue()
    assert "time" in printed.partition("the [robot] arm is stuck\n")[2]


def test_a_status_that_cannot_be_read_is_none(tmp_path):
    assert read_status(tmp_path) is None
    (tmp_path / STATUS_FILE).mkdir()
    assert read_status(tmp_path) is None
