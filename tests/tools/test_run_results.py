import numpy as np
import pytest

from apexrl.errors import ConfigError
from apexrl.learning.record.run_record import CURVE_COLUMNS
from apexrl.tools.run_results import named_by_settings, read_curve, read_run, readable_runs
from tests.tools.run_directories import write_run


def test_a_run_is_read_from_its_files(tmp_path):
    run = read_run(write_run(tmp_path / "run", [0, 1, 5, 3, 4]))
    assert (run.env, run.frames, run.seconds, run.samples_per_insert) == ("Catch-v0", 4000, 240, 4)
    assert run.curve.returns.tolist() == [0, 1, 5, 3, 4] and run.curve.best.tolist() == [1, 2, 6, 4, 5]
    assert run.final_return == 4
    assert run.first_reaching(3) == (2000, 120) and run.first_reaching(6) == (np.inf, np.inf)
    assert run.settings["learning_rate"] == 0.001 and not run.settings.keys() & {"seed", "run_dir", "actor_port"}


def test_few_evaluations_are_all_final_ones(tmp_path):
    assert read_run(write_run(tmp_path / "run", [1, 2])).final_return == 1.5


def test_a_ratio_is_unknown_before_anything_is_inserted(tmp_path):
    assert read_run(write_run(tmp_path / "run", [1])).samples_per_insert is None


def test_evaluations_that_a_kill_took_back_are_left_out(tmp_path):
    rows = ["10,100,5,10,1,1,0,2", "70,700,30,10,2,2,0,2", "130,1300,55,10,9,9,0,9", "75,1400,32,10,3,3,0,9"]
    (tmp_path / "curve.csv").write_text("\n".join([CURVE_COLUMNS, *rows]))
    assert read_curve(tmp_path / "curve.csv").returns.tolist() == [1, 2, 3]


@pytest.mark.parametrize("row", ["10,100,5,10,1,1,0", "10,100,5,10,one,1,0,2", "10,100,5,10,nan,1,0,2", "\0"])
def test_a_line_that_is_no_evaluation_is_named(tmp_path, row):
    (tmp_path / "curve.csv").write_text(f"{CURVE_COLUMNS}\n10,100,5,10,1,1,0,2\n{row}\n")
    with pytest.raises(ConfigError, match=r"curve\.csv: line 3 is no evaluation"):
        read_curve(tmp_path / "curve.csv")


def test_each_run_that_cannot_be_read_has_a_line(tmp_path):
    good, empty = write_run(tmp_path / "good", [1]), write_run(tmp_path / "empty", [])
    young = write_run(tmp_path / "young", [1])
    (young / "evaluations.csv").unlink()
    broken = write_run(tmp_path / "broken", [1])
    (broken / "config.json").write_text("{}")
    faults = []
    found = readable_runs([good, empty, young, broken, tmp_path / "none"], faults)
    assert [run.directory for run in found] == [good] and len(faults) == 4
    assert [fault.split(":")[0] for fault in faults[:2]] == [str(empty), str(young)] and "no evaluation" in faults[1]
    assert "config.json is not the configuration" in faults[2] and "there is no such run" in faults[3]


def test_runs_are_grouped_by_everything_but_seed_and_place(tmp_path):
    same = [
        read_run(
            write_run(
                tmp_path / f"a{seed}",
                [1],
                seed,
                fork=f"runs/seed{seed}",
                wandb=bool(seed),
                port_base=seed,
                callback=["a:B"] * seed,
            )
        )
        for seed in range(3)
    ]
    other = read_run(write_run(tmp_path / "b", [1], 0, learning_rate=0.5, batch_size=32))
    game = read_run(write_run(tmp_path / "c", [1], 0, env="CartPole-v1"))
    foreign = read_run(write_run(tmp_path / "d", [1], 0, agent="tests.own_agent:own"))
    assert list(named_by_settings(same, [])) == ["apex-dqn"]
    assert named_by_settings([*same, other, game, foreign], []) == {
        "apex-dqn --batch-size 128 --learning-rate 0.001": same,
        "apex-dqn --batch-size 32 --learning-rate 0.5": [other],
        "apex-dqn": [game],
        "tests.own_agent:own": [foreign],
    }


def test_runs_on_the_experience_of_others_are_no_seeds_of_it(tmp_path):
    makers = {"online": {}, "guest": {"guest": "/runs/online"}, "offline": {"from_journal": "/runs/online/journal"}}
    runs = [read_run(write_run(tmp_path / name, [1], 0, **made)) for name, made in makers.items()]
    again = read_run(write_run(tmp_path / "again", [1], 1, guest="/runs/online"))
    groups = named_by_settings([*runs, again], [])
    assert sorted(map(len, groups.values())) == [1, 1, 2] and [runs[1], again] in groups.values()


def test_a_setting_that_an_older_run_does_not_tell_is_no_other_value(tmp_path):
    runs = [read_run(write_run(tmp_path / f"a{seed}", [1], seed)) for seed in range(2)]
    del runs[0].settings["gamma"]
    assert named_by_settings(runs, []) == {"apex-dqn": runs}


def test_a_run_without_settings_needs_a_name(tmp_path):
    directory = write_run(tmp_path / "run", [1])
    (directory / "config.json").unlink()
    faults = []
    assert named_by_settings([read_run(directory)], faults) == {}
    assert faults == [f"{directory} has no config.json to group it by: give --group NAME={directory}"]
