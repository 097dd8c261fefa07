"""Several logs in one server: each has its kind of records, its journal, its peers, and bounds of its own."""

import contextlib
import os
import threading

import msgspec
import numpy as np
import pytest

from apexrl.config.sections import ReplayConfig
from apexrl.errors import ConfigError, PeerRefused
from apexrl.net import (
    InsertClient,
    LogAppend,
    LogClient,
    LogStart,
    RecordClient,
    ReplayClient,
    ShardedReplayClient,
    wire,
)
from apexrl.net.replay_server import ACTOR_FRAME_BYTES, ReplayServer
from apexrl.replay import journal
from apexrl.replay.journal import IDENTITY_FILE, Lock, read_entries
from apexrl.types import StreamSpec
from tests.net.peers import Peers, block_of, greeting_of, insert_of, only, routing_id_of
from tests.net.test_versions import old_greeting
from tests.system.processes import Process, wait_for

TABLES = ("pictures/all=priority:0:1", "requests/all=uniform:0:1", "requests/queue=fifo:0:1")
CONFIG = ReplayConfig(capacity=1000, tables=TABLES, journal_flush_seconds=0.02)
KINDS = {"pictures": {"pixels": ("uint8", (4, 4)), "label": "int64"}, "requests": {"text": "U20", "cost": "float32"}}
RECORDS = {
    "pictures": lambda i: {"pixels": np.full((4, 4), i % 256, np.uint8), "label": i},
    "requests": lambda i: {"text": f"request {i}", "cost": i / 2},
}
OTHER = StreamSpec("Other-v0", (3,), "uint8", 1, 4, 1, unroll_starts=8, overlap_steps=1)


@pytest.fixture
def server(tmp_path):
    with ReplayServer(CONFIG, journal_dir=tmp_path / "service") as server:
        yield server


@pytest.fixture
def make():
    """Makes clients of a log, and closes them."""
    with contextlib.ExitStack() as made:

        def make(server, log, sizes=None, kind=RecordClient, **options):
            if kind is RecordClient:
                client = RecordClient(server.endpoints, log, KINDS[log], sizes or {"all": 4}, log=log, **options)
            else:
                client = kind(server.learner_endpoint, log, sizes or {}, 2, log=log, **options)
            return made.enter_context(client)

        yield make


@pytest.fixture
def peers(spec):
    return Peers(spec, tables=TABLES, min_size_to_sample=1)


def fill(client, log, numbers):
    for i in numbers:
        client.insert(RECORDS[log](i), timeout_seconds=100)
    assert client.flush(100)


def stored(server, log):
    return server.service.logs[log].open_log.replay.log.end_number


def of(message, log):
    return msgspec.structs.replace(message, log_name=log)


def subscription(log, wants=(), follows=False):
    return wire.Subscribe(6, "reader", 1, wants, follows, "", 0, 0, 0, log_name=log)


def test_each_log_has_its_fields_tables_keys_and_priorities(server, make):
    pictures, requests = (make(server, log) for log in KINDS)
    fill(pictures, "pictures", range(8))
    fill(requests, "requests", range(5))
    batch = pictures.sample("all", 100)
    assert (batch.data["label"] == batch.keys).all() and (batch.data["pixels"] == batch.keys[:, None, None]).all()
    keys = sorted(requests.sample("all", 100).keys.tolist())
    assert len(set(keys)) == 4 and keys[-1] < 5
    pictures.update_priorities("all", np.arange(7), np.zeros(7))
    wait_for(lambda: set(pictures.sample("all", 100).keys.tolist()) == {7}, 100, "the priorities of pictures")
    assert requests.delete("all", [0, 1], 100) == 2 and requests.delete("queue", [0], 100) == 1
    with pytest.raises(PeerRefused, match="there is no table queue, only all"):
        pictures.delete("queue", [0], 100)
    with ShardedReplayClient([server.learner_endpoint], "r", {"queue": 4}, log="requests") as sharded:
        assert sharded.sample("queue", 100).keys.tolist() == [1, 2, 3, 4]
    assert (stored(server, "pictures"), stored(server, "requests")) == (8, 5)


