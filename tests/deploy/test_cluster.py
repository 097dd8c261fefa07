"""A cluster on this machine: Packer's images, Terraform's user-data and security groups; it trains, and it breaks.

The tests are in order: all of them work on one cluster, which the last one ends.
"""

import concurrent.futures
import datetime
import json
import re
import subprocess

import pytest

from apexrl.net.keyring import ROLES, make_keys
from apexrl.networks.checkpoint import load_checkpoint
from apexrl.networks.headers import LATEST
from apexrl.runs import CURVE_FILE
from tests.deploy.machine import wait_until
from tests.deploy.running_cluster import (
    OPERATOR,
    RUN_DIR,
    addresses_of,
    continued_from,
    figure,
    put_deadline,
    role_of,
    started,
    status,
    store_keys,
    stored_checkpoint,
    updates,
    wait_for,
)  # fmt: skip
from tests.deploy.terraform import BUCKET, Flow, Workspace, flows_of, resources, role_environment, user_data
from tests.deploy.vpc import OUTSIDE
from tests.system.processes import ROOT

# The first time, a root file system is made and packages are downloaded.
pytestmark = [pytest.mark.long("clusters of machines"), pytest.mark.timeout(1800)]

NAME = "one-machine"
VARIABLES = {
    "name": NAME,
    "results_bucket": BUCKET,
    "env": "CartPole-v1",
    "preset": "small",
    "actor_hosts": 2,
    "actor_workers_per_host": 1,
    "environments_per_worker": 4,
    "max_hours": 1,
    "learner_flags": {"checkpoint_period_seconds": "3", "device": "cpu"},
    "evaluator_flags": {"evaluation_period_seconds": "3", "episodes": "5"},
}
WORKERS, SLOTS = 2, 8
GOOD_RETURN = 120.0  # a policy that has learned nothing keeps the pole up for 10 to 25 steps
UNITS = {"replay": {"replay@0", "evaluator"}, "learner": {"learner", "tensorboard"}, "actor": {"actor"}}
SECRETS = {"replay": ("replay", "actor"), "learner": ("learner",), "actor": ("actor",)}
PREFIX = f"{NAME}/run-1/"
PYTHON = ("env", "PYTHONPATH=/opt/apexrl", "OMP_NUM_THREADS=1", "/opt/apexrl/.venv/bin/python", "-c")
# Tries the doors that are for actors, with each of some directories of keys; the owner's come last.
ACTING_GUEST = """
import json, sys
from apexrl.errors import PeerError
from apexrl.net.insert_client import InsertClient
from apexrl.net.keyring import load_keyring
from apexrl.net.metrics_channel import MetricsClient
from apexrl.net.parameter_channel import ParameterSubscriber
replay, learner, directories = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
rings = {name: load_keyring(directory, "actor") for name, directory in directories.items()}
clients = [MetricsClient(f"tcp://{learner}:52002", f"guest-{name}", ring) for name, ring in rings.items()]
subscribers = {name: ParameterSubscriber(f"tcp://{learner}:52001", ring) for name, ring in rings.items()}
header = subscribers["own"].fetch(20_000).header
outcomes = {}
for name, ring in rings.items():
    client = InsertClient(f"tcp://{replay}:51001", f"guest-{name}", header.spec, 1, ring)
    try:
        client.connect(20.0 if name == "own" else 2.0)
        said = ""
    except PeerError as error:
        said = str(error)
    client.close()
    outcomes[name] = [said, name == "own" or subscribers[name].fetch() is not None]
for name, client in zip(rings, clients):
    client.run = header.run
    client.report({f"guest/{name}": 1.0})
    client.close()
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def workspace(terraform_environment, tmp_path_factory):
    workspace = Workspace("cluster", tmp_path_factory.mktemp("plan"), terraform_environment)
    workspace.must("init")
    return workspace


@pytest.fixture(scope="module")
def state(workspace):
    return workspace.apply(VARIABLES)


@pytest.fixture(scope="module")
def running(build, cloud, state, address, tmp_path_factory):
    """Replay, learner and two actor hosts, and an operator on the internet."""
    directory = tmp_path_factory.mktemp("cluster")
    put_deadline(cloud, state)
    with started(state, cloud, build, address, directory, "replay", "learner", "actor0", "actor1") as hosts:
        check_that_roles_wait_for_keys(hosts.hosts["replay"])
        store_keys(cloud, NAME)
        yield hosts


def check_that_roles_wait_for_keys(replay):
    """It has booted without keys, and says how to make them. A failure of the unit that fetches them ends no wait."""
    replay.wait_for_state("apexrl-keys.service", "activating")
    wait_until(lambda: "python -m deploy keys" in replay.journal("apexrl-keys"), 60, "a message about the keys")
    assert replay.show("apexrl-replay@0.service", "ActiveState") == "inactive"
    replay.run("systemctl", "kill", "--signal=KILL", "apexrl-keys.service")


def wait_for_training(running, since: int):
    """Waits until the learner goes on for some time after an update, with all the workers."""
    wait_for(running, lambda: updates(running) >= since + 100)
    wait_for(running, lambda: figure(running, "replay/actors") == WORKERS)


def stored(cloud) -> dict[str, int]:
    """The sizes of the run's files in S3, by name."""
    listed = cloud.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=PREFIX).get("Contents", [])
    return {entry["Key"].removeprefix(PREFIX): entry["Size"] for entry in listed}


