"""Terraform as HashiCorp releases it: `fetch` puts it into .venv/bin.

Only the release whose hash stands here is taken.
"""

import hashlib
import io
import platform
import urllib.request
import zipfile
from pathlib import Path

from tests.system.processes import ROOT

VERSION = "1.11.4"
SHA256 = {
    "linux_amd64": "1ce994251c00281d6845f0f268637ba50c0005657eb3cf096b92f753b42ef4dc",
    "linux_arm64": "a43d1d0da9b9bab214a8305a39db0e40869572594ccf50c416a7756499143633",
    "darwin_arm64": "867e0808fa971217043e25b7a792b10720c79b1546f8a68479b74f138be73e18",
}
"""Checksums of the zip files, by system."""
PROCESSORS = {"x86_64": "amd64", "aarch64": "arm64"}
PROGRAM = ROOT / ".venv" / "bin" / "terraform"
SECONDS = 120


def fetch(program: Path, source: str = "https://releases.hashicorp.com/terraform") -> None:
    """Downloads the program.

    Raises: OSError when it cannot be had: no release for this system, no network, or not the one that was expected.
    """
    processor = PROCESSORS.get(platform.machine(), platform.machine())
    system = f"{platform.system().lower()}_{processor}"
    if system not in SHA256:
        raise OSError(f"there is no hash of Terraform {VERSION} for {system} in {__file__}")
    url = f"{source}/{VERSION}/terraform_{VERSION}_{system}.zip"
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            packed = answer.read()
    except OSError as error:
        raise OSError(f"{url} cannot be fetched: {error}") from error
    if hashlib.sha256(packed).hexdigest() != SHA256[system]:
        raise OSError(f"{url} is not the release that was expected: its SHA-256 is another")
    arriving = program.with_name(f"{program.name}.arriving")
    arriving.write_bytes(zipfile.ZipFile(io.BytesIO(packed)).read("terraform"))
    arriving.chmod(0o755)
    arriving.replace(program)
