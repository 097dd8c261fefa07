"""Cost of guests for a replay server: `python -m benchmarks.guests [--out FILE.json]`.

A process inserts compressed unrolls of Pong at a steady rate, as the actors of a run do. Guests follow the log as their
learners do; they sample in their own processes, so that the server sends them the unrolls and nothing else. Counted is
the server's CPU time, as a share of one core, without guests and with them, in turns.
"""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import tyro

from apexrl.net import InsertClient, LogAppend, LogClient
from benchmarks.machine import machine
from benchmarks.replay import ROOT, Server, serving
from benchmarks.replay_frames import make
from benchmarks.replay_work import STARTS, STREAMS, Feeder

WARM_UP_SECONDS = 2.0
START_SECONDS = 60.0  # until the first unroll is in, and with each guest


@dataclasses.dataclass(frozen=True)
class Options:
    """The load and its length."""

    rates: tuple[int, ...] = (4_000, 12_500)
    """Transitions a second: those of Pong on two cores, and of the paper."""
    guests: tuple[int, ...] = (0, 1, 9)
    """Numbers of guests."""
    seconds: float = 10.0
    """Seconds of each measurement."""
    repeats: int = 3
    """Measurements of each, in turns."""
    steps: int = 4000
    """Steps of each of the 8 environments whose frames are used."""
    directory: Path = Path("runs/benchmark-replay")
    """Directory of the frames."""
    out: str = ""
    """File for the figures as JSON."""
    work: str = ""
    """insert or follow: be a process of the benchmark."""
    ports: tuple[int, int] = (0, 0)
    """The server's ports, for such a process."""


def measured(options: Options, frames: Path, rate: int, guests: int) -> float:
    """Returns the share of a core that the server uses."""
    with serving("--samples-per-insert", 0) as server:
        processes = [start(server, frames, options, rate, 0)]
        if guests:
            processes.append(start(server, frames, options, 0, guests))
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
            time.sleep(WARM_UP_SECONDS)
            server.cpu_share()
            time.sleep(options.seconds)
            share = server.cpu_share()
            assert all(process.poll() is None for process in processes), "a process of the benchmark has ended"
            return share
        finally:
            for process in processes:
                process.kill()
                process.wait()


def start(server: Server, frames: Path, options: Options, rate: int, guests: int) -> "subprocess.Popen[bytes]":
    """Starts the process that inserts, or the one with all guests."""
    flags = ["--work", "follow" if guests else "insert", "--rates", rate, "--guests", guests, "--ports", *server.ports]
    command = [sys.executable, "-m", "benchmarks.guests", "--directory", frames, *flags]
    return subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=subprocess.PIPE)


def insert(options: Options) -> None:
    """Inserts at the rate until killed."""
    feeder = Feeder(options.directory, compress=False)
    client = InsertClient(f"tcp://127.0.0.1:{options.ports[0]}", "bench", feeder.spec, STREAMS)
    client.connect(10)
    print("ready", flush=True)
    due = time.monotonic()
    while True:
        client.insert(*feeder.next(), 30)
        due += STARTS / options.rates[0]
        client.poll()
        early = due - time.monotonic()
        assert early > -1.0, "this machine does not keep to the rate"
        time.sleep(max(0.0, early))


def follow(options: Options) -> None:
    """Follows the log as so many guests until killed."""
    endpoint = f"tcp://127.0.0.1:{options.ports[1]}"
    clients = [LogClient(endpoint, f"guest-{number}", {}, 4) for number in range(options.guests[0])]
    seen = [0] * len(clients)
    is_ready, deadline = False, time.monotonic() + START_SECONDS
    while True:
        for number, client in enumerate(clients):
            while (event := client.poll(1)) is not None:
                seen[number] += isinstance(event, LogAppend)
        assert is_ready or time.monotonic() < deadline, "no unroll has come"
        if min(seen) and not is_ready:
            is_ready = True
            print("ready", flush=True)


def main() -> None:
    """Measures, prints a table and writes the figures."""
    options = tyro.cli(Options)
    if options.work:
        (insert if options.work == "insert" else follow)(options)
    frames = make(options.directory, "Pong", options.steps)
    shares: dict[tuple[int, int], list[float]] = {}
    for _ in range(options.repeats):
        for rate in options.rates:
            for guests in options.guests:
                shares.setdefault((rate, guests), []).append(measured(options, frames, rate, guests))
    print("transitions/s  guests  share of a core: median, least, most")
    for (rate, guests), values in shares.items():
        print(f"{rate:13,}  {guests:6}  {np.median(values):.3f}, {min(values):.3f}, {max(values):.3f}", flush=True)
    rows = [{"transitions_per_second": rate, "guests": guests, "server_shares_of_a_core": values}
            for (rate, guests), values in shares.items()]  # fmt: skip
    if options.out:
        Path(options.out).write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
