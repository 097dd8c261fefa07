"""Tables of whole unrolls without priorities in their draws: uniform, first-in and last-in first-out, and elite."""

import collections

import numpy as np

from apexrl.replay.limiter import Limiter
from apexrl.replay.table import TableState, has_other_pace, resume, state_of
from apexrl.sets import are_in, distinct
from apexrl.types import Granularity, Sample

ELITE_DRAWS = 20  # places, of which the worst is overwritten


class UnrollTable:
    """The common part of tables of unrolls without priorities: the numbers that can be drawn, which are the keys.

    The rank of an unroll is the count of those held before it.
    """

    granularity: Granularity = "unrolls"

    def __init__(self, limiter: Limiter, rng: np.random.Generator):
        self.limiter = limiter
        self._rng = rng
        self._first_number = 0
        self._end_number = 0
        self._floor = 0  # all below it were taken out
        # Numbers held that were taken out, or that a damaged journal lost, ascending.
        self._missing = np.zeros(0, np.int64)

    def insert(self, first_number: int, priorities: np.ndarray, valid: np.ndarray) -> None:
        """Takes note of new unrolls: priorities [M, P] before the exponent, valid [M, K] where a transition starts."""
        self._first_number = first_number if self._first_number == self._end_number else self._first_number
        self._end_number = first_number + len(priorities)
        self.limiter.inserted += len(priorities)

    def skip(self, end_number: int) -> None:
        """The numbers up to end_number - 1 that were not inserted do not exist."""
        if self._first_number == self._end_number:
            self._first_number = end_number
        lost = np.arange(max(self._end_number, self._first_number), end_number)
        self._missing = np.concatenate([self._missing, lost])
        self._end_number = end_number

    def evict(self, number: int) -> None:
        """Takes the oldest unroll out of sampling."""
        self._missing = self._missing[self._num_missing_before(number + 1) :]
        self._first_number = number + 1

    def can_sample(self, batch_size: int) -> bool:
        """False when nothing is there to be drawn, whatever the limiter says."""
        return self._size_from(self._oldest()) >= batch_size

    def sample(self, batch_size: int) -> Sample:
        """Draws a batch; call only when `can_sample`."""
        raise NotImplementedError

    def samples(self, batch_size: int, most: int) -> list[Sample]:
        """Draws up to `most` batches, each by itself."""
        samples: list[Sample] = []
        while len(samples) < most and self.can_sample(batch_size):
            samples.append(self.sample(batch_size))
        return samples

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Does nothing: this table has no priorities."""

    def delete(self, keys: np.ndarray | None) -> int:
        """Takes items out of sampling for ever, with None all. Returns how many could be drawn before."""
        before = self._size_from(self._oldest())
        self._take_out(np.arange(self._oldest(), self._end_number) if keys is None else keys)
        return before - self._size_from(self._oldest())

    def state(self) -> TableState:
        """Returns the state that survives a restart."""
        return state_of(self.limiter, numbers=self._left())

    def restore(self, state: TableState, first_number: int, end_number: int) -> None:
        """Takes the state; unrolls that came after it are all there.

        Raises: ValueError when the state does not fit.
        """
        left = np.frombuffer(b"" if state.priorities else state.numbers, np.int64)  # an elite table keeps others
        resume(self.limiter, state, self._size_from(max(end_number, self._first_number)))
        self._take_out(left[left < end_number])

    def begin_anew(self) -> None:
        """Goes on without a state: all that is inserted was sampled as often as it was due."""
        self.limiter.resume(0, 0, self.limiter.inserted)

    def _oldest(self) -> int:
        """Returns the number from which on unrolls can be drawn."""
        return max(self._floor, self._first_number)

    def _left(self) -> bytes:
        """Returns the numbers held that cannot be drawn, for a state."""
        return np.append(np.arange(self._first_number, self._floor), self._missing).tobytes()

    def _take_out(self, numbers: np.ndarray) -> None:
        """Takes unrolls out of those that can be drawn; it ignores numbers that are not held."""
        numbers = distinct(numbers)
        numbers = numbers[(numbers >= self._oldest()) & (numbers < self._end_number)]
        places = np.searchsorted(self._missing, numbers)
        known = np.append(self._missing, -1)[places] == numbers
        self._missing = np.insert(self._missing, places[~known], numbers[~known])
        floor = max(self._floor, self._first_number)
        run = int((self._missing == floor + np.arange(len(self._missing))).sum())
        self._floor, self._missing = floor + run, self._missing[run:]

    def _size_from(self, number: int) -> int:
        """Returns how many unrolls are held from a number on."""
        return max(self._end_number - number - len(self._missing) + self._num_missing_before(number), 0)

    def _numbers_from(self, number: int, ranks: np.ndarray) -> np.ndarray:
        """Returns the numbers [B] of the unrolls at ranks [B] among those from a number on."""
        missing = self._missing[self._num_missing_before(number) :]
        held_before = missing - number - np.arange(len(missing))
        return number + ranks + np.searchsorted(held_before, ranks, side="right")

    def _num_missing_before(self, number: int) -> int:
        return int(np.searchsorted(self._missing, number))


class UniformTable(UnrollTable):
    """Whole unrolls, each as likely as any other, none twice in a batch. The limiter counts unrolls."""

    def __init__(self, limiter: Limiter, rng: np.random.Generator, capacity: int = 0):
        """Makes an empty table of the newest `capacity` unrolls, or with 0 of all that the log holds."""
        super().__init__(limiter, rng)
        self._capacity = capacity

    def sample(self, batch_size: int) -> Sample:
        oldest = self._oldest()
        size = self._size_from(oldest)
        # In random order: a learner that looks at the first of them only sees a fair draw, too.
        keys = self._numbers_from(oldest, self._rng.choice(size, batch_size, replace=False))
        self.limiter.sampled += batch_size
        return Sample(keys, np.full(batch_size, 1 / size), np.ones(batch_size, np.float32))

    def _oldest(self) -> int:
        oldest = super()._oldest()
        return max(oldest, self._end_number - self._capacity) if self._capacity else oldest


class FifoTable(UnrollTable):
    """Whole unrolls in the order of the log, each once. One that is evicted before it was drawn counts as missed."""

    def __init__(self, limiter: Limiter, rng: np.random.Generator):
        super().__init__(limiter, rng)
        self.num_missed = 0
        self._next_number = 0

    def evict(self, number: int) -> None:
        is_missing = self._num_missing_before(number + 1) > 0
        self.num_missed += self._oldest() <= number and not is_missing
        super().evict(number)

    def keep_newest(self, count: int) -> None:
        """Forgets unrolls that were not handed out yet, but for the newest so many."""
        self.num_missed += self._keep(count)

    def sample(self, batch_size: int) -> Sample:
        keys = self._numbers_from(self._oldest(), np.arange(batch_size))
        self._next_number = int(keys[-1]) + 1
        self.limiter.sampled += batch_size
        return Sample(keys, np.ones(batch_size), np.ones(batch_size, np.float32))

    def state(self) -> TableState:
        return state_of(self.limiter, next_number=self._next_number, numbers=self._left())

    def restore(self, state: TableState, first_number: int, end_number: int) -> None:
        """Goes on behind the last unroll that was handed out.

        Of those that came after the state, as many were handed out as the limiter assumes, and are not given again.

        Raises: ValueError when the state does not fit.
        """
        if state.priorities or state.samples_per_insert > 1:
            raise ValueError("it is of a table that is no queue")
        super().restore(state, first_number, end_number)
        self._next_number = min(state.next_number, end_number)
        left, oldest = np.frombuffer(state.numbers, np.int64), max(self._next_number, first_number)
        waited = max(end_number - oldest, 0) - int(((left >= oldest) & (left < end_number)).sum())
        came, drawn = self.limiter.inserted - state.inserted, self.limiter.sampled - state.sampled
        self._keep(waited + came - drawn)
        if has_other_pace(self.limiter, state):
            self.limiter.forgive(waiting=self._size_from(self._oldest()))

    def begin_anew(self) -> None:
        super().begin_anew()
        self._keep(self.limiter.inserted - self.limiter.sampled)

    def _keep(self, count: int) -> int:
        """Keeps the newest so many of those that were not handed out; returns how many are forgotten."""
        num_forgotten = max(self._size_from(self._oldest()) - count, 0)
        if num_forgotten:
            self._next_number = int(self._numbers_from(self._oldest(), np.array([num_forgotten - 1]))[0]) + 1
        return num_forgotten

    def _oldest(self) -> int:
        return max(self._next_number, super()._oldest())


class LifoTable(UnrollTable):
    """Whole unrolls, each once, the newest first. One that is evicted before it was drawn counts as missed."""

    def __init__(self, limiter: Limiter, rng: np.random.Generator):
        super().__init__(limiter, rng)
        self.num_missed = 0
        self._stack: collections.deque[int] = collections.deque()  # numbers, ascending

    def insert(self, first_number: int, priorities: np.ndarray, valid: np.ndarray) -> None:
        super().insert(first_number, priorities, valid)
        self._stack.extend(range(first_number, self._end_number))

    def evict(self, number: int) -> None:
        super().evict(number)
        if self._stack and self._stack[0] == number:
            self._stack.popleft()
            self.num_missed += 1

    def can_sample(self, batch_size: int) -> bool:
        return len(self._stack) >= batch_size

    def sample(self, batch_size: int) -> Sample:
        keys = np.array([self._stack.pop() for _ in range(batch_size)], np.int64)
        self.limiter.sampled += batch_size
        return Sample(keys, np.ones(batch_size), np.ones(batch_size, np.float32))

    def delete(self, keys: np.ndarray | None) -> int:
        before, gone = len(self._stack), set(self._stack if keys is None else keys.tolist())
        self._stack = collections.deque(number for number in self._stack if number not in gone)
        return before - len(self._stack)

    def state(self) -> TableState:
        held = np.array(self._stack, np.int64) - self._first_number
        left = np.delete(np.arange(self._first_number, self._end_number), held)
        return state_of(self.limiter, numbers=left.tobytes())

    def restore(self, state: TableState, first_number: int, end_number: int) -> None:
        super().restore(state, first_number, end_number)
        left = set(self._missing.tolist())
        self._stack = collections.deque(n for n in self._stack if n >= self._floor and n not in left)
        if has_other_pace(self.limiter, state):
            self.limiter.forgive(waiting=len(self._stack))


class EliteTable(UnrollTable):
    """Whole unrolls, as a uniform table hands them out; a full one overwrites the worst of a few, not the oldest.

    A new unroll has priority 1. When the table is full it takes the place of the one with the smallest priority among
    `ELITE_DRAWS` drawn ones. An unroll of priority 0 leaves. What the log evicts leaves, too.

    Source: github.com/parralplex/elite_buffer_vtrace (2022), elite insertion. There the largest distance is
    overwritten, here the smallest priority: the learner gives priorities that fall with the distance.
    """

    def __init__(self, limiter: Limiter, rng: np.random.Generator, capacity: int):
        super().__init__(limiter, rng)
        self._numbers = np.zeros(capacity, np.int64)  # of the places in use, which come first
        self._priorities = np.zeros(capacity, np.float32)
        self._places: dict[int, int] = {}  # by number

    def insert(self, first_number: int, priorities: np.ndarray, valid: np.ndarray) -> None:
        super().insert(first_number, priorities, valid)
        for number in range(first_number, self._end_number):
            self._put(number)

    def evict(self, number: int) -> None:
        super().evict(number)
        self._remove(number)

    def can_sample(self, batch_size: int) -> bool:
        return len(self._places) >= batch_size

    def sample(self, batch_size: int) -> Sample:
        size = len(self._places)
        keys = self._numbers[self._rng.choice(size, batch_size, replace=False)]
        self.limiter.sampled += batch_size
        return Sample(keys, np.full(batch_size, 1 / size), np.ones(batch_size, np.float32))

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities of the unrolls still kept, in order; those of priority 0 leave."""
        for number, priority in zip(keys.tolist(), priorities.tolist(), strict=True):
            if priority == 0:
                self._remove(number)
            elif number in self._places:
                self._priorities[self._places[number]] = priority

    def delete(self, keys: np.ndarray | None) -> int:
        before = len(self._places)
        for number in list(self._places) if keys is None else keys.tolist():
            self._remove(number)
        return before - len(self._places)

    def state(self) -> TableState:
        size = len(self._places)
        priorities, numbers = self._priorities[:size], self._numbers[:size]
        if not size and self._end_number > self._first_number:  # it kept none, unlike a table of another kind
            priorities, numbers = np.zeros(1, np.float32), np.full(1, -1)
        return state_of(self.limiter, priorities=priorities.tobytes(), numbers=numbers.tobytes())

    def restore(self, state: TableState, first_number: int, end_number: int) -> None:
        """Takes the unrolls that the state kept and the log still holds, and after them all that are newer.

        Raises: ValueError when the state does not fit.
        """
        kept, priorities = np.frombuffer(state.numbers, np.int64), np.frombuffer(state.priorities, np.float32)
        if len(kept) != len(priorities):
            raise ValueError(f"priorities of {len(priorities)} unrolls, not of {len(kept)}")
        if not np.isfinite(priorities).all():
            raise ValueError("priorities that are not finite")
        if not len(kept) and end_number > first_number:
            raise ValueError("it is of a table that kept no unrolls, such as one of another kind")
        resume(self.limiter, state, self._size_from(max(end_number, self._first_number)))
        held = (kept >= self._first_number) & (kept < end_number) & ~are_in(kept, self._missing)
        self._places.clear()
        for number, priority in zip(kept[held].tolist(), priorities[held].tolist(), strict=True):
            self._put(number, priority)
        newer = np.arange(max(end_number, self._first_number), self._end_number)
        for number in newer[~are_in(newer, self._missing)].tolist():
            self._put(number)

    def _put(self, number: int, priority: float = 1.0) -> None:
        """Keeps an unroll, in a free place or in that of the worst of some drawn ones."""
        place = len(self._places)
        if place == len(self._numbers):
            drawn = self._rng.integers(place, size=ELITE_DRAWS)
            place = int(drawn[self._priorities[drawn].argmin()])
            del self._places[int(self._numbers[place])]
        self._numbers[place], self._priorities[place] = number, priority
        self._places[number] = place

    def _remove(self, number: int) -> None:
        """Forgets an unroll; the last place moves into its own."""
        place = self._places.pop(number, None)
        if place is not None and place < (last := len(self._places)):
            self._numbers[place], self._priorities[place] = self._numbers[last], self._priorities[last]
            self._places[int(self._numbers[place])] = place
