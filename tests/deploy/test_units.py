"""The text of the units: flags of their scripts, restarts, device files of GPUs. test_cluster.py starts them."""

import re
import shlex

import pytest

from apexrl.config.commands import ActorCommand, LearnerCommand, ReplayCommand
from apexrl.config.flags import parse
from apexrl.lifecycle import PERMANENT_STATUS
from apexrl.running.tensorboard import link_runs
from tests.deploy.commands import ran
from tests.system.processes import ROOT

UNITS = ROOT / "deploy/files/systemd"


@pytest.mark.parametrize(
    "unit, script, command",
    [
        ("replay@", "replay.py", ReplayCommand),
        ("learner", "learner.py", LearnerCommand),
        ("actor", "actor.py", ActorCommand),
        ("evaluator", "actor.py", ActorCommand),
    ],
)
def test_the_flags_of_a_unit_are_flags_of_its_script(unit, script, command):
    line = re.search(r"^ExecStart=(.*)$", (UNITS / f"apexrl-{unit}.service").read_text(), re.MULTILINE)[1]
    if line.startswith("/bin/sh"):
        line = shlex.split(line)[2].replace("$$(nproc)", "3").replace("$$", "$")
    line = re.sub(r"\$APEXRL_\w*FLAGS", "--preset small --bind-host 0.0.0.0 --keys elsewhere", line)
    line = line.replace("%i", "3").replace("${APEXRL_HOST_RANK}", "0")
    words = shlex.split(line)
    assert f"/opt/apexrl/{script}" in words
    if "--bind-host" in words and command is ActorCommand:
        words.remove("--bind-host"), words.remove("0.0.0.0")
    parsed = parse(command, words[words.index(f"/opt/apexrl/{script}") + 1 :])
    assert parsed.preset == "small" and parsed.wires.keys == "/run/apexrl/keys"
    if unit == "actor":
        assert parsed.acting.num_workers == 3, "one for each processor"


@pytest.mark.parametrize("unit", ["replay@", "learner", "actor", "evaluator", "tensorboard"])
def test_a_permanent_error_is_not_tried_again(unit):
    keys = dict(re.findall(r"^(\w+)=(.*)$", (UNITS / f"apexrl-{unit}.service").read_text(), re.MULTILINE))
    assert keys["Restart"] in ("always", "on-failure")
    assert keys["RestartPreventExitStatus"] == str(PERMANENT_STATUS)


def test_tensorboard_shows_the_run_of_the_learner(tmp_path):
    learner, board = [(UNITS / f"apexrl-{unit}.service").read_text() for unit in ("learner", "tensorboard")]
    run = re.search(r" --run-dir (\S+)", learner)[1]
    served = re.search(r" -m apexrl\.running\.tensorboard (\S+)", board)[1]
    (tmp_path / run[1:] / "tensorboard").mkdir(parents=True)
    (tmp_path / run[1:] / "tensorboard" / "events.out.tfevents.0.learner").touch()
    (tmp_path / "shown").mkdir()
    link_runs(tmp_path / served[1:], tmp_path / "shown")
    assert [link.parent.name for link in (tmp_path / "shown").rglob("events*")] == ["run"]


@pytest.mark.parametrize("unit", ["sync", "learner", "finish"])
def test_an_upload_waits_for_the_one_that_runs(unit):
    found = re.findall(
        r"^Exec\w+=(.*) (?:sync|finish) (.*)$", (UNITS / f"apexrl-{unit}.service").read_text(), re.MULTILINE
    )
    program = "/opt/apexrl/.venv/bin/python /opt/apexrl/deploy/files/apexrl_host.py"
    assert found == [(f"/usr/bin/flock --timeout 120 /var/lib/apexrl {program}", "/var/lib/apexrl/run")]


@pytest.mark.parametrize("num_gpus", [0, 1, 4])
def test_a_device_file_is_made_for_each_gpu(tmp_path, num_gpus):
    """The service itself may not run the program that makes them."""
    [line] = re.findall(r"^ExecStartPre=\+(.*)$", (UNITS / "apexrl-learner.service").read_text(), re.MULTILINE)
    for number in range(num_gpus):
        (tmp_path / f"gpus/0000:{number:02x}:00.0").mkdir(parents=True)
    program = tmp_path / "nvidia-modprobe"
    program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n')
    program.chmod(0o755)
    words = shlex.split(line.replace("/proc/driver/nvidia/gpus", str(tmp_path / "gpus")))
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    result = ran(words, env=path)
    assert result.returncode == 0, result.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["-c 0", "-u -c 0", *(f"-c {number}" for number in range(num_gpus))]
