"""Queues over a restart: what was not handed out is still there, whatever the pace."""

import numpy as np
import pytest

from apexrl.replay.journal import SNAPSHOT_FILE, new_identity
from apexrl.replay.replay import Replay
from apexrl.replay.snapshot import write_snapshot
from tests.replay.test_replay import config_of, insert, lived, recovered


@pytest.mark.parametrize("snapshot_after", [0, 50, 199, 200])
def test_a_queue_hands_nothing_out_again_after_a_kill(spec, tmp_path, snapshot_after):
    tables = ("queue=fifo",)
    identity = lived(spec, tmp_path, 200, snapshot_after, tables=tables)
    new = Replay(config_of(capacity=8000, tables=tables), identity, 0)
    new.restore(recovered(range(200)), 200, tmp_path)
    drawn = []
    for _ in range(50):
        insert(new)
        while not new.why_no_sample("queue", 2):
            drawn += new.sample("queue", 2).keys.tolist()
    assert drawn == list(range(drawn[0], drawn[-1] + 1)) and 198 <= drawn[0] <= 200 and drawn[-1] >= 248


def drawn_from(replay, table, size=2):
    """The unrolls that a table hands out until it has no more batch to give, none twice."""
    drawn = []
    while not replay.why_no_sample(table, size):
        drawn += replay.sample(table, size).keys.tolist()
    assert len(set(drawn)) == len(drawn)
    return set(drawn)


def test_what_waits_in_a_queue_is_there_after_an_end_in_order(spec, tmp_path):
    identity, tables = new_identity(spec), ("queue=fifo",)
    old = Replay(config_of(tables=tables), identity, 0)
    insert(old, count=6)
    assert old.sample("queue", 2).keys.tolist() == [0, 1]
    write_snapshot(tmp_path / SNAPSHOT_FILE, old.snapshot())
    new = Replay(config_of(tables=tables), identity, 0)
    new.restore(recovered(range(6)), 6, tmp_path)
    assert new.sample("queue", 4).keys.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["fifo", "lifo"])
@pytest.mark.parametrize("snapshot_after", [0, 20, 30])
def test_a_kill_before_a_queue_has_begun_takes_nothing_from_it(spec, tmp_path, kind, snapshot_after):
    identity, tables = new_identity(spec), (f"queue={kind}:1:40",)
    old = Replay(config_of(capacity=8000, tables=tables), identity, 0)
    for number in range(30):
        insert(old)
        if number + 1 == snapshot_after:
            write_snapshot(tmp_path / SNAPSHOT_FILE, old.snapshot())
    new = Replay(config_of(capacity=8000, tables=tables), identity, 0)
    new.restore(recovered(range(30)), 30, tmp_path)
    assert new.why_no_sample("queue", 2) == "min_size"
    insert(new, count=30)
    assert drawn_from(new, "queue") == set(range(60))


PACES = ["0:1", "1:1", "0.5:1", "1:50", "0:100"]


@pytest.mark.parametrize("kind", ["fifo", "lifo"])
@pytest.mark.parametrize("before", PACES)
@pytest.mark.parametrize("after", PACES)
def test_what_waits_in_a_queue_is_handed_out_at_another_pace(spec, tmp_path, kind, before, after):
    identity = new_identity(spec)
    old = Replay(config_of(capacity=8000, tables=(f"queue={kind}:{before}",)), identity, 0)
    insert(old, count=100)
    gone = {key for _ in range(10) for key in old.sample("queue", 2).keys.tolist()}
    write_snapshot(tmp_path / SNAPSHOT_FILE, old.snapshot())
    new = Replay(config_of(capacity=8000, tables=(f"queue={kind}:{after}",)), identity, 0)
    new.restore(recovered(range(100)), 100, tmp_path)
    if before == after == "0.5:1":
        assert new.tables["queue"].limiter.error == 30
    else:
        assert drawn_from(new, "queue") == set(range(100)) - gone


def test_a_queue_of_half_a_sample_an_insert_goes_on_where_it_was(spec, tmp_path):
    identity, tables = new_identity(spec), ("queue=fifo:0.5:1",)
    old = Replay(config_of(capacity=8000, tables=tables), identity, 0)
    insert(old, count=100)
    while not old.why_no_sample("queue", 2):
        next_number = int(old.sample("queue", 2).keys[-1]) + 1
    write_snapshot(tmp_path / SNAPSHOT_FILE, old.snapshot())
    new = Replay(config_of(capacity=8000, tables=tables), identity, 0)
    new.restore(recovered(range(100)), 100, tmp_path)
    insert(new, count=10)
    assert new.sample("queue", 2).keys.tolist() == [next_number, next_number + 1]


@pytest.mark.parametrize("kind", ["fifo", "lifo"])
def test_a_queue_whose_items_were_deleted_lets_as_many_in_as_before(spec, kind):
    """They count neither as waiting, nor as handed out."""
    replay = Replay(config_of(tables=(f"queue={kind}",)), new_identity(spec), 0)

    def filled():
        count = 0
        while not replay.why_no_insert():
            insert(replay)
            count += 1
        return count

    replay.set_batch_sizes({"queue": 2})
    first = filled()
    error = replay.tables["queue"].limiter.error
    assert replay.delete("queue", np.arange(first)) == first
    assert replay.tables["queue"].limiter.error == error - first
    assert filled() == first
