import msgspec
import numpy as np
import pytest

from apexrl.config.sections import ReplayConfig
from apexrl.errors import ConfigError, JournalError
from apexrl.net.statistics import log_metrics
from apexrl.replay.journal import SNAPSHOT_FILE, Journal, new_identity
from apexrl.replay.log import LogEntry
from apexrl.replay.recovery import recover
from apexrl.replay.replay import RecoveredUnroll, Replay
from apexrl.replay.snapshot import write_snapshot
from tests.replay.records import powers_of

TABLE = "transitions"
ALL_TABLES = ("transitions=priority", "unrolls=uniform:0:1", "queue=fifo:0:1")


def config_of(**changes):
    numbers = {"capacity": 80, "min_size_to_sample": 16, "samples_per_insert": 0.0, "eviction_period_batches": 5}
    numbers["tables"] = (f"{TABLE}=priority",)
    return ReplayConfig(**(numbers | changes))


def make_replay(spec, **changes):
    return Replay(config_of(**changes), new_identity(spec), seed=0)


def entry_of(transitions=8):
    return LogEntry(b"message", b"block", transitions, 0.0)


def insert(replay, priorities=None, count=1):
    """Inserts unrolls with the same priorities [8]."""
    priorities = np.ones(8) if priorities is None else np.asarray(priorities)
    entries = [entry_of(int((priorities > 0).sum()))] * count
    many = np.tile(priorities, (count, 1)).astype(np.float32)
    return replay.insert(entries, many, many > 0)


def recovered(numbers):
    """Unrolls of these numbers that a journal gave back, all of their priorities 1."""
    return [RecoveredUnroll(number, entry_of(), np.ones(8, np.float32), np.ones(8, bool)) for number in numbers]


def test_keys_name_what_was_inserted(spec):
    replay = make_replay(spec)
    for number in range(200):
        priorities = np.zeros(8)
        priorities[number % 8] = 1.0
        assert insert(replay, priorities) == number
        if number == 0:
            replay.tables[TABLE].limiter.inserted += 16
        first, end = replay.log.first_number, replay.log.end_number
        sample = replay.sample(TABLE, 4)
        assert set(sample.keys.tolist()) <= {8 * n + n % 8 for n in range(first, end)}


def test_capacity_is_a_soft_limit_and_the_oldest_go_first(spec):
    replay = make_replay(spec)  # 10 unrolls, and 8 more before they must go
    for _ in range(18):
        insert(replay)
    assert len(replay.log) == 18
    for _ in range(4):
        replay.sample(TABLE, 4)
    assert len(replay.log) == 18
    replay.sample(TABLE, 4)  # the fifth batch
    assert (replay.log.first_number, replay.log.end_number) == (8, 18)
    for _ in range(9):
        insert(replay)
    assert (replay.log.first_number, replay.log.end_number) == (16, 27)
    assert replay.log.num_transitions == 88 and replay.log.num_bytes == 11 * len(b"messageblock")
    assert replay.log.get(15) is None


def test_more_at_once_than_the_ring_holds_leaves_the_newest(spec):
    replay = make_replay(spec)
    assert insert(replay, count=50) == 0
    assert replay.log.end_number == 50 and 10 <= len(replay.log) <= 18
    assert replay.tables[TABLE].limiter.inserted == 400
    replay.tables[TABLE].check_valid()


def test_nothing_is_sampled_before_the_minimum_size(spec):
    replay = make_replay(spec)
    assert replay.why_no_sample(TABLE, 4) == "min_size"
    insert(replay)
    assert replay.why_no_sample(TABLE, 4) == "min_size"
    insert(replay, np.zeros(8))
    assert replay.why_no_sample(TABLE, 4) == "min_size"  # no transition came
    insert(replay)
    assert replay.why_no_sample(TABLE, 4) == ""


def test_what_a_reader_waits_for_is_said(spec):
    replay = make_replay(spec, samples_per_insert=1.0, tables=ALL_TABLES)
    insert(replay, count=3)
    assert replay.why_no_sample("queue", 4) == "actors"
    replay.tables[TABLE].update_priorities(np.arange(24), np.zeros(24))
    assert replay.why_no_sample(TABLE, 4) == "priorities"
    replay.tables[TABLE].limiter.sampled = 100
    assert replay.why_no_sample(TABLE, 4) == "actors"
    assert replay.why_no_insert() == ""
    replay.tables[TABLE].limiter.sampled = 0
    insert(replay, count=10)
    assert replay.why_no_insert() == "learner"