def stored_updates(cloud, tmp_path) -> int:
    """The updates of the checkpoint in S3."""
    return stored_checkpoint(cloud, NAME, tmp_path).header.counters.updates


def secret_keys(cloud) -> list[str]:
    names = [f"/apexrl/{NAME}/keys/{role}.secret" for role in ROLES]
    answer = cloud.client("ssm").get_parameters(Names=names, WithDecryption=True)
    assert len(answer["Parameters"]) == len(names)
    return [parameter["Value"] for parameter in answer["Parameters"]]


def all_secret_keys(cloud) -> set[str]:
    """Those of today, and those before the keys were changed."""
    names = [f"/apexrl/{NAME}/keys/{role}.secret" for role in ROLES]
    histories = [cloud.client("ssm").get_parameter_history(Name=name, WithDecryption=True) for name in names]
    return {entry["Value"] for history in histories for entry in history["Parameters"]}


def is_on_a_disk(running, text: str) -> bool:
    search = subprocess.run(["grep", "-rqF", "-e", text, *running.disks()], check=False, timeout=60)
    assert search.returncode in (0, 1)
    return search.returncode == 0


def test_returns_rise(running):
    wait_for(running, lambda: (status(running).counters.best_evaluation_return or 0.0) >= GOOD_RETURN, 150)
    wait_for(running, lambda: figure(running, "replay/actors") == WORKERS and figure(running, "replay/slots") == SLOTS)


def test_each_host_plays_the_role_of_its_user_data(running, state):
    for name, host in running.hosts.items():
        role = role_of(name)
        lines = host.run("cat", "/etc/apexrl/role.env").stdout.splitlines()
        assert dict(line.split("=", 1) for line in lines) == role_environment(user_data(state)[role])
        states = {
            unit: host.show(f"apexrl-{unit}.service", "ActiveState") for units in UNITS.values() for unit in units
        }
        assert {unit for unit, found in states.items() if found == "active"} == UNITS[role], states


def test_the_units_are_without_fault_and_their_processes_without_rights(running):
    replay = running.hosts["replay"]
    names = sorted(path.name for path in (ROOT / "deploy/files/systemd").iterdir() if path.is_file())
    verified = replay.run("systemd-analyze", "verify", "--man=no", *names)  # a wrong key is no error to it
    assert len(names) > 10 and not verified.stdout + verified.stderr, verified.stdout + verified.stderr
    assert replay.run("systemctl", "is-enabled", "apexrl.target").stdout.strip() == "enabled"
    pid = replay.show("apexrl-replay@0.service", "MainPID")
    assert replay.run("stat", "-c", "%U", f"/proc/{pid}").stdout.strip() == "apexrl"
    facts = dict(line.split(":", 1) for line in replay.run("cat", f"/proc/{pid}/status").stdout.splitlines())
    assert facts["NoNewPrivs"].strip() == "1" and int(facts["CapEff"], 16) == 0


def test_what_units_say_is_in_the_file_that_the_agent_was_told_to_send(running):
    replay = running.hosts["replay"]
    replay.wait_for_state("apexrl-logs.service", "active")
    config = json.loads(replay.run("cat", "/var/lib/agent-configuration.json").stdout)
    sent = config["logs"]["logs_collected"]["files"]["collect_list"][0]
    assert (sent["log_group_name"], sent["log_stream_name"]) == (f"/apexrl/{NAME}", "replay/{instance_id}")
    lines = lambda: replay.run("cat", sent["file_path"], check=False).stdout  # noqa: E731
    units = ("apexrl-keys: ", "apexrl-limit: ", "apexrl-replay@0: ")
    wait_until(lambda: all(unit in lines() for unit in units), 10, lambda: f"logs: {lines()}")


def test_each_host_has_the_keys_of_its_role_in_memory(running, cloud):
    for name, host in running.hosts.items():
        wanted = {f"{role}.public" for role in ROLES} | {f"{role}.secret" for role in SECRETS[role_of(name)]}
        listing = host.run("find", "/run/apexrl/keys", "-printf", "%U:%G %m %f\\n").stdout.splitlines()
        user = ":".join(host.run("id", flag, "apexrl").stdout.strip() for flag in ("-u", "-g"))
        assert set(listing) == {f"{user} 700 keys", *(f"{user} 600 {name}" for name in wanted)}
        assert host.run("findmnt", "-no", "FSTYPE", "--target", "/run/apexrl/keys").stdout.strip() == "tmpfs"
        owned = host.run("sh", "-c", "cat /run/apexrl/keys/*.secret").stdout.split()
        assert owned and set(owned) <= set(secret_keys(cloud))


