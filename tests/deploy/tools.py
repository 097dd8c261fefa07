"""Gets for tests/deploy what pip does not install: `python -m tests.deploy.tools`. Tests without it are skipped.

Terraform as HashiCorp releases it goes into .venv/bin. Only the files whose hashes stand here are taken.
"""

import hashlib
import io
import platform
import sys
import urllib.request
import zipfile

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


def main() -> None:
    """Gets Terraform, or says that it cannot be had."""
    from tests.deploy.needed import look_for_terraform

    if look_for_terraform()[1]:
        try:
            fetch_terraform()
        except OSError as error:
            print(f"{error}: the tests of Terraform are skipped. {TERRAFORM_CURE}", file=sys.stderr)


if __name__ == "__main__":
    main()
