"""A cluster on this machine: the hosts of a Terraform state, as machines of the images that Packer built; its state."""

import contextlib
import datetime
import ipaddress
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from apexrl.learning.record.status_file import Status, read_status
from apexrl.networks.checkpoint import Checkpoint, load_checkpoint
from apexrl.networks.headers import LATEST, Counters
from tests.deploy import rootfs
from tests.deploy.commands import ran
from tests.deploy.image_build import Build
from tests.deploy.imds import metadata_service
from tests.deploy.machine import Machine, booted, seed, wait_until
from tests.deploy.moto_process import REGION, Aws
from tests.deploy.terraform import BUCKET, fixed_addresses, resources, user_data
from tests.deploy.vpc import METADATA, OUTSIDE, Vpc, vpc
from tests.system.processes import ROOT

OPERATOR = "203.0.113.7"
RUN_DIR = "var/lib/apexrl/run"
IMAGES = {"replay": "cpu", "learner": "gpu", "actor": "cpu"}
FIRST_FREE, MOST_ADDRESSES = 20, 80
ADDRESS_SECONDS = 120
VOLUME_BYTES = 1 << 30  # a sparse file
DROP_IN = "etc/systemd/system/apexrl-.service.d/aws.conf"
# Where AWS is, and patience with its metadata service, which shares two cores with everything else. Nothing else is
# told to a host but by Terraform: its credentials are those of its profile, from the metadata service.
SETTINGS = """[Service]
Environment=AWS_ENDPOINT_URL=http://{address}:443
Environment=AWS_METADATA_SERVICE_TIMEOUT=10 AWS_METADATA_SERVICE_NUM_ATTEMPTS=3
"""


class Interface(NamedTuple):
    """A network interface in moto; `facts` are what its host's metadata service knows, by path."""

    name: str
    facts: dict[str, str]


def make_interface(aws: Aws, subnet: str, address: str) -> Interface:
    """Makes the network interface of a new host."""
    made = aws.client("ec2").create_network_interface(SubnetId=subnet, PrivateIpAddress=address)["NetworkInterface"]
    name, mac = made["NetworkInterfaceId"], made["MacAddress"]
    known = f"/latest/meta-data/network/interfaces/macs/{mac}"
    facts = {"/latest/meta-data/mac": mac, f"{known}/interface-id": name, f"{known}/local-ipv4s": address}
    return Interface(name, facts)


def addresses_of(aws: Aws, interface: str) -> list[str]:
    """Returns the private addresses of an interface, the first one first."""
    [found] = aws.client("ec2").describe_network_interfaces(NetworkInterfaceIds=[interface])["NetworkInterfaces"]
    return [entry["PrivateIpAddress"] for entry in found["PrivateIpAddresses"]]


