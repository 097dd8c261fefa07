import errno
import json
import math
import os
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apexrl.agents.apex_dqn_config import ApexUpdate
from apexrl.errors import ApexError, ConfigError
from apexrl.learning.record import run_record
from apexrl.learning.record.latest import latest_checkpoint
from apexrl.learning.record.run_record import RunRecord
from apexrl.net.metrics_channel import Evaluation
from apexrl.networks.checkpoint import load_checkpoint
from apexrl.networks.config import DuelingConfig, to_text
from apexrl.networks.headers import BEST, LATEST, NUMBERED, ParametersHeader, numbered_checkpoints
from apexrl.networks.parameters import encode_parameters
from apexrl.runs import CURVE_FILE, read_evaluations
from apexrl.types import LogPosition, StreamSpec
from tests.full_disk import full_disk
from tests.lockstep import identity_of, make_updater


@pytest.fixture
def agent(spec):
    torch.manual_seed(0)
    return make_updater(spec)


@pytest.fixture
def record(tmp_path, spec):
    return RunRecord(tmp_path, identity_of(spec))


def evaluation(agent, *returns):
    header = ParametersHeader(agent.num_updates, *identity_of(StreamSpec("Any-v0", (2,), "float32", 1, 2, 1)))
    encoded = encode_parameters(header, agent.parameters()[0])
    return Evaluation(agent.num_updates, 0.0, returns, (10,) * len(returns), 1.0, parameters=encoded)


def best_return(directory):
    return load_checkpoint(directory / "checkpoints" / BEST).header.counters.best_evaluation_return


def faults_of(directory, record):
    record.report({}, {}, "")
    return json.loads((directory / "status.json").read_text())["metrics"]["learner/disk_faults_total"]


def curve(directory):
    return [line.split(",") for line in (directory / CURVE_FILE).read_text().splitlines()]


def test_a_run_goes_on_where_it_was(tmp_path, spec, agent, record):
    record.count(40, 16, (LogPosition("log", 7, 320), LogPosition("other", 2, 80)), 3)
    record.evaluated(evaluation(agent, 1.0, 3.0))
    assert record.checkpoint(agent)
    again = RunRecord(tmp_path, identity_of(spec))
    again.restore(agent, latest_checkpoint(tmp_path))
    assert msgspec.structs.replace(again.counters, seconds=0) == msgspec.structs.replace(record.counters, seconds=0)
    assert again.run == record.run
    assert agent.num_updates == 40
    again.evaluated(evaluation(agent, 5.0))
    assert [row[4] for row in curve(tmp_path)] == ["mean", "2", "5"]


def test_a_row_of_the_curve_tells_when_its_parameters_were_published(tmp_path, agent, record):
    """An evaluation takes a while, in which the run goes on."""
    record.count(0, 16, (LogPosition("log", 7, 320),), 3)
    record.published(agent.num_updates)
    record.count(40, 16, (LogPosition("log", 30, 900),), 3)
    record.evaluated(evaluation(agent, 1.0))
    agent.num_updates = 7  # which this life of the learner has not published
    record.evaluated(evaluation(agent, 2.0))
    frames = record.frames // 900
    assert [row[1:3] for row in curve(tmp_path)[1:]] == [[str(320 * frames), "0"], [str(900 * frames), "7"]]


def test_a_learner_that_died_after_an_evaluation_keeps_the_best_network(tmp_path, spec, agent, record):
    agent.num_updates = 1
    record.checkpoint(agent)
    record.evaluated(evaluation(agent, 20.0))  # and dies before the next checkpoint
    again = RunRecord(tmp_path, identity_of(spec))
    again.restore(agent, latest_checkpoint(tmp_path))
    agent.num_updates = 2
    again.evaluated(evaluation(agent, 16.0))
    assert best_return(tmp_path) == 20.0 == again.counters.best_evaluation_return
    again.evaluated(evaluation(agent, 21.0))
    assert best_return(tmp_path) == 21.0


def best_update(directory):
    return load_checkpoint(directory / "checkpoints" / BEST).header.counters.updates


