"""A whole `packer build`: EC2's interface is moto's, the instances that it starts are machines of systemd-nspawn.

It differs from a build in AWS:
* torch is a package without content (the real one is 200 MB and more)
* wheels, Ubuntu's packages and the agent come from this machine
* debootstrap makes the base image of both
* Packer connects to the instance's private address, as moto has no Session Manager
* the base images are named by their ids, as moto has none of the parameters that name them
* the driver of the gpu image is a number that modinfo tells
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import rootfs, site
from tests.deploy.commands import ran
from tests.deploy.machine import Machine, booted, network, seed
from tests.deploy.moto_process import Aws, moto_server
from tests.system.processes import ROOT

VERSION = "v0.0-test"
BUILD_SECONDS = 1500  # only ends what hangs
BASES = {
    "cpu": (
        "ami-0000000000000c901",
        "099720109477",
        "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20261101",
    ),
    "gpu": (
        "ami-0000000000000c902",
        "898082745236",
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261101",
    ),
}
# Whose build it is: easily found where it should not be.
BUILDER = {
    "AWS_ACCESS_KEY_ID": "AKIATHEBUILDERSOWNID",
    "AWS_SECRET_ACCESS_KEY": "the/builders+own/secret+key/for+the/test",
}
PROFILE = "apexrl-us-east-1-image-build"
DRIVER = "580.95.05"
TORCH = {"cpu": "2.13.0+cpu", "gpu": "2.13.0"}


@dataclasses.dataclass(frozen=True)
class Instance:
    """The instance that Packer asked EC2 for, as it was while the image was built."""

    description: dict[str, Any]
    public_key: str
    volumes: list[dict[str, Any]]
    open_to: list[dict[str, Any]]
    profile: str


@dataclasses.dataclass(frozen=True)
class Image:
    """A built image: its layers, the newest first, its entry in EC2, and the instance that it was built on."""

    layers: Sequence[Path]
    description: dict[str, Any]
    instance: Instance

    @property
    def tags(self) -> dict[str, str]:
        """The tags by key."""
        return {tag["Key"]: tag["Value"] for tag in self.description["Tags"]}

    @property
    def changes(self) -> Path:
        """The directory with all that differs from the base image."""
        return self.layers[0]


@dataclasses.dataclass(frozen=True)
class Build:
    """A finished run of Packer."""

    images: dict[str, Image]
    repository: Path
    output: str
    aws: Aws


def copy_repository(directory: Path) -> Path:
    """Returns a repository with one commit and a tag: the files of ours as they are now."""
    names = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)
    return directory


def commit(repository: Path) -> None:
    """Makes the commit that is the version."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "init.defaultBranch=main"]
    for words in (["init"], ["add", "--all"], ["commit", "--message=test"], ["tag", VERSION]):
        subprocess.run(["git", *identity, *words], cwd=repository, check=True, capture_output=True, timeout=60)


def packer(*words: str, cwd: Path = ROOT, seconds: float = 100) -> subprocess.CompletedProcess:
    """Runs a command of Packer; skips the test where there is no Packer."""
    if shutil.which("packer") is None:
        pytest.skip("not installed: apt-get install packer")
    return ran(["packer", *words], cwd=cwd, env=os.environ | packer_environment(), seconds=seconds)


def packer_environment() -> dict[str, str]:
    """Returns what Packer is told: to ask nobody for newer versions, and where its plugins are kept."""
    plugins = os.environ.get("PACKER_PLUGIN_PATH", str(rootfs.cache() / "packer-plugins"))
    return {"CHECKPOINT_DISABLE": "1", "PACKER_PLUGIN_PATH": plugins}


def for_this_packer(repository: Path) -> None:
    """Gets the plugins that the template needs, which are part of Packer 1.6, the last one in Debian.

    From the template of Packer 1.6 it removes the lines that the template marks as newer, nothing else. Skips the test
    where the plugins cannot be had.
    """
    major, minor = map(int, re.findall(r"v(\d+)\.(\d+)", packer("version").stdout)[0])
    if (major, minor) >= (1, 7):
        result = packer("init", "deploy/packer", cwd=repository, seconds=300)
        if result.returncode != 0:
            problem = " ".join((result.stdout + result.stderr).split())[-300:]
            pytest.skip(
                f"packer init cannot get its plugins ({problem}): let it reach github.com, or set PACKER_PLUGIN_PATH "
                "to a folder that has them"
            )
        return
    folder = repository / "deploy/packer"
    (folder / "plugins.pkr.hcl").unlink()
    names = "".join(f'    {image} = "{base[0]}"\n' for image, base in BASES.items())
    (folder / "bases.pkr.hcl").write_text(f"locals {{\n  base_images = {{\n{names}  }}\n}}\n")
    template = folder / "apexrl.pkr.hcl"
    lines = template.read_text().splitlines(keepends=True)
    template.write_text("".join(line for line in lines if not line.rstrip().endswith("# packer >= 1.7")))


