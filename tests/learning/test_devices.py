"""The devices of several learners."""

import dataclasses

import pytest

from apexrl.config.commands import LearnerCommand
from apexrl.config.flags import default_command
from apexrl.config.sections import LearningConfig
from apexrl.errors import ConfigError
from apexrl.learning.devices import devices_of, is_rank
from apexrl.learning.updates import team as teams
from apexrl.learning.updates.team import join_team
from apexrl.running.learners import _order


@pytest.mark.parametrize(
    ("devices", "device", "count", "num_gpus", "expected"),
    [
        ("", "auto", 2, 0, ["auto", "auto"]),
        ("", "auto", 2, 2, ["cuda:0", "cuda:1"]),
        ("", "cpu", 3, 4, ["cpu"] * 3),
        ("cpu,cpu", "auto", 2, 0, ["cpu", "cpu"]),
        ("cuda:1,cuda:0", "auto", 2, 2, ["cuda:1", "cuda:0"]),
    ],
)
def test_each_learner_has_a_device(devices, device, count, num_gpus, expected):
    assert devices_of(LearningConfig(device=device, learner_devices=devices), count, num_gpus) == expected


def test_a_learner_alone_has_the_device_that_is_named_for_it(monkeypatch):
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)  # of a launcher that started something else around us

    def joined(**devices):
        command = default_command(LearnerCommand)
        command, team = join_team(dataclasses.replace(command, learning=LearningConfig(**devices)))
        assert team.size == 1
        return command.learning.device

    assert joined(learner_devices="cuda:1") == "cuda:1"
    assert joined(device="cuda:1") == "cuda:1" and joined() == "auto"
    with pytest.raises(ConfigError, match="names 2 devices for 1 learners"):
        joined(learner_devices="cpu,cpu")


def test_learners_of_a_team_compare_the_flags_that_make_their_updates(monkeypatch):
    compared = {}

    class Met:
        def __init__(self, rank, size, device):
            self.place = rank, size

        def check_flags(self, values):
            compared.update(values)

    monkeypatch.setattr(teams, "Team", Met)
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    learning = LearningConfig(num_learners=2, device="cpu", total_frames=7)
    command = dataclasses.replace(default_command(LearnerCommand), learning=learning, learner_hosts=2)
    _, team = join_team(command)
    assert team.place == (3, 4) and compared["total_frames"] == 7 and compared["agent"] == command.agent
    assert compared.keys() >= {"batch_size", "gamma", "hidden_size", "learning_rate", "seed"}
    assert not compared.keys() & {"learner_host_rank", "run_dir", "device", "learner_threads", "memory_gb", "bind_host"}


@pytest.mark.parametrize(
    ("variables", "num_learners", "expected"),
    [({}, 2, False), ({"RANK": "0"}, 2, False), ({"RANK": "0", "WORLD_SIZE": "1"}, 2, False),
     ({"RANK": "1", "WORLD_SIZE": "2"}, 2, True), ({"RANK": "1", "WORLD_SIZE": "2"}, 1, False)],
)  # fmt: skip
def test_a_process_is_one_of_the_learners_where_the_launcher_started_as_many(
    monkeypatch, variables, num_learners, expected
):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_rank(num_learners) is expected


def test_the_status_that_tells_the_cause_counts():
    """1 is that of a learner that lost another one."""
    assert sorted([1, -9, 143, 69, 2, 1], key=_order) == [2, 69, -9, 1, 143, 1]


def test_too_few_devices_are_an_error():
    with pytest.raises(ConfigError, match="names 1 devices for 2 learners"):
        devices_of(LearningConfig(learner_devices="cuda:0"), 2, 4)
    with pytest.raises(ConfigError, match="4 learners want 4 GPUs, 2 are here"):
        devices_of(LearningConfig(), 4, 2)