def test_each_table_has_its_own_limiter(spec):
    replay = make_replay(spec, tables=("a=uniform:2:3", "b=fifo:1:1"))
    insert(replay, count=2)
    assert replay.why_no_sample("a", 1) == "min_size" and replay.why_no_sample("b", 1) == ""
    insert(replay, count=2)
    replay.set_batch_sizes({"a": 2})
    assert (replay.tables["a"].limiter.slack, replay.tables["b"].limiter.slack) == (8.0, 2.0)
    assert (replay.tables["a"].limiter.error, replay.tables["b"].limiter.error) == (2, 4)
    assert replay.sample("a", 2).keys.max() < 4
    assert (replay.tables["a"].limiter.sampled, replay.tables["b"].limiter.sampled) == (2, 0)


def test_a_uniform_table_begins_with_a_whole_batch(spec):
    replay = make_replay(spec, tables=("a=uniform:64:1",))
    replay.set_batch_sizes({"a": 5})
    for held in range(5):
        assert replay.why_no_sample("a", 5) == "min_size" and replay.why_no_insert() == "", held
        insert(replay)
    assert replay.why_no_sample("a", 5) == ""
    assert replay.tables["a"].limiter.error == 0  # nothing was due before


def test_a_reader_of_large_batches_holds_up_nobody(spec):
    replay = make_replay(spec, tables=("a=uniform:8:1",))
    replay.set_batch_sizes({"a": 5})
    for _ in range(6):
        insert(replay)
    error = replay.tables["a"].limiter.error
    replay.set_batch_sizes({"a": 5}, {"a": 9})
    assert (
        replay.why_no_sample("a", 5) == ""
        and replay.why_no_sample("a", 9)
        and replay.tables["a"].limiter.error == error
    )
    for _ in range(3):
        insert(replay)
    assert replay.why_no_sample("a", 9) == ""


def test_a_learner_of_two_tables_never_waits_for_actors_that_wait_for_it(spec):
    replay = make_replay(spec, tables=("queue=fifo", "old=uniform:0:10"))
    replay.set_batch_sizes({"queue": 2, "old": 3})
    for held in range(10):
        assert replay.why_no_sample("old", 3) == "min_size" and replay.why_no_insert() == "", held
        insert(replay)
    assert replay.why_no_sample("old", 3) == "" and replay.tables["queue"].limiter.error == 10
    assert replay.why_no_insert() == "learner"  # both can be sampled: now the band holds again
    for _ in range(3):
        assert (replay.sample("queue", 2).keys.max(), len(set(replay.sample("old", 3).keys))) < (6, 4)
    assert replay.why_no_insert() == ""


def test_a_reader_that_waits_for_its_own_start_does_not_widen_the_band_of_others(spec):
    replay = make_replay(spec, tables=("queue=fifo", "old=uniform:0:10"))
    replay.set_batch_sizes({"queue": 2}, {"old": 3})
    insert(replay, count=5)
    assert replay.why_no_insert() == "learner"
    replay.set_batch_sizes({"queue": 2}, {"queue": 1, "old": 3})
    assert replay.why_no_insert() == "learner"
    replay.set_batch_sizes({"queue": 2, "old": 3}, {"queue": 1, "old": 3})
    assert replay.why_no_insert() == ""


def test_a_table_that_has_no_batch_to_give_holds_nobody_up(spec):
    replay = make_replay(spec, samples_per_insert=8.0)
    insert(replay, count=10)
    assert replay.why_no_insert() == "learner"
    replay.tables[TABLE].update_priorities(np.arange(80), np.zeros(80))
    assert replay.why_no_insert() == ""


@pytest.mark.parametrize("kind", ["fifo", "lifo"])
def test_a_queue_whose_unrolls_were_missed_holds_nobody_up(spec, kind):
    replay = make_replay(spec, tables=(f"queue={kind}", "any=uniform:0:1"), eviction_period_batches=1)
    replay.set_batch_sizes({"queue": 12})
    insert(replay, count=18)
    replay.sample("any", 1)
    assert (log_metrics(replay, 0.0)["table/queue/missed"], len(replay.log)) == (8, 10)
    replay.tables["queue"].limiter.inserted += 20  # as if many more had been missed
    assert replay.why_no_sample("queue", 12) == "actors" and replay.why_no_insert() == ""