def put_torch_aside(repository: Path, folder: Path) -> None:
    """Makes packages without content in torch's place, and lets the locks name those."""
    for image, version in TORCH.items():
        wheel = folder / image / f"torch-{version}-py3-none-any.whl"
        wheel.parent.mkdir(parents=True)
        information = f"torch-{version}.dist-info"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr("torch/__init__.py", f'"""Stands in for torch."""\n__version__ = "{version}"\n')
            file.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            file.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{information}/RECORD", "")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lock = repository / f"deploy/packer/requirements-{image}.txt"
        assert re.search(rf"^torch=={re.escape(version)} ", lock.read_text(), re.MULTILINE), lock
        lock.write_text(f"-r requirements-common.txt\ntorch=={version} --hash=sha256:{digest}\n")


def trust(repository: Path, fingerprint: str) -> None:
    """Puts the key of the stand-in for the CloudWatch agent in the place of AWS's."""
    script = repository / "deploy/packer/agent.sh"
    text, count = re.subn(r"(?<=^readonly fingerprint=)[0-9A-F]{40}$", fingerprint, script.read_text(), flags=re.M)
    assert count == 1
    script.write_text(text)


def write_amis(path: Path) -> Path:
    """Writes the images that moto knows: the bases."""
    amis = [
        {
            **{"ami_id": ami_id, "owner_id": owner, "name": name, "description": name, "state": "available"},
            **{"architecture": "x86_64", "root_device_type": "ebs", "virtualization_type": "hvm", "public": True},
            **{"root_device_name": "/dev/sda1", "sriov": "simple", "hypervisor": "xen", "image_type": "machine"},
            **{"image_location": f"amazon/{name}", "platform": None},
            "creation_date": f"{name[-8:-4]}-{name[-4:-2]}-{name[-2:]}T00:00:00.000Z",
        }
        for ami_id, owner, name in BASES.values()
    ]
    path.write_text(json.dumps(amis))
    return path


class Instances:
    """Plays EC2's part for the instances that moto has: each gets a machine with its address and its key."""

    def __init__(self, aws: Aws, directory: Path, address: str, proxy: str, binds: dict[Path, str]):
        self._ec2 = aws.client("ec2")
        self._directory = directory
        self._address = address
        self._proxy = proxy
        self._binds = binds
        self._base = rootfs.base()
        self._stack = contextlib.ExitStack()
        self.machines: dict[str, Machine] = {}
        self.instances: dict[str, Instance] = {}

    def boot_new(self) -> None:
        """Boots a machine for each instance that has none."""
        if len(self.machines) == len(BASES):
            return
        for reservation in self._ec2.describe_instances()["Reservations"]:
            for instance in reservation["Instances"]:
                image = next(name for name, (ami_id, *_) in BASES.items() if ami_id == instance["ImageId"])
                # An instance of moto is listed before it has its volume and its profile, which comes last.
                if image not in self.machines and "IamInstanceProfile" in instance:
                    self._boot(image, instance)

    def consoles(self) -> str:
        """Returns the console of each machine, for the reader of a failure."""
        texts = ((image, machine.log.read_text(errors="replace")) for image, machine in self.machines.items())
        return "".join(f"\n--- console of the {image} machine ---\n{text}" for image, text in texts)

    def _boot(self, image: str, instance: dict[str, Any]) -> None:
        pairs = self._ec2.describe_key_pairs(KeyNames=[instance["KeyName"]], IncludePublicKey=True)
        key = pairs["KeyPairs"][0]["PublicKey"].strip()
        directory = self._directory / image
        root = self._stack.enter_context(rootfs.overlay([self._base], directory))
        seed(root, "#cloud-config\n{}\n", **{"public-keys": f"[{key}]"})
        for name, text in self._site(image).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
            (root / name).chmod(0o755)
        namespace = self._stack.enter_context(network(instance["PrivateIpAddress"], self._address))
        log = self._directory / f"{image}.console"
        self.machines[image] = self._stack.enter_context(booted(root, namespace, log, self._binds))
        self.instances[image] = self._describe(instance, key.split()[1])

    def _describe(self, instance: dict[str, Any], public_key: str) -> Instance:
        volumes = [{"Name": "attachment.instance-id", "Values": [instance["InstanceId"]]}]
        groups = [group["GroupId"] for group in instance["SecurityGroups"]]
        return Instance(
            instance,
            public_key,
            self._ec2.describe_volumes(Filters=volumes)["Volumes"],
            [
                rule
                for group in self._ec2.describe_security_groups(GroupIds=groups)["SecurityGroups"]
                for rule in group["IpPermissions"]
            ],
            instance["IamInstanceProfile"]["Arn"].rsplit("/", 1)[1],
        )

    def _site(self, image: str) -> dict[str, str]:
        return {
            "etc/apt/apt.conf.d/99test": f'Acquire::http::Proxy "{self._proxy}";\n',
            "etc/cloud/cloud.cfg.d/99-test.cfg": "apt: {preserve_sources_list: true}\n",
            "etc/pip.conf": f"[global]\nno-index = true\nfind-links = /mnt/wheels /mnt/torch/{image}\n",
            "usr/local/sbin/modinfo": f"#!/bin/sh\necho {DRIVER}\n",
            "etc/ssh/sshd_config.d/test.conf": "PubkeyAcceptedAlgorithms +ssh-rsa\n",  # all that Packer 1.6 can
        }

    def stop(self) -> None:
        """Powers all machines off, and takes away the additions of the test."""
        for image, machine in self.machines.items():
            if machine.is_running:
                machine.wait_for_boot()
                machine.power_off()
            for name in self._site(image):
                (machine.root / name).unlink()
            for target in self._binds.values():
                (machine.root / target.lstrip("/")).rmdir()

    def close(self) -> None:
        """Unmounts everything."""
        self._stack.close()

    def layers(self, image: str) -> list[Path]:
        """Returns the layers of a machine's file system."""
        return [self._directory / image / "upper", self._base]