def interpreter(directory: Path) -> dict[Path, str]:
    """Returns what to bind so that a host's code runs with this Python and its packages, torch among them."""
    prefix, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    folders = {Path(path): f"/opt/packages/{n}" for n, path in enumerate(sys.path) if path.endswith("-packages")}
    environment = directory / "venv"
    packages = environment / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (environment / "bin").mkdir()
    (environment / "bin/python").symlink_to(f"/opt/python/bin/{version}")
    (environment / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
    (packages / "here.pth").write_text("".join(f"{path}\n" for path in folders.values()))
    shared = {path: f"/usr/lib/x86_64-linux-gnu/{path.name}" for path in prefix.glob("lib/libpython*.so.1.0")}
    return {environment: "/opt/apexrl/.venv", prefix: "/opt/python"} | folders | shared


@contextlib.contextmanager
def blank_volume(directory: Path, volume: str) -> Iterator[dict[Path, str]]:
    """Makes a block device with nothing on it; yields what a machine has to bind to see it as EBS attaches a volume."""
    file = directory / f"{volume}.img"
    with file.open("wb") as blank:
        blank.truncate(VOLUME_BYTES)
    result = ran(["losetup", "--find", "--show", str(file)])
    if result.returncode != 0:
        pytest.skip(f"no loop device can be had here ({result.stderr.strip()}): {rootfs.PRIVILEGED}")
    device = result.stdout.strip()
    try:
        yield {Path(device): f"/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{volume.replace('-', '')}"}
    finally:
        subprocess.run(["losetup", "--detach", device], check=True, timeout=30)


def role_of(name: str) -> str:
    """Returns the role of a host: its name without a number."""
    return name.rstrip("-0123456789")


def name_of(address: str) -> str:
    """Returns the name that a VPC gives to the host of an address."""
    return f"ip-{address.replace('.', '-')}"


class RunningCluster:
    """Its hosts by name: replay, learner, learner-1 ..., actor0, actor1 ...; close it at the end.

    As from a group, a learner host gets another address at each start. It is known by the one that it takes itself.
    """

    def __init__(
        self,
        state: dict[str, Any],
        aws: Aws,
        vpc: Vpc,
        layers: Mapping[str, Sequence[Path]],
        binds: Mapping[Path, str],
        directory: Path,
    ):
        """Takes the state, AWS, the network, the layers of both images, and a directory for disks and consoles."""
        self.vpc = vpc
        self.hosts: dict[str, Machine] = {}
        self.interfaces: dict[str, Interface] = {}
        self._aws = aws
        self._layers = layers
        self._binds = binds
        self._directory = directory
        cidr = resources(state)["aws_subnet.this[0]"]["cidr_block"]
        self._network = ipaddress.ip_network(cidr)
        network = aws.client("ec2").create_vpc(CidrBlock=cidr)["Vpc"]["VpcId"]
        self._subnet = aws.client("ec2").create_subnet(VpcId=network, CidrBlock=cidr)["Subnet"]["SubnetId"]
        self._fixed = fixed_addresses(state)
        self._user_data = user_data(state)
        self._stacks: dict[str, contextlib.ExitStack] = {}
        self._numbers = itertools.count(1)

    def start(self, *names: str) -> None:
        """Starts hosts with new disks, and waits until cloud-init has done its work on them."""
        for name in names:
            self._stacks[name] = stack = contextlib.ExitStack()
            self.hosts[name] = self._boot(name, stack)
        for name in names:
            self.hosts[name].wait_for_boot()
        for name in names:
            if role_of(name) == "learner":
                self._wait_for_address(name)

    def _wait_for_address(self, name: str) -> None:
        """Waits until a host has taken its address, and lets the network know, as AWS does at once."""
        address, interface = self._fixed[name], self.interfaces[name].name
        wait_until(
            lambda: address in addresses_of(self._aws, interface),
            ADDRESS_SECONDS,
            lambda: f"{name} to take its address:\n{self.hosts[name].journal('apexrl-*')}",
        )
        self.vpc.deliver(address, name)

    def _boot(self, name: str, stack: contextlib.ExitStack) -> Machine:
        number, role = next(self._numbers), role_of(name)
        address = self._fixed["replay"] if role == "replay" else str(self._network[FIRST_FREE + number])
        host_name = name_of(address)
        directory = self._directory / f"{number}-{name}"
        root = stack.enter_context(rootfs.overlay(self._layers[IMAGES[role]], directory))
        namespace = stack.enter_context(self.vpc.plugged(name, address))
        metadata = stack.enter_context(metadata_service(METADATA, 80, namespace))
        self.interfaces[name] = make_interface(self._aws, self._subnet, address)
        metadata.facts |= self.interfaces[name].facts
        seed(
            root,
            self._user_data[name if name in self._fixed else role],
            **{"instance-id": f"i-{number:017x}", "local-hostname": host_name},
        )
        others = [str(self._network[n]) for n in range(MOST_ADDRESSES) if str(self._network[n]) != address]
        named = [f"127.0.0.1 localhost {host_name}", *(f"{other} {name_of(other)}" for other in others)]
        (root / "etc/hosts").write_text("\n".join(named) + "\n")  # a VPC has a name server for this
        (root / DROP_IN).write_text(SETTINGS.format(address=self.vpc.aws_address))
        machine = stack.enter_context(booted(root, namespace, directory / "console.log", self._binds))
        machine.address = self._fixed.get(name, address)
        return machine

    def vanish(self, name: str) -> None:
        """Takes a host away as when its hardware fails: it says goodbye to nobody, and its disk is lost."""
        self.vpc.cut(name)
        self.hosts.pop(name).kill()
        self._stacks.pop(name).close()

    def disks(self) -> list[Path]:
        """Returns the directories with what each host, also one that is gone, has written to its disk."""
        return sorted(self._directory.glob("*/upper"))

    def close(self) -> None:
        """Ends all hosts."""
        with contextlib.ExitStack() as stack:
            for own in self._stacks.values():
                stack.callback(own.close)


@contextlib.contextmanager
def started(
    state: dict[str, Any], aws: Aws, build: Build, address: str, directory: Path, *names: str
) -> Iterator[RunningCluster]:
    """Starts the hosts of a state, and an operator on the internet; at the end nothing of them is left."""
    found = resources(state)
    cidr, journal = found["aws_subnet.this[0]"]["cidr_block"], found["aws_ebs_volume.journal"]["id"]
    layers = {name: image.layers for name, image in build.images.items()}
    with (
        vpc(cidr, address, aws, rootfs.base()) as network,
        network.plugged(OUTSIDE, OPERATOR),
        blank_volume(directory, journal) as volume,
    ):
        network.permit(state)
        cluster = RunningCluster(state, aws, network, layers, interpreter(directory) | volume, directory / "hosts")
        try:
            cluster.start(*names)
            yield cluster
        finally:
            cluster.close()
            shutil.rmtree(directory, ignore_errors=True)


def store_keys(aws: Aws, name: str, *flags: str) -> None:
    """Makes the keys of a cluster, as a user does."""
    command = [sys.executable, "-m", "deploy", "keys", "--cluster", name, "--region", REGION, *flags]
    subprocess.run(command, cwd=ROOT, env=aws.environment, check=True, capture_output=True, timeout=100)


def put_deadline(aws: Aws, state: dict[str, Any], when: datetime.datetime | None = None) -> None:
    """Stores a deadline where the hosts of a state read it, by default that of the state."""
    parameter = resources(state)["aws_ssm_parameter.deadline"]
    value = f"{when:%Y-%m-%dT%H:%M:%SZ}" if when else parameter["value"]
    aws.client("ssm").put_parameter(Name=parameter["name"], Value=value, Type=parameter["type"], Overwrite=True)


def status(running: RunningCluster) -> Status:
    """Returns the learner's status, from the file that it writes."""
    return read_status(running.hosts["learner"].root / RUN_DIR) or Status("", 0, Counters(), {}, "")


def updates(running: RunningCluster) -> int:
    """Returns the number of updates so far."""
    return status(running).counters.updates


def figure(running: RunningCluster, tag: str) -> float:
    """Returns a metric, -1 where there is none."""
    return status(running).metrics.get(tag, -1.0)


def stored_checkpoint(aws: Aws, cluster: str, directory: Path) -> Checkpoint:
    """Returns the newest checkpoint in S3 of a cluster's run."""
    aws.client("s3").download_file(BUCKET, f"{cluster}/run-1/checkpoints/{LATEST}", str(directory / LATEST))
    return load_checkpoint(directory / LATEST)


def describe(running: RunningCluster) -> str:
    """Returns the state of the cluster, for a test that has waited in vain."""
    journals = [f"{name}:\n{host.journal('apexrl-*')[-3000:]}" for name, host in running.hosts.items()]
    return "\n".join(["the cluster", str(status(running)), *journals])


def wait_for(running: RunningCluster, condition, seconds: float = 90) -> None:
    """Waits until a condition holds."""
    wait_until(condition, seconds, lambda: describe(running))


def continued_from(host: Machine) -> list[int]:
    """Returns the updates from which the learner of a host went on."""
    return [int(found) for found in re.findall(r"continuing from update (\d+)", host.journal("apexrl-learner"))]