@pytest.mark.parametrize(("table", "size", "held"), [("a", 4, 3), ("b", 11, 10), ("c", 11, 10)])
def test_a_batch_that_a_uniform_table_can_never_give_is_named(spec, table, size, held):
    replay = make_replay(spec, tables=("a=uniform:0:1:3", "b=uniform:0:1", "c=uniform:0:1:500", "d=fifo"))
    assert (
        replay.why_never(table, size)
        == f"table {table} holds {held} unrolls, too few for a batch of {size} different ones"
    )
    assert replay.why_never(table, held) == replay.why_never("d", size) == ""


def test_eviction_never_takes_what_is_about_to_be_drawn(spec):
    replay = make_replay(spec, eviction_period_batches=1, tables=ALL_TABLES)
    insert(replay, count=8)
    insert(replay, np.zeros(8), count=10)
    assert replay.why_no_sample("queue", 12) == ""
    assert replay.sample("queue", 12).keys.max() < 18
    replay = make_replay(spec, eviction_period_batches=1)
    insert(replay, count=8)
    insert(replay, np.zeros(8), count=10)
    assert replay.why_no_sample(TABLE, 4) == ""
    assert len(replay.sample(TABLE, 4).keys) == 4


def test_a_capacity_below_the_minimum_size_is_refused(spec):
    with pytest.raises(ConfigError, match="--capacity"):
        make_replay(spec, capacity=8)


def test_a_table_repeats_with_the_seed_and_differs_between_lives(spec):
    identity = new_identity(spec)
    later = type(identity)(identity.format, identity.log, (0, 3), spec)
    keys = []
    for seed, which in ((1, identity), (1, identity), (2, identity), (1, later)):
        replay = Replay(config_of(), which, seed)
        insert(replay, count=8)
        keys.append(replay.sample(TABLE, 32).keys.tolist())
    assert keys[0] == keys[1] and keys[0] != keys[2] and keys[0] != keys[3]


def test_an_insert_that_the_disk_refuses_changes_nothing(spec, tmp_path, monkeypatch):
    identity = new_identity(spec)
    replay = Replay(config_of(tables=ALL_TABLES), identity, 0, Journal(tmp_path, identity))
    insert(replay, count=4)
    before = replay.snapshot()

    def fail(*_):
        raise JournalError("no space")

    monkeypatch.setattr(Journal, "append", fail)
    with pytest.raises(JournalError):
        insert(replay)
    assert replay.snapshot() == before and replay.log.num_transitions == 32
    monkeypatch.undo()
    assert insert(replay) == 4


def test_old_files_go_with_what_is_evicted(spec, tmp_path):
    identity = new_identity(spec)
    replay = Replay(config_of(), identity, 0, Journal(tmp_path, identity, segment_bytes=1))
    for _ in range(60):
        insert(replay)
        assert len(list(tmp_path.glob("unrolls-*.log"))) == len(replay.log)
    assert [entry.number for entry in recover(tmp_path).entries] == list(range(replay.log.first_number, 60))


def restored(spec, numbers, end, directory, **changes):
    """A replay restored from these unrolls."""
    replay = Replay(config_of(tables=ALL_TABLES, **changes), new_identity(spec), 0)
    replay.restore(recovered(numbers), end, directory)
    replay.tables[TABLE].check_valid()
    return replay


@pytest.mark.parametrize(
    ("numbers", "end"),
    [([], 0), ([], 7), ([0], 1), (range(5), 5), (range(40), 40), ([33, 35, 38], 40), ([3], 40), ([5, 6], 9)],
)
def test_a_restored_replay_goes_on_behind_the_last_number(spec, tmp_path, numbers, end):
    replay = restored(spec, numbers, end, tmp_path)
    held = [number for number in numbers if number >= end - 10]
    assert [n for n in range(end + 2) if replay.log.get(n) is not None] == held
    assert replay.log.num_transitions == 8 * len(held)
    assert replay.tables[TABLE].limiter.inserted == 8 * len(held)
    for number in range(end, end + 25):
        assert insert(replay) == number
        replay.tables[TABLE].check_valid()
        first = replay.log.first_number  # drawn unrolls may be evicted right after
        keys = replay.sample(TABLE, 8).keys
        assert first <= keys.min() // 8 and keys.max() // 8 <= number


