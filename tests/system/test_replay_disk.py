"""A real replay server whose disk is full, read-only, taken, of another run, or damaged."""

import contextlib
import dataclasses
import random
import subprocess

import msgspec
import pytest

from apexrl.errors import PeerError
from apexrl.lifecycle import PERMANENT_STATUS, TEMPORARY_STATUS
from apexrl.net import InsertClient, LogAppend, LogClient, LogStart, ReplayClient, wire
from apexrl.replay.journal import segment_paths
from apexrl.replay.recovery import recover
from tests.system.fuzz import BLOCK, HOST, SPEC, TABLE, GoodPeers, K, make_header, resident_mb, scaled, start_replay
from tests.system.processes import Process, wait_for

DISK_BYTES = 3 * 2**20
NUM_ROUNDS = scaled(1, 5)
NUM_UNROLLS = scaled(60, 2000)  # in each life, in the test of a damaged file


def as_root(*command, lack):
    """Runs a command and returns what it prints; the test is skipped where that is not possible."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        reason = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"{lack}: {reason}")
    return done.stdout.strip()


@contextlib.contextmanager
def small_disk(path, options=f"size={DISK_BYTES}"):
    """A file system in memory; the test is skipped where none may be mounted."""
    path.mkdir()
    lack = "a small file system cannot be mounted here"
    as_root("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path), lack=lack)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], timeout=300, check=True)


def fill(path):
    """Takes what is left of a disk, to the last byte."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while file.write(bytes(1024)):
            pass


def stored_sequences(directory):
    """The inserts in a journal, by actor."""
    stored = {}
    for entry in recover(directory).entries:
        insert = wire.decode_insert(entry.message)
        stored.setdefault(insert.actor.rpartition("-")[0], []).append(insert.sequence)
    return stored


@pytest.mark.timeout(4000)
def test_a_full_disk_makes_actors_wait_and_loses_nothing(tmp_path, free_ports, caplog):
    ports = free_ports(2)
    ended = 0
    with small_disk(tmp_path / "disk") as disk, contextlib.ExitStack() as stack:
        ballast = disk / "ballast"

        def start():
            flags = ["--journal-dir", disk / "journal", "--capacity", K * 100_000]
            return stack.enter_context(start_replay(tmp_path, ports, *flags))

        server = start()
        good = stack.enter_context(GoodPeers(ports, seconds_between=0.002))
        before = resident_mb(server)
        for i in range(NUM_ROUNDS):
            wait_for(lambda: good.num_samples > 5 or good.errors, 30, "a first batch")
            assert_stops_when_full(server, good, ballast)
            if i % 2 == 0:
                server.kill()
                fill(ballast)
                server = start()
                ended += assert_waits_or_ends(server, good)
            ballast.unlink()
            server = server if server.popen.poll() is None else start()
            inserts = good.num_inserts
            wait_for(lambda: good.num_inserts > inserts + 100 or good.errors, 30, "inserts after the disk has room")
        good.finish()
        after = resident_mb(server)
        server.kill()
        stored = stored_sequences(disk / "journal")
    print(
        f"\nfull disk: {NUM_ROUNDS} times, every other with a SIGKILL and a restart while full (that ended with status "
        f"1: {ended}); {good.num_inserts} inserts, lost 0, doubled 0; batches {good.num_samples}; the actor waited "
        f"{good.actor.waited_seconds['journal']:.1f} s for the journal; memory {before:.0f} -> {after:.0f} MB"
    )
    assert stored == {"good": list(range(good.num_inserts))}
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "No space left on device" in said and str(disk) in said


def assert_waits_or_ends(server, good):
    """A server that is started while the disk is full serves what it has, or says that it cannot; whether it ended."""
    if server.popen.poll() is None:
        assert_waits(server, good, good.actor.waited_seconds["journal"])
        return False
    assert server.popen.returncode == TEMPORARY_STATUS
    assert "No space left on device" in server.text().splitlines()[-1], server.text()
    return True


def assert_stops_when_full(server, good, ballast):
    refusals = server.text().count("inserts are refused")
    fill(ballast)
    wait_for(lambda: server.text().count("inserts are refused") > refusals or good.errors, 30, "a refusal")
    assert_waits(server, good, good.actor.waited_seconds["journal"])


def assert_waits(server, good, waited):
    """The actor waits for the journal and says so, batches go on."""
    wait_for(lambda: good.actor.waited_seconds["journal"] > waited + 0.5 or good.errors, 40, "an actor that waits")
    samples = good.num_samples
    wait_for(lambda: good.num_samples > samples + 20 or good.errors, 30, "batches while the disk is full")
    assert not good.errors, good.errors
    assert server.popen.poll() is None


def end_of(tmp_path, ports, journal_dir, name):
    """The last line of a server that cannot start."""
    arguments = ["replay.py", "--journal-dir", journal_dir, "--actor-port", ports[0], "--batch-port", ports[1]]
    with Process(arguments, tmp_path / f"{name}.txt") as server:
        assert server.popen.wait(300) in (PERMANENT_STATUS, TEMPORARY_STATUS), server.text()
        assert "Traceback" not in server.text(), server.text()
        line = server.text().splitlines()[-1]
        print(f"\njournal-dir {name}: {line}")
        assert str(journal_dir) in line
        return line


def test_a_read_only_journal_directory_is_an_error_with_its_name(tmp_path, free_ports):
    ports = free_ports(2)
    with small_disk(tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=300)
        assert "Read-only file system" in end_of(tmp_path, ports, disk / "journal", "read-only")
        assert "Read-only file system" in end_of(tmp_path, ports, disk, "read-only-itself")


