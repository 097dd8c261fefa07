"""A guest on a log: its tables are its own, and it keeps up with the newest unrolls."""

import dataclasses

import msgspec
import numpy as np
import pytest

from apexrl.config.sections import ReplayConfig
from apexrl.errors import ConfigError
from apexrl.learning.experience.guest_client import BACKLOG_BATCHES, GuestClient
from apexrl.net.log_client import LogAppend, LogBatch, LogStart
from apexrl.net.wire import Insert
from apexrl.types import UnrollHeader
from apexrl.unroll import UnrollCodec

RING = 40


class HostLog:
    """The client of a host's log: gives the events that were put into it."""

    def __init__(self):
        self.events, self.waits_for, self.is_closed = [], "", False

    def poll(self, timeout_milliseconds):
        return self.events.pop(0) if self.events else None

    def close(self):
        self.is_closed = True


def start(spec, log="00000000000000aa", next_number=0, continues=False):
    return LogStart(log, spec, RING, next_number, continues, {})


def append(spec, make_unroll, number, version=0):
    starts = spec.unroll_starts
    header = UnrollHeader(
        0, number * starts, version, 0.1, np.ones(starts, bool), np.full(starts, 1.0 + number, np.float32), ()
    )
    return LogAppend(number, Insert.of(header, number, "actor-0"), UnrollCodec(spec).encode(make_unroll(spec)))


def guest_of(host, spec, tables, sizes, wanted=None, **numbers):
    numbers = {"capacity": RING * spec.unroll_starts, "min_size_to_sample": 1, "samples_per_insert": 0.0} | numbers
    config = ReplayConfig(tables=tables, **numbers)
    return GuestClient(host, lambda held: wanted or held, config, sizes, 2, 0)


def drained(guest):
    """All events until there is none. Some events of the host's log give none."""
    events = []
    while guest._client.events or events[-1:] != [None]:
        events.append(guest.poll(0))
    return [event for event in events if event is not None]


