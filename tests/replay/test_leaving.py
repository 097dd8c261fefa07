"""Items that leave a table: deleted, drawn often enough, or all at once; and what a restart makes of it."""

import numpy as np
import pytest

from apexrl.config.tables import TableConfig
from apexrl.net.records import layout_of, spec_of
from apexrl.replay.draw_counter import DrawCounter
from apexrl.replay.kinds import make_table

SPEC = spec_of(layout_of({"a": "int8"}))
KINDS = ["priority", "uniform", "elite", "fifo", "lifo"]


def table_of(kind, count=0, first=0, missing=()):
    table = make_table(TableConfig(kind, 0.0, 1, 30 if kind == "elite" else 0), 40, SPEC, (1.0, 1.0), 0)
    for number in range(first, first + count):
        if number in missing:
            table.skip(number + 1)
        else:
            table.insert(number, np.ones((1, 1)), np.ones((1, 1), bool))
    return table


def held(table):
    """The numbers that can be drawn."""
    found, left = set(), table.delete(np.zeros(0, np.int64))
    assert left == 0
    for number in range(60):
        if table.delete(np.array([number])):
            found.add(number)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_deleted_items_leave_for_ever(kind):
    table = table_of(kind, 12)
    table.evict(0)
    assert table.delete(np.array([0, 3, 3, 5, 11, 12, 39, 52])) == 3
    table.update_priorities(np.arange(12), np.ones(12, np.float32))
    assert held(table) == {1, 2, 4, 6, 7, 8, 9, 10}
    assert not table.can_sample(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_was_reset_holds_what_comes_then(kind):
    table = table_of(kind, 12)
    assert (table.delete(None), table.delete(None)) == (12, 0)
    table.evict(0)
    table.insert(12, np.ones((2, 1)), np.ones((2, 1), bool))
    assert table.sample(1).keys[0] in (12, 13)
    assert held(table) in ({12, 13}, {12}, {13})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_reset", [False, True])
def test_what_left_stays_away_after_a_restart(kind, is_reset):
    table = table_of(kind, 12)
    table.delete(None if is_reset else np.array([2, 5, 11]))
    state = table.state()
    again = table_of(kind, 15)  # with what was inserted since
    again.restore(state, 0, 12)
    assert held(again) == (set() if is_reset else set(range(12)) - {2, 5, 11}) | {12, 13, 14}


@pytest.mark.parametrize(("before", "after"), [("elite", "uniform"), ("uniform", "lifo"), ("lifo", "fifo")])
def test_a_table_of_another_kind_of_that_name_holds_the_same(before, after):
    table = table_of(before, 12)
    table.delete(np.array([2, 5]))
    again = table_of(after, 15, missing=(7,))
    again.restore(table.state(), 0, 12)
    assert held(again) == set(range(15)) - ({7} if before == "elite" else {2, 5, 7})


def test_draws_are_counted_until_an_item_has_to_leave():
    counter = DrawCounter(3, items=2)
    assert counter.count(np.array([1, 1, 4])).tolist() == []
    state = counter.added_to(table_of("uniform").state())
    assert counter.count(np.array([1, 4, 6, 6, 6, 6])).tolist() == [1, 6]
    counter.evict(2)  # keys 4 and 5
    assert counter.count(np.array([4, 1])).tolist() == []
    again = DrawCounter(3, items=2)
    again.restore(state, 2)  # the number of key 4 was given to another unroll
    assert again.count(np.array([1, 4, 4])).tolist() == [1]
