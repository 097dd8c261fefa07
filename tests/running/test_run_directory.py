"""The directory of a run: its one owner, and the files that a later start finds."""

import dataclasses
import os
import signal
import subprocess
import sys

import msgspec
import pytest
import torch

from apexrl.config.commands import RunCommand
from apexrl.config.flags import Asked, default_command, with_preset, with_sections
from apexrl.config.sections import EnvConfig, WireConfig
from apexrl.errors import ConfigError
from apexrl.files import locked, write_json
from apexrl.learning.record.latest import result_in
from apexrl.learning.record.status_file import LAST_EVALUATION, Status
from apexrl.net.keyring import ROLES, make_keys
from apexrl.networks.checkpoint import save_checkpoint
from apexrl.networks.headers import BEST, NUMBERED, CheckpointHeader, Counters, latest_path
from apexrl.running.plan import make_plan
from apexrl.running.prepare import on_saved
from apexrl.running.run_directory import (
    CONFIG_FILE,
    RESULTS,
    as_fork,
    check_new,
    continued,
    journals_of,
    lock_run,
    save_config,
    saved_command,
    set_aside,
    update_of,
)
from apexrl.runs import CURVE_FILE, STATUS_FILE, CurvePoint
from apexrl.types import LogPosition
from tests.system.processes import ROOT


def write_checkpoint(path, spec, updates=7):
    save_checkpoint(path, CheckpointHeader(spec, "apex-dqn", "{}", Counters(updates=updates)), {"x": torch.zeros(2)})


def test_a_run_directory_has_one_owner(tmp_path):
    directory = tmp_path / "run"
    with lock_run(str(directory)):
        with pytest.raises(ConfigError, match=f"{directory} belongs to a run that goes on"), lock_run(str(directory)):
            pass
        check_new(directory)
    with lock_run(str(directory)):
        pass


def test_a_run_is_forked_twice_at_the_same_time_and_does_not_go_on_meanwhile(tmp_path):
    def refused(**how):
        return pytest.raises(ConfigError, match="belongs to a run that goes on"), lock_run(str(tmp_path), **how)

    def shared():
        return lock_run(str(tmp_path), is_shared=True)

    fault, alone = refused()
    with shared(), shared(), fault, alone:
        pass
    fault, other = refused(is_shared=True)
    with lock_run(str(tmp_path)), fault, other:
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    hold = "import pathlib, time; from apexrl.files import locked\n"
    hold += f"with locked(pathlib.Path({str(tmp_path / 'l')!r}), 'x'):"
    process = subprocess.Popen([sys.executable, "-c", hold + " print('held', flush=True); time.sleep(600)"],
                               cwd=ROOT, stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError, match="belongs to x"), locked(tmp_path / "l", "x"):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    with locked(tmp_path / "l", "x"):
        pass


def test_a_lock_says_nothing_about_the_errors_of_its_holder(tmp_path):
    with pytest.raises(BlockingIOError, match="another"), locked(tmp_path / "lock", "x"):
        raise BlockingIOError("another")


@pytest.mark.parametrize("directory", ["file", "file/run", "/sys/apexrl"])
def test_a_directory_that_cannot_be_written_is_refused(tmp_path, directory):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{directory} cannot be written"), lock_run(str(tmp_path / directory)):
        pass


def test_a_new_run_wants_an_empty_directory(tmp_path):
    check_new(tmp_path / "run")
    with lock_run(str(tmp_path / "run")):
        pass
    (tmp_path / "run" / f"{CONFIG_FILE}.tmp").touch()
    check_new(tmp_path / "run")  # an earlier start has failed, or was killed
    (tmp_path / "run" / "notes").write_text("")
    with pytest.raises(ConfigError, match=r"is not empty.*or empty it"):
        check_new(tmp_path / "run")
    for content, cure in (
        ("{}", "or --resume"),
        ('{"command": {"reproducible": false}}', "or --resume"),
        ('{"command": {"reproducible": true}}', "or empty it: a reproducible run begins anew"),
    ):
        (tmp_path / "run" / CONFIG_FILE).write_text(content)
        with pytest.raises(ConfigError, match=f"is not empty.*{cure}"):
            check_new(tmp_path / "run")


@pytest.mark.parametrize("agent", ["apex-dqn", "tests.own_agent:own"])
def test_a_configuration_comes_back_without_what_was_of_one_start_only(tmp_path, agent):
    command = dataclasses.replace(
        with_preset(default_command(RunCommand, agent), "small"),
        env=EnvConfig("Catch-v0"), wires=WireConfig(actor_port=7), run_dir=str(tmp_path),
    )  # fmt: skip
    once = dataclasses.replace(command, max_seconds=3.0, smoke=True, from_scratch=True)
    save_config(once)
    assert saved_command(tmp_path) == (command, [])


@pytest.mark.parametrize(("transitions", "updates", "left"), [(None, 0, (400, 9)), (50, 7, (400, 9)), (100, 7, (0, 9)),
                                                             (50, 9, (400, 0))])  # fmt: skip
