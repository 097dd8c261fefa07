"""Quotas of CPU time of control groups, in trees made of files and in a real group."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from apexrl.control_groups import num_cores
from tests.system.processes import ROOT

KINDS = pytest.mark.parametrize("kind", ["cgroup2", "cgroup"])
PERIOD = 100_000


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Makes a process of a host of 64 cores, and its groups: a quota in CPUs by path, None for no quota."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)

    def make(kind, path, quotas, root="/", period=PERIOD):
        top, process = tmp_path / "fs", tmp_path / "self"
        process.mkdir()
        is_second = kind == "cgroup2"
        (process / "cgroup").write_text(f"0::{path}\n" if is_second else f"4:memory:/\n3:cpu,cpuacct:{path}\n0::/\n")
        options = "rw" if is_second else "rw,cpu,cpuacct"
        (process / "mountinfo").write_bytes(
            b"22 1 0:20 / /media/M\xfcller\xe2\x80\xa8s rw - cifs //host/a\x85b rw\n"
            b"23 1 0:21 / / rw - ext4 /dev/root rw\n"
            b"24 23 0:22 / /x rw - tmpfs  rw\n"
            b"25 23 0:23 / /mnt/c rw - 9p C:\\134 rw,aname=drvfs;path=C:\\Program Files\\Docker\n"
            + f"35 31 0:32 {root} {top} rw,relatime shared:9 - {kind} {kind} {options}\n".encode()
        )
        for place, quota in quotas.items():
            directory = top / place
            directory.mkdir(parents=True, exist_ok=True)
            if is_second:
                (directory / "cpu.max").write_text(f"{'max' if quota is None else int(quota * period)} {period}\n")
            else:
                (directory / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else int(quota * period)}\n")
                (directory / "cpu.cfs_period_us").write_text(f"{period}\n")
        return process

    return make


@KINDS
@pytest.mark.parametrize(("quota", "cores"), [(None, 64), (2, 2), (1.5, 2), (0.25, 1), (100, 64)])
def test_a_quota_counts_as_cores(host, kind, quota, cores):
    assert num_cores(host(kind, "/a", {"a": quota})) == cores


@KINDS
def test_the_smallest_quota_up_to_the_root_counts(host, kind):
    assert num_cores(host(kind, "/a/b", {"": 16, "a": 3, "a/b": None})) == 3


@KINDS
def test_a_container_that_sees_its_group_as_the_root_is_bounded_by_it(host, kind):
    assert num_cores(host(kind, "/docker/abc", {"": 2}, root="/docker/abc", period=50_000)) == 2


@pytest.mark.parametrize("text", ["", "x y", "100000", "100000 0", "-1 100000"])
def test_a_quota_that_makes_no_sense_is_none(host, tmp_path, text):
    process = host("cgroup2", "/a", {"a": 2})
    (tmp_path / "fs" / "a" / "cpu.max").write_text(text)
    assert num_cores(process) == 64


def test_a_machine_without_groups_has_the_cores_of_its_affinity(host, tmp_path):
    assert num_cores(tmp_path) == 64


def test_a_process_in_a_real_group_sees_its_quota():
    parent = next((path for path in map(Path, ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup")) if path.is_dir()), None)
    if parent is None or not os.access(parent, os.W_OK) or os.geteuid():
        pytest.skip("needs root and control groups that can be made")
    group = parent / f"apexrl-test-{os.getpid()}"
    try:
        group.mkdir()
        is_first = (group / "cpu.cfs_quota_us").exists()
        (group / ("cpu.cfs_quota_us" if is_first else "cpu.max")).write_text("90000" if is_first else "90000 100000")
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"needs root and control groups that can be made ({error.strerror})")
    code = (
        f"import os, pathlib; pathlib.Path({str(group / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
        "from apexrl.control_groups import num_cores; print(num_cores())"
    )
    try:
        found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        group.rmdir()
    assert int(found.stdout) == 1
