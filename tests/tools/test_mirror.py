"""A copy of a log on another host: it follows a server over restarts of both, and a server goes on from it."""

import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

from apexrl.config.sections import ReplayConfig
from apexrl.errors import ConfigError
from apexrl.net import RecordClient, wire
from apexrl.net.log_client import LogAppend, LogClient, LogStart
from apexrl.net.replay_server import ReplayServer
from apexrl.replay.journal import read_entries, read_identity
from apexrl.tools import replay_tool
from apexrl.tools.mirror import Mirror, follow
from tests.system.processes import ROOT, call, wait_for

CONFIG = ReplayConfig(capacity=10_000, tables=("hard=priority:0:1", "any=uniform:0:1", "queue=fifo:0:1"))
FIELDS = {"id": "int64", "name": "U8"}
NO_BOUND = float("inf")


def fill(server, numbers):
    with RecordClient(server.endpoints, "writer", FIELDS) as client:
        for i in numbers:
            client.insert({"id": i, "name": f"n{i}"}, i + 1.0, 100)
        assert client.flush(100)


def num_copied(directory):
    try:
        return sum(1 for _ in read_entries(directory))
    except ConfigError:  # there is no copy yet
        return 0


def copied(server, directory, end_number):
    """Follows a server until the copy is so far."""
    end = time.monotonic() + 100
    with Mirror(directory, NO_BOUND) as copy, LogClient(server.learner_endpoint, "mirror", {}, 1) as client:
        follow(client, copy, lambda: copy.end_number >= end_number or time.monotonic() > end)
        assert copy.end_number == end_number


def test_a_server_goes_on_from_the_copy(tmp_path):
    origin, copy = tmp_path / "origin", tmp_path / "copy"
    for begin, end in ((0, 20), (20, 30)):  # both of them start again
        with ReplayServer(CONFIG, journal_dir=origin) as server:
            fill(server, range(begin, end))
            copied(server, copy, end)
            assert call(replay_tool.main, "verify", copy)[0] == 0
    assert list(read_entries(copy)) == list(read_entries(origin))
    first, second = read_identity(origin), read_identity(copy)
    assert second.ancestors == (first.log,) and second.log != first.log and second.spec == first.spec
    with ReplayServer(CONFIG, journal_dir=copy) as server:
        fill(server, range(30, 32))
        sizes = {"any": 32, "hard": 16, "queue": 32}
        with RecordClient(server.endpoints, "reader", batch_sizes=sizes) as client:
            assert sorted(client.sample("any", 100).data["id"]) == list(range(32))
            assert client.sample("queue", 100).data["id"].tolist() == list(range(32))
            hard = client.sample("hard", 100)
            powers = (np.arange(32) + 1.0) ** CONFIG.priority_exponent  # as their writers gave them
            assert hard.probabilities == pytest.approx((powers / powers.sum())[hard.data["id"]], rel=1e-5)
    with ReplayServer(CONFIG, journal_dir=origin) as server:
        fill(server, range(40, 41))
        with pytest.raises(ConfigError, match=r"copy has another unroll 30: .*give another directory"):
            copied(server, copy, 33)
    with ReplayServer(CONFIG) as server:
        fill(server, range(1))
        with pytest.raises(ConfigError, match=r"copy has no copy of the log .*: give another directory"):
            copied(server, copy, 33)


@pytest.mark.parametrize("number", ["-1", "nan", "inf"])
def test_a_bound_that_makes_no_sense_is_refused(tmp_path, number):
    status, said = call(replay_tool.main, "mirror", tmp_path / "copy", "--max-gb", number, "--server", "nowhere")
    assert status == 2 and f"--max-gb {float(number)} makes no sense: it has to be" in said
    assert not (tmp_path / "copy").exists()


def test_only_one_program_writes_a_copy(tmp_path):
    with Mirror(tmp_path, NO_BOUND), pytest.raises(ConfigError, match="belongs to"):
        Mirror(tmp_path, NO_BOUND)
    with ReplayServer(CONFIG, journal_dir=tmp_path), pytest.raises(ConfigError, match="belongs to"):
        Mirror(tmp_path, NO_BOUND)


@pytest.mark.parametrize(("ring", "max_bytes", "held"), [(8, NO_BOUND, 8), (1000, 500, 4)])
def test_a_copy_keeps_within_its_bounds_and_has_the_gaps_of_the_log(tmp_path, spec, ring, max_bytes, held):
    insert = wire.Insert(0, "actor", 0, 0, 0, 0.1, b"\xff", np.ones(8, np.float32).tobytes())
    size = len(wire.encode(insert)) + 40
    max_bytes = max_bytes if max_bytes == NO_BOUND else held * size + 10
    numbers = [*range(30), *range(50, 60)]
    with Mirror(tmp_path, max_bytes, segment_bytes=300) as copy:
        copy.begin(LogStart("log", spec, ring, 0, False, {}))
        for number in numbers:
            copy.append(LogAppend(number, insert, bytes(40)))
            assert copy.num_bytes <= min(max_bytes, ring * size)
        copy.append(LogAppend(40, insert, bytes(40)))  # it comes again, in order
        copy.sync()
    found = [entry.number for entry in read_entries(tmp_path)]
    assert found == numbers[-len(found) :] and held <= len(found) <= held + 4
    changed = msgspec.structs.replace(insert, params_version=1)
    with Mirror(tmp_path, max_bytes) as copy:
        copy.begin(LogStart("log", spec, ring, 0, False, {}))
        assert copy.end_number == 60
        with pytest.raises(ConfigError, match="another unroll 59"):
            copy.append(LogAppend(59, changed, bytes(40)))


def test_the_command_follows_until_a_signal(tmp_path):
    with ReplayServer(CONFIG) as server:
        fill(server, range(10))
        command = [sys.executable, "-m", "apexrl", "inspect", "mirror", tmp_path / "copy", "--server"]
        address = server.learner_endpoint.removeprefix("tcp://")
        process = subprocess.Popen([*command, address], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        wait_for(lambda: num_copied(tmp_path / "copy") == 10, 100, "all unrolls")
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=100)[0]
        assert process.returncode == 0 and "copy has the log up to unroll 10, " in said
        assert said.index(f"waits for the replay server at tcp://{address}") < said.index("follows the log ")
    status, said = call(replay_tool.main, "mirror", tmp_path / "other", "--server", "nowhere")
    assert status == 2 and "is no endpoint: give tcp://HOST:PORT" in said and not (tmp_path / "other").exists()