@pytest.mark.parametrize("table", ["transitions", "unrolls", "queue"])
def test_unrolls_that_a_damaged_journal_lost_are_never_drawn(spec, tmp_path, table):
    numbers = [0, 1, 4, 5, 8]
    replay = restored(spec, numbers, 10, tmp_path)
    starts = 8 if table == "transitions" else 1
    drawn = []
    for _ in range(200):
        if replay.why_no_sample(table, 1):
            break
        drawn += (replay.sample(table, 1).keys // starts).tolist()
    assert sorted(set(drawn)) == numbers
    assert table != "queue" or len(drawn) == len(numbers)


def test_unrolls_out_of_order_are_an_error(spec, tmp_path):
    with pytest.raises(ValueError, match="skip"):
        restored(spec, [2, 1], 3, tmp_path)


def test_a_snapshot_of_a_table_that_is_gone_or_new_does_no_harm(spec, tmp_path):
    identity = new_identity(spec)
    old = Replay(config_of(tables=("a=uniform", "b=fifo")), identity, 0)
    insert(old, count=5)
    old.sample("b", 2)
    write_snapshot(tmp_path / SNAPSHOT_FILE, old.snapshot())
    new = Replay(config_of(tables=("b=fifo", "c=uniform", "transitions=priority")), identity, 0)
    new.restore(recovered(range(5)), 5, tmp_path)
    assert new.sample("b", 2).keys.tolist() == [2, 3]
    assert new.tables["c"].limiter.inserted == 5 and new.tables["transitions"].limiter.inserted == 40


def lived(spec, directory, inserts, snapshot_after, **changes):
    """A replay that a life of 200 sampled unrolls left behind, and that was killed after its snapshot."""
    identity = new_identity(spec)
    old = Replay(config_of(capacity=8000, **changes), identity, 0)
    [name] = old.tables
    for number in range(inserts):
        insert(old)
        while not old.why_no_sample(name, 2):
            old.sample(name, 2)
        if number + 1 == snapshot_after:
            write_snapshot(directory / SNAPSHOT_FILE, old.snapshot())
    return identity


@pytest.mark.parametrize(("before", "after"), [((0.5, 16), (8.0, 16)), ((8.0, 16), (0.5, 16)), ((2.0, 16), (2.0, 800))])
def test_another_pace_is_for_what_comes(spec, tmp_path, before, after):
    def numbers(pace):
        return {"samples_per_insert": pace[0], "min_size_to_sample": pace[1], "tables": ("a=priority",)}

    identity = lived(spec, tmp_path, 200, 200, **numbers(before))
    new = Replay(config_of(capacity=8000, **numbers(after)), identity, 0)
    new.set_batch_sizes({"a": 2})
    new.restore(recovered(range(200)), 200, tmp_path)
    limiter = new.tables["a"].limiter
    assert limiter.error == 0 and limiter.sampled == pytest.approx(
        (1600 - before[1]) * before[0], abs=10 * before[0] + 8
    )
    write_snapshot(tmp_path / SNAPSHOT_FILE, new.snapshot())
    again = Replay(config_of(capacity=8000, **numbers(after)), identity, 0)
    again.restore(recovered(range(200)), 200, tmp_path)
    assert again.tables["a"].limiter.error == 0, "what was forgiven stays forgiven"
    since = again.tables["a"].limiter.sampled
    for _ in range(100):
        insert(again)
        while not again.why_no_sample("a", 2):
            again.sample("a", 2)
    slack = again.tables["a"].limiter.slack
    assert again.tables["a"].limiter.sampled - since == pytest.approx(800 * after[0], abs=slack + 2)


def test_priorities_of_unrolls_that_a_power_cut_took_do_not_land_on_others(spec, tmp_path):
    identity = new_identity(spec)
    replay = Replay(config_of(), identity, 0)
    insert(replay, count=9)
    replay.tables[TABLE].update_priorities(np.arange(72), np.full(72, 5.0))
    write_snapshot(tmp_path / SNAPSHOT_FILE, replay.snapshot())
    # Life 1 found 6 of the 9 unrolls, gave the numbers 6 .. to others, and was killed before it wrote a snapshot.
    again = Replay(config_of(), msgspec.structs.replace(identity, lives=(0, 6, 8)), 0)
    again.restore(recovered(range(8)), 8, tmp_path)
    assert powers_of(again.tables[TABLE], 8)[:, 0] == pytest.approx([5**0.6] * 6 + [1.0] * 2)
