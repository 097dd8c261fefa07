"""Fault tests of the replay server: the processes that take part, and the check that nothing was lost or doubled.

Run as a program it is a reader, like a learner without a network: it follows the log, samples, updates priorities and
writes down what it was sent, until SIGTERM. Arguments: the server's endpoint, the reader's name, the file of its notes.

APEXRL_FAULT_SCALE=full makes the tests long; a number multiplies the short version, up to the long one.
"""

import collections
import contextlib
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apexrl.net import LogAppend, LogBatch, LogClient, LogStart, wire
from apexrl.replay.journal import segment_paths
from apexrl.replay.segment import Entry, scan
from apexrl.unroll import UnrollCodec
from tests.system.numbering_actor import SPEC, numbered_insert
from tests.system.processes import ROOT, Process, wait_for

SCALE = os.environ.get("APEXRL_FAULT_SCALE", "1")
TIMEOUT_SECONDS = 3600 if SCALE == "full" else 1200
DEADLINE_SECONDS = 900
BATCH_SIZE = 32
UPDATE_SECONDS = 0.005  # that a reader pretends to learn from a batch
TABLE = "transitions"


def scaled(short, full):
    """Returns how much of a fault a test makes: a count or seconds."""
    return full if SCALE == "full" else type(short)(min(short * float(SCALE), full))


class Tally(NamedTuple):
    """Counts of a test's inserts: all, the lost and the doubled."""

    inserts: int
    lost: int
    doubled: int


def read_journal(directory: Path) -> list[Entry]:
    """Returns the unrolls of a journal as its files hold them; numbers that come twice are there twice."""
    return [entry for path in segment_paths(directory) for entry in scan(path.read_bytes()).entries]


def tally(entries: list[Entry], streams: dict[str, int], acknowledged: dict[str, int]) -> Tally:
    """Counts what is lost and doubled among unrolls in the order of their log.

    Args:
      streams: the number of streams of each actor that ever was.
      acknowledged: how many inserts each actor saw acknowledged.
    Raises: AssertionError when numbers have gaps, an actor's order is not kept or content is not what was inserted.
    """
    codec = UnrollCodec(SPEC)
    stored: dict[str, list[int]] = collections.defaultdict(list)
    for number, entry in enumerate(entries):
        assert entry.number == number
        insert = wire.decode_insert(entry.message)
        actor = insert.actor.rpartition("-")[0]  # without its mark
        header, block = numbered_insert(actor, streams[actor], insert.sequence, codec)
        assert entry.block == block, f"unroll {number} is damaged"
        assert (insert.stream, insert.first_step) == (header.stream, header.first_step)
        assert insert.priorities == header.priorities.tobytes()
        assert insert.header(SPEC.unroll_starts).valid.tolist() == header.valid.tolist()
        stored[actor].append(insert.sequence)
    lost = doubled = 0
    for actor in streams:
        sequences = stored[actor]
        assert list(dict.fromkeys(sequences)) == sorted(set(sequences)), f"inserts of {actor} are out of order"
        doubled += len(sequences) - len(set(sequences))
        lost += len(set(range(max([acknowledged[actor], *(s + 1 for s in sequences[-1:])]))) - set(sequences))
    return Tally(len(entries), lost, doubled)


class Reader(NamedTuple):
    """A reader process and the file of its notes."""

    process: Process
    path: Path


