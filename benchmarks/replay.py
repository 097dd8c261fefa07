"""Replay services side by side: `python -m benchmarks.replay [--parts ...] [--games ...] [--out FILE.json]`.

It compares ours (replay.py, with its journal on the disk), dm-reverb, and a re-creation of the 2019 design that pickles
through one lock. Each gets the same frames through real sockets:

  insert       one process inserts as fast as it can; ours twice: unrolls compressed before, and compressing too
  sample       batches of 512 delivered, decoded and gathered in the learner's memory
  together     both at once, priorities sent back
  memory       bytes that the server grew by, per transition held

These parts measure ours alone:

  keys         sampling without a replica
  paper        the load of the Ape-X paper
  crowd        512 actors
  recovery     of 2 M transitions
  scaling      cost of a sample from 2^16 to 2^24 transitions; --plot FILE draws it
"""

import contextlib
import dataclasses
import json
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import tyro

from benchmarks.peers import environment
from benchmarks.replay_frames import GAMES, make
from benchmarks.replay_scaling import plot, scaling

ROOT = Path(__file__).resolve().parent.parent
END_SECONDS = 20.0  # a run promises less
PAPER_TRANSITIONS, PAPER_BATCHES = 12_500, 19
SIDE_BY_SIDE = ("insert", "sample", "together", "memory")
ALONE = ("keys", "paper", "crowd", "recovery", "scaling")


@dataclasses.dataclass(frozen=True)
class Options:
    """The choice of measurements."""

    parts: tuple[str, ...] = (*SIDE_BY_SIDE, *ALONE)
    """insert, sample, together, memory; keys, paper, crowd, recovery, scaling."""
    peers: tuple[str, ...] = ("ours", "reverb", "pickle")
    """Services to compare."""
    games: tuple[str, ...] = GAMES
    """Games of the frames."""
    seconds: float = 5.0
    """Seconds of each measurement, after its warm-up."""
    batch: int = 512
    """Transitions in a batch."""
    steps: int = 4000
    """Steps of each of the 8 environments whose frames are used."""
    fill: int = 100_000
    """Transitions held before sampling is measured (the peers: 20,000)."""
    directory: Path = Path("runs/benchmark-replay")
    """Directory of the frames and the peers' environment."""
    out: str = ""
    """File for the figures as JSON."""
    plot: str = ""
    """File for the plot of the scaling."""


class Server:
    """Runs a replay server of ours in a process of its own."""

    def __init__(self, directory: Path, *flags: object):
        self.ports = free_ports(2)
        arguments = ["--actor-port", self.ports[0], "--batch-port", self.ports[1], "--journal-dir", directory, *flags]
        self._log = (directory.parent / f"{directory.name}.txt").open("ab")
        self.process = psutil.Popen([sys.executable, "replay.py", *map(str, arguments)], cwd=ROOT, stderr=self._log)
        wait_for_port(self.ports[1])
        time.sleep(0.5)
        self.empty_bytes = self.process.memory_info().rss
        self._cpu, self._since = self.cpu_seconds(), time.perf_counter()

    def cpu_seconds(self) -> float:
        """Returns the CPU time by the scheduler: clock ticks miscount a process that wakes often and briefly."""
        paths = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        nanoseconds = sum(int(path.read_text().split()[0]) for path in paths)
        times = self.process.cpu_times()
        return nanoseconds / 1e9 or times.user + times.system

    def cpu_share(self) -> float:
        """Returns the share of a core that the process used since the last call."""
        cpu, now = self.cpu_seconds(), time.perf_counter()
        share = (cpu - self._cpu) / (now - self._since)
        self._cpu, self._since = cpu, now
        return share

    def grown_bytes(self) -> int:
        """Returns the resident memory beyond that of the empty server."""
        return self.process.memory_info().rss - self.empty_bytes

    def close(self) -> None:
        """Ends the process."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except psutil.TimeoutExpired:
            self.process.kill()
        self._log.close()


@contextlib.contextmanager
def serving(*flags: object) -> Iterator[Server]:
    """Yields a server with a journal of its own, and removes both at the end."""
    with tempfile.TemporaryDirectory(prefix="apexrl-benchmark-") as directory:
        server = Server(Path(directory) / "journal", *flags)
        try:
            yield server
        finally:
            server.close()


@contextlib.contextmanager
def running(arguments: Sequence[object], log: Path) -> Iterator[psutil.Process]:
    """Starts a program of Python and yields its process. The context ends it, and so all that it has started."""
    with log.open("wb") as file:
        command = [sys.executable, *map(str, arguments)]
        process = psutil.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except psutil.TimeoutExpired:  # the roles of a run notice within seconds that their launcher is gone
                process.kill()
                process.wait()


def free_ports(count: int) -> list[int]:
    """Returns ports on which no process listens."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def wait_for_port(port: int, seconds: float = 60.0) -> None:
    """Waits until a process listens on a port; raises TimeoutError when none does in time."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody listens on port {port}")
        time.sleep(0.05)


def start(work: str, **arguments: object) -> subprocess.Popen[str]:
    """Starts a process of `benchmarks.replay_work`."""
    flags = [text for name, value in arguments.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    flags = [flag for flag in flags if flag != "True"]
    command = [sys.executable, "-m", "benchmarks.replay_work", work, *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for the end of a process and returns its figures."""
    output, _ = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(f"{process.args} ended with status {process.returncode}")
    return json.loads(output.splitlines()[-1])


