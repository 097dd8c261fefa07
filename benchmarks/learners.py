"""Several learners beside one: `python -m benchmarks.learners [--parts real simulated network model] [--json FILE]`.

Weak scaling: each learner has a batch of its own, and all make every update together.

  real       one and two learners, a core each, on recorded Pong. Two that exchange are compared with two that do not:
             that is the cost of the exchange alone, apart from that of a shared memory bus.
  simulated  1, 2, 4 and 8 learners whose arithmetic is a wait with a measured variation. All else is real: a replay
             server for each, draws, priorities, the gradient's bytes through gloo, publications. A point counts while
             the machine is busy for less than 70 % of its time.
  network    The same, each learner with its shard on a host of its own. Time runs 20 times slower: 1.25 Gbit/s stand
             for 25 Gbit/s, 400 ms of arithmetic for 20 ms. Delays are not added.
  model      E(L) = t / (t (1 + cv e(L)) + a(L)), with e(L) the mean largest of L normal numbers and a(L) the time to
             add up. Fitted to the simulated 1 and 2, it predicts 4 and 8.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import tyro

from benchmarks.namespaces import Namespaces
from benchmarks.replay import ROOT, free_ports
from benchmarks.replay_frames import make
from benchmarks.replay_work import insert

LARGEST_OF_NORMALS = {1: 0.0, 2: 0.564, 4: 1.029, 8: 1.424}
MOST_BUSY = 0.7
SLOWED = ("tbf", "rate", "1250mbit", "burst", "1mb", "latency", "50ms")  # 20 times slower than 25 Gbit/s
START_SECONDS = 180.0
NUM_UNROLLS = 200  # of a simulated learner's shard
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """The choice of measurements."""

    parts: tuple[Literal["real", "simulated", "network", "model"], ...] = ("real", "simulated", "network", "model")
    """Measurements, in this order."""
    seconds: float = 20.0
    """Seconds of each measurement, after its warm-up."""
    repeats: int = 3
    """Repeats of each real measurement, in turn."""
    learners: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of simulated learners."""
    parameters: tuple[int, ...] = (700_000, 3_300_000)
    """network: numbers in the gradient; those of the presets two-cores and paper."""
    batch_sizes: tuple[int, ...] = (64, 512)
    """Transitions in the batch of each real learner."""
    compute_milliseconds: float = 400.0
    """Mean time of a simulated update's arithmetic. All learners exchange at one moment, so eight on two cores need it
    long: a wait of 50 ms measures the two cores."""
    directory: Path = Path("runs/benchmark-replay")
    """Directory of the played game."""
    json: str = ""
    """File for the figures."""