def test_only_what_the_plan_lets_through_passes(running, state, cloud):
    allowed = flows_of(state, "ingress") & flows_of(state, "egress")
    ports = {22, 443, 6006, *(flow.port for flow in allowed)}
    addresses = {name: host.address for name, host in running.hosts.items()}
    wanted = {
        source: {
            (address, port): "open" if Flow(role_of(source), role_of(target), port) in allowed else "silence"
            for target, address in addresses.items()
            if target != source
            for port in ports
        }
        for source in (*addresses, OUTSIDE)
    }
    for source in addresses:  # AWS's interfaces, and nothing else outside
        wanted[source] |= {(running.vpc.aws_address, 443): "open", (running.vpc.aws_address, 80): "silence"}
    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        found = pool.map(lambda source: running.vpc.reach(source, list(wanted[source])), wanted)
    assert dict(zip(wanted, found, strict=True)) == wanted
    opened = [outcome for outcomes in wanted.values() for outcome in outcomes.values()].count("open")
    assert opened == 4 + 2 + 1 + 2 * 3, "AWS; replay to learner; learner to replay; each actor host to both"


def test_operators_reach_tensorboard_when_the_plan_names_them(running, workspace, state):
    opened = workspace.apply(VARIABLES | {"operator_cidrs": [f"{OPERATOR}/32"]})
    assert user_data(opened) == user_data(state), "no host is replaced for it"
    board = (running.hosts["learner"].address, 6006)
    others = [(host.address, port) for host in running.hosts.values() for port in (22, 6006, 51002, 52001)]
    running.vpc.permit(opened)
    try:
        wait_for(running, lambda: running.vpc.reach(OUTSIDE, [board])[board] == "open")
        outcomes = running.vpc.reach(OUTSIDE, others)
        assert {target for target, outcome in outcomes.items() if outcome != "silence"} == {board}
        running.hosts["learner"].run("curl", "--fail", "--silent", "--show-error", "http://127.0.0.1:6006/")
        assert running.vpc.reach("actor0", [board])[board] == "silence"
    finally:
        running.vpc.permit(state)
    assert running.vpc.reach(OUTSIDE, [board])[board] == "silence"


def test_strangers_without_keys_of_the_cluster_are_refused(running):
    """Where the network lets them: on an actor host."""
    replay, learner, actor = (running.hosts[name] for name in ("replay", "learner", "actor0"))
    make_keys(actor.root / "root/strange", ROLES)
    for name in ("replay", "learner"):  # the public keys are no secret
        actor.run("cp", f"/run/apexrl/keys/{name}.public", "/root/strange/")
    kinds = {"none": "", "strange": "/root/strange", "own": "/run/apexrl/keys"}
    asked = actor.run(*PYTHON, ACTING_GUEST, replay.address, learner.address, json.dumps(kinds))
    found = json.loads(asked.stdout)
    assert found["own"] == ["", True]
    for kind, reason in (("none", "was silent for"), ("strange", "it does not accept our key")):
        assert reason in found[kind][0] and found[kind][1] is False, found
    wait_for(running, lambda: figure(running, "guest/own") == 1.0)
    assert figure(running, "guest/none") == figure(running, "guest/strange") == -1.0


def test_an_actor_host_that_vanishes_is_replaced_and_its_slots_are_leased_again(running):
    wait_for(running, lambda: figure(running, "replay/actors") == WORKERS)
    before = updates(running)
    running.vanish("actor0")
    wait_for(running, lambda: figure(running, "replay/actors") == WORKERS / 2)
    assert updates(running) > before, "the other host goes on"
    running.start("actor2")
    wait_for(running, lambda: figure(running, "replay/actors") == WORKERS)
    assert figure(running, "replay/slots") == SLOTS
    wait_for_training(running, updates(running))


def test_a_learner_that_is_killed_continues_from_its_checkpoint_and_leaves_it_in_s3(running, cloud, tmp_path):
    learner = running.hosts["learner"]
    kept = load_checkpoint(learner.root / RUN_DIR / "checkpoints" / LATEST).header.counters.updates
    before = updates(running)
    learner.run("kill", "-KILL", learner.show("apexrl-learner.service", "MainPID"))
    wait_for(running, lambda: continued_from(learner))
    assert continued_from(learner)[0] >= kept > 0
    wait_for_training(running, before)
    names = stored(cloud)
    assert {f"checkpoints/{LATEST}", CURVE_FILE, "status.json"} <= names.keys()
    assert any(name.startswith("tensorboard/events.") and size for name, size in names.items())
    assert stored_updates(cloud, tmp_path) >= kept