def work(name: str, **arguments: object) -> dict[str, Any]:
    """Runs a process of `benchmarks.replay_work` to its end and returns its figures."""
    return finish(start(name, **arguments))


UNLIMITED = ("--capacity", 2_000_000, "--samples-per-insert", 0)


def ours(part: str, game: str, frames: Path, options: Options) -> list[dict[str, Any]]:
    """Measures our service with one game."""
    seconds, row = options.seconds, {"peer": "ours", "game": game, "work": part}
    fill = min(options.fill, 20_000) if game == "noise" else options.fill
    if part == "insert":
        rows = []
        for compress in (False, True):
            with serving(
                *(UNLIMITED if game != "noise" else ("--capacity", fill, "--samples-per-insert", 0))
            ) as server:
                flags = {"compress": True} if compress else {}
                if game == "noise":  # as the peers' rings: full, because memory that is touched first is slow
                    work("insert", frames=frames, port=server.ports[0], seconds=0, count=fill // 64 * 5 // 4)
                before = server.cpu_seconds()
                found = work("insert", frames=frames, port=server.ports[0], seconds=seconds, **flags)
                found["server_us_per_unroll"] = 1e6 * (server.cpu_seconds() - before) / found["all_unrolls"]
            rows.append(row | found | {"work": "insert, compressing" if compress else "insert"})
        return rows
    with serving(*UNLIMITED, "--min-size-to-sample", 1000) as server:
        if part in ("sample", "memory"):
            work("insert", frames=frames, port=server.ports[0], seconds=0, count=fill // 64)
        if part == "memory":
            return [row | {"server_bytes_per_transition": server.grown_bytes() / fill}]
        if part == "sample":
            server.cpu_share()
            found = work("learn", port=server.ports[1], seconds=seconds, batch=options.batch)
            return [row | found]
    # The limiter keeps both in proportion. At their best the peers make about 1.2 samples an insert. As theirs, our
    # rings are full before anything is measured, because memory that is touched for the first time is slow.
    sizes = ("--capacity", fill, "--min-size-to-sample", fill)
    with serving(*sizes, "--samples-per-insert", 1.2) as server:
        inserting = start("insert", frames=frames, port=server.ports[0], seconds=seconds + 12, compress=True)
        found = work("learn", port=server.ports[1], seconds=seconds, batch=options.batch)
        found["server_cpu"] = server.cpu_share()
        inserting.kill()  # it waits for the limiter now
        inserting.wait()
    return [row | found | {"transitions_per_second": found["transitions_applied_per_second"]}]


def keys_alone(frames: Path, options: Options) -> dict[str, Any]:
    """Measures key-only sampling from two million transitions."""
    with serving(*UNLIMITED) as server:
        work("insert", frames=frames, port=server.ports[0], seconds=0, count=31_000)
        found = {}
        for name, flags in (("keys", {}), ("keys and updates", {"updates": True})):
            before = server.cpu_seconds()
            row = work("keys", port=server.ports[1], seconds=options.seconds, batch=options.batch, **flags)
            found[name] = row | {"server_us_per_batch": 1e6 * (server.cpu_seconds() - before) / row["batches"]}
        return found


def paper(frames: Path, options: Options) -> dict[str, Any]:
    """Measures the Ape-X paper's load: 12.5 k transitions/s of 64 actors, 19 batches of 512 per second, priorities."""
    with serving(*UNLIMITED, "--min-size-to-sample", 10_000) as server:
        actors = {"actors": 64, "rate": PAPER_TRANSITIONS}
        acting = start("crowd", frames=frames, port=server.ports[0], seconds=options.seconds + 20, **actors)
        learning = start("learn", port=server.ports[1], seconds=options.seconds, batch=512, rate=PAPER_BATCHES)
        assert learning.stdout is not None and "measuring" in learning.stdout.readline(), "the learner got no batches"
        server.cpu_share()
        time.sleep(options.seconds)
        share = server.cpu_share()
        return finish(acting) | finish(learning) | {"server_core_share": share}


def crowds(frames: Path, options: Options) -> dict[str, Any]:
    """Measures 512 actors, as fast as the server allows, and then at half of that rate."""
    found: dict[str, Any] = {}
    for name in ("full", "half"):
        with serving(*UNLIMITED) as server:
            rate = found["full"]["transitions_per_second"] / 2 if found else 0.0
            ports = {"port": server.ports[0], "learner_port": server.ports[1]}
            found[name] = work("crowd", frames=frames, **ports, seconds=options.seconds, rate=rate)
    return found


def recovery(frames: Path) -> dict[str, Any]:
    """Kills a server that holds two million transitions, and starts it again."""
    with tempfile.TemporaryDirectory(prefix="apexrl-benchmark-") as directory:
        journal = Path(directory) / "journal"
        server = Server(journal, *UNLIMITED, "--journal-snapshot-seconds", 5)
        work("insert", frames=frames, port=server.ports[0], seconds=0, count=31_250)
        time.sleep(7)
        server.process.kill()
        server.process.wait()
        size = sum(path.stat().st_size for path in journal.iterdir())
        started = time.perf_counter()
        server = Server(journal, *UNLIMITED)
        elapsed = time.perf_counter() - started - 0.5
        held = server.process.memory_info().rss
        server.close()
    return {"transitions": 31_250 * 64, "journal_bytes": size, "seconds_from_start_to_listening": elapsed,
            "server_memory_bytes": held}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a table of text, with ratios to Reverb's row of the same work and game."""
    lines = [f"{'work':20} {'game':10} {'peer':8} {'inserts/s':>12} {'x reverb':>9} {'batches/s':>10} {'x reverb':>9} "
             f"{'bytes held':>10}"]  # fmt: skip
    for row in rows:
        same = (r for r in rows if r["peer"] == "reverb" and r["game"] == row["game"])
        reverb = next((r for r in same if r["work"] == row["work"].split(",")[0]), {})
        cells = f"{row['work']:20} {row['game']:10} {row['peer']:8}"
        for name, width in (("transitions_per_second", 12), ("batches_per_second", 10)):
            value, other = row.get(name), reverb.get(name)
            cells += f" {value:{width},.0f}" if value else " " * (width + 1)
            cells += f" {value / other:9.1f}" if value and other else " " * 10
        held = row.get("server_bytes_per_transition")
        lines.append(cells + (f" {held:10,.0f}" if held else "") + (" FAILED" if "failed" in row else ""))
    return "\n".join(lines)


def main(options: Options) -> None:
    """Measures and prints the chosen parts."""
    frames = {game: make(options.directory, game, options.steps) for game in options.games}
    results: dict[str, Any] = {"machine": f"{psutil.cpu_count()} cores, {platform.processor()}", "rows": []}
    interpreters = {"pickle": Path(sys.executable)}
    if "reverb" in options.peers and set(options.parts) & set(SIDE_BY_SIDE):
        made = environment.make(options.directory / "reverb-environment")
        if made is None:
            print("SKIPPED: dm-reverb does not install here")
        else:
            interpreters["reverb"] = made
    for part in [part for part in options.parts if part in SIDE_BY_SIDE]:
        for game, path in frames.items():
            measured = ours(part, game, path, options) if "ours" in options.peers else []
            for peer in [peer for peer in options.peers if peer in interpreters]:
                measured += peers(peer, part, path, options, interpreters[peer])
            for row in measured:
                results["rows"].append(row)
                print(json.dumps(row), flush=True)
    print(table(results["rows"]))
    first = next(iter(frames.values()))
    for part in [part for part in options.parts if part in ALONE]:
        alone = {"keys": lambda: keys_alone(first, options), "paper": lambda: paper(first, options),
                 "crowd": lambda: crowds(first, options), "recovery": lambda: recovery(first),
                 "scaling": lambda: scaling(options.batch)}  # fmt: skip
        results[part] = alone[part]()
        print(part, json.dumps(results[part]), flush=True)
    if options.plot:
        plot(results["scaling"], Path(options.plot))
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1))


