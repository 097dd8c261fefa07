"""The ends of a cluster: the deadline that hosts read, and a learner that has finished its run."""

import datetime
import json
import time

import pytest

from tests.deploy.groups import make_groups, wanted_hosts
from tests.deploy.host_commands import BUCKET, DEADLINE, PREFIX
from tests.system.processes import ROOT, wait_for

pytestmark = pytest.mark.long("commands for EC2")

GROUPS = ("catch-actor", "catch-learner-1", "catch-learner")
END = {"APEXRL_GROUP": GROUPS[-1], "APEXRL_GROUPS": " ".join(GROUPS[:-1])}


def set_deadline(aws, text: str) -> None:
    aws.client("ssm").put_parameter(Name=DEADLINE, Value=text, Type="String", Overwrite=True)


def in_seconds(seconds: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0) + datetime.timedelta(seconds=seconds)


def as_text(when: datetime.datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def up_for(seconds: float, directory) -> dict[str, str]:
    """Returns the environment of a process that believes that the host has been up for so long."""
    start = f"start = time.monotonic() - {seconds}"
    text = f"import time\n{start}\ntime.clock_gettime = lambda clock: time.monotonic() - start\n"
    (directory / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(directory)}


def powered_off(notes) -> int:
    """Waits until the host is powered off; returns when."""
    when, what = wait_for(lambda: notes.exists() and notes.read_text(), 60, "the end").split(maxsplit=1)
    assert what == "poweroff\n"
    return int(when)


@pytest.fixture
def limit(start, systemctl, tmp_path):
    """Starts the clock of a host."""
    return lambda **environment: start("limit", tmp_path, role="replay", PATH=systemctl[1], **environment)


def test_more_time_is_read_before_the_host_is_powered_off(monkeypatch, tmp_path):
    """At the first deadline the Parameter Store tells the second one."""
    monkeypatch.syspath_prepend(ROOT / "deploy" / "files")
    import apexrl_host

    deadlines = [in_seconds(seconds) for seconds in (1, 2, 2)]
    told, off = iter(deadlines), []
    monkeypatch.setattr(apexrl_host, "newest_deadline", lambda kept: next(told))
    monkeypatch.setattr(apexrl_host, "POWEROFF_SECONDS", 0.0)
    monkeypatch.setattr(apexrl_host.subprocess, "run", lambda command, **_: off.append((command, in_seconds(0))))
    apexrl_host.limit(tmp_path)
    [(command, when)] = off
    assert command == ["systemctl", "poweroff"] and when >= deadlines[-1] and not list(told)


def test_the_last_deadline_counts_while_the_parameter_store_is_away(limit, systemctl, aws, tmp_path, free_ports):
    """Also for a clock that is started anew, on a host that has been up for long."""
    deadline = in_seconds(8)
    set_deadline(aws, as_text(deadline))
    process = limit()
    wait_for((tmp_path / "deadline").exists, 30, "the deadline to be kept")
    process.popen.kill()
    away = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_ports(1)[0]}"}
    process = limit(**away, **up_for(10_000, tmp_path))
    assert powered_off(systemctl[0]) >= deadline.timestamp()
    assert "the deadline is not known" in process.text()


@pytest.mark.parametrize("text", ["", "tomorrow", "2026-01-02 03:04:05"])
def test_a_host_without_a_readable_deadline_ends_an_hour_after_its_start(limit, systemctl, aws, tmp_path, text):
    if text:
        set_deadline(aws, text)
    asked = time.time()
    process = limit(**up_for(3600 - 3, tmp_path))
    assert powered_off(systemctl[0]) >= int(asked) + 3
    assert "the deadline is not known" in process.text()
    assert (text or "ParameterNotFound") in process.text()


def test_a_learner_host_that_ends_is_not_replaced(start, systemctl, aws, tmp_path, free_ports):
    """Its group would start a new one for ever. It ends also while AWS does not answer."""
    make_groups(aws, *GROUPS)
    set_deadline(aws, as_text(in_seconds(0)))
    start("limit", tmp_path, PATH=systemctl[1], **END)
    powered_off(systemctl[0])
    assert wanted_hosts(aws) == dict.fromkeys(GROUPS, 1) | {GROUPS[-1]: 0}
    systemctl[0].unlink()
    away = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_ports(1)[0]}"}
    process = start("limit", tmp_path, PATH=systemctl[1], **END, **away)
    powered_off(systemctl[0])
    assert "the group of this host stays" in process.text()


def a_run(directory, frames: int, updates: int) -> str:
    """Makes a run that has come so far; returns its directory."""
    (directory / "run").mkdir()
    status = {"env": "Catch-v0", "frames": frames, "counters": {"updates": updates}, "metrics": {}, "waits_for": ""}
    (directory / "run" / "status.json").write_text(json.dumps(status))
    return str(directory / "run")


def test_a_finished_learner_ends_the_cluster(finish, bucket, aws, tmp_path):
    make_groups(aws, *GROUPS)
    run = a_run(tmp_path, 4000, 100)
    for flags in ("--total-frames 4000", "--preset small --total-updates 100 --seed 3"):
        set_deadline(aws, "2100-01-01T00:00:00Z")
        before = in_seconds(0)
        status, text = finish("finish", run, APEXRL_FLAGS=flags, **END)
        assert status == 0 and "the run is complete" in text, text
        assert wanted_hosts(aws) == dict.fromkeys(GROUPS, 0)
        stored = aws.client("ssm").get_parameter(Name=DEADLINE)["Parameter"]["Value"]
        assert before <= datetime.datetime.fromisoformat(stored) <= in_seconds(1)
    assert bucket.get_object(Bucket=BUCKET, Key=f"{PREFIX}status.json")["ContentLength"] > 0, "the last upload"


def test_a_learner_that_is_stopped_before_its_end_ends_nothing(finish, bucket, aws, tmp_path):
    make_groups(aws, *GROUPS)
    set_deadline(aws, "2100-01-01T00:00:00Z")
    run = a_run(tmp_path, 4000, 100)
    for flags in ("--preset paper", "--total-frames 4001", "--total-updates 0 --total-frames 0", "--total-updates 101"):
        status, text = finish("finish", run, APEXRL_FLAGS=flags, **END)
        assert status == 0 and "the cluster stays" in text, text
    assert wanted_hosts(aws) == dict.fromkeys(GROUPS, 1)
    assert aws.client("ssm").get_parameter(Name=DEADLINE)["Parameter"]["Value"] == "2100-01-01T00:00:00Z"


def test_a_cluster_whose_last_files_cannot_be_uploaded_stays(finish, aws, tmp_path):
    """There is no bucket. The unit tries again, until the time limit."""
    make_groups(aws, *GROUPS)
    set_deadline(aws, "2100-01-01T00:00:00Z")
    run = a_run(tmp_path, 4000, 0)
    status, text = finish("finish", run, APEXRL_FLAGS="--total-frames 1", **END)
    assert status == 1 and "not uploaded" in text, text
    assert wanted_hosts(aws) == dict.fromkeys(GROUPS, 1)


def test_the_host_of_a_finished_learner_ends_last(finish, bucket, aws, tmp_path):
    """Until all else is ended its group keeps it: when something fails, the unit tries again."""
    make_groups(aws, *GROUPS)
    environment = END | {"APEXRL_FLAGS": "--total-frames 1", "APEXRL_DEADLINE": "/aws/deadline"}
    status, text = finish("finish", a_run(tmp_path, 4000, 0), **environment)
    assert status == 1 and "PutParameter" in text, text
    assert wanted_hosts(aws) == dict.fromkeys(GROUPS, 0) | {GROUPS[-1]: 1}
