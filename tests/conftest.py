"""Settings and fixtures of all tests: one thread, small specs, and streams whose every number is known."""

import collections
import contextlib
import itertools
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from apexrl.lifecycle import allow_many_files
from apexrl.types import StreamSpec, Unroll
from tests.schedule import (  # noqa: F401 - hooks
    pytest_addoption,
    pytest_configure,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
)

torch.set_num_threads(1)
allow_many_files()  # tests with hundreds of connections have both of their ends

# What is shown must not depend on where the tests run: rich and the display look at these.
for name in ("CI", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm"

# Nor may what runs depend on a person's own settings, or on the job that the tests are part of.
OF_JOBS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
for name in (*OF_JOBS, "APEXRL_VENV", "RAY_ADDRESS"):
    os.environ.pop(name, None)
for name in ("no_proxy", "NO_PROXY"):  # of servers on this host
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost", "::1")))


# By a part of the reason why a test was skipped: how to get it to run.
CURES = {
    "not installed": "bash tests/deploy/install.sh",
    "is missing": "bash tests/deploy/install.sh",
    "needs a GPU": "run it on a machine with an NVIDIA GPU",
    "not permitted": "run it as root",
    "needs root": "run it as root",
}


def pytest_terminal_summary(terminalreporter):
    """Says why tests were skipped, the most frequent reason first, and how to get them to run."""
    reasons = collections.Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section(f"{reasons.total()} tests were skipped")
    for reason, count in reasons.most_common():
        cure = next((cure for part, cure in CURES.items() if part in reason and cure not in reason), "")
        terminalreporter.line(f"{count:5} {reason}" + (f": {cure}" if cure else ""))


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Gives the signals back that a test took: a role that runs in this process would keep Ctrl-C for itself."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)


@pytest.fixture(autouse=True)
def same_networks() -> None:
    """Makes the new networks of a test the same ones each time, alone and after other tests."""
    torch.manual_seed(0)


@pytest.fixture
def spec() -> StreamSpec:
    """Frames of two numbers, stacks of 3, unrolls of 8 starts and 2 more steps."""
    return StreamSpec("Known-v0", (2,), "float32", 3, 4, 1, unroll_starts=8, overlap_steps=2)


@pytest.fixture
def make_unroll():
    """Makes an unroll of random content without ends of episodes."""

    def make(spec: StreamSpec, seed: int = 0) -> Unroll:
        rng = np.random.default_rng(seed)
        frames = rng.integers(0, 256, (spec.unroll_frames, *spec.frame_shape)).astype(spec.frame_dtype)
        if spec.num_actions:
            actions = rng.integers(0, spec.num_actions, spec.unroll_steps).astype(np.int32)
        else:
            low, high = np.array(spec.action_bounds).T
            actions = rng.uniform(low, high, (spec.unroll_steps, len(low))).astype(np.float32)
        return Unroll(
            frames,
            actions,
            rng.normal(size=spec.unroll_steps).astype(np.float32),
            np.ones(spec.unroll_steps, np.float32),
            np.zeros(spec.unroll_steps + 1, bool),
        )

    return make


@pytest.fixture(scope="session")
def free_ports():
    """Finds ports that nobody listens on, in ascending order: this worker's own, and none of outgoing connections."""
    share = 4_000 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = 28_000 + share * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = itertools.cycle(range(first, first + share))

    def find(count: int) -> list[int]:
        ports: list[int] = []
        for port in itertools.islice(own, share):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                return ports
        raise AssertionError(f"no {count} free ports from {first} to {first + share - 1}")

    return find
