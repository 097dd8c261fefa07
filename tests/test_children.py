"""Processes that ours start."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from apexrl import children
from apexrl.children import make_session_nice

ROOT = Path(__file__).resolve().parent.parent


def test_the_session_of_a_child_has_our_niceness():
    program = """
import os, subprocess
from apexrl.children import start_child
print(os.nice(7), flush=True)
body = "import sys; sys.stdin.read(); print(open('/proc/self/autogroup').read().split()[-1])"
child = start_child(["-c", body], {}, stdin=subprocess.PIPE)
child.communicate(timeout=100)
"""
    if not os.access("/proc/self/autogroup", os.W_OK):
        pytest.skip("a kernel without autogroups")
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110, check=True
    )
    mine, its = result.stdout.split()
    assert its == mine


def test_a_child_has_our_time_of_day_whatever_became_of_the_clock(monkeypatch):
    monkeypatch.setattr(children, "epoch", lambda: 1000.0)
    body = "import time; from apexrl.clocks import time_of_day; print(time_of_day() - time.monotonic())"
    child = children.start_child(["-c", body], {}, stdout=subprocess.PIPE)
    assert float(child.communicate(timeout=100)[0]) == pytest.approx(1000, abs=1)


def test_linux_may_refuse_a_change_of_a_session_for_a_moment():
    with mock.patch.object(Path, "write_text", side_effect=[BlockingIOError, BlockingIOError, None]) as write:
        make_session_nice(os.getpid(), 5)
    assert write.call_count == 3
    with mock.patch.object(Path, "write_text", side_effect=PermissionError) as write:
        make_session_nice(os.getpid(), 5)
    assert write.call_count == 1