def test_of_equal_evaluations_the_newest_is_the_best(tmp_path, spec, agent, record):
    """A game has a greatest return, and the first network that reached it by luck is not the best for ever.

    Of a learner that died and went on from update 0, that one replaces none.
    """
    record.checkpoint(agent)
    threes = (0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.2, 0.3, 0.1)
    for updates, returns in (*enumerate(threes, 1), (4, (0.1, 0.1, 0.1)), (0, (0.9, 0.9, 0.9))):
        agent.num_updates = updates
        record.evaluated(evaluation(agent, *returns))
        assert best_update(tmp_path) == (min(updates, 3) or 3)
    again = RunRecord(tmp_path, identity_of(spec))
    again.restore(agent, latest_checkpoint(tmp_path))
    agent.num_updates = 5
    again.evaluated(evaluation(agent, 0.3, 0.1, 0.2))
    assert best_update(tmp_path) == 5 and best_return(tmp_path) == again.counters.best_evaluation_return


def test_a_return_whose_network_nobody_has_is_not_the_best(tmp_path, agent, record):
    without = msgspec.structs.replace(evaluation(agent, 1e300), parameters=b"")
    record.evaluated(without)
    assert (record.counters.best_evaluation_return, record.counters.last_evaluation_return) == (None, 1e300)
    record.evaluated(evaluation(agent, 2.0))
    record.evaluated(without)
    assert best_return(tmp_path) == 2.0 == record.counters.best_evaluation_return


def test_a_best_network_that_was_taken_away_is_made_anew(tmp_path, spec, agent, record):
    record.evaluated(evaluation(agent, 20.0))
    record.checkpoint(agent)
    (tmp_path / "checkpoints" / BEST).unlink()
    again = RunRecord(tmp_path, identity_of(spec))
    again.restore(agent, latest_checkpoint(tmp_path))
    again.evaluated(evaluation(agent, 1.0))
    assert best_return(tmp_path) == 1.0


def test_results_without_a_checkpoint_are_not_begun_anew(tmp_path, agent, record):
    assert latest_checkpoint(tmp_path) is None
    record.evaluated(evaluation(agent, 20.0))
    record.checkpoint(agent)
    assert latest_checkpoint(tmp_path) is not None
    (tmp_path / "checkpoints" / LATEST).unlink()
    with pytest.raises(
        ConfigError, match=r"latest.safetensors is missing, and .*best.safetensors is there: .*--from-scratch"
    ):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("value", [torch.nan, 1e6])  # the latter is no number of float16, which actors get
def test_a_network_that_is_not_finite_is_never_kept(tmp_path, agent, record, value):
    record.checkpoint(agent)
    kept = (tmp_path / "checkpoints" / LATEST).read_bytes()
    for parameter in agent.learner.online["q"].parameters():
        parameter.data[..., 0] = value
        break
    with pytest.raises(ApexError, match="lower --learning-rate"):
        record.checkpoint(agent)
    assert (tmp_path / "checkpoints" / LATEST).read_bytes() == kept


def test_a_checkpoint_that_is_not_finite_is_refused(tmp_path, spec, agent, record, monkeypatch):
    monkeypatch.setattr("apexrl.learning.record.run_record.all_finite", lambda tensors: True)
    next(agent.learner.online["q"].parameters()).data[..., 0] = torch.inf
    record.checkpoint(agent)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="not finite"):
        latest_checkpoint(tmp_path)