def run_packer(repository: Path, aws: Aws, agent_url: str, instances: Instances, log: Path) -> str:
    """Runs the build; returns its output."""
    variables = {
        "version": VERSION,
        "instance_type": "c7i.xlarge",
        "ssh_interface": "private_ip",
        "ssh_cidrs": '["10.213.0.0/16"]',
        "ec2_endpoint": aws.endpoint,
        "cloudwatch_agent_url": agent_url,
    }
    words = ["packer", "build", "-color=false"]
    words += [word for name, value in variables.items() for word in ("-var", f"{name}={value}")]
    settings = {"PACKER_LOG": "1", "PACKER_LOG_PATH": f"{log}.debug", "HOME": str(log.parent), **BUILDER}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, "deploy/packer"],
            cwd=repository,
            env=aws.environment | packer_environment() | settings,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + BUILD_SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline:
            instances.boot_new()
            time.sleep(0.5)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its plugins are processes of their own
        status = process.wait()
    assert status == 0, log.read_text() + instances.consoles()
    return log.read_text()


@contextlib.contextmanager
def built(directory: Path) -> Iterator[Build]:
    """Builds both images."""
    rootfs.require("packer", "git")
    wheels = rootfs.wheels()
    repository = copy_repository(directory / "repository")
    for_this_packer(repository)
    put_torch_aside(repository, directory / "torch")
    published = directory / "published"
    trust(repository, site.publish_agent(published))
    commit(repository)
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(site.host_address())
        proxy = stack.enter_context(site.serving(address, published))
        amis = str(write_amis(directory / "amis.json"))
        aws = stack.enter_context(moto_server(directory / "moto.log", MOTO_AMIS_PATH=amis))
        binds = {wheels: "/mnt/wheels", directory / "torch": "/mnt/torch"}
        aws.client("iam").create_instance_profile(InstanceProfileName=PROFILE)
        instances = Instances(aws, directory / "machines", address, proxy, binds)
        stack.callback(instances.close)
        output = run_packer(repository, aws, proxy, instances, directory / "packer.log")
        instances.stop()
        descriptions = aws.client("ec2").describe_images(Owners=["self"])["Images"]
        by_role = {tag["Value"]: image for image in descriptions for tag in image["Tags"] if tag["Key"] == "Role"}
        instances.close()
        images = {name: Image(instances.layers(name), by_role[name], instances.instances[name]) for name in BASES}
        yield Build(images, repository, output, aws)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """Both images, built once in a session; pytest would keep all that of the last three sessions."""
    directory = tmp_path_factory.mktemp("build")
    try:
        with built(directory) as result:
            yield result
    finally:
        subprocess.run(["rm", "-rf", directory], check=False, timeout=100)  # faster than shutil.rmtree
