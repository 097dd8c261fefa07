"""The launcher of a host's learners, where other hosts have to come."""

import os
import re
import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from apexrl.config.commands import LearnerCommand
from apexrl.config.flags import default_command
from apexrl.errors import ConfigError, KilledError, PeerError, PeerTimeout
from apexrl.lifecycle import PATIENCE_STATUS, PERMANENT_STATUS, TEMPORARY_STATUS, Stop, exit_status
from apexrl.running import learners
from tests.system.processes import Process, wait_for

MEETS = "learner host 0 of 2; they meet at 127.0.0.1:"


@pytest.fixture
def first_host(tmp_path, free_ports):
    """Starts learner.py on the first of two hosts; nobody comes."""
    flags = (
        "--preset",
        "small",
        "--learner-hosts",
        2,
        "--meeting-port",
        free_ports(1)[0],
        "--run-dir",
        tmp_path / "run",
    )
    return lambda *more: Process(["learner.py", *flags, *more], tmp_path / "said.txt")


def test_hosts_that_do_not_come_in_time_are_told_in_one_line_and_may_come_later(first_host, tmp_path):
    with first_host("--patience-seconds", 1) as host:
        assert host.popen.wait(300) == 1, host.text()
    [line] = re.findall(r"^.* learner: the learners of 2 hosts do not meet at 127\.0\.0\.1:.*$", host.text(), re.M)
    assert "does learner.py run on each host, with its own --learner-host-rank" in line
    assert "Traceback" not in host.text() and not (tmp_path / "run").exists()


def test_a_host_that_waits_for_the_others_can_be_stopped(first_host):
    """It waits inside of torch, where Python hears no signal."""
    with first_host() as host:
        wait_for(lambda: MEETS in host.text(), 60, "the wait")
        host.signal(signal.SIGTERM)
        assert host.popen.wait(300) == 0, host.text()


@pytest.mark.parametrize(
    ("status", "kind", "own"),
    [
        (PERMANENT_STATUS, ConfigError, PERMANENT_STATUS),
        (PATIENCE_STATUS, PeerTimeout, PATIENCE_STATUS),
        (TEMPORARY_STATUS, KilledError, TEMPORARY_STATUS),  # a port in use: a supervisor tries it again
        (-signal.SIGKILL, KilledError, TEMPORARY_STATUS),
        (1, PeerError, 1),
    ],
)
def test_the_launcher_of_learners_ends_as_the_one_that_failed(monkeypatch, status, kind, own):
    def fail(_):
        raise ChildFailedError("learner", {0: ProcessFailure(0, 1, status, "")})

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(learners.torchrun, "run", fail)
    with pytest.raises(kind, match="learner 0: ") as ended:
        learners.run_learners(default_command(LearnerCommand), Stop())
    assert type(ended.value) is kind and exit_status(ended.value) == own


def test_a_rank_that_no_host_has_is_refused(first_host):
    with first_host("--learner-host-rank", 2) as host:
        assert host.popen.wait(300) == PERMANENT_STATUS
        assert "--learner-host-rank 2: with --learner-hosts 2 give one from 0 to 1" in host.text()


def test_a_host_that_the_others_cannot_reach_is_refused(first_host):
    with first_host("--learner-host", "192.0.2.7") as host:
        assert host.popen.wait(300) == PERMANENT_STATUS
        assert "no other host reaches --bind-host 127.0.0.1" in host.text()
