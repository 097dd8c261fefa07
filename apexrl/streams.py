"""Streams from unrolls: their order, and the steps of each environment, joined again and cut for another spec.

Numpy, single-threaded, without clock or socket. The unrolls of one stream have to come in their order.
"""

import collections
from collections.abc import Iterable, Iterator

import numpy as np

from apexrl.types import EnvironmentSpec, StreamSpec, Unroll

SILENT_ROUNDS = 8  # unrolls that come for each stream while one is silent that has ended
TAILS_BYTES = 2**28
NO_UNROLL = -1  # in the place of an unroll's number

Stream = tuple[str, int]  # an actor's name, and the number of one of its streams


class SeenSteps:
    """The number of steps that were seen of each stream, for unrolls of T steps."""

    def __init__(self, unroll_steps: int):
        self._unroll_steps = unroll_steps
        self._ends: dict[Stream, int] = {}

    def known(self, stream: Stream, first_step: int) -> int | None:
        """Takes an unroll; returns how many of its steps were seen before, None where steps before it are missing."""
        end = first_step + self._unroll_steps
        seen, self._ends[stream] = self._ends.get(stream, -1), end
        return seen - first_step if first_step <= seen <= end else None

    def forget(self, stream: Stream) -> None:
        """Forgets a stream that has ended."""
        del self._ends[stream]


class StreamOrder:
    """An index of a log's newest unrolls, by number: the order of each stream, and the beginnings of episodes.

    Owned by one thread.
    """

    def __init__(self, ring_unrolls: int, unroll_starts: int):
        self.ring_unrolls = ring_unrolls
        self._unroll_starts = unroll_starts
        self._numbers, self._previous, self._next = (np.full(ring_unrolls, NO_UNROLL, np.int64) for _ in range(3))
        self._begins = np.zeros(ring_unrolls, bool)  # an episode begins before the last observation of the unroll
        self._ends = np.zeros(ring_unrolls, bool)  # an episode begins at the last one: the next unroll's first
        self._newest: dict[Stream, tuple[int, int]] = {}  # by actor and stream: a number, and its first step

    def add(self, number: int, actor: str, stream: int, first_step: int, starts: np.ndarray) -> int:
        """Adds an unroll, in place of the one that is ring_unrolls older.

        Args:
          starts: [T + 1] of the unroll.
        Returns: the number of the unroll before it in its stream; -1 where that is not held.
        """
        position = number % self.ring_unrolls
        self._numbers[position] = number
        self._begins[position], self._ends[position] = starts[:-1].any(), starts[-1]
        previous, its_first_step = self._newest.get((actor, stream), (NO_UNROLL, 0))
        if not self.holds(previous) or its_first_step + self._unroll_starts != first_step:
            previous = NO_UNROLL
        else:
            self._next[self._place(previous)] = number
        self._previous[position], self._next[position] = previous, NO_UNROLL
        self._newest[actor, stream] = number, first_step
        if len(self._newest) > self.ring_unrolls:  # some are of actors that ended long ago
            self._newest = {key: place for key, place in self._newest.items() if self.holds(place[0])}
        return previous

    def holds(self, number: int) -> bool:
        """Returns whether an unroll is among the newest."""
        return number != NO_UNROLL and bool(self._numbers[self._place(number)] == number)

    def held(self, numbers: np.ndarray) -> np.ndarray:
        """Returns [M] bool: which unrolls are among the newest."""
        return self._numbers[numbers % self.ring_unrolls] == numbers

    def beginning(self, number: int) -> int:
        """Returns the unroll in which the episode of an unroll begins; the oldest one held where that is evicted."""
        while not self._begins[self._place(number)] and self.holds(
            previous := int(self._previous[self._place(number)])
        ):
            number = previous
        return number

    def following(self, number: int, is_first: bool) -> int:
        """Returns the unroll in which a walk goes on, -1 where its episode ends or the next unroll is not there yet.

        Args:
          is_first: the walk begins with this unroll, with the last episode that begins in it.
        """
        position = self._place(number)
        if self._ends[position] or (self._begins[position] and not is_first):
            return NO_UNROLL
        return int(self._next[position])

    def _place(self, number: int) -> int:
        return number % self.ring_unrolls


class _Tail:
    """The steps of one stream that no unroll has begun with yet, as arrays by field."""

    def __init__(self, first_step: int, arrays: dict[str, np.ndarray]):
        self.first_step = first_step
        self.arrays = arrays
        self.heard = 0  # the count of unrolls when its last one came


