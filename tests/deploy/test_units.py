"""The units, started for real: each host is a machine of the image that Packer built."""

import contextlib
import datetime
import json
import re
import shlex
import sys

import pytest

from apexrl.config.commands import ActorCommand, LearnerCommand, ReplayCommand
from apexrl.config.flags import parse
from apexrl.errors import PeerError
from apexrl.lifecycle import PERMANENT_STATUS
from apexrl.net.keyring import ROLES, load_keyring
from apexrl.net.replay_client import ReplayClient
from tests.deploy import rootfs, site
from tests.deploy.commands import ran
from tests.deploy.hosts import CLUSTER, RUN, VOLUME, host, interpreter, put_keys, role_env
from tests.deploy.imds import NOTICE, metadata_service
from tests.deploy.machine import wait_until
from tests.deploy.moto_process import Aws, moto_server
from tests.deploy.volume import blank_volume
from tests.system.processes import ROOT

UNITS = ROOT / "deploy/files/systemd"
# The first time, a root file system is made and packages are downloaded.
pytestmark = [pytest.mark.long("clusters of machines"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def address():
    rootfs.require()
    with site.host_address() as address:
        yield address


@pytest.fixture(scope="module")
def aws_server(address, tmp_path_factory):
    """AWS, where hosts reach it."""
    log = tmp_path_factory.mktemp("aws") / "moto.log"
    with moto_server(log, address, MOTO_EC2_LOAD_DEFAULT_AMIS="false") as aws:
        yield aws


@pytest.fixture
def cloud(aws_server):
    """AWS with nothing in it but a deadline: these machines take the hours of this computer for their own."""
    aws_server.reset()
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    name, value = role_env(aws_server, "none")["APEXRL_DEADLINE"], f"{end:%Y-%m-%dT%H:%M:%SZ}"
    aws_server.client("ssm").put_parameter(Name=name, Value=value, Type="String")
    return aws_server


def answers(client) -> bool:
    try:
        client.statistics(1.0)
    except PeerError:
        return False
    return True


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


@pytest.mark.parametrize("unit", ["replay@", "learner", "actor", "evaluator", "tensorboard"])
def test_a_permanent_error_is_not_tried_again(unit):
    keys = dict(re.findall(r"^(\w+)=(.*)$", (UNITS / f"apexrl-{unit}.service").read_text(), re.MULTILINE))
    assert keys["Restart"] in ("always", "on-failure")
    assert keys["RestartPreventExitStatus"] == str(PERMANENT_STATUS)


@pytest.mark.parametrize(
    "change, message",
    [
        ({}, ""),
        ({"APEXRL_ROLE": "replays"}, "APEXRL_ROLE='replays' in /etc/apexrl/role.env"),
        ({"APEXRL_DEADLINE": "tomorrow"}, "APEXRL_DEADLINE='tomorrow' in /etc/apexrl/role.env"),
        ({"APEXRL_ROLE": "replay", "APEXRL_JOURNAL_VOLUME": "/dev/sdf"}, "APEXRL_JOURNAL_VOLUME='/dev/sdf' in"),
        ({"APEXRL_BUCKET": ""}, "APEXRL_BUCKET='' in /etc/apexrl/role.env"),
        ({"APEXRL_KEYS_PATH": "apexrl keys"}, "APEXRL_KEYS_PATH='apexrl keys'"),
        ({"APEXRL_ROLE": "replay", "APEXRL_SHARDS": "0"}, "APEXRL_SHARDS='0' in /etc/apexrl/role.env"),
        ({"APEXRL_HOST_RANK": "first"}, "APEXRL_HOST_RANK='first' in /etc/apexrl/role.env"),
        ({"APEXRL_ADDRESS": "learner"}, "APEXRL_ADDRESS='learner' in /etc/apexrl/role.env"),
        ({"APEXRL_FLAGS": "--env 'Catch"}, "APEXRL_FLAGS: No closing quotation"),
    ],
)
def test_what_terraform_says_is_checked_before_anything_starts(change, message):
    variables = role_env(Aws("http://127.0.0.1:1"), "learner", **change)
    command = [sys.executable, ROOT / "deploy/files/apexrl_host.py", "check"]
    result = ran(command, env=variables)
    assert (result.returncode, message in result.stderr) == (int(bool(message)), True), result.stderr


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


def test_systemd_finds_nothing_wrong_with_the_units(request, cloud, address, tmp_path):
    """Anything that systemd-analyze says is a mistake: a wrong key is no error to it. It is the host's own."""
    try:
        layers = request.getfixturevalue("build").images["cpu"].layers
    except pytest.skip.Exception as reason:
        pytest.skip(f"systemd-analyze has not verified the units, as there is no image: {reason}")
    names = sorted(path.name for path in UNITS.iterdir() if path.is_file())
    assert len(names) > 10
    variables = role_env(cloud, "none")
    with host(layers, variables, tmp_path / "host", address) as machine:
        result = machine.run("systemd-analyze", "verify", "--man=no", *names)
    assert not result.stdout + result.stderr, result.stdout + result.stderr


def test_a_replay_host(build, cloud, address, tmp_path):
    """It has two shards. Its keys come late, and go when an operator stops it.

    Who gets in with which keys, and that no secret is on a disk, test_cluster.py shows.
    """
    flags = "--preset small --bind-host 0.0.0.0 --learner-host 127.0.0.1 --shards 2"
    variables = role_env(cloud, "replay", APEXRL_FLAGS=flags, APEXRL_SHARDS="2")
    shards = [f"apexrl-replay@{shard}.service" for shard in range(2)]
    with (
        blank_volume(tmp_path, VOLUME) as binds,
        host(build.images["cpu"].layers, variables, tmp_path / "host", address, binds) as machine,
    ):
        # Nothing that boots waits for keys that nobody has made yet.
        assert "status: done" in machine.run("cloud-init", "status", "--wait", check=False).stdout
        machine.wait_for_state("apexrl-keys.service", "activating")
        wait_until(lambda: "python -m deploy keys" in machine.journal("apexrl-keys"), 30, "a message about the keys")
        assert [machine.show(shard, "ActiveState") for shard in shards] == ["inactive"] * 2
        assert machine.run("systemctl", "is-enabled", "apexrl.target").stdout.strip() == "enabled"

        # A failure of the unit that fetches the keys does not end the wait of those that need them.
        machine.run("systemctl", "kill", "--signal=KILL", "apexrl-keys.service")
        keys = put_keys(cloud, tmp_path / "keys")
        for shard in shards:
            machine.wait_for_state(shard, "active", 60)
        check_keys(machine)
        for number in range(2):
            check_replay(machine, number, keys)
        check_logs(machine)

        machine.run("systemctl", "stop", "apexrl.target")
        for shard in shards:
            machine.wait_for_state(shard, "inactive")
        assert not machine.run("ls", "/run/apexrl", check=False).stdout.strip(), "keys stay when the role is stopped"
        assert machine.show("apexrl-limit.service", "ActiveState") == "active"
        assert machine.run("journalctl", "-q", "-p", "warning", "-u", "apexrl-evaluator").stdout == ""


def check_keys(machine):
    """The secrets of this host's roles and all public keys are for the service only."""
    listing = machine.run("find", "/run/apexrl/keys", "-printf", "%U:%G %m %f\n").stdout.split("\n")
    user = ":".join(machine.run("id", flag, "apexrl").stdout.strip() for flag in ("-u", "-g"))
    names = ["replay.secret", "actor.secret", *(f"{role}.public" for role in ROLES)]
    assert set(filter(None, listing)) == {f"{user} 700 keys", *(f"{user} 600 {name}" for name in names)}


def check_replay(machine, shard, keys):
    """It answers, and runs as nobody special."""
    endpoint = f"tcp://{machine.address}:{51002 + 2 * shard}"
    with contextlib.closing(ReplayClient(endpoint, "test", keyring=load_keyring(str(keys), "learner"))) as client:
        wait_until(lambda: answers(client), 30, "the replay to answer")
    pid = machine.show(f"apexrl-replay@{shard}.service", "MainPID")
    assert machine.run("stat", "-c", "%U", f"/proc/{pid}").stdout.strip() == "apexrl"
    status = dict(line.split(":", 1) for line in machine.run("cat", f"/proc/{pid}/status").stdout.splitlines())
    assert status["NoNewPrivs"].strip() == "1" and int(status["CapEff"], 16) == 0
    assert machine.run("ls", f"/var/lib/apexrl/journal/{RUN}/shard-{shard}").stdout.strip()


def check_logs(machine):
    """Checks that the messages of units are in the file that the CloudWatch agent was told to send."""
    wait_until(lambda: machine.show("apexrl-logs.service", "ActiveState") == "active", 30, "the agent's start")
    config = json.loads(machine.run("cat", "/var/lib/agent-configuration.json").stdout)
    sent = config["logs"]["logs_collected"]["files"]["collect_list"][0]
    assert (sent["log_group_name"], sent["log_stream_name"]) == (f"/apexrl/{CLUSTER}", "replay/{instance_id}")
    lines = lambda: machine.run("cat", sent["file_path"], check=False).stdout  # noqa: E731
    units = ("apexrl-keys: ", "apexrl-limit: ", "apexrl-replay@0: ", "apexrl-replay@1: ")
    wait_until(lambda: all(unit in lines() for unit in units), 10, lambda: f"logs: {lines()}")


def test_an_actor_host_stops_its_actors_when_it_is_taken_back(build, cloud, address, tmp_path):
    put_keys(cloud, tmp_path / "keys")
    flags = "--preset small --env Catch-v0 --replay-host 127.0.0.1 --learner-host 127.0.0.1"
    with contextlib.ExitStack() as stack:
        metadata = stack.enter_context(metadata_service(address))
        endpoint = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.endpoint}
        variables = role_env(cloud, "actor", APEXRL_FLAGS=flags, **endpoint)
        layers = build.images["cpu"].layers
        machine = stack.enter_context(host(layers, variables, tmp_path / "host", address, interpreter(tmp_path)))
        machine.wait_for_state("apexrl-actor.service", "active", 60)
        count = ("sh", "-c", "grep -lzs 'worker[-]index' /proc/[0-9]*/cmdline | wc -l")
        wait_until(
            lambda: machine.run(*count).stdout == machine.run("nproc").stdout,
            60,
            lambda: machine.journal("apexrl-actor"),
        )
        wait_until(lambda: (f"GET {NOTICE}", 404) in metadata.asked, 30, "a question for the spot notice")
        assert machine.show("apexrl-actor.service", "ActiveState") == "active"

        metadata.notice = {"action": "terminate", "time": "2026-01-02T03:04:05Z"}
        machine.wait_for_state("apexrl-actor.service", "inactive", 60)
        machine.wait_for_state("apexrl-spot.service", "inactive")
        assert machine.show("apexrl-actor.service", "Result") == "success", machine.journal("apexrl-actor")
        assert machine.show("apexrl-actor.service", "SubState") == "dead", "not one that will start again"


def test_a_host_that_terraform_did_not_mean_starts_nothing_and_still_ends(build, cloud, address, tmp_path):
    variables = role_env(cloud, "replay") | {"APEXRL_ROLE": "replays"}
    with host(build.images["cpu"].layers, variables, tmp_path / "host", address) as machine:
        machine.wait_for_state("apexrl-role.service", "failed")
        assert "APEXRL_ROLE='replays' in /etc/apexrl/role.env" in machine.journal("apexrl-role")
        assert machine.show("apexrl-keys.service", "ActiveState") == "inactive"
        assert machine.show("apexrl-limit.service", "ActiveState") == "active"