def test_another_optimizer_is_a_clear_error(tmp_path, spec, agent, record):
    record.checkpoint(agent)
    update = ApexUpdate(optimizer="rmsprop")
    other = make_updater(spec, update)
    with pytest.raises(ConfigError, match="--optimizer"):
        RunRecord(tmp_path, identity_of(spec)).restore(other, latest_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"agent": "impala", "network": "{}"}, "agent is apex-dqn, not impala"),
        ({"network": to_text(DuelingConfig((1, 2, 3), 4))}, "channels is .*, not .*; hidden_size is .*, not 4"),
        ({"spec": StreamSpec("Other-v0", (2,), "float32", 1, 2, 1)}, "env is .*, not Other-v0; .*"),
        ({"network": "junk"}, "channels is .*; network is the default, not junk.*"),
    ],
)
def test_results_of_another_run_are_not_written_over_and_the_differences_named(
    tmp_path, spec, agent, record, change, words
):
    record.checkpoint(agent)
    other = identity_of(spec)._replace(**change)
    refusal = rf"\.safetensors is of another run, whose {words}: give that run's flags .* another --run-dir$"
    with pytest.raises(ConfigError, match=f"latest{refusal}") as refused:
        RunRecord(tmp_path, other).restore(agent, latest_checkpoint(tmp_path))
    assert "Header(" not in str(refused.value)
    record.evaluated(evaluation(agent, 20.0))
    with pytest.raises(ConfigError, match=f"best{refusal}"):
        RunRecord(tmp_path, other)


def test_a_best_network_that_cannot_be_read_is_refused(tmp_path, spec, agent, record):
    record.evaluated(evaluation(agent, 20.0))
    (tmp_path / "checkpoints" / BEST).write_bytes(b"junk")
    with pytest.raises(ConfigError, match=r"best\.safetensors"):
        RunRecord(tmp_path, identity_of(spec))


def test_the_status_shows_the_living_and_the_last_games(tmp_path, record):
    record.report({"actor/frames_per_second": 3000.0, "learner/loss": np.nan}, {"actor/return_mean": 2.0}, "")
    record.report({"replay/fill": 0.5}, {}, "actor")  # the actors are gone
    status = json.loads((tmp_path / "status.json").read_text())
    metrics = {"replay/fill": 0.5, "actor/return_mean": 2.0, "learner/disk_faults_total": 0.0}
    assert status["metrics"] == metrics and status["waits_for"] == "actor"


def test_a_full_disk_stops_nothing_and_everything_is_written_later(tmp_path, agent, record, monkeypatch, caplog):
    agent.num_updates = 1
    record.checkpoint(agent)
    record.evaluated(evaluation(agent, 1.0))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with full_disk(monkeypatch):
        record.evaluated(evaluation(agent, 5.0))
        record.report({"a": 1.0}, {}, "")
        assert not record.checkpoint(agent)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert len([line for line in caplog.messages if "free some space" in line]) == 1
    assert faults_of(tmp_path, record) >= 4
    assert best_return(tmp_path) == 5.0
    assert [row[4] for row in curve(tmp_path)] == ["mean", "1", "5"]
    assert record.checkpoint(agent)


def test_what_a_killed_learner_left_is_removed(tmp_path, spec, record):
    names = "checkpoints/latest.4711.tmp", "checkpoints/best.safetensors.tmp", "status.json.tmp", "evaluations.csv.tmp"
    others = "checkpoints/mine.tmp", "notes.tmp"
    for name in (*names, *others):
        (tmp_path / name).write_bytes(b"half")
    RunRecord(tmp_path, identity_of(spec))
    assert [(tmp_path / name).exists() for name in (*names, *others)] == [False] * 4 + [True] * 2


def test_a_run_directory_that_cannot_be_is_a_clear_error(tmp_path, spec):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ConfigError, match="file cannot be used"):
        RunRecord(tmp_path / "file", identity_of(spec))


def test_a_status_that_cannot_be_replaced_stops_nothing(tmp_path, record):
    (tmp_path / "status.json").mkdir()
    record.report({"a": 1.0}, {}, "")
    (tmp_path / "status.json").rmdir()
    assert faults_of(tmp_path, record) == 1