def test_statistics_are_of_the_log_that_the_client_names_and_the_servers_of_all(server, make):
    fill(make(server, "pictures"), "pictures", range(3))
    make(server, "requests").insert(RECORDS["requests"](0))
    found = make(server, "pictures", kind=ReplayClient).statistics(100)
    assert found.metrics["size"] == found.metrics["table/all/inserted"] == 3 and found.metrics["memory_bytes"] >= 0
    assert {peer.name.partition("-")[0] for peer in found.peers} == {"pictures"}
    own = server.service.statistics(0.0)
    assert own["pictures/size"] == 3 and "requests/actors" in own and "size" not in own
    assert [name for name in own if "memory" in name] == ["memory_bytes"]


def test_both_logs_come_back_after_a_restart(tmp_path, make):
    for begin in (0, 10):
        with ReplayServer(CONFIG, journal_dir=tmp_path) as server:
            for log, fields in KINDS.items():
                assert begin == (0 if server.service.logs[log].open_log is None else stored(server, log))
                with RecordClient(server.endpoints, log, fields, log=log) as client:
                    fill(client, log, range(begin, begin + 10))
    for log in KINDS:
        assert [number for number, *_ in read_entries(tmp_path / log)] == list(range(20))


def test_both_logs_come_back_after_kills_with_all_that_was_inserted(tmp_path, free_ports):
    ports = free_ports(2)
    words = ["replay.py", "--actor-port", ports[0], "--batch-port", ports[1], "--tables", *TABLES]
    with contextlib.ExitStack() as stack:
        clients = {
            log: stack.enter_context(RecordClient(tuple(f"tcp://127.0.0.1:{p}" for p in ports), log, fields, log=log))
            for log, fields in KINDS.items()
        }
        for begin in (0, 100, 200):
            with Process([*words, "--journal-dir", tmp_path / "service"], tmp_path / "replay.txt"):
                for log, client in clients.items():
                    fill(client, log, range(begin, begin + 50))
                    for i in range(begin + 50, begin + 100):
                        client.insert(RECORDS[log](i), timeout_seconds=100)
                    assert begin < 200 or client.flush(100)
    for log in KINDS:
        inserts = [wire.decode_insert(message) for _, message, _ in read_entries(tmp_path / "service" / log)]
        assert [insert.first_step for insert in inserts] == list(range(300))


@pytest.mark.parametrize(
    ("log", "text"),
    [
        ("films", "this server has the logs pictures, requests: none is named films"),
        ("", "this server has the logs pictures, requests: name one of them"),
    ],
)
def test_a_client_that_names_no_log_of_the_server_is_refused(server, spec, header, log, text):
    with InsertClient(server.actor_endpoint, "a", spec, 1, log=log) as client, pytest.raises(PeerRefused, match=text):
        client.connect(100)
    with ReplayClient(server.learner_endpoint, "r", {"all": 1}, log=log) as client:
        for call in (lambda: client.sample("all", 100), lambda: client.statistics(100)):
            with pytest.raises(PeerRefused, match=text):
                call()


def test_a_server_whose_log_has_no_name_takes_nobody_who_names_one(start_server, spec):
    with (
        start_server() as server,
        InsertClient(server.actor_endpoint, "a", spec, 1, log="films") as client,
        pytest.raises(PeerRefused, match="one log, which has no name: none is named films"),
    ):
        client.connect(100)


def test_a_peer_of_the_release_is_told_the_names(peers, spec):
    peers.raw("actor", b"a", [old_greeting(b"a", spec)])
    assert peers.heard(b"a")[0].reason.endswith("the logs pictures, requests: name one of them")