def test_a_replay_that_is_killed_has_its_journal(running):
    replay = running.hosts["replay"]
    before, size = updates(running), figure(running, "replay/size")
    replay.run("kill", "-KILL", replay.show("apexrl-replay@0.service", "MainPID"))
    wait_for(running, lambda: recovered(replay))
    assert recovered(replay)[0] >= 0.9 * size > 0
    wait_for_training(running, before)


def recovered(replay) -> list[int]:
    """The transitions that each start of a replay host's server has found in the journal."""
    said = replay.journal("apexrl-replay@0")
    return [int(count) for count in re.findall(r"recovered \d+ unrolls \((\d+) transitions\)", said)]


def test_a_replay_host_that_vanishes_is_replaced_and_has_its_journal(running):
    """The volume is attached to the new host; what the old one had on its own disk is lost."""
    before, size = updates(running), figure(running, "replay/size")
    running.vanish("replay")
    running.start("replay")
    replay = running.hosts["replay"]
    wait_for(running, lambda: recovered(replay))
    assert recovered(replay)[0] >= 0.9 * size > 0
    assert "which was blank" not in replay.journal("apexrl-journal")
    wait_for_training(running, before)


def test_a_learner_host_that_vanishes_is_replaced_and_continues_from_s3(running, cloud, tmp_path):
    running.hosts["learner"].run("systemctl", "start", "apexrl-sync.service")  # the timer's turn
    games = status(running).counters.evaluation_episodes
    before = updates(running)
    lost, address = running.interfaces["learner"].name, running.hosts["learner"].address
    running.vanish("learner")
    kept = stored_updates(cloud, tmp_path)
    assert kept > 0
    running.start("learner")  # as its group does
    learner = running.hosts["learner"]
    first, taken = addresses_of(cloud, running.interfaces["learner"].name)
    assert (first != addresses_of(cloud, lost)[0], taken) == (True, address), "another host, known by the same address"
    wait_for(running, lambda: continued_from(learner))
    assert continued_from(learner) == [kept]
    wait_for_training(running, max(before, kept))
    # A process that only listens has to notice, too, that it listens to a host that is gone.
    wait_for(running, lambda: status(running).counters.evaluation_episodes > games)
    wait_for(running, lambda: figure(running, "actor/params_version") > max(before, kept))


def test_new_keys_are_taken_by_a_running_cluster(running, cloud):
    before, old = updates(running), secret_keys(cloud)
    store_keys(cloud, NAME, "--rotate")
    for host in running.hosts.values():
        host.run("systemctl", "restart", "apexrl-keys.service")
        owned = host.run("sh", "-c", "cat /run/apexrl/keys/*.secret").stdout.split()
        assert owned and set(owned) <= set(secret_keys(cloud)) - set(old)
    wait_for_training(running, before)


def test_a_host_whose_role_is_stopped_has_nothing_but_its_clock(running):
    host = running.hosts["actor1"]
    host.run("systemctl", "stop", "apexrl.target")
    for unit in ("actor", "keys", "logs", "role"):
        host.wait_for_state(f"apexrl-{unit}.service", "inactive", 60)
    assert host.show("apexrl-actor.service", "Result") == "success", host.journal("apexrl-actor")
    assert not host.run("ls", "/run/apexrl", check=False).stdout.strip(), "keys stay when the role is stopped"
    assert host.show("apexrl-limit.service", "ActiveState") == "active"


def test_at_the_time_limit_all_hosts_are_off_and_the_last_checkpoint_is_in_s3(running, state, cloud, tmp_path):
    planned = datetime.datetime.fromisoformat(resources(state)["aws_ssm_parameter.deadline"]["value"])
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=20)  # after all were asked
    put_deadline(cloud, state, soon)
    for host in running.hosts.values():
        assert f"this host is powered off at {planned.isoformat()}" in host.journal("apexrl-limit")
        host.run("systemctl", "restart", "--no-block", "apexrl-limit.service")  # else it looks within a minute
    before = updates(running)
    for host in running.hosts.values():
        host.wait_for_poweroff(90)
    assert stored_updates(cloud, tmp_path) >= before > 0

    s3 = cloud.client("s3")
    texts = [s3.get_object(Bucket=BUCKET, Key=PREFIX + name)["Body"].read() for name in stored(cloud)]
    secrets = all_secret_keys(cloud)
    assert len(secrets) == 2 * len(ROLES) and set(secret_keys(cloud)) < secrets
    for secret in secrets:
        assert not any(secret.encode() in text for text in texts)
        assert not is_on_a_disk(running, secret)
    assert is_on_a_disk(running, f"APEXRL_CLUSTER={NAME}")
