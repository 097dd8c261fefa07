"""The page about a run: from the launcher's configuration, or a learner's own flags."""

import dataclasses
import json

import pytest

from apexrl.config.commands import LearnerCommand, RunCommand
from apexrl.config.flags import default_command, with_preset
from apexrl.learning.record.run_page import about, telling_flags
from apexrl.runs import CONFIG_FILE


def test_the_page_holds_the_flags_the_revision_and_the_machine(tmp_path):
    config = {
        "command": {
            "env": {"env": "Catch|v0", "noop_max": 5, "life_loss_terminal": True},
            "run_dir": "runs/x",
            "update": {"learning_rate": 0.5, "mix": ["queue=1/2", "uniform=1/2"]},
            "wires": {"actor_port": 1},
            "tensorboard_port": 2,
            "smoke": True,
        },
        "revision": "abc",
        "versions": {"torch": "2.13.0", "cores": "2"},
    }
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    command = with_preset(default_command(LearnerCommand), "small")
    flags, page = about(command.__class__(**{**vars(command), "run_dir": str(tmp_path)}))
    told = {"env": "Catch|v0", "noop-max": 5, "learning-rate": 0.5, "mix": "queue=1/2 uniform=1/2"}
    assert flags == told
    assert "| noop-max | 5 |" in page and page.index("differ") < page.index("All flags") and "| smoke | True |" in page
    for line in ("| learning-rate | 0.5 |", "| revision | abc |", "| cores | 2 |", "| env | Catch v0 |"):
        assert line in page.splitlines()


@pytest.mark.parametrize("agent", ["apex-dqn", "somewhere:apex-dqn", "somewhere:unknown"])
def test_what_a_preset_gives_does_not_differ_from_it(agent):
    """Nor for an algorithm of one's own, once its module has put it there; of an unknown one all flags are told."""
    command = with_preset(default_command(RunCommand), "small")
    values = dataclasses.asdict(command) | {"agent": agent, "preset": "small", "seed": 7}
    what, flags = telling_flags(values)
    is_known = not agent.endswith("unknown")
    assert (what == "All flags") != is_known and flags["seed"] == 7
    assert ("batch-size" in flags, "learning-rate" in flags) == (not is_known, not is_known)


def test_a_learner_by_hand_knows_its_own_flags(tmp_path):
    command = with_preset(default_command(LearnerCommand), "small")
    for written in ("", "no json", "{}"):
        if written:
            (tmp_path / CONFIG_FILE).write_text(written)
        flags, page = about(command.__class__(**{**vars(command), "run_dir": str(tmp_path)}))
        always = {"agent": "apex-dqn", "preset": "small", "seed": 0, "learning-rate": command.update.learning_rate}
        assert flags == always
        assert f"| batch-size | {command.update.batch_size} |" in page and "| actor-port" not in page
        assert "| revision | unknown |" in page