def test_a_read_only_journal_that_holds_a_log_is_an_error_with_its_name(tmp_path, free_ports):
    ports = free_ports(2)
    with small_disk(tmp_path / "disk") as disk:
        with start_replay(tmp_path, ports, "--journal-dir", disk):
            insert(ports, "first", 10)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=300)
        assert "Read-only file system" in end_of(tmp_path, ports, disk, "read-only")
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True, timeout=300)
        with start_replay(tmp_path, ports, "--journal-dir", disk) as server:
            assert "recovered 10 unrolls" in server.text()


def test_a_file_as_a_journal_directory_is_an_error(tmp_path, free_ports):
    path = tmp_path / "file"
    path.write_text("x")
    end_of(tmp_path, free_ports(2), path, "file")


def test_a_journal_of_a_running_server_is_an_error(tmp_path, free_ports):
    ports = free_ports(4)
    flags = ["--journal-dir", tmp_path / "journal"]
    with start_replay(tmp_path, ports[:2], *flags):
        insert(ports, "first", 10)
        line = end_of(tmp_path, ports[2:], tmp_path / "journal", "taken")
        assert "give another" in line
        insert(ports, "second", 10)
    with start_replay(tmp_path, ports[:2], *flags) as server:
        assert "recovered 20 unrolls" in server.text()


def insert(ports, name, count, spec=SPEC):
    """An actor that inserts so many unrolls and leaves."""
    actor = InsertClient(f"tcp://{HOST}:{ports[0]}", name, spec, 2)
    try:
        actor.connect(20)
        for i in range(count):
            actor.insert(make_header(i), BLOCK, 20)
        assert actor.flush(20)
    finally:
        actor.close()


def test_a_journal_of_another_environment_refuses_the_actor_with_a_cure(tmp_path, free_ports):
    ports = free_ports(2)
    flags = ["--journal-dir", tmp_path / "journal"]
    with start_replay(tmp_path, ports, *flags):
        insert(ports, "first", 10)
    other = msgspec.structs.replace(SPEC, env="Other-v0")
    with start_replay(tmp_path, ports, *flags) as server:
        with pytest.raises(PeerError, match=r"Known-v0.*Other-v0.*--journal-dir") as refusal:
            insert(ports, "second", 1, other)
        print(f"\nother environment: {refusal.value}")
        insert(ports, "third", 10)
        assert server.popen.poll() is None


@dataclasses.dataclass
class Follower:
    """A replica of the log's numbers, as a learner holds one."""

    client: LogClient
    numbers: list = dataclasses.field(default_factory=list)
    starts: list = dataclasses.field(default_factory=list)

    def read_to(self, number):
        def has_read():
            while event := self.client.poll(20):
                if isinstance(event, LogStart):
                    self.starts.append(event)
                elif isinstance(event, LogAppend):
                    self.numbers.append(event.number)
            return self.numbers and self.numbers[-1] >= number - 1

        wait_for(has_read, 30, f"the log up to {number}")


def flip_bytes(path, rng):
    """Damages some bytes behind the header, in the middle of a file."""
    data = bytearray(path.read_bytes())
    for _ in range(3):
        data[rng.randrange(len(data) // 2, len(data) // 2 + 100)] ^= 0x55
    path.write_bytes(data)


def test_a_damaged_file_costs_what_was_in_the_damage_and_nothing_else(tmp_path, free_ports):
    ports = free_ports(2)
    directory = tmp_path / "journal"
    flags = ["--journal-dir", directory, "--capacity", K * 100_000]
    client = LogClient(f"tcp://{HOST}:{ports[1]}", "follower", {}, 1)
    with contextlib.closing(client):
        follower = Follower(client)
        for life in range(3):
            with start_replay(tmp_path, ports, *flags):
                insert(ports, f"actor-{life}", NUM_UNROLLS)
                follower.read_to((life + 1) * NUM_UNROLLS)
        middle = segment_paths(directory)[1]
        flip_bytes(middle, random.Random(3))
        with start_replay(tmp_path, ports, *flags) as server:
            insert(ports, "actor-3", NUM_UNROLLS)
            follower.read_to(4 * NUM_UNROLLS)
            lost = assert_rest_is_served(ports)
            text = server.text()
            assert f"{middle} is damaged" in text and (directory / f"{middle.name}.damaged").exists()
    print(
        f"\ndamaged file: bytes of 3 places changed, {len(lost)} of {NUM_UNROLLS} unrolls of the file lost ({lost}), "
        f"0 of others; the follower went on at {follower.numbers[3 * NUM_UNROLLS]}"
    )
    assert follower.numbers == list(range(4 * NUM_UNROLLS))
    assert all(start.continues for start in follower.starts[1:])


def assert_rest_is_served(ports):
    """All unrolls but the damaged ones of the second life can be fetched, and batches name none of those."""
    reader = ReplayClient(f"tcp://{HOST}:{ports[1]}", "reader", {TABLE: 64})
    with contextlib.closing(reader):
        reader.sample(TABLE, 20)
        held = reader.fetch(range(4 * NUM_UNROLLS), 30)
        lost = sorted(set(range(4 * NUM_UNROLLS)) - set(held))
        assert 1 <= len(lost) <= 3 and NUM_UNROLLS <= lost[0] <= lost[-1] < 2 * NUM_UNROLLS, lost
        assert [held[number].header.first_step for number in held] == [number % NUM_UNROLLS * K for number in held]
        for _ in range(20):
            assert not set((reader.sample(TABLE, 20).keys // K).tolist()) & set(lost)
    return lost
