"""The comparison of runs as a program: its table, its files, and its answers to bad input."""

import csv
import sys

import pytest

from apexrl.tools.compare import main
from tests.tools.run_directories import write_run

PNG = b"\x89PNG\r\n"


@pytest.fixture
def run_main(tmp_path, monkeypatch, capsys):
    """Runs the program in tmp_path; returns its exit status, its table's rows as dictionaries, and both outputs."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
        status = main()
        out, err = capsys.readouterr()
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
        rows = [dict(zip(lines[0], line, strict=True)) for line in lines[2:] if len(line) == len(lines[0])]
        return status, rows, out, err

    return run


def write_groups(tmp_path):
    for seed, value in enumerate([4.0, 6.0, 8.0]):
        write_run(tmp_path / "slow" / f"s{seed}", [0, 0, value / 2, *[value] * 3], seed)
    for seed in range(2):
        write_run(tmp_path / "fast" / f"s{seed}", [0, 9, 9, 9], seed, frames=500, learning_rate=0.5)


def test_groups_are_compared_in_a_table_a_csv_and_a_picture(tmp_path, run_main):
    write_groups(tmp_path)
    status, rows, out, err = run_main("slow/*", "fast/s0", "fast/s1", "--threshold", "5", "--out", "out/c")
    assert (status, err) == (0, "")
    assert rows[0] == {
        **{"group": "apex-dqn --learning-rate 0.001", "env": "Catch-v0", "seeds": "3", "frames": "5,000"},
        **{"minutes": "5.0", "samples an insert": "4.00", "final return": "6.00 [4.00, 8.00]"},
        **{"final median": "0.00", "last": "6.00", "best": "6.00"},
        **{"frames to 5": "3,000 (2 of 3 seeds)", "minutes to 5": "3.0 (2 of 3 seeds)"},
    }
    assert rows[1]["final return"] == "9.00 [9.00, 9.00]" and rows[1]["frames to 5"] == "500"
    assert out.splitlines()[-2:] == ["out/c.csv", "out/c.png"]
    assert (tmp_path / "out" / "c.png").read_bytes().startswith(PNG)
    points = list(csv.DictReader((tmp_path / "out" / "c.csv").read_text().splitlines()))
    assert {(p["against"], p["seeds"]) for p in points} == {(a, s) for a in ("frames", "minutes") for s in "23"}
    last = next(p for p in points if p["group"].endswith("0.001") and p["position"] == "5000")
    assert (last["return"], last["low"], last["high"], last["env"]) == ("6", "4", "8", "Catch-v0")
    assert max(float(p["position"]) for p in points if p["against"] == "minutes") == 5


def test_a_name_may_be_no_text(tmp_path, run_main):
    write_run(tmp_path / "one", [1, 2], 0)
    status, _, out, err = run_main("--group", "\udcff=one", "comparison.csv")
    assert (status, err) == (0, "left out: comparison.csv: there is no such run\n"), out
    assert "\\udcff" in (tmp_path / "comparison.csv").read_text()
    assert run_main("--group", "\udcff=one", "comparison.csv")[3].endswith("this is no directory of a run\n")


def test_a_name_may_look_like_mathematics(tmp_path, run_main):
    write_run(tmp_path / "one", [1, 2], 0)
    status, _, out, err = run_main("--group", "costs $x^$=one")
    assert (status, err) == (0, "") and (tmp_path / "comparison.png").read_bytes().startswith(PNG), out


def test_a_threshold_that_most_seeds_miss_is_not_reached(tmp_path, run_main):
    write_groups(tmp_path)
    _, rows, *_ = run_main("slow/*", "--threshold", "7")
    assert rows[0]["frames to 7"] == rows[0]["minutes to 7"] == "not reached (1 of 3 seeds)"


def test_groups_have_names_and_patterns(tmp_path, run_main):
    write_groups(tmp_path)
    status, rows, *_ = run_main("--group", f"all={tmp_path}/*/s?,slow/s0", "--group", "one=slow/s1")
    assert status == 0 and [(row["group"], row["seeds"]) for row in rows] == [("all", "5"), ("one", "1")]
    assert rows[1]["final return"] == "6.00", "one seed has no interval"
    _, rows, *_ = run_main("--group", "twice=slow/s1", "--group", "twice=slow/s1,slow/s*")
    assert [row["seeds"] for row in rows] == ["3"], "each run counts once"


def test_games_are_averaged_where_all_groups_have_them(tmp_path, run_main):
    for group, value in (("a", 1.0), ("b", 0.5)):
        for seed in range(3):
            write_run(tmp_path / group / f"catch{seed}", [0, value, value, value], seed)
            write_run(tmp_path / group / f"cart{seed}", [0, *[400 * value] * 3], seed, env="CartPole-v1")
    write_run(tmp_path / "b" / "pong", [3], env="Pong-v4")
    asked = ("--group", "a=a/*", "--group", "b=b/*")
    _, rows, out, _ = run_main(*asked, "--scale", "CartPole-v1=0:1000")
    assert len(rows) == 5
    assert "| a     | 2     |  0.70 [0.70, 0.70] |" in out and "| b     | 2     |  0.35 [0.35, 0.35] |" in out
    assert "CartPole-v1: 0 is 0 and 1000 is 1, Catch-v0: 0 is 0 and 1 is 1" in out
    status, _, _, err = run_main(*asked, "--scale", "Breakout-v5=0:1")
    assert status == 2 and err.startswith(
        "cannot compare: --scale Breakout-v5: these runs are of CartPole-v1, Catch-v0, Pong-v4"
    )


def test_a_game_of_one_return_needs_a_scale(tmp_path, run_main):
    for env in ("Catch-v0", "CartPole-v1"):
        write_run(tmp_path / "runs" / env, [1, 1], env=env)
    status, rows, out, err = run_main("runs/*")
    assert (status, len(rows)) == (0, 2) and "interquartile" not in out and (tmp_path / "comparison.png").exists()
    assert "no average over games: CartPole-v1 has no return but 1: give compare --scale CartPole-v1=LOW:HIGH" in err
    _, _, out, err = run_main("runs/*", "--scale", "Catch-v0=0:1", "--scale", "CartPole-v1=0:2")
    assert "interquartile" in out and not err


def test_what_is_no_run_is_named_and_left_out(tmp_path, run_main):
    write_run(tmp_path / "good", [1])
    write_run(tmp_path / "new", [])
    write_run(tmp_path / "torn", [1]).joinpath("status.json").write_text('{"env": ')
    (tmp_path / "loop").symlink_to("loop")
    status, rows, _, err = run_main("good", "new", "torn", "none", "loop")
    assert (status, len(rows)) == (0, 1)
    first, torn, *others = err.splitlines()
    assert first == "left out: new: no evaluation yet" and torn.startswith("left out: torn/status.json")
    assert others == [f"left out: {name}: there is no such run" for name in ("none", "loop")]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["none", "neither/*"], "none: there is no such run\nneither/*: there is no such run"),
        ([], "give the directories of runs"),
        (["--group", "name"], "--group name: give NAME=RUN,RUN,..."),
        (["good", "--threshold", "nan"], "--threshold nan makes no sense: give a mean return"),
        (["--group", "=x"], "--group =x: give NAME=RUN,RUN,..."),
        (["good", "--group", "apex-dqn=good"], "--group apex-dqn=...: runs without a group have this name, too"),
        (["good", "--out", "."], "--out .: give a path without .csv and .png, such as comparison"),
        (["good", "--out", ".."], "--out ..: give a path without .csv and .png, such as ../comparison"),
        *((["good", "--scale", text], f"--scale {text}: give ENV=LOW:HIGH") for text in ("x=2", "x=3:2", "x=1:inf")),
    ],
)
def test_bad_input_has_status_2_and_a_line(tmp_path, run_main, arguments, complaint):
    write_run(tmp_path / "good", [1])
    status, _, out, err = run_main(*arguments)
    assert (status, out) == (2, "") and err.startswith(f"cannot compare: {complaint}")
    assert not (tmp_path / "comparison.csv").exists()


def test_without_matplotlib_there_is_everything_but_the_picture(tmp_path, run_main, monkeypatch):
    write_run(tmp_path / "good", [1])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "apexrl.tools.picture", raising=False)
    monkeypatch.delattr("apexrl.tools.picture", raising=False)
    status, rows, _, err = run_main("good")
    assert (status, len(rows)) == (0, 1) and "-m pip install matplotlib" in err
    assert (tmp_path / "comparison.csv").exists() and not (tmp_path / "comparison.png").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path, run_main):
    write_run(tmp_path / "good", [1])
    status, _, _, err = run_main("good", "--out", "good/status.json/c")
    assert status == 2 and err.startswith("cannot compare: ") and "status.json" in err and "give another --out" in err


def test_a_run_whose_name_looks_like_a_pattern_is_meant_itself(tmp_path, run_main):
    write_run(tmp_path / "a[1]", [3, 3, 3])
    write_run(tmp_path / "a1", [7, 7, 7])
    _, rows, _, _ = run_main("a[1]")
    assert [(row["seeds"], row["final return"]) for row in rows] == [("1", "3.00")]


def test_positions_in_the_csv_are_whole_frames(tmp_path, run_main):
    write_run(tmp_path / "long", [1, 1], frames=123_456_789)
    run_main("long")
    with (tmp_path / "comparison.csv").open() as file:
        assert "123456789" in {row["position"] for row in csv.DictReader(file)}


def test_a_file_that_is_no_comparison_is_not_replaced(tmp_path, run_main):
    write_run(tmp_path / "good", [1])
    before = (tmp_path / "good" / "evaluations.csv").read_bytes()
    status, _, _, err = run_main("good", "--out", "good/evaluations")
    assert status == 2 and "good/evaluations.csv is no comparison: give another name" in err
    assert (tmp_path / "good" / "evaluations.csv").read_bytes() == before
    assert [run_main("good", "--out", "c")[0] for _ in "12"] == [0, 0]


def test_a_picture_of_others_is_not_replaced(tmp_path, run_main):
    write_run(tmp_path / "good", [1])
    (tmp_path / "figure.png").write_bytes(b"mine")
    status, _, _, err = run_main("good", "--out", "figure")
    assert status == 2 and "figure.png is there without its figure.csv: give another name" in err
    assert (tmp_path / "figure.png").read_bytes() == b"mine"
