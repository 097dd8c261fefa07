"""Calls that wait for a server. They send and receive, and leave it to their caller how to wait meanwhile.

A call is written as a generator. It yields the connection from which it needs a message, and the seconds after which it
goes on without one. `finish` waits in the thread, `await` lets the other tasks of an event loop go on.
"""

import asyncio
import functools
import math
import os
import time
from collections.abc import Callable, Generator
from numbers import Real
from typing import Any, Generic, ParamSpec, Self, TypeVar

from apexrl.net.connection import Connection

P = ParamSpec("P")
T = TypeVar("T")
Steps = Generator[tuple[Connection, float], None, T]


def deadline_of(timeout_seconds: float) -> float:
    """Returns when a call gives up, by the monotonic clock. Raises ValueError when the seconds are no number."""
    if not isinstance(timeout_seconds, Real) or math.isnan(timeout_seconds):
        raise ValueError(f"timeout_seconds {timeout_seconds!r}: give the seconds to wait, a number")
    return time.monotonic() + timeout_seconds


class Call(Generic[T]):
    """A call that has not begun: `finish` it, `await` it, or make it part of another one with `yield from`."""

    def __init__(self, steps: Steps[T]):
        self._steps = steps

    def __iter__(self) -> Steps[T]:
        return self._steps

    def __await__(self) -> Generator[Any, None, T]:
        return self._run().__await__()

    def finish(self) -> T:
        """Runs it to its end, and returns its result."""
        try:
            while True:
                connection, seconds = next(self._steps)
                connection.wait(seconds)
        except StopIteration as end:
            return end.value
        finally:
            self._steps.close()

    async def _run(self) -> T:
        try:
            while True:
                connection, seconds = next(self._steps)
                if not connection.is_readable:
                    await _readable(connection, seconds)
        except StopIteration as end:
            return end.value
        finally:
            self._steps.close()


def call(function: Callable[P, Steps[T]]) -> Callable[P, Call[T]]:
    """Makes a generator function one that returns a call."""

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> Call[T]:
        return Call(function(*args, **kwargs))

    return make


async def _readable(connection: Connection, seconds: float) -> None:
    """Waits until the descriptor says something; it does so once, and to all who wait.

    A loop has one reader of a descriptor, and the program may be that of the connection's: so this is another one.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    if not connection.waiters:
        connection.watched = os.dup(connection.fileno())
        loop.add_reader(connection.watched, _wake, connection)
    connection.waiters.add(waiter)
    try:
        await asyncio.wait({waiter}, timeout=seconds)
    finally:
        connection.waiters.discard(waiter)
        if not connection.waiters:
            loop.remove_reader(connection.watched)
            os.close(connection.watched)


def _wake(connection: Connection) -> None:
    for waiter in connection.waiters:
        if not waiter.done():
            waiter.set_result(None)


class Closing:
    """Closes itself at the end of a `with`."""

    def close(self) -> None:
        """Ends all use."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
