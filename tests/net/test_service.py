"""The service as a whole, without sockets: restarts, a disk that fails, garbage, metrics."""

import random

import msgspec
import numpy as np
import pytest

from apexrl.errors import ConfigError, JournalError
from apexrl.net import wire
from apexrl.net.statistics import summary
from apexrl.replay.journal import IDENTITY_FILE, SNAPSHOT_FILE, LogIdentity
from apexrl.replay.snapshot import write_snapshot
from tests.net.peers import TABLE, Peers, insert_of, name_of, only
from tests.replay.records import powers_of

DISK = "the journal cannot be written (No space left on device)"


def stored(peers):
    """Actor and sequence of everything in the log, in its order; None where it lacks one."""
    log = peers.log
    records = [log.get(number) for number in range(log.first_number, log.end_number)]
    inserts = [wire.decode_insert(record.message) if record else None for record in records]
    return [insert and (insert.actor.rpartition("-")[0], insert.sequence) for insert in inserts]


def priorities_of(peers):
    """Priorities of all transitions of the log, by unroll."""
    return powers_of(peers.service.open_log.replay.tables[TABLE], 8)


def test_everything_acknowledged_outlives_a_killed_server(spec, tmp_path):
    peers = Peers(spec, tmp_path)
    peers.hello(b"a", streams=20)
    peers.hello(b"b", streams=20)
    rng = random.Random(0)
    sequences = {b"a": 0, b"b": 0}
    for life in range(4):
        for _ in range(15):
            peer = rng.choice([b"a", b"b"])
            peers.insert(peer, sequences[peer])
            sequences[peer] += 1
            if rng.random() < 0.5:
                peers.service.advance()
        acknowledged = {p: peers.acknowledged(p) for p in sequences}
        assert acknowledged == sequences
        before = stored(peers)
        blocks = [peers.log.get(number).block for number in range(peers.log.end_number)]
        peers.restart()
        assert stored(peers) == before and len(before) == 15 * (life + 1)
        assert [peers.log.get(number).block for number in range(peers.log.end_number)] == blocks
        assert peers.log.num_transitions == 8 * len(before)
        for peer, sequence in sequences.items():
            peers.hello(peer, streams=20, first=max(sequence - 3, 0))
            assert peers.heard(peer)[0].stored_sequence == sequence
            peers.store(peer, max(sequence - 1, 0))
    assert peers.dropped["duplicate"] == 2
    assert peers.log.end_number == 60


def test_what_was_not_stored_before_the_crash_is_taken_from_its_resend(spec, tmp_path):
    peers = Peers(spec, tmp_path)
    peers.hello(b"a")
    peers.store(b"a", 0)
    peers.insert(b"a", 1)  # arrived, and neither journalled nor acknowledged
    peers.restart()
    peers.hello(b"a", first=0)
    assert peers.heard(b"a")[0].stored_sequence == 1
    peers.insert(b"a", 1)
    assert peers.acknowledged(b"a") == 2
    assert stored(peers) == [("a", 0), ("a", 1)]


def test_a_restarted_server_goes_on_with_the_same_log_for_its_learners(spec, tmp_path):
    peers = Peers(spec, tmp_path)
    peers.hello(b"a", streams=10)
    for sequence in range(5):
        peers.insert(b"a", sequence)
    peers.subscribe(b"l")
    first = peers.heard(b"l")[0]
    peers.restart()
    peers.subscribe(b"l", first.log, first.life, 5)
    subscribed = peers.heard(b"l")[0]
    assert (subscribed.log, subscribed.life, subscribed.continues) == (first.log, 1, True)
    assert subscribed.next_number == 5


def test_priorities_outlive_a_restart_through_the_snapshot(spec, tmp_path):
    peers = Peers(spec, tmp_path)
    peers.hello(b"a", streams=20)
    for sequence in range(6):
        peers.store(b"a", sequence, [0, *range(1, 8)])
    peers.subscribe(b"l")
    keys = np.arange(48)
    update = wire.UpdatePriorities(0, keys.tobytes(), (keys % 5 + 0.5).astype(np.float32).tobytes())
    peers.say("learner", b"l", update)
    peers.service.advance()
    write_snapshot(tmp_path / SNAPSHOT_FILE, peers.service.open_log.replay.snapshot())
    peers.store(b"a", 6, [3.0] * 8)
    before = priorities_of(peers)
    peers.restart()
    assert priorities_of(peers) == pytest.approx(before, rel=1e-6)
    assert (priorities_of(peers)[:, 0] > 0).tolist() == [False] * 6 + [True]
    peers.service.open_log.replay.tables[TABLE].check_valid()
    (tmp_path / SNAPSHOT_FILE).unlink()
    peers.restart()
    assert priorities_of(peers)[0] == pytest.approx(np.arange(8.0) ** 0.6)  # the actor's own