def test_the_newest_checkpoints_are_kept_under_their_updates(tmp_path, spec, agent):
    record = RunRecord(tmp_path, identity_of(spec), keep_checkpoints=2)
    for updates in (8, 9, 9, 10, 100):
        record.count(updates, 16, (LogPosition("log", updates, 0),), 0)
        assert record.checkpoint(agent)
    kept = [load_checkpoint(path).header.counters for path in numbered_checkpoints(tmp_path)]
    assert [(counters.updates, counters.logs[0].next_number) for counters in kept] == [(10, 10), (100, 100)]
    assert latest_checkpoint(tmp_path).header.counters == kept[-1]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_after_a_return_to_an_earlier_checkpoint_the_new_ones_are_kept(tmp_path, spec, agent):
    record = RunRecord(tmp_path, identity_of(spec), keep_checkpoints=2)
    written = iter((4000, 3000, 2000, 1000))  # the clock is set back meanwhile
    for updates in (900, 1000, 510, 520):
        record.count(updates, 16, (), 0)
        assert record.checkpoint(agent)
        os.utime(tmp_path / "checkpoints" / NUMBERED.format(updates), (next(written),) * 2)
        later = [load_checkpoint(path).header.counters.updates for path in numbered_checkpoints(tmp_path)]
        assert updates in later
    assert later == [510, 520]


def test_checkpoints_are_kept_where_a_file_has_one_name(tmp_path, spec, agent, monkeypatch):
    record = RunRecord(tmp_path, identity_of(spec), keep_checkpoints=2)
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EOPNOTSUPP, "Operation not supported")))
    record.count(8, 16, (), 0)
    assert record.checkpoint(agent) and faults_of(tmp_path, record) == 0
    assert [load_checkpoint(path).header.counters.updates for path in numbered_checkpoints(tmp_path)] == [8]


def test_an_evaluation_that_is_told_twice_counts_once(tmp_path, agent, record):
    for _ in range(2):
        record.evaluated(evaluation(agent, 1.0, 3.0))
    assert [row[4] for row in curve(tmp_path)] == ["mean", "2"] and record.counters.evaluation_episodes == 2


def test_an_evaluation_that_is_told_again_with_its_film_is_drawn_once(tmp_path, agent, record):
    figures = evaluation(agent, 1.0, 3.0)
    film = msgspec.structs.replace(figures, picture=b"\x89PNG\r\n\x1a\n", video="/videos/game.webm")
    record.published(agent.num_updates, 50)
    for told in (figures, film, film):
        record.evaluated(told)
    assert [row[4] for row in curve(tmp_path)] == ["mean", "2"] and record.counters.evaluation_episodes == 2
    found = events(tmp_path)
    assert [event.step for event in found.Images("evaluation/game")] == [50]
    texts = [event.tensor_proto.string_val[0].decode() for event in found.Tensors("evaluation/games/text_summary")]
    assert texts == [figures.words, "`/videos/game.webm`"]


def test_small_returns_are_not_rounded_away(tmp_path, agent, record):
    record.evaluated(evaluation(agent, 0.004, 0.003))
    assert curve(tmp_path)[-1][4:] == ["0.0035", "0.0035", "0.003", "0.004", "0"]


def test_no_other_checkpoint_is_kept_unless_asked_for(tmp_path, agent, record):
    record.checkpoint(agent)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [LATEST]


def events(directory):
    found = EventAccumulator(str(directory / "tensorboard"))
    found.Reload()
    return found


def test_an_evaluation_is_drawn_where_its_network_was_published(tmp_path, agent, record):
    frames = []
    for updates, transitions in ((0, 320), (7, 900)):
        record.count(updates, 16, (LogPosition("log", 1, transitions),), 3)
        record.published(updates)
        frames.append(record.frames)
    for updates, transitions in ((0, 2000), (7, 3000)):  # the games of either end later
        record.count(8, 16, (LogPosition("log", 1, transitions),), 3)
        agent.num_updates = updates
        seen = {"picture": b"\x89PNG\r\n\x1a\n", "video": f"/videos/{updates}"}
        record.report({"evaluation/games_finished": 9.0, "evaluation/return_so_far": 2.0}, {}, "")
        record.evaluated(msgspec.structs.replace(evaluation(agent, 1.0, 3.0), **seen))
        record.report({"replay/size": 1.0}, {}, "")
    found = events(tmp_path)
    shown = [tag for tag in found.Tags()["scalars"] if tag.startswith(("evaluation/", "Overview/1"))]
    drawn = {tag: [event.step for event in found.Scalars(tag)] for tag in shown}
    drawn |= {tag: [event.step for event in found.Images(tag)] for tag in found.Tags()["images"]}
    drawn["games"] = [event.step for event in found.Tensors("evaluation/games/text_summary")]
    assert set(map(tuple, drawn.values())) == {tuple(frames)}
    assert {"evaluation/return_mean", "evaluation/game", "evaluation/seconds"} < drawn.keys()
    assert json.loads((tmp_path / "status.json").read_text())["metrics"]["evaluation/frames"] == frames[1]