def test_a_guest_numbers_the_runs_unrolls_as_the_run_does_and_samples_by_their_priorities(spec, make_unroll):
    host = HostLog()
    guest = guest_of(host, spec, ("transitions=priority",), {"transitions": 64}, priority_exponent=1.0)
    host.events = [start(spec, next_number=7), *(append(spec, make_unroll, number) for number in range(7, 12))]
    begin, *events = drained(guest)
    assert (begin.log, begin.spec, begin.granularity) == ("00000000000000aa", spec, {"transitions": "transitions"})
    assert [event.number for event in events if isinstance(event, LogAppend)] == list(range(7, 12))
    batches = [event for event in events if isinstance(event, LogBatch)]
    assert len(batches) == 2, "as many as may wait"
    keys = np.concatenate([batch.sample.keys for batch in batches])
    assert set(keys // spec.unroll_starts) <= set(range(7, 12))
    guest.update_priorities(
        np.arange(7 * spec.unroll_starts, 12 * spec.unroll_starts - 1),
        np.zeros(5 * spec.unroll_starts - 1),
        "transitions",
    )
    guest.batch_used("transitions")
    assert guest.poll(0) is not None
    guest.close()
    assert host.is_closed


def test_a_reader_that_lost_the_server_goes_on_and_a_new_log_begins_anew(spec, make_unroll):
    host = HostLog()
    guest = guest_of(host, spec, ("unrolls=uniform",), {"unrolls": 2})
    host.events = [
        start(spec),
        append(spec, make_unroll, 0),
        start(spec, next_number=3, continues=True),
        append(spec, make_unroll, 3),
    ]
    events = drained(guest)
    assert sum(isinstance(event, LogStart) for event in events) == 1
    assert [event.number for event in events if isinstance(event, LogAppend)] == [0, 3]
    host.events = [start(spec, log="00000000000000bb"), append(spec, make_unroll, 0)]
    guest.batch_used("unrolls")
    guest.batch_used("unrolls")
    begin, *rest = drained(guest)
    assert begin.log == "00000000000000bb" and [event.number for event in rest] == [0], "one unroll is no batch of two"


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_mended_log_names_those_that_it_has_the_unrolls_of(spec, make_unroll, is_cut):
    """A replica counts none of them again."""
    wanted = msgspec.structs.replace(spec, unroll_starts=spec.unroll_starts // 2) if is_cut else spec
    host = HostLog()
    guest = guest_of(host, spec, ("unrolls=uniform",), {"unrolls": 2}, wanted)
    mended = dataclasses.replace(start(spec, log="00000000000000bb"), ancestors=("00000000000000aa",))
    host.events = [start(spec), append(spec, make_unroll, 0), mended]
    first, second = (event for event in drained(guest) if isinstance(event, LogStart))
    assert second.ancestors == (first.log,) and (first.log != "00000000000000aa") == is_cut


@pytest.mark.parametrize("gap", [1, 3, RING - 1, RING, 10 * RING])
def test_what_the_run_dropped_before_a_slow_guest_could_read_it_is_left_out(spec, make_unroll, gap):
    """The guest's own replay is full: the gap takes the place of its oldest unrolls."""
    host, size = HostLog(), 2
    guest = guest_of(host, spec, ("unrolls=uniform", "transitions=priority"), {"unrolls": size, "transitions": 1})
    end = 2 * RING
    host.events = [start(spec), *(append(spec, make_unroll, number) for number in range(end))]
    drained(guest)
    later = end + gap
    host.events = [start(spec, next_number=later, continues=True)]
    host.events += [append(spec, make_unroll, number) for number in range(later, later + 3)]
    assert [event.number for event in drained(guest) if isinstance(event, LogAppend)] == [later, later + 1, later + 2]
    drawn = set()
    for _ in range(50):
        for table in ("unrolls", "transitions"):
            guest.batch_used(table)
        for batch in drained(guest):
            drawn |= set((batch.sample.keys // (1 if len(batch.sample.keys) == size else spec.unroll_starts)).tolist())
    assert {later, later + 1, later + 2} <= drawn
    assert not drawn & set(range(end, later)) and min(drawn) > later - 2 * RING


def test_a_queue_of_a_slow_guest_gives_the_newest(spec, make_unroll):
    host = HostLog()
    guest = guest_of(host, spec, ("queue=fifo",), {"queue": 2})
    host.events = [start(spec), *(append(spec, make_unroll, number) for number in range(30))]
    batches = [event for event in drained(guest) if isinstance(event, LogBatch)]
    assert [batch.sample.keys.tolist() for batch in batches] == [[22, 23], [24, 25]]
    assert 30 - 22 == BACKLOG_BATCHES * 2
    guest.batch_used("queue")
    assert guest.poll(0).sample.keys.tolist() == [26, 27]


def test_its_samples_an_insert_bound_the_guest(spec, make_unroll):
    host = HostLog()
    guest = guest_of(host, spec, ("unrolls=uniform",), {"unrolls": 1}, samples_per_insert=1.0)
    host.events = [start(spec), *(append(spec, make_unroll, number) for number in range(6))]
    num_batches = 0
    events = drained(guest)
    while batches := [event for event in events if isinstance(event, LogBatch)]:
        num_batches += len(batches)
        for _ in batches:
            guest.batch_used("unrolls")
        events = drained(guest)
    assert 6 <= num_batches <= 6 + 4 + 1 and guest.waits_for == "actors"


def test_a_run_that_is_away_is_missed_also_where_its_unrolls_are_enough_for_batches(spec, make_unroll):
    host = HostLog()
    guest = guest_of(host, spec, ("unrolls=uniform",), {"unrolls": 1})
    host.events = [start(spec), *(append(spec, make_unroll, number) for number in range(6))]
    assert drained(guest) and guest.waits_for != "replay_connection"
    host.waits_for = "replay_connection"
    guest.batch_used("unrolls")
    assert isinstance(guest.poll(0), LogBatch) and guest.waits_for == "replay_connection"
    host.waits_for = ""
    guest.batch_used("unrolls")
    assert isinstance(guest.poll(0), LogBatch) and guest.waits_for == ""


def test_unrolls_that_do_not_fit_are_cut_anew(spec, make_unroll):
    wanted = msgspec.structs.replace(spec, unroll_starts=2 * spec.unroll_starts, overlap_steps=1)
    host = HostLog()
    guest = guest_of(host, spec, ("transitions=priority",), {"transitions": 4}, wanted)
    host.events = [start(spec), *(append(spec, make_unroll, number) for number in range(8))]
    begin, *events = drained(guest)
    appends = [event for event in events if isinstance(event, LogAppend)]
    assert begin.spec == wanted and begin.log != "00000000000000aa"
    assert [event.number for event in appends] == list(range(len(appends))) and 2 <= len(appends) <= 4
    for event in appends:
        assert UnrollCodec(wanted).decode(event.block).actions.shape == (wanted.unroll_steps,)
        assert set(event.insert.header(wanted.unroll_starts).priorities) <= {0, 1}


@pytest.mark.parametrize("starts", [0.5, 1.5, 2])
def test_a_guest_that_begins_again_knows_what_it_has_counted_of_unrolls_cut_anew(spec, make_unroll, starts):
    """But for a part of one unroll of each stream: where they begin depends on the oldest that the run still holds."""
    wanted = msgspec.structs.replace(spec, unroll_starts=int(starts * spec.unroll_starts), overlap_steps=1)

    def followed(numbers, wanted=wanted, log="00000000000000aa"):
        host = HostLog()
        guest = guest_of(host, spec, ("transitions=priority",), {"transitions": 4}, wanted)
        host.events = [start(spec, log), *(append(spec, make_unroll, number) for number in numbers)]
        begin, *events = drained(guest)
        return begin.log, [event for event in events if isinstance(event, LogAppend)]

    name, before = followed(range(8))
    again, after = followed(range(3, 12))
    assert again == name != "00000000000000aa"
    for appends in (before, after):
        numbers = [event.log_number for event in appends]
        assert numbers == sorted(set(numbers))
    new = [event for event in after if event.log_number > before[-1].log_number]
    counted_steps = before[-1].insert.first_step + wanted.unroll_starts
    assert counted_steps - wanted.unroll_starts < new[0].insert.first_step <= counted_steps
    longer = msgspec.structs.replace(wanted, unroll_starts=5 * spec.unroll_starts)
    others = followed(range(2), log="00000000000000bb")[0], followed(range(2), longer)[0]
    assert len({name, *others}) == 3


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_unroll_that_cannot_be_read_ends_no_guest(spec, make_unroll, is_cut):
    wanted = msgspec.structs.replace(spec, unroll_starts=2 * spec.unroll_starts) if is_cut else None
    host = HostLog()
    guest = guest_of(host, spec, ("transitions=priority",), {"transitions": 4}, wanted)
    good = [append(spec, make_unroll, number) for number in range(8)]
    bad = LogAppend(3, good[3].insert, b"garbage")
    if not is_cut:  # the replica decodes those, so only what the message says can be wrong here
        bad = LogAppend(3, msgspec.structs.replace(good[3].insert, valid=b""), good[3].block)
    host.events = [start(spec), *good[:3], bad, *good[4:]]
    numbers = [event.number for event in drained(guest) if isinstance(event, LogAppend)]
    assert numbers == ([0, 1, 2] if is_cut else [0, 1, 2, 4, 5, 6, 7])  # 1 of the 3 before, 2 of the 4 after, when cut


def test_another_environment_is_refused(spec, make_unroll):
    host = HostLog()
    guest = guest_of(host, spec, ("unrolls=uniform",), {"unrolls": 1}, msgspec.structs.replace(spec, env="Other-v0"))
    host.events = [start(spec)]
    with pytest.raises(ConfigError, match="does not fit"):
        guest.poll(0)