def run_ranks(ranks: list[list[str]], size: int, seconds: float, hosts: Namespaces | None = None) -> list[Row]:
    """Runs learners with these arguments side by side, in teams of a size; returns their figures.

    Args:
      hosts: where each learner runs; by default on this machine.
    """
    ports = free_ports(-(-len(ranks) // size))
    processes = []
    for index, arguments in enumerate(ranks):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(index % size), "WORLD_SIZE": str(size)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[index // size])}
        command = [sys.executable, "-m", "benchmarks.learners_rank", *arguments, "--seconds", str(seconds)]
        if hosts is not None:
            environment |= {"MASTER_ADDR": hosts.address("0"), "GLOO_SOCKET_IFNAME": "eth0"}
            command = hosts.command(str(index), command)
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=START_SECONDS + 2 * seconds)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a learner failed: {[process.returncode for process in processes]}")
    return [json.loads(text.splitlines()[-1]) for text in said]


def rate(rows: list[Row]) -> float:
    """Returns the updates a second of one learner, as the mean over all."""
    return statistics.mean(row["updates"] / row["seconds"] for row in rows)


def real(options: Options) -> list[Row]:
    """Returns the rows of one learner, of two that exchange nothing, and of two that make every update together."""
    frames = make(options.directory, "Pong", 4000)
    rows = []
    for batch_size in options.batch_sizes:
        arguments = ["--work", "real", "--frames", str(frames), "--batch-size", str(batch_size)]
        pinned = [[*arguments, "--core", str(core)] for core in range(2)]
        found: dict[str, list[float]] = {"one": [], "two alone": [], "two together": []}
        exchanges = []
        for _ in range(options.repeats):
            found["one"].append(rate(run_ranks(pinned[:1], 1, options.seconds)))
            found["two alone"].append(rate(run_ranks(pinned, 1, options.seconds)))
            together = run_ranks(pinned, 2, options.seconds)
            found["two together"].append(rate(together))
            exchanges += [1000 * row["exchange_seconds"] / row["updates"] for row in together]
        medians = {name: statistics.median(rates) for name, rates in found.items()}
        pairs = zip(found["two together"], found["two alone"], strict=True)
        efficiency = statistics.median(together / alone for together, alone in pairs)
        row = {"part": "real", "batch_size": batch_size, "updates_per_second": medians, "efficiency": efficiency}
        row |= {"of_one": medians["two together"] / medians["one"], "exchange_ms": statistics.median(exchanges)}
        print(
            f"real  batch {batch_size:4}  one {medians['one']:6.1f}  two alone {medians['two alone']:6.1f}  together "
            f"{medians['two together']:6.1f} updates/s each: {efficiency:.3f} of alone, {row['of_one']:.3f} of one; "
            f"{row['exchange_ms']:.1f} ms in the exchange"
        )
        rows.append(row)
    return rows


def simulated(options: Options) -> list[Row]:
    """Returns the rows of simulated learners."""
    rows: list[Row] = []
    for size in options.learners:
        rows.append(simulated_row(options, size, 700_000, None) | {"part": "simulated"})
        say(rows[-1], rows[0])
    return rows


def network(options: Options) -> list[Row]:
    """Returns the rows of simulated learners on hosts of their own."""
    rows: list[Row] = []
    for parameters in options.parameters:
        first = len(rows)
        for size in options.learners:
            with Namespaces() as hosts:
                for index in range(size):
                    hosts.add(str(index), SLOWED)
                rows.append(simulated_row(options, size, parameters, hosts) | {"part": "network"})
            say(rows[-1], rows[first])
    return rows


def say(row: Row, of_one: Row) -> None:
    """Adds the efficiency to a row, and prints it."""
    row["efficiency"] = row["updates_per_second"] / of_one["updates_per_second"]
    work = f"{row['part']}  {row['learners']} learners  {row['parameters']:,} parameters"
    pace = f"{row['updates_per_second']:5.2f} updates/s  efficiency {row['efficiency']:.3f}"
    validity = "" if row["counts"] else "  (void)"
    print(f"{work}  {pace}  {row['exchange_ms']:.1f} ms in the exchange  machine busy {row['busy']:.0%}{validity}")


def simulated_row(options: Options, size: int, parameters: int, hosts: Namespaces | None) -> Row:
    """Returns the figures of so many simulated learners."""
    frames = make(options.directory, "Pong", 4000)
    with tempfile.TemporaryDirectory() as directory:
        shards = [Shard(Path(directory) / str(index), frames, hosts, str(index)) for index in range(size)]
        try:
            work = ["--work", "simulated", "--batch-size", "512", "--parameters", str(parameters)]
            work += ["--compute-milliseconds", str(options.compute_milliseconds)]
            psutil.cpu_percent()
            ranks = [[*work, "--replay", shard.endpoint] for shard in shards]
            found = run_ranks(ranks, size, options.seconds, hosts)
            busy = psutil.cpu_percent() / 100
        finally:
            for shard in shards:
                shard.close()
    exchange = statistics.mean(row["exchange_seconds"] / row["updates"] for row in found)
    return {
        "learners": size, "parameters": parameters, "updates_per_second": rate(found), "busy": busy,
        "exchange_ms": 1000 * exchange, "compute_ms": options.compute_milliseconds, "counts": busy < MOST_BUSY,
    }  # fmt: skip


class Shard:
    """A replay server with recorded unrolls, whose table holds nobody up."""

    def __init__(self, directory: Path, frames: Path, hosts: Namespaces | None, host: str):
        actor_port, batch_port = free_ports(2)
        address = hosts.address(host) if hosts is not None else "127.0.0.1"
        flags = ["--actor-port", str(actor_port), "--batch-port", str(batch_port), "--journal-dir", str(directory)]
        tables = ["--tables", "transitions=priority:0:1", "--bind-host", address]
        command = [sys.executable, "replay.py", *flags, *tables]
        if hosts is not None:
            command = hosts.command(host, command)
        self._process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        self.endpoint = f"tcp://{address}:{batch_port}"
        insert(frames, actor_port, 0.0, count=NUM_UNROLLS, host=address)

    def close(self) -> None:
        """Ends the server."""
        self._process.terminate()
        self._process.wait(30)


def model(rows: list[Row]) -> list[Row]:
    """Returns the efficiency that a model predicts, fitted to 1 and 2 simulated learners, beside the measured one."""
    measured = {row["learners"]: row for row in rows if row["part"] == "simulated"}
    if not {1, 2} <= measured.keys():
        raise SystemExit("the model is fitted to 1 and 2 simulated learners: measure them, too")
    period = {size: 1 / row["updates_per_second"] for size, row in measured.items()}
    cv, made = 0.05, []
    # Adding up takes 2 (L - 1) / L of the buffer through each learner: one number is fitted to 2 learners.
    unit = period[2] - period[1] * (1 + cv * LARGEST_OF_NORMALS[2])
    for size, row in sorted(measured.items()):
        adding = unit * 2 * (size - 1) / size if size > 1 else 0.0
        predicted = period[1] / (period[1] * (1 + cv * LARGEST_OF_NORMALS.get(size, np.nan)) + adding)
        error = predicted / row["efficiency"] - 1
        made.append({"part": "model", "learners": size, "efficiency": predicted, "error": error})
        print(f"model  {size} learners  efficiency {predicted:.3f}, measured {row['efficiency']:.3f} ({error:+.1%})")
    return made


def main(options: Options) -> None:
    """Measures, prints and writes."""
    rows: list[Row] = []
    for part in options.parts:
        rows += (
            {"real": real, "simulated": simulated, "network": network}[part](options)
            if part != "model"
            else model(rows)
        )
    if options.json:
        figures = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "rows": rows}
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