class StreamCutter:
    """Joins the streams of one log, and cuts them into unrolls of another spec of the same environment.

    The newest steps of a stream wait for those that complete their unroll. Where they take much memory, those of a
    stream that has fallen silent are dropped: actors come and go, and a new one has new streams.
    """

    def __init__(self, log: StreamSpec, wanted: StreamSpec):
        """Takes a log's spec and another one, of which `why_not_cut` says nothing."""
        self._wanted = wanted
        self._seen = SeenSteps(log.unroll_steps)
        self._tails: collections.OrderedDict[Stream, _Tail] = collections.OrderedDict()  # the last heard at the end
        self._kept_tails = TAILS_BYTES // (log.unroll_bytes + wanted.unroll_bytes)
        self._num_unrolls = 0
        stacked = log.stacked_frames
        # By field: the entries beyond one a step. Starts are kept for all frames, as `UnrollBuilder` does.
        self._beyond = {"frame": stacked, "start": stacked, "action": 0, "reward": 0, "discount": 0}
        self._beyond |= {field.name: int(field.at == "observation") for field in wanted.extras}
        self._firsts = [field.name for field in wanted.extras if field.at == "first"]
        self._log_starts = log.unroll_starts
        self._firsts_dropped = wanted.unroll_starts // log.unroll_starts

    def add(self, stream: Stream, first_step: int, unroll: Unroll) -> Iterator[tuple[int, Unroll]]:
        """Takes the next unroll of a stream; yields those that it completes, each with the position of its first step.

        All of them have to be taken before the next call.
        """
        known, arrays = self._seen.known(stream, first_step), self._arrays_of(unroll)
        if known is None or self._misses_firsts(self._tails[stream], first_step):
            tail = self._tails[stream] = _Tail(first_step, arrays)
        else:
            tail = self._tails[stream]
            for name, array in arrays.items():
                new = array if name in self._firsts else array[known + self._beyond[name] :]
                tail.arrays[name] = np.concatenate([tail.arrays[name], new])
        self._forget_silent(stream, tail)
        while len(tail.arrays["action"]) >= self._wanted.unroll_steps:
            yield tail.first_step, self._cut(tail)
            tail.first_step += self._wanted.unroll_starts
            for name, array in tail.arrays.items():
                dropped = self._firsts_dropped if name in self._firsts else self._wanted.unroll_starts
                tail.arrays[name] = array[dropped:]

    def _misses_firsts(self, tail: _Tail, first_step: int) -> bool:
        """True when an unroll before this one is missing, of which only the steps are known."""
        due = (tail.first_step + len(tail.arrays[name]) * self._log_starts for name in self._firsts)
        return any(step != first_step for step in due)

    def _forget_silent(self, stream: Stream, tail: _Tail) -> None:
        """Takes note that a stream was heard; where there are many, forgets those that have ended."""
        self._num_unrolls += 1
        tail.heard = self._num_unrolls
        self._tails.move_to_end(stream)
        while len(self._tails) > self._kept_tails:
            if self._num_unrolls - next(iter(self._tails.values())).heard <= SILENT_ROUNDS * len(self._tails):
                return
            gone, _ = self._tails.popitem(last=False)
            self._seen.forget(gone)

    def _arrays_of(self, unroll: Unroll) -> dict[str, np.ndarray]:
        older = np.zeros(self._wanted.stacked_frames - 1, bool)  # their frames are hidden already
        starts = np.concatenate([older, unroll.starts])
        steps = {"action": unroll.actions, "reward": unroll.rewards, "discount": unroll.discounts}
        extras = {field.name: unroll.extras[field.name] for field in self._wanted.extras}
        return {"frame": unroll.frames, "start": starts} | steps | extras

    def _cut(self, tail: _Tail) -> Unroll:
        steps, older = self._wanted.unroll_steps, self._wanted.stacked_frames - 1
        cut = {name: array[: steps + self._beyond[name]] for name, array in tail.arrays.items()}
        extras = {field.name: cut[field.name] for field in self._wanted.extras}
        extras |= {name: tail.arrays[name][:1] for name in self._firsts}
        frames, starts = cut["frame"].copy(), cut["start"]
        for j in range(1, older + 1):  # frames of the game before are not seen by a stack of this one
            if starts[j]:
                frames[:j] = 0
        return Unroll(frames, cut["action"], cut["reward"], cut["discount"], starts[older:], extras)


def difference(held: StreamSpec, other: StreamSpec) -> str:
    """Returns the fields in which two specs differ, as "env is A, not B"; an empty string where they are equal."""
    return "; ".join(_differing(held, other, StreamSpec.__struct_fields__))


def _differing(held: EnvironmentSpec, other: EnvironmentSpec, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        ours, theirs = getattr(held, name), getattr(other, name)
        if ours != theirs:
            ours, theirs = ("none" if value in ("", ()) else value for value in (ours, theirs))
            yield f"{name} is {ours}, not {theirs}"


def why_not_cut(log: StreamSpec, wanted: StreamSpec) -> str:
    """Returns the field for which a log's streams cannot be cut into unrolls of another spec, or an empty string.

    A field that only the log has is left out. Other lengths and overlaps are no hindrance.
    """
    for differing in _differing(log, wanted, EnvironmentSpec.__struct_fields__):
        return f"its {differing}"
    held = {field.name: field for field in log.extras}
    for field in wanted.extras:
        needed = f"{field.dtype} {list(field.shape)} at each {field.at}"
        if field.name not in held:
            return f"it has no field {field.name} ({needed})"
        if held[field.name] != field:
            own = held[field.name]
            return f"its field {field.name} is {own.dtype} {list(own.shape)} at each {own.at}, not {needed}"
        if field.at == "first" and wanted.unroll_starts % log.unroll_starts:
            return (
                f"it has the field {field.name} at the first of each {log.unroll_starts} steps: "
                f"--unroll-starts {wanted.unroll_starts} has to be a multiple"
            )
    return ""
