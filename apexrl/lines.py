"""Lines that programs say on a terminal and in a log: none controls the terminal, or is repeated without a bound.

A peer's text that has a bound and a pattern of its own (`types`) needs neither. All others pass `printable` where they
go out: in a log, in the text of an error, on the screen of a run.
"""

import logging
import sys
import time
import unicodedata
from collections.abc import Callable, Collection, Sequence
from typing import Any

FORM, TIME_FORM = "%(asctime)s %(name)s: %(message)s", "%H:%M:%S"
ALIKE = 30  # lines of one place in the code that a log takes within ALIKE_SECONDS
ALIKE_SECONDS = 60.0
MAX_PLACES = 4_096  # in the code, whose lines are counted


def printable(text: str) -> str:
    """Returns a text in which escapes stand for all but line ends, tabs and what a terminal shows."""
    if text.isprintable():
        return text
    return "".join(c if _is_shown(c) else c.encode("unicode_escape").decode() for c in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"


def is_utf8(text: str) -> bool:
    """Returns whether files, messages and other programs can hold a text: not the name of a file of other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def say(*texts: object, **options: Any) -> None:
    """Prints texts as `print` does; none of them controls the terminal."""
    print(*(printable(str(text)) for text in texts), **options)


def aligned(rows: Sequence[Sequence[str]], to_the_right: Collection[int]) -> list[list[str]]:
    """Returns the cells of a table, as wide as their columns, of which some are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if i in to_the_right else str.ljust for i in range(len(widths))]
    return [[pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)] for row in rows]


class Repeats:
    """Lets some lines of one kind through in a while, and counts the others. One owner.

    Args:
      seconds: a while, which begins with the first line.
      most: lines in it.
    """

    def __init__(self, seconds: float, most: int = 1, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._most, self._clock = seconds, most, clock
        self._began, self._passed, self._left_out = -seconds, 0, 0

    def let_through(self) -> bool:
        """Takes a line; returns whether it may be said."""
        now = self._clock()
        if now >= self._began + self._seconds:
            self._began, self._passed = now, 0
        self._passed += 1
        self._left_out += self._passed > self._most
        return self._passed <= self._most

    @property
    def is_full(self) -> bool:
        """Whether further lines are left out for now."""
        return self._passed >= self._most

    def more(self) -> str:
        """Returns the number of lines that were left out, for the end of the next one; empty without any."""
        count, self._left_out = self._left_out, 0
        return f" ({count:,} more like this before)" if count else ""


class _Alike(logging.Filter):
    """Leaves out lines of the same place in the code beyond ALIKE in ALIKE_SECONDS; the next one tells how many."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._repeats: dict[tuple[str, int], Repeats] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a record is to be said."""
        place = record.pathname, record.lineno
        if place not in self._repeats and len(self._repeats) >= MAX_PLACES:
            self._repeats.clear()
        repeats = self._repeats.setdefault(place, Repeats(ALIKE_SECONDS, ALIKE, self._clock))
        if not repeats.let_through():
            return False
        record.more = repeats.more() + (" (more like this are counted now, and not said)" if repeats.is_full else "")
        return True


class _Printable(logging.Formatter):
    """Writes a record so that no text in it controls a terminal, or looks like a record of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """Returns a record without its traceback."""
        return _indented(super().formatMessage(record)) + getattr(record, "more", "")

    def formatException(self, ei) -> str:  # type: ignore[no-untyped-def]  # noqa: N802
        """Returns a traceback."""
        return _indented(super().formatException(ei))


def _indented(text: str) -> str:
    return printable(text).replace("\n", "\n    ")


def log_to(
    handler: logging.Handler | None = None,
    form: str = FORM,
    level: int = logging.INFO,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Makes all loggers write to a handler, by default to stderr. Only programs call this."""
    handler = logging.StreamHandler(sys.stderr) if handler is None else handler
    handler.setFormatter(_Printable(form, TIME_FORM))
    handler.addFilter(_Alike(clock))
    logging.basicConfig(level=level, handlers=[handler])
