"""Acknowledgements of inserts while a disk is slow: `python -m benchmarks.slow_disk [--sync-ms 200] [--seconds 30]`.

One client inserts at a steady pace, and asks after each insert until it is acknowledged. The server is a thread of the
same process. Its journal's files are small, so that one is full every few inserts, and each sync takes so much longer.
Latencies are of inserts that began a file, and of the others; once with syncs in the background, once with
`--journal-flush-seconds 0`, where each insert waits for its own.
"""

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from apexrl import RecordClient
from apexrl.config.sections import ReplayConfig
from apexrl.net.replay_server import ReplayServer
from apexrl.replay.journal import Journal

FIELDS = {"x": ("float32", 64)}
SERVED_LOG = "apexrl.net.served_log.Journal"


def latencies(flush_seconds: float, sync_ms: float, segment_bytes: int, seconds: float) -> dict[str, list[float]]:
    """Returns milliseconds from each insert to its acknowledgement, by whether it began a file."""
    found = {"at a roll": list[float](), "elsewhere": list[float]()}

    def slow(sync: Callable[[int], None], descriptor: int) -> None:
        time.sleep(sync_ms / 1e3)
        sync(descriptor)

    config = ReplayConfig(capacity=10**6, tables=("all=priority:0:1",), journal_flush_seconds=flush_seconds)
    small = functools.partial(Journal, segment_bytes=segment_bytes)
    rng = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory(prefix="apexrl-benchmark-") as directory,
        mock.patch("os.fdatasync", functools.partial(slow, os.fdatasync)),
        mock.patch("os.fsync", functools.partial(slow, os.fsync)),
        mock.patch(SERVED_LOG, small),
        ReplayServer(config, journal_dir=Path(directory)) as server,
        RecordClient(server.endpoints, "benchmark", FIELDS) as client,
    ):
        client.insert({"x": np.zeros(64)})  # the first one writes the identity of the log, too
        assert client.flush()
        end, files = time.perf_counter() + seconds, files_in(directory)
        while (began := time.perf_counter()) < end:
            client.insert({"x": rng.standard_normal(64)})
            assert client.flush(60)
            elapsed, before, files = time.perf_counter() - began, files, files_in(directory)
            found["elsewhere" if files == before else "at a roll"].append(1e3 * elapsed)
    return found


def files_in(directory: str) -> int:
    """Returns how many files of unrolls a journal has."""
    return sum(name.startswith("unrolls-") for name in os.listdir(directory))


def main() -> None:
    """Measures both, and prints a row of a table for each kind of insert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sync-ms", type=float, default=200.0)
    parser.add_argument("--segment-bytes", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    print("| --journal-flush-seconds | inserts | p50, p99, max ms |\n| --- | --- | --- |")
    for flush_seconds in (1.0, 0.0):
        found = latencies(flush_seconds, arguments.sync_ms, arguments.segment_bytes, arguments.seconds)
        for kind, values in found.items():
            quantiles = ", ".join(f"{value:.0f}" for value in np.percentile(values, (50, 99, 100)))
            print(f"| {flush_seconds:g} | {len(values)} {kind} | {quantiles} |")


if __name__ == "__main__":
    main()
