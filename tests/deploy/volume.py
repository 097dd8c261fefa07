"""A volume as EBS attaches it: a file of this machine as a block device of a host, under the volume's name."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.commands import ran
from tests.deploy.rootfs import PRIVILEGED

VOLUME_BYTES = 1 << 30  # a sparse file


@contextlib.contextmanager
def blank_volume(directory: Path, volume: str) -> Iterator[dict[Path, str]]:
    """Makes a volume with nothing on it; yields what a machine has to bind."""
    file = directory / f"{volume}.img"
    with file.open("wb") as blank:
        blank.truncate(VOLUME_BYTES)
    result = ran(["losetup", "--find", "--show", str(file)])
    if result.returncode != 0:
        pytest.skip(f"no loop device can be had here ({result.stderr.strip()}): {PRIVILEGED}")
    device = result.stdout.strip()
    try:
        yield {Path(device): f"/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{volume.replace('-', '')}"}
    finally:
        subprocess.run(["losetup", "--detach", device], check=True, timeout=30)
