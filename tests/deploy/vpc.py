"""A VPC on this machine: hosts are network namespaces around a router, where nftables keep the plan's security groups.

As with EC2 a group acts outside of its hosts, knows connections, and drops without an answer what no rule lets through.
AWS is moto on port 443 of one address. Each host has an address for a metadata service of its own.
"""

import contextlib
import ipaddress
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.commands import ran
from tests.deploy.machine import UPLINK, ip, network
from tests.deploy.moto_process import Aws
from tests.deploy.rootfs import PRIVILEGED
from tests.deploy.terraform import rules_of

METADATA = "169.254.169.254"
OUTSIDE = "internet"
RULES = """
flush ruleset
table ip aws {{
  chain interfaces {{
    type nat hook prerouting priority dstnat;
    ip daddr {address} tcp dport 443 dnat to {address}:{port}
  }}
  chain gateway {{
    type nat hook postrouting priority srcnat;
    oifname {uplink} masquerade
  }}
}}
table ip security_groups {{
  chain egress {{
    type filter hook forward priority -10; policy drop;
    ct state established,related accept
    iifname {outside} accept
    {egress}
  }}
  chain ingress {{
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    oifname {uplink} accept
    {ingress}
  }}
}}
"""
REACH_SECONDS = 1.5  # the kernel asks twice in that time
REACH = """
import concurrent.futures, json, socket, sys
targets, seconds = json.loads(sys.argv[1]), float(sys.argv[2])
def outcome(target):
    with socket.socket() as client:
        client.settimeout(seconds)
        try:
            client.connect(tuple(target))
        except ConnectionRefusedError:
            return "refused"
        except TimeoutError:
            return "silence"
        return "open"
with concurrent.futures.ThreadPoolExecutor(len(targets)) as pool:
    print(json.dumps(list(pool.map(outcome, targets))))
"""


def nft_rules(state: dict[str, Any], direction: str) -> list[str]:
    """Returns the rules of one direction as nftables' text. The interface of a host begins with its role."""
    lines = []
    for rule in rules_of(state, direction):
        assert rule["ip_protocol"] == "tcp", rule
        own, peer = ("oifname", "iifname") if direction == "ingress" else ("iifname", "oifname")
        if rule["peer"] is not None:
            other = f'{peer} "{rule["peer"]}*"'
        else:
            other = f"ct original ip {'saddr' if direction == 'ingress' else 'daddr'} {rule['cidr_ipv4']}"
        # Original: as the host sees it, before this network sends it on to moto.
        ports = "-".join(map(str, sorted({rule["from_port"], rule["to_port"]})))
        port = f"meta l4proto tcp ct original proto-dst {ports}"
        lines.append(f'{own} "{rule["own"]}*" {other} {port} accept')
    return lines


class Vpc:
    """The network. `router` is a namespace; it has an interface with the name of each host."""

    def __init__(self, router: str, cidr: str, aws_address: str, moto_port: int, root: Path):
        """Takes a router with an uplink. `root` is a root file system that has nft."""
        self.aws_address = aws_address
        self._router = router
        self._gateway = str(ipaddress.ip_network(cidr)[1])
        self._moto_port = moto_port
        self._root = root
        self._namespaces: dict[str, str] = {}

    def permit(self, state: dict[str, Any]) -> None:
        """Puts the rules of a plan or state in the place of those before, all at once."""
        egress, ingress = ("\n    ".join(nft_rules(state, direction)) for direction in ("egress", "ingress"))
        names = {"address": self.aws_address, "port": self._moto_port}
        rules = RULES.format(**names, uplink=UPLINK, outside=OUTSIDE, egress=egress, ingress=ingress)
        command = ["ip", "netns", "exec", self._router, "chroot", str(self._root), "nft", rules]
        result = ran(command)
        assert result.returncode == 0, f"{result.stderr}\n{rules}"

    @contextlib.contextmanager
    def plugged(self, name: str, address: str) -> Iterator[str]:
        """Plugs a host in; yields its namespace, where it has this address."""
        with network(address, self._gateway, self._router, name) as namespace:
            ip("-n", namespace, "address", "add", f"{METADATA}/32", "dev", "lo")
            self._namespaces[name] = namespace
            try:
                yield namespace
            finally:
                self._namespaces.pop(name, None)

    def deliver(self, address: str, name: str) -> None:
        """Delivers what is for an address to a host from now on, as AWS does for the interface that has it."""
        ip("-n", self._router, "route", "replace", f"{address}/32", "dev", name)

    def cut(self, name: str) -> None:
        """Cuts a host off: from now on nothing comes from it, not even the end of its connections."""
        ip("-n", self._router, "link", "set", name, "down")

    def reach(self, name: str, targets: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """Returns what becomes of a host's connection to each address and port: "open", "refused" or "silence"."""
        command = ["ip", "netns", "exec", self._namespaces[name], sys.executable, "-c", REACH]
        command += [json.dumps(list(targets)), str(REACH_SECONDS)]
        result = ran(command)
        assert result.returncode == 0, result.stderr
        return dict(zip(targets, json.loads(result.stdout), strict=True))


@contextlib.contextmanager
def vpc(cidr: str, address: str, aws: Aws, root: Path) -> Iterator[Vpc]:
    """Makes a network in which AWS is at `address` of this machine. Nothing passes before `permit`."""
    link = f"{address.rsplit('.', 1)[0]}.250"
    with network(link, address) as router:
        forward = ["ip", "netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
        result = ran(forward)
        if result.returncode != 0:
            pytest.skip(f"no router can be made here ({result.stderr.strip()}): {PRIVILEGED}")
        ip("-n", router, "route", "add", "blackhole", cidr)  # packets to a host that is not there stay in here
        yield Vpc(router, cidr, address, int(aws.endpoint.rsplit(":", 1)[1]), root)
