"""The replay service with thousands of actors: `python -m benchmarks.connections [--actors N ...] [--out FILE.json]`.

A few processes hold the connections, each with the insert client of an actor process. They insert unrolls of a real
game, encoded before. With each number of actors three loads follow each other:

  idle   all are connected and say once a second that they are there
  rate   they insert so many transitions a second together
  full   they insert as fast as the server allows

The delay is the time from an insert to its acknowledgement, as seen by a process that looks at its connections in turn.
At the end every insert has to be acknowledged, and in the server's count.
"""

import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tyro

from apexrl.net import ReplayClient
from apexrl.net.keyring import load_keyring, make_keys
from benchmarks.replay import ROOT, UNLIMITED, Server
from benchmarks.replay_frames import make
from benchmarks.replay_work import STARTS

ROLES = ("replay", "learner", "actor")


@dataclasses.dataclass(frozen=True)
class Options:
    """The choice of measurements."""

    actors: tuple[int, ...] = (1000, 4000)
    """Numbers of actors, one measurement each."""
    environments: int = 16
    """Environments of an actor; the server has 65,536 places."""
    processes: int = 4
    """Processes that hold the connections."""
    rate: float = 100_000
    """Transitions a second of all actors together, for the load `rate`."""
    seconds: float = 20.0
    """Seconds of each load."""
    keys: bool = True
    """Encrypt as between hosts."""
    game: str = "Pong"
    """Game of the frames."""
    directory: Path = Path("runs/benchmark-replay")
    """Directory of the frames."""
    out: str = ""
    """File for the figures as JSON."""


class Holder:
    """A process that holds a part of the connections."""

    def __init__(self, index: int, port: int, frames: Path, keys: Path | None, options: Options, actors: int):
        count = actors // options.processes + (index < actors % options.processes)
        flags = {"port": port, "frames": frames, "actors": count, "environments": options.environments, "name": index}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        words += ["--keys", str(keys)] if keys else []
        command = [sys.executable, "-m", "benchmarks.connections_work", *words]
        self.share = count / actors
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, line: str) -> None:
        """Sends a line to the process."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def hear(self) -> dict[str, Any]:
        """Returns the next figures of the process.

        Raises: RuntimeError when it has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of connections ended with status {self.process.wait(10)}")
        return json.loads(line)


def measure(actors: int, frames: Path, options: Options) -> dict[str, Any]:
    """Returns the figures with so many actors."""
    with tempfile.TemporaryDirectory(prefix="apexrl-connections-") as name:
        directory = Path(name)
        keys = directory / "keys" if options.keys else None
        if keys:
            make_keys(keys, ROLES)
        server = Server(directory / "journal", *UNLIMITED, *(("--keys", keys) if keys else ()))
        before = server.cpu_seconds()
        holders = [Holder(i, server.ports[0], frames, keys, options, actors) for i in range(options.processes)]
        try:
            return _loads(server, holders, keys, actors, before, options)
        finally:
            for holder in holders:
                holder.process.kill()
                holder.process.wait()
            server.close()


def _loads(
    server: Server, holders: list[Holder], keys: Path | None, actors: int, before: float, options: Options
) -> dict[str, Any]:
    joined = [holder.hear() for holder in holders]
    found: dict[str, Any] = {
        "actors": actors,
        "environments": actors * options.environments,
        "encrypted": options.keys,
        "seconds_until_all_have_joined": max(figures["seconds"] for figures in joined),
        "server_cpu_ms_per_join": (server.cpu_seconds() - before) / actors * 1e3,
        "server_bytes_per_connection": server.grown_bytes() / actors,
        "server_descriptors": server.process.num_fds(),
    }
    sent = 0
    for load, rate in (("idle", 0.0), ("rate", options.rate), ("full", float("inf"))):
        server.cpu_share()
        for holder in holders:
            holder.tell(f"{options.seconds} {rate * holder.share / STARTS}")
        parts = [holder.hear() for holder in holders]
        share = server.cpu_share()
        delays = np.concatenate([part["delays"] for part in parts])
        acknowledged = sum(part["acknowledged"] for part in parts)
        sent += sum(part["sent"] for part in parts)
        found[load] = {
            "server_core_share": share,
            "server_cpu_us_per_insert": share * options.seconds / acknowledged * 1e6 if acknowledged else None,
            "inserts_acknowledged_per_second": acknowledged / options.seconds,
            "transitions_per_second": acknowledged * STARTS / options.seconds,
            "longest_turn_ms": max(part["longest_turn_seconds"] for part in parts) * 1e3,
            "server_bytes": server.process.memory_info().rss,
        }
        if len(delays):
            found[load] |= {f"delay_p{q}_ms": float(np.percentile(delays, q)) * 1e3 for q in (50, 99)}
        print(actors, load, json.dumps(found[load]), flush=True)
    return found | {"unrolls_sent": sent} | _count(server, keys)


def _count(server: Server, keys: Path | None) -> dict[str, Any]:
    """Returns the server's own count of actors and unrolls, and the messages that it dropped."""
    keyring = load_keyring(str(keys), "learner") if keys else None
    client = ReplayClient(f"tcp://127.0.0.1:{server.ports[1]}", "count", {}, keyring=keyring)
    metrics = client.statistics(30).metrics
    client.close()
    dropped = {name: value for name, value in metrics.items() if name.startswith("dropped_") and value}
    unrolls = metrics["transitions_inserted"] / STARTS
    return {"server_actors": metrics["actors"], "server_unrolls": unrolls, "server_dropped": dropped}


def main(options: Options) -> None:
    """Measures and prints."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    frames = make(options.directory, options.game, 4000)
    results: dict[str, Any] = {"cores": psutil.cpu_count(), "load_average": psutil.getloadavg(), "rows": []}
    for actors in options.actors:
        row = measure(actors, frames, options)
        if row["server_unrolls"] != row["unrolls_sent"] or row["server_actors"] != actors:
            raise RuntimeError(f"something was lost: {row}")
        results["rows"].append(row)
        print(json.dumps({name: value for name, value in row.items() if not isinstance(value, dict)}), flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
