"""Free memory beside what control groups leave, in trees made of files and in a real group."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from apexrl import memory
from apexrl.memory import free_memory_bytes
from tests.system.processes import ROOT

GB = 10**9


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes a process of a machine with 16 GB free, and its groups: (limit, used, file cache) by path."""
    available = type("Memory", (), {"available": 16 * GB})
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: available)

    def make(kind, path, groups, root="/"):
        top, process = tmp_path / "fs", tmp_path / "self"
        process.mkdir()
        if kind == "cgroup2":
            names, own, options = ("memory.max", "memory.current", "inactive_file"), f"0::{path}\n", "rw"
        else:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            own, options = f"9:name=systemd:/\n4:memory:{path}\n0::/\n", "rw,memory"
        (process / "cgroup").write_text(own)
        (process / "mountinfo").write_text(
            "23 1 0:21 / / rw - ext4 /dev/root rw\n"
            f"35 31 0:32 {root} {top} rw,relatime shared:9 - {kind} {kind} {options}\n"
        )
        for place, (limit, used, cached) in groups.items():
            directory = top / place
            directory.mkdir(parents=True, exist_ok=True)
            for name, value in zip(names, (limit, used), strict=False):
                (directory / name).write_text(f"{value}\n")
            (directory / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\nactive_file 7\n")
        return process

    return make


KINDS = pytest.mark.parametrize("kind", ["cgroup2", "cgroup"])
UNLIMITED = {"cgroup2": "max", "cgroup": 2**63 - 4096}


@KINDS
def test_a_group_without_a_limit_leaves_what_the_machine_has(machine, kind):
    assert free_memory_bytes(process=machine(kind, "/a", {"a": (UNLIMITED[kind], GB, 0)})) == 16 * GB


@KINDS
def test_a_limit_leaves_what_is_not_used_and_the_cache_of_files(machine, kind):
    assert free_memory_bytes(process=machine(kind, "/a/b", {"a/b": (3 * GB, 2 * GB, GB // 2)})) == 3 * GB // 2


@KINDS
def test_the_smallest_of_all_groups_up_to_the_root_counts(machine, kind):
    groups = {"": (5 * GB, 4 * GB, 0), "a": (2 * GB, GB // 2, 0), "a/b": (UNLIMITED[kind], 1, 0)}
    assert free_memory_bytes(process=machine(kind, "/a/b", groups)) == GB


@KINDS
def test_a_container_that_sees_its_group_as_the_root_is_bounded_by_it(machine, kind):
    process = machine(kind, "/docker/abc", {"": (GB, 0, 0)}, root="/docker/abc")
    assert free_memory_bytes(process=process) == GB


@KINDS
def test_a_path_that_is_not_seen_here_is_bounded_by_what_is_seen(machine, kind):
    assert free_memory_bytes(process=machine(kind, "/elsewhere", {"": (GB, 0, 0)}, root="/docker/abc")) == GB


def test_a_group_that_is_full_leaves_nothing(machine):
    assert free_memory_bytes(process=machine("cgroup2", "/a", {"a": (GB, 2 * GB, 0)})) == 0


def test_a_number_that_is_asked_for_wins(machine):
    assert free_memory_bytes(2.5, machine("cgroup2", "/a", {"a": (GB, 0, 0)})) == 2_500_000_000


def test_a_machine_without_groups_has_what_is_available(tmp_path):
    assert free_memory_bytes(process=tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.5)


def test_a_process_in_a_real_group_sees_its_limit():
    parents = {
        Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
        Path("/sys/fs/cgroup"): "memory.max",
    }
    parent = next((path for path, name in parents.items() if (path / "memory.stat").exists()), None)
    if parent is None or not os.access(parent, os.W_OK) or os.geteuid():
        pytest.skip("needs root and control groups that can be made")
    group = parent / f"apexrl-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / parents[parent]).write_text(str(300 * 2**20))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"needs root and control groups that can be made ({error.strerror})")
    code = (
        f"import os, pathlib; pathlib.Path({str(group / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
        "from apexrl.memory import free_memory_bytes; print(free_memory_bytes())"
    )
    try:
        found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        group.rmdir()
    assert 0 < int(found.stdout) <= 300 * 2**20