def test_a_client_that_names_a_log_leaves_a_server_that_does_not_know_of_names(by_hand, spec, context):
    with InsertClient(by_hand.endpoint, "a", spec, 1, context=context, log="pictures") as client:
        client.poll()
        (hello,) = wait_for(by_hand.heard, 100, "a greeting")
        assert hello.log_name == "pictures"
        by_hand.say(wire.Welcome((0,), 1, 0, 8, ""))
        with pytest.raises(PeerRefused, match="too old for several logs"):
            client.connect(100)


def test_later_messages_are_for_the_log_that_the_greeting_chose(peers, spec):
    peers.say("actor", b"a", of(greeting_of(b"a", 1, OTHER), "requests"))
    peers.say("actor", b"b", of(greeting_of(b"b", 1, spec), "pictures"))
    assert [peers.heard(name)[0].log_name for name in (b"a", b"b")] == ["requests", "pictures"]
    peers.say("actor", b"a", insert_of(b"a", 0), block_of(OTHER))
    for sequence in range(2):
        peers.say("actor", b"b", insert_of(b"b", sequence), block_of(spec))
    peers.say("learner", b"l", subscription("requests", (wire.Want("queue", 1),)))
    subscribed = only(peers.heard(b"l"), wire.Subscribed)[0]
    assert (subscribed.log_name, subscribed.spec) == ("requests", OTHER)
    peers.say("learner", b"l", wire.Demand(0, (2,)))
    (batch,) = only(peers.heard(b"l"), wire.Batch)
    assert batch.sample().keys.tolist() == [0] and batch.next_number == 1
    ends = {name: log.open_log.replay.log.end_number for name, log in peers.service.logs.items()}
    assert ends == {"pictures": 2, "requests": 1}


def test_a_peer_that_greets_another_log_leaves_the_first(peers, spec):
    logs = peers.service.logs
    peers.say("actor", b"a", of(greeting_of(b"a", 3, OTHER), "requests"))
    peers.say("actor", b"a", of(greeting_of(b"a", 2, spec), "pictures"))
    assert [name for name, log in logs.items() if log.knows("actor", routing_id_of(b"a"))] == ["pictures"]
    assert logs["requests"].open_log.actors.leases.ladder_size == 0
    for log in ("requests", "pictures"):
        peers.say("learner", b"l", subscription(log))
    assert [name for name, log in logs.items() if log.knows("learner", routing_id_of(b"l"))] == ["pictures"]


def test_silent_peers_of_every_log_are_given_up(peers, spec):
    for log, kind in (("requests", OTHER), ("pictures", spec)):
        peers.say("actor", log.encode(), of(greeting_of(log.encode(), 1, kind), log))
    for peers.now in (4.0, 8.0, 12.0, 16.0):
        peers.service.expire(peers.now)
    assert not any(log.open_log.actors.sessions for log in peers.service.logs.values())


def test_who_follows_one_log_hears_nothing_of_the_other(server, make):
    pictures, requests = (make(server, log) for log in KINDS)
    fill(pictures, "pictures", range(3))
    follower, numbers = make(server, "pictures", kind=LogClient), []

    def follow():
        match follower.poll(100):
            case LogStart() as start:
                assert start.continues is False and start.spec.variant != ""
                numbers.clear()
            case LogAppend() as unroll:
                numbers.append(unroll.number)
        return len(numbers)

    wait_for(lambda: follow() == 3, 100, "the log")
    fill(requests, "requests", range(20))
    fill(pictures, "pictures", range(3, 5))
    wait_for(lambda: follow() == 5, 100, "the log")
    assert numbers == list(range(5))


class Disk:
    """A disk of which one directory may be full, or hang in a sync."""

    def __init__(self, monkeypatch):
        self.full = self.hangs = "nowhere"
        self.goes_on, self.has_waiter = threading.Event(), threading.Event()
        write, sync, probe = os.writev, os.fdatasync, journal.write_durably

        def writev(descriptor, pieces):
            self._refuse(os.readlink(f"/proc/self/fd/{descriptor}"))
            return write(descriptor, pieces)

        def write_durably(path, data):
            self._refuse(path)
            probe(path, data)

        def fdatasync(descriptor):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(self.hangs)):
                self.has_waiter.set()
                assert self.goes_on.wait(100)
            sync(descriptor)

        monkeypatch.setattr(os, "writev", writev)
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        monkeypatch.setattr(journal, "write_durably", write_durably)

    def _refuse(self, path):
        if str(path).startswith(str(self.full)):
            raise OSError(28, "No space left on device")


