"""Checks of the arguments of calls: a server drops a whole message for one wrong number in it, so none is sent."""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from apexrl.casts import exactly
from apexrl.errors import WireError
from apexrl.net import wire
from apexrl.sets import distinct
from apexrl.types import Episode, UnrollHeader

T = TypeVar("T")

MAX_NUMBER = 2**53  # of an unroll


def checked_sizes(batch_sizes: Mapping[str, int]) -> tuple[wire.Want, ...]:
    """Returns the wants of batch sizes by table.

    Raises: ValueError when a server draws no batches of such a size.
    """
    for table, size in batch_sizes.items():
        if not (isinstance(size, int | np.integer) and 1 <= size <= wire.MAX_BATCH):
            raise ValueError(f"batch size {size!r} of table {table}: give a whole number from 1 to {wire.MAX_BATCH}")
    return tuple(wire.Want(table, int(size)) for table, size in batch_sizes.items())


def check_named(table: str, tables: Collection[str]) -> None:
    """Raises KeyError when a table is not among those that a reader asks for."""
    if table not in tables:
        raise KeyError(f"table {table!r} was not named when the client was made, only {sorted(tables)}")


def checked_numbers(numbers: Iterable[int]) -> list[int]:
    """Returns unroll numbers in order, each once.

    Raises: ValueError when one is no whole number from 0 to 2**53.
    """
    found = distinct(checked_whole(list(numbers), "unroll numbers"))
    if len(found) and found[-1] > MAX_NUMBER:
        raise ValueError(f"unroll number {found[-1]}: the largest is {MAX_NUMBER}")
    return [int(number) for number in found]


def checked_update(keys: ArrayLike, priorities: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys [B] int64 and priorities [B] float32.

    Raises: ValueError when keys are no whole numbers from 0, when priorities are negative or not finite, or when there
      are not as many of both.
    """
    keys = checked_whole(keys, "keys")
    try:
        values = exactly(priorities, np.float32, keys.shape)
    except ValueError as error:
        raise ValueError(f"priorities of {error}") from error
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        first = wrong[0]
        given = np.ravel(priorities)[first]
        raise ValueError(f"priority {given} of key {keys[first]}, where finite float32 numbers from 0 are needed")
    return keys, values


def checked_header(header: UnrollHeader) -> UnrollHeader:
    """Returns a header with numbers of Python, which messages are made of, for those of numpy.

    Raises: WireError when one is no number, or no whole one where that is needed.
    """
    numbers = header.stream, header.first_step, header.params_version, header.exploration
    if tuple(map(type, numbers)) == (int, int, int, float) and not header.episodes:  # nearly all
        return header
    return header._replace(
        stream=checked_number(operator.index, header.stream, "stream"),
        first_step=checked_number(operator.index, header.first_step, "first_step"),
        params_version=checked_number(operator.index, header.params_version, "params_version"),
        exploration=checked_number(float, header.exploration, "exploration"),
        episodes=tuple(
            Episode(
                checked_number(float, episode.episode_return, "episode_return"),
                checked_number(operator.index, episode.steps, "steps"),
                checked_number(float, episode.exploration, "exploration"),
            )
            for episode in header.episodes
        ),
    )


def checked_number(cast: Callable[[Any], T], value: object, name: str) -> T:
    """Returns a number as one of Python.

    Raises: WireError when the cast does not take it.
    """
    try:
        return cast(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{name} of {value!r}: {error}") from error


def checked_whole(values: ArrayLike, name: str) -> np.ndarray:
    """Returns numbers [B] int64.

    Raises: ValueError when they are no whole numbers from 0.
    """
    try:
        numbers = exactly(values, np.int64)
    except ValueError as error:
        raise ValueError(f"{name} of {error}") from error
    if numbers.ndim != 1:
        raise ValueError(f"{name} of the shape {numbers.shape}, where one dimension is needed")
    if len(numbers) and numbers.min() < 0:
        raise ValueError(f"{numbers.min()} among {name}, where whole numbers from 0 are needed")
    return numbers
