"""Hosts of a cluster: machines of a built image, started by user-data as Terraform's, with AWS as moto plays it."""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from apexrl.net.keyring import ROLES, make_keys
from tests.deploy import rootfs
from tests.deploy.machine import Machine, booted, network, seed
from tests.deploy.moto_process import Aws

CLUSTER = "test"
KEYS_PATH = f"/apexrl/{CLUSTER}/keys"
VOLUME = "vol-0123456789abcdef0"
BUCKET, RUN = "test-results", "first"
ADDRESS = "10.79.0.11"
USER_DATA = """#cloud-config
write_files:
  - path: /etc/apexrl/role.env
    permissions: "0644"
    content: |
{content}
runcmd:
  - [systemctl, start, --no-block, apexrl.target]
"""
_hosts = itertools.count(2)


def role_env(aws: Aws, role: str, **further: str) -> dict[str, str]:
    """Returns what user-data writes to role.env, and where this AWS is."""
    names = ("AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    return {
        "APEXRL_ROLE": role,
        "APEXRL_CLUSTER": CLUSTER,
        "APEXRL_KEYS_PATH": KEYS_PATH,
        "APEXRL_BUCKET": BUCKET,
        "APEXRL_RUN": RUN,
        "APEXRL_SHARDS": "1",
        "APEXRL_HOST_RANK": "0",
        "APEXRL_DEADLINE": f"/apexrl/{CLUSTER}/deadline",
        "APEXRL_ADDRESS": ADDRESS,
        "APEXRL_GROUP": f"{CLUSTER}-learner",
        "APEXRL_GROUPS": f"{CLUSTER}-actor",
        "APEXRL_JOURNAL_VOLUME": VOLUME,
        **{name: aws.environment[name] for name in names},
        **further,
    }


def put_keys(aws: Aws, directory: Path) -> Path:
    """Makes the keys of a cluster and stores them; returns the directory with a copy."""
    ssm = aws.client("ssm")
    for path in make_keys(directory, ROLES):
        ssm.put_parameter(Name=f"{KEYS_PATH}/{path.name}", Value=path.read_text().strip(), Type="SecureString")
    return directory


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
def host(
    layers: Sequence[Path],
    variables: Mapping[str, str],
    directory: Path,
    address: str,
    binds: Mapping[Path, str] | None = None,
) -> Iterator[Machine]:
    """Boots a host of an image with user-data that sets these variables; `machine.address` is its own."""
    directory.mkdir(parents=True, exist_ok=True)
    content = "".join(f"      {name}={value}\n" for name, value in variables.items()).rstrip("\n")
    own = f"{address.rsplit('.', 1)[0]}.{next(_hosts)}"
    with rootfs.overlay(layers, directory) as root, network(own, address) as namespace:
        seed(root, USER_DATA.format(content=content))
        with booted(root, namespace, directory / "console.log", binds) as machine:
            machine.address = own
            machine.wait_for_boot()
            yield machine