def test_a_total_that_is_not_reached_yet_stays(tmp_path, spec, transitions, updates, left):
    command = dataclasses.replace(default_command(RunCommand), run_dir=str(tmp_path))
    save_config(with_sections(command, {"learning": {"total_frames": 400, "total_updates": 9}}))
    if transitions is not None:
        counters = Counters(updates=updates, logs=(LogPosition("log", 0, transitions),))
        spec = msgspec.structs.replace(spec, frames_per_step=4)
        save_checkpoint(
            latest_path(tmp_path), CheckpointHeader(spec, "apex-dqn", "{}", counters), {"x": torch.zeros(2)}
        )
    learning = saved_command(tmp_path)[0].learning
    assert (learning.total_frames, learning.total_updates) == left


@pytest.mark.parametrize(
    ("waits_for", "evaluated", "has_ended", "left"),
    [(LAST_EVALUATION, False, False, 400), ("min_size", False, False, 0), (LAST_EVALUATION, True, False, 0),
     (LAST_EVALUATION, False, True, 0)],
)  # fmt: skip
def test_a_run_that_was_killed_in_its_last_evaluation_keeps_its_end(
    tmp_path, spec, waits_for, evaluated, has_ended, left
):
    """Else its rate would begin anew, and a later network take the place of the one that nobody has evaluated."""
    command = dataclasses.replace(default_command(RunCommand), run_dir=str(tmp_path))
    save_config(with_sections(command, {"learning": {"total_frames": 400}}))
    counters = Counters(updates=7, logs=(LogPosition("log", 0, 400),))
    save_checkpoint(latest_path(tmp_path), CheckpointHeader(spec, "apex-dqn", "{}", counters), {"x": torch.zeros(2)})
    write_json(tmp_path / STATUS_FILE, Status("Catch-v0", 400, counters, {}, waits_for))
    if evaluated:
        (tmp_path / CURVE_FILE).write_text(f"{','.join(CurvePoint._fields)}\n9,400,7,1,1,1,1,1,0\n")
    if has_ended:
        (tmp_path / "summary.json").write_text("{}")
    assert saved_command(tmp_path, is_resumed=True)[0].learning.total_frames == left
    assert saved_command(tmp_path)[0].learning.total_frames == 0, "a fork goes on"


@pytest.mark.parametrize(("frames", "left"), [(399, 400), (400, 0)])
def test_a_run_that_lost_its_checkpoint_knows_by_its_status_what_it_has_reached(tmp_path, frames, left):
    """Its log's frames count for a new network, too, which would end where it begins."""
    command = dataclasses.replace(default_command(RunCommand), run_dir=str(tmp_path))
    save_config(with_sections(command, {"learning": {"total_frames": 400}}))
    (tmp_path / "status.json").write_bytes(msgspec.json.encode({"frames": frames}))
    assert saved_command(tmp_path)[0].learning.total_frames == left


def test_a_fork_of_an_earlier_update_has_the_totals_that_its_run_reached_later(tmp_path, spec):
    command = dataclasses.replace(default_command(RunCommand), run_dir=str(tmp_path))
    save_config(with_sections(command, {"learning": {"total_frames": 400}}))
    for path, updates, frames in ((latest_path(tmp_path), 9, 400), (kept_path(tmp_path, 5), 5, 100)):
        counters = Counters(updates=updates, logs=(LogPosition("log", 0, frames),))
        save_checkpoint(path, CheckpointHeader(spec, "apex-dqn", "{}", counters), {"x": torch.zeros(2)})
    kept_path(tmp_path, 7).write_bytes(b"damaged")  # a checkpoint that nobody asks for
    totals = {at: saved_command(tmp_path, at)[0].learning.total_frames for at in (0, 5, 9)}
    assert totals == {0: 0, 5: 400, 9: 0}


def kept_path(directory, updates):
    return latest_path(directory).with_name(NUMBERED.format(updates))


def test_arguments_go_on_top_of_the_run_that_they_continue(tmp_path):
    """On a cluster the directory may be on another host: then the arguments are all that is known."""
    saved = with_sections(default_command(RunCommand), {"learning": {"num_learners": 2}, "wires": {"shards": 4}})
    save_config(dataclasses.replace(saved, run_dir=str(tmp_path)))
    for flag, directory, learners in (("--resume", tmp_path, 2), ("--fork", tmp_path, 2), ("--resume", "elsewhere", 1)):
        arguments = [flag, str(directory), "--seed", "5"]
        _, found = on_saved(arguments)
        assert (found.learning.num_learners, found.seed) == (learners, 5)
    assert on_saved([])[1] == default_command(RunCommand)


def test_the_names_that_a_configuration_does_not_give_are_told(tmp_path):
    save_config(dataclasses.replace(default_command(RunCommand), run_dir=str(tmp_path)))
    saved = msgspec.json.decode((tmp_path / CONFIG_FILE).read_bytes())
    del saved["command"]["wires"], saved["command"]["network"]["hidden_size"]
    (tmp_path / CONFIG_FILE).write_bytes(msgspec.json.encode(saved))
    command, not_given = saved_command(tmp_path)
    assert not_given == ["wires", "hidden_size"]
    assert command == dataclasses.replace(default_command(RunCommand), run_dir=str(tmp_path))