def test_an_old_log_keeps_its_size_after_a_restart(spec, tmp_path):
    peers = Peers(spec, tmp_path, capacity=80)
    peers.hello(b"a", streams=50)
    for sequence in range(43):
        peers.store(b"a", sequence)
    held = stored(peers)
    peers.restart()
    assert stored(peers) == held[-10:]
    assert (peers.log.first_number, peers.log.end_number) == (33, 43)


def test_a_journal_of_another_spec_is_named_to_the_actor(spec, tmp_path):
    peers = Peers(spec, tmp_path / "kept")
    peers.hello(b"a")
    peers.store(b"a", 0)
    peers.restart()
    peers.hello(b"b", spec=msgspec.structs.replace(spec, overlap_steps=5))
    (refused,) = peers.heard(b"b")
    assert isinstance(refused, wire.Refused)
    assert "--journal-dir" in refused.reason and str(tmp_path / "kept") in refused.reason
    peers.hello(b"a", first=1)
    assert peers.heard(b"a")[0].stored_sequence == 1


def test_a_table_of_another_kind_takes_the_place_of_an_old_one(spec, tmp_path):
    peers = Peers(spec, tmp_path, tables=("x=uniform",))
    peers.hello(b"a")
    peers.store(b"a", 0)
    for kind in ("priority", "fifo", "uniform", "priority"):
        write_snapshot(tmp_path / SNAPSHOT_FILE, peers.service.open_log.replay.snapshot())
        peers.restart(tables=(f"x={kind}",))
        assert stored(peers) == [("a", 0)]
        assert peers.service.open_log.replay.tables["x"].can_sample(1) == (kind != "fifo")  # a queue gives what is new


def test_two_servers_cannot_use_one_journal(spec, tmp_path):
    Peers(spec, tmp_path)
    with pytest.raises(ConfigError, match="--journal-dir"):
        Peers(spec, tmp_path)


def test_a_journal_of_another_version_is_given_back(spec, tmp_path):
    (tmp_path / IDENTITY_FILE).write_bytes(msgspec.json.encode(LogIdentity(99, "log", (0,), spec)))
    for _ in range(2):
        with pytest.raises(ConfigError, match="format 99"):
            Peers(spec, tmp_path)


def full(*_):
    raise OSError(28, "No space left on device")


def test_a_journal_that_cannot_be_mended_is_a_clear_error(spec, tmp_path, monkeypatch):
    peers = Peers(spec, tmp_path)
    peers.hello(b"a")
    for sequence in range(3):
        peers.store(b"a", sequence)
    peers.crash()
    (path,) = tmp_path.glob("unrolls-*.log")
    path.write_bytes(path.read_bytes().replace(wire.encode(insert_of(b"a", 1)), b"?" * 10))
    with monkeypatch.context() as patch:
        patch.setattr("apexrl.replay.recovery.write_durably", full)
        with pytest.raises(ConfigError, match="No space left"):
            Peers(spec, tmp_path)
    assert stored(Peers(spec, tmp_path)) == [("a", 0), None, ("a", 2)]


def test_a_server_restarted_on_a_full_disk_serves_what_it_has(spec, tmp_path, monkeypatch):
    peers = Peers(spec, tmp_path)
    peers.hello(b"a", streams=20)
    for sequence in range(3):
        peers.store(b"a", sequence)
    monkeypatch.setattr("apexrl.replay.journal.write_durably", full)
    monkeypatch.setattr("apexrl.replay.journal.Journal.is_writable", lambda _: False)
    peers.restart()
    peers.hello(b"a", streams=20, first=3)
    peers.subscribe(b"l")
    peers.demand(b"l", 0, 3)
    peers.insert(b"a", 3)
    assert len(only(peers.heard(b"l"), wire.Batch)) == 3
    messages = peers.heard(b"a")
    assert only(messages, wire.Acknowledge)[-1].waits_for == "journal" and peers.log.end_number == 3
    monkeypatch.undo()
    peers.try_journal()
    assert wire.Stranger() in peers.heard(b"a")
    peers.hello(b"a", streams=20, first=3)
    peers.store(b"a", 3)
    peers.restart()
    assert stored(peers) == [("a", n) for n in range(4)]