class Notes:
    """The notes of a reader; `update` reads on."""

    def __init__(self, path: Path):
        self.starts: list[bool] = []  # whether the log continued
        self.unrolls: dict[int, int] = {}  # checksums by number
        self.num_batches = 0
        self._path = path
        self._offset = 0

    def update(self) -> "Notes":
        """Reads the new notes."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                self._take(*line.split())
        return self

    def _take(self, what: bytes, *values: bytes) -> None:
        match what, [int(value) for value in values]:
            case b"start", [continues]:
                self.starts.append(bool(continues))
            case b"unroll", [number, checksum]:
                assert number not in self.unrolls, f"unroll {number} was sent twice"
                self.unrolls[number] = checksum
            case b"batch", []:
                self.num_batches += 1


class Actor(NamedTuple):
    """An actor process, its name and streams, and the file of its acknowledged count."""

    process: Process
    name: str
    num_streams: int
    path: Path

    def acknowledged(self) -> int:
        """Returns the number of inserts that it has seen acknowledged."""
        return int(self.path.read_text() or 0) if self.path.exists() else 0


class World:
    """A replay server with a journal, numbering actors and readers; a context manager that ends them all.

    Killed actors and readers stay in the books: their acknowledged inserts have to be there at the end too.
    """

    def __init__(self, directory: Path, ports: list[int], *flags: object, environment=None):
        """Starts nobody yet.

        Args:
          ports: for actors, for readers, and one where nobody listens.
        """
        self.journal = directory / "journal"
        self.host = "127.0.0.1"
        self.actor_port, self.reader_port = ports[:2]  # where actors and readers connect to
        self.server_inside: list[object] = []  # arguments of Python that run the server somewhere else
        self.clients_inside: list[object] = []
        self.actors: list[Actor] = []
        self.readers: list[Reader] = []
        self.notes: dict[Path, Notes] = {}
        self._directory = directory
        self._environment = environment
        self._flags = (
            *("--actor-port", ports[0], "--batch-port", ports[1], "--metrics-port", ports[2]),
            *("--journal-dir", self.journal, "--journal-flush-seconds", 0.05, "--journal-snapshot-seconds", 0.2),
            *("--capacity", 4_000_000, "--min-size-to-sample", 64, "--samples-per-insert", 0, *flags),
        )
        self._all_actors: list[Actor] = []
        self._num_lives = 0
        self._stack = contextlib.ExitStack()
        self.server: Process

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stack.__exit__(*error)

    def start_server(self) -> None:
        """Starts the server, again after it was killed."""
        arguments = [*self.server_inside, ROOT / "replay.py", *self._flags, "--bind-host", self.host]
        self._num_lives += 1
        self.server = self._start(arguments, f"server-{self._num_lives}")

    def start_actor(self, num_streams: int) -> None:
        """Starts one more actor, under a name that nobody had."""
        name = f"actor-{len(self._all_actors)}"
        path = self._directory / f"{name}.acknowledged"
        arguments = [f"tcp://{self.host}:{self.actor_port}", name, num_streams, path]
        process = self._start([*self.clients_inside, "-m", "tests.system.numbering_actor", *arguments], name)
        self.actors.append(Actor(process, name, num_streams, path))
        self._all_actors.append(self.actors[-1])

    def start_reader(self) -> None:
        """Starts one more reader, under a name that nobody had."""
        name = f"reader-{len(self.notes)}"
        path = self._directory / f"{name}.notes"
        arguments = [f"tcp://{self.host}:{self.reader_port}", name, path]
        process = self._start([*self.clients_inside, "-m", "tests.system.faults", *arguments], name)
        self.readers.append(Reader(process, path))
        self.notes[path] = Notes(path)

    def kill(self, role: str) -> None:
        """Kills the server, all actors or all readers."""
        if role == "server":
            self.server.kill()
        for peer in {"actors": self.actors, "readers": self.readers}.get(role, []):
            peer.process.kill()

    def replace(self, role: str) -> None:
        """Starts the killed processes anew."""
        if role == "server":
            self.start_server()
        elif role == "actors":
            dead, self.actors = self.actors, []
            for actor in dead:
                self.start_actor(actor.num_streams)
        else:
            dead, self.readers = self.readers, []
            for _ in dead:
                self.start_reader()

    def is_alive(self) -> bool:
        """True; fails when a process has ended by itself."""
        for process in [self.server, *(peer.process for peer in [*self.actors, *self.readers])]:
            assert process.popen.poll() is None, f"{process.log.name} ended: {process.text()[-2000:]}"
        return True

    def wait_until_storing(self) -> None:
        """Waits until something is acknowledged by the server that runs now."""
        wait_for(lambda: "actors at tcp" in self.server.text(), DEADLINE_SECONDS, "its ports")
        before = sum(actor.acknowledged() for actor in self.actors)
        wait_for(lambda: sum(a.acknowledged() for a in self.actors) > before, DEADLINE_SECONDS, "acknowledgements")

    def wait_until_written(self) -> None:
        """Returns at the moment when the server has written unrolls to its journal, before it can tell anybody."""
        path = segment_paths(self.journal)[-1]
        before, deadline = path.stat().st_size, time.monotonic() + DEADLINE_SECONDS
        while path.stat().st_size == before:
            assert time.monotonic() < deadline, "nothing was written"

    def wait_for_progress(self) -> None:
        """Waits until everybody has got on by 10: inserts of actors acknowledged, unrolls and batches of readers."""

        def positions():
            assert self.is_alive()
            found = [actor.acknowledged() for actor in self.actors]
            for reader in self.readers:
                notes = self.notes[reader.path].update()
                found += [len(notes.unrolls), notes.num_batches]
            return found

        before = positions()
        wait_for(
            lambda: all(now >= then + 10 for now, then in zip(positions(), before, strict=True)),
            DEADLINE_SECONDS,
            f"everybody going on from {before}",
        )

    def finish(self, fault: str, times: int, extra: str = "") -> Tally:
        """Ends all in good order, compares journal, replicas and acknowledgements, and prints the line of the test."""
        for actor in self.actors:
            actor.process.signal(signal.SIGTERM)
        for actor in self.actors:
            assert actor.process.popen.wait(DEADLINE_SECONDS) == 0, actor.process.text()
        for reader in self.readers:
            wait_for(
                lambda: len(self.notes[reader.path].update().unrolls) == len(read_journal(self.journal)),
                DEADLINE_SECONDS,
                "the whole log",
            )
        for process in [*(reader.process for reader in self.readers), self.server]:
            process.signal(signal.SIGTERM)
            assert process.popen.wait(DEADLINE_SECONDS) == 0, process.text()
        entries = read_journal(self.journal)
        self._compare_replicas(entries)
        streams = {actor.name: actor.num_streams for actor in self._all_actors}
        result = tally(entries, streams, {actor.name: actor.acknowledged() for actor in self._all_actors})
        print(
            f"\n{fault}: times={times} inserts={result.inserts} lost={result.lost} doubled={result.doubled}"
            f" actors={len(streams)} readers={len(self.notes)} {extra}".rstrip()
        )
        assert result.lost == result.doubled == 0
        return result

    def _compare_replicas(self, entries: list[Entry]) -> None:
        checksums = {entry.number: zlib.crc32(entry.block, zlib.crc32(entry.message)) for entry in entries}
        living = {reader.path for reader in self.readers}
        for path, notes in self.notes.items():
            notes.update()
            assert not notes.starts or notes.starts == [False, *[True] * (len(notes.starts) - 1)], "it started over"
            assert notes.unrolls.items() <= checksums.items(), f"{path.name} was sent what the journal does not hold"
            assert path not in living or len(notes.unrolls) == len(checksums)

    def _start(self, arguments, name: str) -> Process:
        process = Process(arguments, self._directory / f"{name}.txt", self._environment)
        return self._stack.enter_context(process)


def follow(endpoint: str, name: str, path: Path) -> None:
    """Follows the log until SIGTERM; ends with an error when a batch names an unroll that was not sent before."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    client = LogClient(endpoint, name, {TABLE: BATCH_SIZE}, 2)
    rng, held = np.random.default_rng(zlib.crc32(name.encode())), set()
    with path.open("w") as file:
        while not told:
            event = client.poll(20)
            match event:
                case None:
                    file.flush()
                case LogStart():
                    file.write(f"start {int(event.continues)}\n")
                case LogAppend():
                    held.add(event.number)
                    checksum = zlib.crc32(event.block, zlib.crc32(wire.encode(event.insert)))
                    file.write(f"unroll {event.number} {checksum}\n")
                case LogBatch(sample=sample):
                    assert set((sample.keys // SPEC.unroll_starts).tolist()) <= held, "a batch names unknown unrolls"
                    client.update_priorities(sample.keys, rng.random(BATCH_SIZE) + 0.1)
                    client.batch_used()
                    file.write("batch\n")
                    time.sleep(UPDATE_SECONDS)
    client.close()


if __name__ == "__main__":
    follow(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