@pytest.mark.parametrize("agent", [{"gamma": 0.99, "n_steps": 3}, None])
def test_the_configuration_of_an_earlier_version_is_refused(tmp_path, agent):
    (tmp_path / CONFIG_FILE).write_bytes(msgspec.json.encode({"command": {"agent": agent, "update": {}}}))
    with pytest.raises(ConfigError, match=r"written by an earlier version, .* begin a new run"):
        saved_command(tmp_path)


@pytest.mark.parametrize(("section", "value"), [("update", 3), ("update", {"batch_size": "x"}), ("seed", "x")])
def test_a_configuration_with_wrong_values_is_refused(tmp_path, section, value):
    text = msgspec.json.encode({"command": {"agent": "apex-dqn", section: value}})
    (tmp_path / CONFIG_FILE).write_bytes(text)
    with pytest.raises(ConfigError, match="is not the configuration of a run"):
        saved_command(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"command": 3, "revision": "", "versions": {}}'])
def test_a_damaged_configuration_is_refused(tmp_path, text):
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(ConfigError, match="is not the configuration of a run"):
        saved_command(tmp_path)


def test_a_run_goes_on_from_its_checkpoint(tmp_path, spec):
    assert continued(tmp_path) is None
    write_checkpoint(latest_path(tmp_path), spec)
    (tmp_path / CURVE_FILE).write_text("")
    assert continued(tmp_path).updates == 7


@pytest.mark.parametrize(
    "result",
    [f"checkpoints/{BEST}", CURVE_FILE, "status.json", "summary.json", "checkpoints/update-000000000007.safetensors"],
)
def test_results_without_a_checkpoint_are_not_written_over(tmp_path, result):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / result).write_text("")
    with pytest.raises(ConfigError, match=rf"latest\.safetensors is missing, and .*{result} is there.*--from-scratch"):
        continued(tmp_path)


@pytest.mark.parametrize(("summary", "result"), [('{"updates": 0}', None), ('{"updates": 9}', "summary.json")])
def test_the_summary_of_a_run_that_never_learned_is_no_result(tmp_path, summary, result):
    (tmp_path / "summary.json").write_text(summary)
    assert result_in(tmp_path) == (result and tmp_path / result)
    (tmp_path / "status.json").write_text("{}")
    assert result_in(tmp_path) == tmp_path / "status.json"


def test_a_damaged_checkpoint_is_refused(tmp_path):
    latest_path(tmp_path).parent.mkdir()
    latest_path(tmp_path).write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"latest\.safetensors cannot be continued.*--from-scratch"):
        continued(tmp_path)
    latest_path(tmp_path).unlink()
    latest_path(tmp_path).mkdir()
    with pytest.raises(ConfigError, match=r"latest\.safetensors cannot be continued"):
        continued(tmp_path)


@pytest.mark.parametrize("name", ["status.json", "summary.json", CURVE_FILE])
def test_a_directory_in_the_place_of_a_file_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name} is a directory"):
        continued(tmp_path)


def test_results_are_set_aside_and_the_experience_stays(tmp_path, spec):
    for number in (1, 2):
        write_checkpoint(latest_path(tmp_path), spec, updates=number)
        for name in RESULTS[1:]:
            (tmp_path / name).write_text(f"{number}")
        (tmp_path / "journal").mkdir(exist_ok=True)
        aside = set_aside(tmp_path)
        assert aside == tmp_path / f"earlier-{number}"
        assert {path.name for path in aside.iterdir()} == set(RESULTS)
        assert continued(aside).updates == number
        assert continued(tmp_path) is None and (tmp_path / "journal").is_dir()
    (tmp_path / CURVE_FILE).write_text("alone")
    assert (set_aside(tmp_path) / CURVE_FILE).read_text() == "alone"


@pytest.mark.parametrize(("text", "update"), [("", 0), ("70", 70), ("7_000", 7000), ("2e5", 200_000), ("many", 0)])
def test_theupdate_of_a_fork_is_read_as_flags_are(text, update):
    assert update_of(text) == update


def test_relative_journals_films_and_keys_stay_where_they_are(tmp_path, monkeypatch):
    def plan(*words):
        arguments = ["--env", "Catch-v0", "--run-dir", "x", "--memory-gb", "8", *words]
        return make_plan(Asked.of(default_command(RunCommand), arguments), None).command

    monkeypatch.chdir(tmp_path)
    make_keys(tmp_path / "keys", ROLES)
    command = plan("--journal-dir", "kept", "--record-dir", "films", "--keys", "keys")
    monkeypatch.chdir("/")
    assert command.wires.keys == str(tmp_path / "keys")
    assert as_fork(command).evaluation.record_dir == ""  # the films of its source stay
    assert journals_of(command) == [tmp_path / "kept"] and command.evaluation.record_dir == str(tmp_path / "films")
    assert plan("--journal-dir", "off").replay.journal_dir == "off"
