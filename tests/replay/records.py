"""Journals of small records, for tests."""

import numpy as np

from apexrl.replay.journal import Journal
from apexrl.replay.recovery import recover
from apexrl.replay.segment import Entry, scan

SMALL_FILE_BYTES = 240


def record(number):
    return b"message %d" % number, bytes([number % 256]) * (20 + number % 7)


def fill(journal, numbers):
    """Appends one record at a time."""
    for number in numbers:
        journal.append(number, [record(number)])


def entries(numbers):
    return [Entry(number, *record(number)) for number in numbers]


def failing(number, message):
    """A function that raises an OSError."""

    def fail(*_):
        raise OSError(number, message)

    return fail


def powers_of(table, num_items):
    """Returns the priorities [M, num_items] of the unrolls that a table holds, after the exponent."""
    return np.frombuffer(table.state().priorities, np.float32).reshape(-1, num_items)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def open_again(directory, **options):
    """A journal for the next life of the server."""
    return Journal(directory, recover(directory).identity, **options)


def last_file(directory):
    return sorted(directory.glob("unrolls-*.log"))[-1]


def header_of(path):
    return scan(path.read_bytes()).header
