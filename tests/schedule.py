"""Which tests a run takes, in which order, in how many processes, and how it ends.

Tests with the marker `long` and the name of their part are left out without `--all`, and the last line says so; tests
that are named by their path always run. A process takes one test at a time, the longest first: `durations.json` has
what they took in an earlier run (`--record-durations`). Files that share a slow fixture stay together in one process.
"""

import collections
import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from apexrl.control_groups import num_cores
from apexrl.memory import free_memory_bytes

DURATIONS = Path(__file__).with_name("durations.json")
KEPT_SECONDS = 0.5  # tests that take less are not in the file
USUAL_SECONDS = 0.02  # one of these
WORKER_BYTES = 10**9  # of memory that a process has to find free, with what its tests start
TOGETHER = {
    **dict.fromkeys(("cluster", "cluster_learners", "packer", "units"), "images"),
    **dict.fromkeys(("checkov", "policies", "secrets", "terraform", "terraform_shards"), "plans"),
    **dict.fromkeys(("terraform_values", "terraform_variables"), "plans"),
    **{name: name for name in ("docs", "library", "package", "ray_cluster", "rlax", "team")},
}
"""The groups of files that share a slow fixture, by the names of their files between `test_` and `.py`."""
ENDING_SECONDS = 0.8  # after Ctrl-C, for running tests to end what they have started


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("apexrl")
    group.addoption("--all", action="store_true", help="take the long tests, too")
    group.addoption("--record-durations", action="store_true", help=f"write what each test takes to {DURATIONS.name}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU, and is skipped without one")
    config.addinivalue_line("markers", "long(part): left out without --all, unless its path is given")
    config.pluginmanager.register(Schedule(config))
    # A shell without job control starts what runs in the background with Ctrl-C ignored, and programs inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler if is_worker(config) else interrupt)


def is_worker(config: pytest.Config) -> bool:
    """Returns whether this process runs tests for another one."""
    return hasattr(config, "workerinput")


def names_paths(config: pytest.Config) -> bool:
    """Returns whether the command line names files or directories."""
    return config.args_source == pytest.Config.ArgsSource.ARGS


def group_of(nodeid: str) -> str:
    """Returns the name of the tests that have to run in one process with a test: its own where it shares nothing."""
    file = nodeid.partition(".py::")[0].rpartition("/test_")[2]
    return TOGETHER.get(file, nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Hands out groups of tests in the order in which they were collected."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns a process for each core and one more, as tests of real processes often wait; none for a few tests.

    There are no more than fit into the memory that is free.
    """
    if names_paths(config):
        return 0
    return max(min(num_cores() + 1, free_memory_bytes() // WORKER_BYTES), 1)


class Schedule:
    """Counts what a run of pytest leaves out, and what its tests take."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._is_whole = config.option.all or names_paths(config)
        self._left_out: collections.Counter[str] = collections.Counter()
        self._seconds: collections.Counter[str] = collections.Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        parts = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("long"))}
        if parts and not self._is_whole:
            self._left_out.update(parts.values())
            self._config.hook.pytest_deselected(items=list(parts))
            items[:] = [item for item in items if item not in parts]
        if not names_paths(self._config):
            items[:] = longest_first(items, json.loads(DURATIONS.read_text()))

    def pytest_sessionfinish(self) -> None:
        if is_worker(self._config):
            self._config.workeroutput["left_out"] = dict(self._left_out)
        elif self._config.option.record_durations:
            write_durations(self._seconds, is_whole=self._config.option.all and not names_paths(self._config))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        """Takes over what a worker has left out: each worker collects all tests."""
        self._left_out = collections.Counter(getattr(node, "workeroutput", {}).get("left_out", {})) or self._left_out

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_unconfigure(self) -> None:
        if self._left_out and not is_worker(self._config):
            parts = ", ".join(f"{count} of {part}" for part, count in sorted(self._left_out.items()))
            self._config.get_terminal_writer().line(f"left out: {parts}. `bash run.sh test --all` takes them, too.")


def longest_first(items: list[pytest.Item], durations: dict[str, float]) -> list[pytest.Item]:
    """Returns the tests in the order in which they are begun. Groups, and short tests of one file, stay together."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)

    def seconds(group: list[pytest.Item]) -> float:
        return sum(durations.get(item.nodeid, USUAL_SECONDS) for item in group)

    ordered = sorted(groups.values(), key=lambda group: -round(seconds(group) / KEPT_SECONDS))
    return [item for group in ordered for item in group]


def write_durations(seconds: dict[str, float], is_whole: bool) -> None:
    """Writes what tests took. A whole run forgets those that are no more."""
    known = {} if is_whole else json.loads(DURATIONS.read_text())
    known |= {name: round(spent, 1) for name, spent in seconds.items()}
    kept = {name: spent for name, spent in sorted(known.items()) if spent >= KEPT_SECONDS}
    DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")


def interrupt(*_: object) -> None:
    """Ends the run, also one whose test catches everything. Called at Ctrl-C."""
    threading.Thread(target=end_soon, daemon=True).start()
    raise KeyboardInterrupt


def end_soon() -> None:
    """Ends this process and all that it has started, whatever they are doing."""
    family = psutil.Process().children(recursive=True)
    time.sleep(ENDING_SECONDS)
    for process in {*family, *psutil.Process().children(recursive=True)}:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    time.sleep(ENDING_SECONDS / 4)
    os._exit(pytest.ExitCode.INTERRUPTED)
