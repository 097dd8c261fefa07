import pytest

from apexrl.replay.log import LogEntry, UnrollLog


def record(number):
    return LogEntry(b"m%d" % number, b"block", 3, float(number))


def test_a_ring_holds_the_newest():
    log = UnrollLog(4)
    for number in range(4):
        assert log.append(record(number)) == number
    assert log.free == 0
    assert log.evict() == 0
    assert log.append(record(4)) == 4
    assert [log.get(n) for n in range(-1, 6)] == [None, None, *map(record, range(1, 5)), None]
    assert (len(log), log.num_transitions, log.num_bytes) == (4, 12, 4 * len(b"m1block"))


def test_missing_numbers_are_neither_held_nor_counted():
    log = UnrollLog(6)
    log.skip_to(10)
    assert (log.first_number, log.end_number, len(log)) == (10, 10, 0)
    log.append(record(10))
    log.skip_to(13)
    log.append(record(13))
    assert (log.first_number, log.end_number, log.free) == (10, 14, 2)
    assert [log.get(n) for n in range(9, 15)] == [None, record(10), None, None, record(13), None]
    assert log.num_transitions == 6
    log.skip_to(14)
    for number in range(10, 14):
        assert log.evict() == number
    assert (log.num_transitions, log.num_bytes, len(log)) == (0, 0, 0)


def test_what_cannot_be_skipped_to_is_refused():
    log = UnrollLog(6)
    log.append(record(0))
    for number in (0, 7):
        with pytest.raises(ValueError, match="skip"):
            log.skip_to(number)
    log.skip_to(6)
    assert log.free == 0


def test_an_empty_log_skips_only_ahead():
    log = UnrollLog(3)
    log.skip_to(1000)
    with pytest.raises(ValueError, match="skip"):
        log.skip_to(5)
    assert log.append(record(1000)) == 1000