def test_the_progress_of_an_evaluation_is_in_the_status(tmp_path, record):
    record.report({"evaluation/games_finished": 9.0}, {}, "")
    assert json.loads((tmp_path / "status.json").read_text())["metrics"]["evaluation/games_finished"] == 9.0


def test_the_newest_evaluation_and_its_video_are_told(tmp_path, agent, record):
    assert record.evaluated_updates == -1
    agent.num_updates = 30
    record.evaluated(msgspec.structs.replace(evaluation(agent, 1.0), video="/videos/game-30.webm"))
    assert record.evaluated_updates == 30
    (games,) = events(tmp_path).Tensors("evaluation/games/text_summary")
    told = b"1 game, mean 1.00, median 1.00, min 1.00, max 1.00, exploration 0, `/videos/game-30.webm`"
    assert games.tensor_proto.string_val[0] == told


def test_the_curve_tells_the_exploration_also_behind_lines_of_an_earlier_version(tmp_path, spec, agent):
    (tmp_path / CURVE_FILE).write_text("seconds,frames,updates,episodes,mean,median,min,max\n0,0,0,4,5,6,7,8\n")
    record = RunRecord(tmp_path, identity_of(spec))
    agent.num_updates = 9
    record.evaluated(msgspec.structs.replace(evaluation(agent, 1.0), exploration=0.001))
    old, new = read_evaluations(tmp_path / CURVE_FILE)
    assert (old.max, new.mean, new.exploration) == (8, 1, 0.001) and math.isnan(old.exploration)


@pytest.mark.parametrize(
    ("end", "means"), [("20,200,2,10,1", [1, 4]), ("20,200,2,10,3,3,3,3,0.001", [1, 3, 4]), ("20,200,2,10,3,3\n", None)]
)
def test_a_line_that_was_cut_off_does_not_run_into_the_next(tmp_path, spec, agent, end, means):
    columns = "seconds,frames,updates,episodes,mean,median,min,max,exploration\n"
    (tmp_path / CURVE_FILE).write_text(f"{columns}10,100,1,10,1,1,1,1,0.001\n{end}")
    record = RunRecord(tmp_path, identity_of(spec))
    agent.num_updates = 9
    record.published(9, 900)
    record.evaluated(evaluation(agent, 4.0))
    if means is None:  # a whole line that is none is not ours to remove
        with pytest.raises(ConfigError, match="line 3 is no evaluation"):
            read_evaluations(tmp_path / CURVE_FILE)
        return
    lines = (tmp_path / CURVE_FILE).read_text().splitlines()
    assert lines[0] == columns.strip()
    assert [float(line.split(",")[4]) for line in lines[1:]] == means


def test_a_line_with_more_numbers_than_an_evaluation_has_is_none(tmp_path):
    line = "seconds,frames,updates,episodes,mean,median,min,max,exploration\n20,200,2,10,130,300,3,10,5,5,5,5,0\n"
    (tmp_path / CURVE_FILE).write_text(line)
    with pytest.raises(ConfigError, match="line 2 is no evaluation"):
        read_evaluations(tmp_path / CURVE_FILE)


def test_a_kill_between_curve_and_best_network_leaves_no_line_without_its_network(tmp_path, agent, record, monkeypatch):
    agent.num_updates, written = 7, []
    monkeypatch.setattr(run_record, "write_durably", lambda path, content: written.append(path.name))
    monkeypatch.setattr(run_record, "save_checkpoint", lambda path, *_: written.append(path.name))
    record.evaluated(evaluation(agent, 5.0))
    assert written == ["best.safetensors", CURVE_FILE]