def peers(peer: str, part: str, frames: Path, options: Options, python: Path) -> list[dict[str, Any]]:
    """Measures another service with one game. Each server is fresh, and its ring is full before inserts count."""
    if part == "memory":  # each measurement of sampling gives it, too
        return []
    ports = free_ports(1 if peer == "reverb" else 3)
    if peer == "reverb":
        command = [python, "benchmarks/peers/reverb_server.py", "--port", ports[0]]
    else:
        flags = zip(("--push-port", "--sample-port", "--priority-port"), ports, strict=True)
        pairs = [text for pair in flags for text in pair]
        command = [python, "benchmarks/peers/pickle_lock_server.py", *pairs, "--batch", options.batch]
    server = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert server.stdout is not None and b"ready" in server.stdout.readline(), f"{peer} did not start"
        server_flags = ["--peer", peer, "--ports", *ports, "--server-pid", server.pid, "--batch", options.batch]
        work_flags = ["--frames", frames, "--work", part, "--seconds", options.seconds]
        driving = [python, "benchmarks/peers/drive.py", *server_flags, *work_flags]
        command = list(map(str, driving))
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        if output.returncode:
            return [{"peer": peer, "game": frames.stem, "work": part, "failed": output.stderr[-300:]}]
        return [json.loads(output.stdout.splitlines()[-1])]
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