def test_a_log_whose_journal_cannot_be_begun_takes_nothing_until_it_can(spec, tmp_path, monkeypatch):
    peers = Peers(spec, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("apexrl.replay.journal.write_durably", full)
        peers.hello(b"a")
        peers.insert(b"a", 0)
        assert only(peers.heard(b"a"), wire.Acknowledge)[-1] == wire.Acknowledge(0, 0, 2, "journal")
    peers.try_journal()
    peers.hello(b"a")
    peers.insert(b"a", 0)
    assert peers.acknowledged(b"a") == 1
    peers.restart()
    assert stored(peers) == [("a", 0)]


@pytest.fixture
def broken(spec, tmp_path, monkeypatch):
    """Two actors with 4 stored inserts each, a learner, and a disk that takes no more since then."""
    peers = Peers(spec, tmp_path)
    for peer in (b"a", b"b"):
        peers.hello(peer, streams=10)
        for sequence in range(4):
            peers.store(peer, sequence)
    peers.subscribe(b"l")
    peers.demand(b"l", 0, 0)
    peers.heard(b"a"), peers.heard(b"b"), peers.heard(b"l")

    def fail(*_):
        raise JournalError(DISK)

    monkeypatch.setattr("apexrl.replay.journal.Journal.append", fail)
    monkeypatch.setattr("apexrl.replay.journal.Journal.is_writable", lambda _: False)
    peers.mend = monkeypatch.undo
    return peers


def test_a_full_disk_stops_inserts_and_says_why_while_sampling_goes_on(broken):
    broken.insert(b"a", 4)
    messages = broken.heard(b"a")
    assert DISK in only(messages, wire.Dropped)[0].reason
    assert only(messages, wire.Acknowledge)[-1] == wire.Acknowledge(4, 4, 20, "journal")
    assert only(broken.heard(b"b"), wire.Acknowledge)[-1] == wire.Acknowledge(4, 4, 20, "journal")
    assert broken.log.end_number == 8
    broken.now += 1
    broken.service.expire(broken.now)
    broken.try_journal()
    broken.demand(b"l", 8, 3)
    assert len(only(broken.heard(b"l"), wire.Batch)) == 3
    metrics = broken.service.statistics(broken.now)
    assert metrics["journal_failed"] == 1 and metrics["waited_seconds_actor_journal"] > 0
    broken.hello(b"c")
    assert broken.heard(b"c")[0].waits_for == "journal"


def test_after_the_disk_has_room_everything_is_resent_and_stored_once_in_order(broken):
    for sequence in (4, 5):
        broken.insert(b"a", sequence)
    broken.insert(b"b", 4)
    broken.heard(b"a"), broken.heard(b"b")
    broken.insert(b"a", 6)  # was on the way already
    broken.try_journal()
    assert not only([*broken.heard(b"a"), *broken.heard(b"b")], wire.Stranger)
    broken.mend()
    broken.try_journal()
    broken.service.advance()
    broken.store(b"b", 5)  # said before it heard that insert 4 was lost
    assert broken.log.end_number == 8
    for peer, end in ((b"a", 7), (b"b", 5)):
        assert wire.Stranger() in broken.heard(peer)
        broken.hello(peer, streams=10, first=4)
        welcome = broken.heard(peer)[0]
        assert (welcome.stored_sequence, welcome.waits_for) == (4, "") and welcome.allowed_sequence >= end
        for sequence in range(4, end):
            broken.insert(peer, sequence)
        assert broken.acknowledged(peer) == end
    before = stored(broken)
    assert sorted(before) == [*(("a", n) for n in range(7)), *(("b", n) for n in range(5))]
    assert [n for actor, n in before if actor == "a"] == list(range(7))
    broken.restart()
    assert stored(broken) == before


def test_a_disk_that_fails_behind_an_append_stops_inserts_until_it_can_be_written(broken):
    broken.mend()
    broken.service.open_log.journal_failed("the disk did not take the journal")
    assert broken.heard(b"a")[-1].waits_for == "journal"
    broken.insert(b"a", 4)
    assert broken.log.end_number == 8
    broken.try_journal()
    assert wire.Stranger() in broken.heard(b"a")
    broken.hello(b"a", streams=10, first=4)
    broken.store(b"a", 4)
    assert broken.log.end_number == 9


def test_garbage_from_strangers_and_friends_does_no_harm(peers):
    rng = random.Random(0)
    peers.hello(b"a")
    peers.store(b"a", 0)
    peers.subscribe(b"l")
    said = [wire.Demand(0, (3,)), wire.Heartbeat(), wire.Fetch(0, (0, 1)), wire.AskStatistics(0)]
    valid = [*map(wire.encode, said), wire.encode(insert_of(b"a", 1))]
    for _ in range(3000):
        data = bytearray(rng.choice([*valid, rng.randbytes(rng.randrange(60))]))
        if data and rng.random() < 0.7:
            data[rng.randrange(len(data))] = rng.randrange(256)
        frames = [bytes(data)] + [rng.randbytes(5)] * rng.randrange(3)
        peers.raw(rng.choice(["actor", "learner"]), rng.choice([b"a", b"l", b"x"]), frames)
        peers.heard(b"a"), peers.heard(b"l"), peers.heard(b"x")
    assert sum(peers.dropped.values()) > 1000
    held = peers.log.end_number
    peers.hello(b"z")
    peers.store(b"z", 0)
    assert peers.log.end_number == held + 1


TABLES = (
    ("transitions=priority",),
    ("transitions=priority", "more=priority"),
    ("transitions=priority", "queue=fifo:1:1"),
    ("queue=fifo:1:1", "any=uniform:2:1"),
)


@pytest.mark.parametrize("tables", TABLES)
def test_metrics_of_the_run_count_each_transition_once_with_any_tables(spec, tmp_path, tables):
    peers = Peers(spec, tmp_path, tables=tables, capacity=80)
    peers.hello(b"a", streams=20)
    before = peers.service.statistics(0.0)
    for sequence in range(30):
        peers.store(b"a", sequence, [0, *[1] * 7])
    names = [text.partition("=")[0] for text in tables]
    peers.subscribe(b"l", tables=names, batch_size=4)
    peers.demand(b"l", 30, *[2] * len(tables))
    peers.service.advance()
    metrics = peers.service.statistics(1.0)
    kinds = dict(text.split(":")[0].split("=") for text in tables)
    sampled = sum(2 * 4 * (1 if kind == "priority" else 8) for kind in kinds.values())
    assert (metrics["transitions_inserted"], metrics["transitions_sampled"]) == (210, sampled)
    assert metrics["fill"] == metrics["size"] / 80
    for name, kind in kinds.items():
        assert metrics[f"table/{name}/inserted"] == (210 if kind == "priority" else 30)
        assert metrics[f"table/{name}/sampled"] == 8
    ratios = [metrics[f"table/{name}/samples_per_insert"] for name in kinds]
    assert metrics["samples_per_insert"] == sum(ratios) > 0
    assert f"in 210/s, out {sampled}/s" in summary(metrics, before, 1.0)
    write_snapshot(tmp_path / SNAPSHOT_FILE, peers.service.open_log.replay.snapshot())
    peers.store(b"a", 30, [0, *[1] * 7])
    peers.restart()
    assert peers.service.statistics(2.0)["transitions_inserted"] == 217


def test_metrics_and_peers_are_told_to_who_asks(spec, tmp_path):
    peers = Peers(spec, tmp_path, tables=("transitions=priority", "queue=fifo:1:1"))
    peers.say("learner", b"x", wire.AskStatistics(1))
    assert peers.heard(b"x")[0].peers == ()
    before = peers.service.statistics(0.0)
    peers.hello(b"a", streams=3)
    for sequence in range(8):
        peers.store(b"a", sequence)
    peers.subscribe(b"l", tables=("queue",))
    peers.demand(b"l", 0, 100)
    peers.service.advance()
    peers.now = 3.0
    peers.service.expire(peers.now)
    peers.say("learner", b"x", wire.AskStatistics(7))
    (answer,) = peers.heard(b"x")
    assert isinstance(answer, wire.Statistics) and answer.request == 7
    assert {peer.name: (peer.role, peer.silent_seconds, peer.waits_for) for peer in answer.peers} == {
        name_of(b"a"): ("actor", 3.0, ""),
        "l": ("learner", 3.0, "actors"),
    }
    metrics = answer.metrics
    assert (metrics["size"], metrics["actors"], metrics["learners"], metrics["slots"]) == (64, 1, 1, 3)
    assert (metrics["table/transitions/inserted"], metrics["table/queue/inserted"]) == (64, 8)
    assert (metrics["table/queue/sampled"], metrics["table/queue/samples_per_insert"]) == (8, 1)
    assert metrics["age_seconds"] == 3.0 and metrics["waited_seconds_learner_actors"] == 3.0
    files = tmp_path.glob("unrolls-*.log")
    assert metrics["journal_bytes"] == sum(path.stat().st_size for path in files) > 0
    line = summary(metrics, before, 3.0)
    assert "64 transitions" in line and "learner waits for actors 100%" in line and "journal" in line
