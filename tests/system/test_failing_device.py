"""A replay server on a block device that fails: a loop device over a file in memory, which has no room for a while.

Then the kernel tells a sync of the fault once, and forgets the bytes, as it does for a disk that breaks.
"""

import contextlib
import functools
import os
import subprocess

import pytest

from tests.system.fuzz import GoodPeers, K, scaled, start_replay
from tests.system.processes import wait_for
from tests.system.test_replay_disk import as_root, fill, small_disk, stored_sequences

NUM_FAULTS = scaled(2, 10)
MEMORY = "size=48m"
DEVICE_BYTES = 2**28  # more than the memory has; the file holds what was written only

pytestmark = [pytest.mark.long("a block device that fails"), pytest.mark.timeout(4000)]


run = functools.partial(as_root, lack="no block device can be made, which needs root and loop devices")


class Device:
    """A file system on such a device. It has no journal of its own: with one it would be read-only after a fault."""

    def __init__(self, memory, path, stack):
        self.path, self._memory = path, memory
        image = memory / "device"
        with image.open("wb") as file:
            file.truncate(DEVICE_BYTES)
        run("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard", image)
        self._name = run("losetup", "--find", "--show", image)
        stack.callback(subprocess.run, ["losetup", "--detach", self._name], timeout=300, check=True)
        path.mkdir()
        self._mount()
        stack.callback(subprocess.run, ["umount", path], timeout=300, check=True)

    def _mount(self):
        run("mount", "-t", "ext4", "-o", "errors=continue", self._name, self.path)

    @contextlib.contextmanager
    def failing(self):
        """Lets it take no block that it does not have yet, until the end of the block."""
        fill(self._memory / "ballast")
        try:
            yield
        finally:
            (self._memory / "ballast").unlink()

    def power_off(self):
        """Forgets what the kernel holds, and reads the device anew."""
        subprocess.run(["umount", self.path], timeout=300, check=True)
        self._mount()


@pytest.fixture
def device(tmp_path):
    with small_disk(tmp_path / "memory", MEMORY) as memory, contextlib.ExitStack() as stack:
        yield Device(memory, tmp_path / "device", stack)


def test_the_device_of_these_tests_is_one_that_shows_the_fault(device):
    path, data = device.path / "file", b"lost" * 2**21
    with path.open("wb", buffering=0) as file:
        with device.failing():
            file.write(data)
            with pytest.raises(OSError, match=r"No space left|Input/output error"):
                os.fsync(file.fileno())
        os.fsync(file.fileno())  # without an error
        assert path.read_bytes() == data
    device.power_off()
    assert path.read_bytes() != data


def test_what_was_acknowledged_is_on_a_device_that_has_failed(device, tmp_path, free_ports):
    ports = free_ports(2)
    flags = ["--journal-dir", device.path / "journal", "--journal-flush-seconds", 0.1, "--capacity", K * 100_000]
    with start_replay(tmp_path, ports, *flags) as server, GoodPeers(ports, seconds_between=0.01) as good:

        def wait_until(text, times):
            wait_for(lambda: server.text().count(text) >= times or good.errors, 300, text)
            assert not good.errors and server.popen.poll() is None, (good.errors, server.text())

        for fault in range(1, NUM_FAULTS + 1):
            inserts = good.num_inserts
            wait_for(lambda before=inserts: good.num_inserts > before + 50 or good.errors, 300, "inserts")
            with device.failing():
                wait_until("inserts are refused", fault)
            wait_until("can be written again", fault)
        good.finish(300)
        server.kill()
    device.power_off()
    assert stored_sequences(device.path / "journal") == {"good": list(range(good.num_inserts))}
    assert "the disk did not take all of the journal" in server.text()
    print(f"\na device that failed {NUM_FAULTS} times: {good.num_inserts} inserts, lost 0, doubled 0")