def test_a_full_disk_of_one_log_does_not_stop_the_other(server, make, tmp_path, monkeypatch):
    disk, (pictures, requests) = Disk(monkeypatch), (make(server, log) for log in KINDS)
    fill(pictures, "pictures", range(4))
    disk.full = tmp_path / "service" / "pictures"
    pictures.insert(RECORDS["pictures"](4))
    wait_for(lambda: server.service.statistics(0.0)["pictures/journal_failed"], 100, "a failed journal")
    fill(requests, "requests", range(100))
    assert not pictures.flush(0.5) and len(pictures.sample("all", 100).keys) == 4
    assert server.service.statistics(0.0)["requests/journal_failed"] == 0
    disk.full = None
    assert pictures.flush(100) and stored(server, "pictures") == 5


def test_a_disk_that_hangs_under_one_log_does_not_hold_up_the_other(server, make, tmp_path, monkeypatch):
    disk, (pictures, requests) = Disk(monkeypatch), (make(server, log) for log in KINDS)
    fill(pictures, "pictures", range(4))
    disk.hangs = tmp_path / "service" / "pictures"
    fill(pictures, "pictures", range(4, 8))
    assert disk.has_waiter.wait(100)
    fill(requests, "requests", range(100))
    wait_for(lambda: not server.service.statistics(0.0)["requests/journal_unsynced_bytes"], 100, "the other's sync")
    assert server.service.statistics(0.0)["pictures/journal_unsynced_bytes"]
    disk.goes_on.set()


def test_the_bounds_are_each_logs_own(tmp_path, make):
    config = ReplayConfig(capacity=20, eviction_period_batches=1, tables=TABLES)
    with ReplayServer(config) as server:
        pictures, requests = (make(server, log) for log in KINDS)
        fill(pictures, "pictures", range(20))
        fill(requests, "requests", range(200))
        for _ in range(3):
            requests.sample("all", 100)
            pictures.sample("all", 100)
        sizes = [server.service.statistics(0.0)[f"{log}/size"] for log in KINDS]
        assert sizes[0] == 20 and sizes[1] < 200


def test_a_log_of_larger_unrolls_may_begin_later(make):
    size = 2 * ACTOR_FRAME_BYTES
    with ReplayServer(CONFIG) as server:
        requests = make(server, "requests")
        fill(requests, "requests", range(3))
        with RecordClient(server.endpoints, "large", {"bytes": ("uint8", size)}, log="pictures") as client:
            client.insert({"bytes": np.random.default_rng(0).integers(0, 256, size, np.uint8)}, timeout_seconds=100)
            assert client.flush(100)
        fill(requests, "requests", range(3, 6))
        assert stored(server, "requests") == 6


def test_a_directory_of_a_log_without_a_name_is_left_alone(tmp_path, spec):
    with (
        ReplayServer(ReplayConfig(tables=("all=uniform:0:1",)), journal_dir=tmp_path) as server,
        RecordClient(server.endpoints, "r", KINDS["requests"]) as client,
    ):
        fill(client, "requests", range(2))
    assert (tmp_path / IDENTITY_FILE).exists()
    with pytest.raises(ConfigError, match="holds a log without a name: give another one for pictures, requests"):
        ReplayServer(CONFIG, journal_dir=tmp_path)


def test_a_server_that_cannot_have_one_journal_gives_the_others_back(tmp_path):
    (tmp_path / "requests").mkdir()
    held = Lock(tmp_path / "requests")
    with pytest.raises(ConfigError, match="requests"):
        ReplayServer(CONFIG, journal_dir=tmp_path)
    held.close()
    with ReplayServer(CONFIG, journal_dir=tmp_path):
        pass
