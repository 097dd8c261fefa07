"""The limiter keeps samples and inserts in proportion, so that no learning curve depends on a machine's speed.

The law, over all transitions since the start:
    error = (inserted - min_size) * samples_per_insert - sampled - forgiven
    inserting may go on while error <= +slack; a batch may be sampled while error >= batch_size - slack.
Nothing is sampled before min_size transitions are there. A queue hands those out as well: its error is
    inserted * samples_per_insert - sampled - forgiven.
`forgiven` is 0 until a server starts again with another samples_per_insert or min_size, until nobody could draw the
samples that were due (`Replay.note_stall`), or until items of a queue are deleted. Then the law is for what comes, and
neither side makes up for the past. A queue that goes on with another pace has due what waits in it.

The limiter only decides which side waits. Inserts that it allowed earlier still come, so the error is at most
    slack + samples_per_insert * (transitions of all inserts that are allowed and not stored yet).
An actor of E streams may have 2 E + 2 unrolls on the way. With many actors this is the wider part of the band.
"""

import dataclasses


@dataclasses.dataclass
class Limiter:
    """Decides which side waits. With `samples_per_insert` 0 neither side waits once min_size is reached."""

    samples_per_insert: float
    min_size: int
    slack: float
    is_queue: bool = False
    inserted: int = 0
    sampled: int = 0
    forgiven: float = 0.0
    min_batch: int = 1  # takes the place of a smaller min_size

    def __post_init__(self) -> None:
        if self.samples_per_insert < 0 or self.min_size < 1 or self.slack <= 0:
            raise ValueError(f"samples_per_insert >= 0, min_size >= 1 and slack > 0 are needed, not {self}")

    @property
    def error(self) -> float:
        """Samples that are due and not drawn yet; negative when more were drawn than were due."""
        return self._paced() * self.samples_per_insert - self.sampled - self.forgiven

    @property
    def has_begun(self) -> bool:
        """True once there is enough to sample from."""
        return self.inserted >= self._start

    def may_insert(self) -> bool:
        """False while the learner is behind by more than the slack."""
        return self.samples_per_insert == 0 or not self.has_begun or self.error <= self.slack

    def may_sample(self, batch_size: int) -> bool:
        """False before min_size transitions are inserted, and while the actors are behind by more than the slack."""
        if not self.has_begun:
            return False
        return self.samples_per_insert == 0 or self.error >= batch_size - self.slack

    def num_batches(self, batch_size: int, most: int) -> int:
        """Returns how many batches, at most `most`, may be sampled one after the other."""
        before, count = self.sampled, 0
        while count < most and self.may_sample(batch_size):
            self.sampled += batch_size
            count += 1
        self.sampled = before
        return count

    def samples_per_insert_so_far(self) -> float:
        """Returns the samples drawn for each transition inserted beyond min_size; in a queue for each at all."""
        return self.sampled / max(self._paced(), 1)

    def resume(self, inserted: int, sampled: int, inserted_since: int, forgiven: float = 0.0) -> None:
        """Continues from the totals of an earlier life, after which `inserted_since` more transitions came.

        The number of samples drawn since then is lost. Before min_size there were none. The limiter assumes that the
        others kept pace with the inserts, so that no learner has to draw them again.
        """
        self.inserted, self.sampled, self.forgiven = inserted, sampled, forgiven
        before_start = min(max(self._start - 1 - inserted, 0), inserted_since)
        self.inserted += before_start
        due = max(self.error, 0.0)
        self.inserted += inserted_since - before_start
        self.sampled += int(max(self.error - due, 0.0))

    def forgive(self, waiting: int = 0) -> None:
        """Forgets what is due, or drawn ahead, of transitions beyond min_size, but for `waiting` items of a queue."""
        self.forgiven += self.error - min(self._paced() * self.samples_per_insert, 0.0) - waiting

    def _paced(self) -> int:
        """Returns the transitions for which samples are due."""
        return self.inserted - (0 if self.is_queue else self._start)

    @property
    def _start(self) -> int:
        return max(self.min_size, self.min_batch)
