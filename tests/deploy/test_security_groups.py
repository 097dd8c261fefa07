"""The plan's allowed connections, against those that the roles make: they run, each on an address of its own."""

import ipaddress
import os
import time
from pathlib import Path

import psutil
import pytest

from apexrl.learning.record.status_file import read_status
from tests.deploy.flows import Flow, flows_of, rules_of
from tests.deploy.terraform import BUCKET, resources, templates
from tests.system.processes import Process

pytestmark = pytest.mark.long("clusters of machines")

OURS = f"127.{1 + os.getpid() // 250 % 250}.{os.getpid() % 250}"  # not those of another run of these tests
ADDRESSES = {"replay": f"{OURS}.10", "learner": f"{OURS}.11"}
TENSORBOARD_PORT = 6006
START_SECONDS = 90


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Runs all roles as the cluster does; returns the flows between hosts, and the ports that each host listens on."""
    directory = tmp_path_factory.mktemp("roles")
    shared = ["--preset", "small", "--replay-host", ADDRESSES["replay"], "--learner-host", ADDRESSES["learner"]]
    acting = [*shared, "--env", "Catch-v0", "--environments-per-worker", "2"]
    few = ["--capacity", "20000", "--min-size-to-sample", "500"]
    learner = ["learner.py", *shared, "--bind-host", ADDRESSES["learner"], "--run-dir", directory / "run"]
    board = ["-m", "apexrl.running.tensorboard", directory, ADDRESSES["learner"], TENSORBOARD_PORT]
    commands = {
        "replay": ("replay", ["replay.py", *shared, "--bind-host", ADDRESSES["replay"], *few]),
        "learner": ("learner", learner),
        "actor": ("actor", ["actor.py", *acting, "--num-workers", "2"]),
        "evaluator": ("replay", ["actor.py", *acting, "--evaluate"]),
        "tensorboard": ("learner", board),
    }
    running = {}
    try:
        for name, (_, command) in commands.items():
            running[name] = Process(command, directory / f"{name}.log")
        hosts = {name: (host, running[name]) for name, (host, _) in commands.items()}
        yield _watch(hosts, directory / "run")
    finally:
        for process in running.values():
            process.__exit__()


def _watch(hosts: dict[str, tuple[str, Process]], run_dir: Path) -> tuple[set[Flow], set[tuple[str, int]]]:
    """Looks at the processes' sockets until each has done its work, and nothing new was seen for three seconds."""
    names = {address: role for role, address in ADDRESSES.items()}
    flows: set[Flow] = set()
    ports: set[tuple[str, int]] = set()
    deadline = time.monotonic() + START_SECONDS
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < 3 or not _has_learned(run_dir) or len(ports) < 5:
        assert time.monotonic() < deadline, (flows, ports, [process.log.read_text() for _, process in hosts.values()])
        before = len(flows) + len(ports)
        for host, process in hosts.values():
            assert process.popen.poll() is None, process.log.read_text()
            for child in [psutil.Process(process.popen.pid), *process.descendants()]:
                for socket in _sockets(child):
                    if socket.status == psutil.CONN_LISTEN and socket.laddr.ip in names:
                        ports.add((host, socket.laddr.port))
                    elif socket.status == psutil.CONN_ESTABLISHED and socket.raddr.ip in names:
                        if socket.laddr.ip == socket.raddr.ip:  # the server's end of the connection
                            continue
                        flows.add(Flow(host, names[socket.raddr.ip], socket.raddr.port))
        if len(flows) + len(ports) > before:
            quiet_since = time.monotonic()
        time.sleep(0.2)
    return flows, ports


def _has_learned(run_dir: Path) -> bool:
    """Whether there were updates, an evaluation, and figures of the actors and the replay server."""
    status = read_status(run_dir)
    if status is None or not status.counters.updates or status.counters.best_evaluation_return is None:
        return False
    return status.metrics.get("replay/actors", 0) > 0 and any(name.startswith("actor/") for name in status.metrics)


def _sockets(process: psutil.Process):
    try:
        return process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return []


def test_each_flow_of_the_roles_is_let_through_and_nothing_else(applied, spoken):
    flows, _ = spoken
    assert flows_of(applied, "ingress") == flows
    assert flows_of(applied, "egress") == flows


def test_each_port_that_a_role_opens_is_reachable_by_somebody_and_no_other(applied, spoken):
    _, ports = spoken
    reachable = {(flow.target, flow.port) for flow in flows_of(applied, "ingress")}
    assert reachable | {("learner", TENSORBOARD_PORT)} == ports


def test_nothing_comes_in_but_from_the_cluster(applied):
    for rule in rules_of(applied, "ingress"):
        assert rule["peer"] and not rule["cidr_ipv4"] and not rule["cidr_ipv6"] and not rule["prefix_list_id"], rule
    for address, values in resources(applied).items():
        if address.startswith(("aws_security_group.", "aws_default_security_group.")):
            assert not values["ingress"] and not values["egress"], address


def test_out_go_only_the_flows_and_https(applied):
    for rule in rules_of(applied, "egress"):
        if rule["peer"] is None:
            assert (rule["ip_protocol"], rule["from_port"], rule["to_port"]) == ("tcp", 443, 443), rule


def test_operators_reach_tensorboard_and_nothing_else(cluster):
    operators = ["203.0.113.7/32", "198.51.100.0/24"]
    found = resources(cluster.planned({"results_bucket": BUCKET, "operator_cidrs": operators}))
    open_to_addresses = {
        address: values
        for address, values in found.items()
        if address.startswith("aws_vpc_security_group_ingress_rule.") and values["cidr_ipv4"]
    }
    assert {values["cidr_ipv4"] for values in open_to_addresses.values()} == set(operators)
    for address, values in open_to_addresses.items():
        assert address.startswith("aws_vpc_security_group_ingress_rule.tensorboard["), address
        assert (values["ip_protocol"], values["from_port"], values["to_port"]) == ("tcp", 6006, 6006)


def test_no_operator_network_is_the_internet(cluster):
    for wide in ("0.0.0.0/0", "0.0.0.0/1", "203.0.0.0/15"):
        assert ipaddress.ip_network(wide).prefixlen < 16
        result = cluster.plan({"results_bucket": BUCKET, "operator_cidrs": ["203.0.113.7/32", wide]})
        assert result.returncode == 1 and "operator_cidrs must not be wider than /16" in result.stderr


def test_hosts_are_in_the_group_of_their_role(applied):
    found = resources(applied)
    groups = {role: found[f'aws_security_group.role["{role}"]']["id"] for role in ("replay", "learner", "actor")}
    assert found["aws_instance.replay"]["vpc_security_group_ids"] == [groups["replay"]]
    for role, template in templates(applied).items():
        [interface] = template["network_interfaces"]
        assert interface["security_groups"] == [groups[role]]
