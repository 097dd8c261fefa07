"""One replay: the log, its journal, the tables that sample it, and the limiters between inserts and samples."""

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apexrl.config.sections import ReplayConfig
from apexrl.config.tables import DISTINCT, QUEUES, TableConfig, tables_of
from apexrl.replay.draw_counter import DrawCounter
from apexrl.replay.journal import SNAPSHOT_FILE, Journal, LogIdentity
from apexrl.replay.kinds import Table, make_table
from apexrl.replay.log import LogEntry, UnrollLog
from apexrl.replay.snapshot import Snapshot, recover_snapshot
from apexrl.sets import distinct
from apexrl.types import Sample

logger = logging.getLogger(__name__)

AT_ONCE = 4096  # unrolls that a restored table takes
ROOM_BATCHES = 2  # that a bound of bytes should hold, where it held less than one


class RecoveredUnroll(NamedTuple):
    """An unroll read back from a journal."""

    number: int
    entry: LogEntry
    priorities: np.ndarray  # [P]
    valid: np.ndarray  # [K] bool


class Replay:
    """Owns all experience of a server. Single-threaded. It takes every insert; the limiters say which side waits."""

    def __init__(self, config: ReplayConfig, identity: LogIdentity, seed: int, journal: Journal | None = None):
        """Makes an empty replay.

        Raises: ConfigError when the configuration of the tables cannot work.
        """
        spec = identity.spec
        self.config = config
        self.identity = identity
        self.spec = spec
        self.soft_unrolls = -(-config.capacity // spec.unroll_starts)
        self.ring_unrolls = ring_unrolls(config.capacity, spec.unroll_starts)
        self.max_bytes = max_bytes_of(config)
        self.log = UnrollLog(self.ring_unrolls)
        self.journal = journal
        self.num_batches = 0
        self.num_stalls = 0
        self._is_stalled = False
        self._learners: tuple[Mapping[str, int], ...] = ()
        self._settings: dict[str, TableConfig] = tables_of(config, spec.unroll_starts, spec.has_unroll_priorities)
        exponents = config.priority_exponent, config.importance_exponent
        seeds = np.random.SeedSequence([seed, identity.life]).spawn(len(self._settings))
        self.tables: dict[str, Table] = {
            name: make_table(table, self.ring_unrolls, spec, exponents, table_seed)
            for (name, table), table_seed in zip(self._settings.items(), seeds, strict=True)
        }
        self._counters = {
            name: DrawCounter(table.most_draws, self._items_of(name))
            for name, table in self._settings.items()
            if table.most_draws
        }
        self.set_batch_sizes()

    @property
    def fill(self) -> float:
        """The log's size as a share of its bound: of transitions or of bytes, whichever it is nearer to."""
        return max(self.log.num_transitions / self.config.capacity, self.log.num_bytes / self.max_bytes)

    def set_batch_sizes(self, *learners: Mapping[str, int]) -> None:
        """Takes the batch sizes of each learner, by table, and fits the limiters to them.

        A queue's slack is 2 batches. That of another table is 4 batches, or a tenth of the samples due at the start,
        whichever is more. A table that draws no unroll twice in a batch begins with at least a batch, the smallest one:
        a reader of larger ones holds up nobody.
        """
        self._learners = learners
        for name, table in self.tables.items():
            settings, limiter, batch_size = self._settings[name], table.limiter, self._batch_size(name)
            if settings.kind in QUEUES:
                limiter.slack = 2.0 * batch_size
                continue
            due = 0.1 * settings.samples_per_insert * settings.min_size_to_sample
            limiter.slack = max(4.0 * batch_size, due)
            if settings.kind in DISTINCT:
                limiter.min_batch = min((sizes[name] for sizes in learners if name in sizes), default=1)

    def why_never(self, table: str, batch_size: int) -> str:
        """Returns the reason why a table can never give such batches, or an empty string."""
        settings = self._settings[table]
        if settings.kind == "priority":
            return ""
        held = min(settings.capacity or self.soft_unrolls, self.soft_unrolls)
        if settings.kind in QUEUES:
            held = self.ring_unrolls
        needed = f"too few for a batch of {batch_size} different ones"
        if batch_size > held:
            return f"table {table} holds {held} unrolls, {needed}"
        held, num_bytes = len(self.log), self.log.num_bytes
        if batch_size <= held or not held or num_bytes + num_bytes / held <= self.max_bytes:  # one more fits
            return ""
        gb = ROOM_BATCHES * batch_size * num_bytes / held / 1e9
        return f"table {table}: --max-gb {self.config.max_gb:.3g} holds {held} unrolls, {needed}: give {gb:.3g} or more"

    def insert(self, entries: Sequence[LogEntry], priorities: np.ndarray, valid: np.ndarray) -> int:
        """Journals M unrolls with priorities [M, P] and valid [M, K], appends them to the log, makes them sampleable.

        Returns: the number of the first one.
        Raises: JournalError when the disk does not take them; nothing has changed then.
        """
        first = self.log.end_number
        if self.journal is not None:
            self.journal.append(first, [(entry.message, entry.block) for entry in entries])
        done = 0
        while done < len(entries):
            if self.log.free == 0:
                self._evict_to(self.soft_unrolls)
            stop = min(done + self.log.free, len(entries))
            for entry in entries[done:stop]:
                self.log.append(entry)
            for table in self.tables.values():
                table.insert(first + done, priorities[done:stop], valid[done:stop])
            done = stop
        self._evict_to(self.ring_unrolls)
        return first

    def restore(self, unrolls: Sequence[RecoveredUnroll], end_number: int, directory: Path) -> None:
        """Fills an empty replay with the unrolls of its journal and the priorities of the last snapshot.

        Raises: ValueError when the unrolls are not in order.
        """
        first = max(end_number - self.soft_unrolls, 0)
        unrolls = [item for item in unrolls if item.number >= first]
        for _, together in itertools.groupby(enumerate(unrolls), key=lambda i: (i[1].number - i[0], i[0] // AT_ONCE)):
            run = [item for _, item in together]  # without a gap
            self.skip_to(run[0].number)
            for item in run:
                self.log.append(item.entry)
            priorities, valid = np.stack([item.priorities for item in run]), np.stack([item.valid for item in run])
            for table in self.tables.values():
                table.insert(run[0].number, priorities, valid)
        self.skip_to(end_number)
        snapshot = recover_snapshot(directory / SNAPSHOT_FILE, self.identity.log)
        # Unrolls that a power cut took after the snapshot may have lost their numbers to other unrolls.
        same_until = 0 if snapshot is None else self.identity.end_of_life(snapshot.life, snapshot.end_number)
        if snapshot is not None:
            since = sum(item.entry.transitions for item in unrolls if item.number >= same_until)
            self.log.num_inserted = max(snapshot.inserted + since, self.log.num_transitions)
        for name, table in self.tables.items():
            state = snapshot.tables.get(name) if snapshot is not None else None
            try:
                if snapshot is None or state is None:
                    raise ValueError("there is no snapshot of it")
                table.restore(state, snapshot.first_number, same_until)
                if name in self._counters:
                    self._counters[name].restore(state, same_until)
            except ValueError as error:
                logger.warning("table %s goes on with the actors' own priorities: %s", name, error)
                table.begin_anew()
        self._evict_to(self.ring_unrolls)

    def skip_to(self, number: int) -> None:
        """Goes on at a number; those before it that were not inserted do not exist. Old ones make room for them."""
        if number != self.log.end_number:
            self._evict_to(max(self.ring_unrolls - (number - self.log.end_number), 0))
            self.log.skip_to(number)
            for table in self.tables.values():
                table.skip(number)

    def snapshot(self) -> Snapshot:
        """Returns a copy of the state of all tables."""
        tables = {name: table.state() for name, table in self.tables.items()}
        tables |= {name: counter.added_to(tables[name]) for name, counter in self._counters.items()}
        log = self.log
        return Snapshot(
            self.identity.log, self.identity.life, log.first_number, log.end_number, tables, log.num_inserted
        )

    def sample(self, table: str, batch_size: int) -> Sample:
        """Draws a batch. Call it only when `why_no_sample` returns an empty string."""
        return self._draw(table, batch_size, 1)[0]

    def samples(self, table: str, batch_size: int, most: int, drawn: dict[int, LogEntry] | None = None) -> list[Sample]:
        """Draws the batches, at most `most`, that `sample` could draw now, one after the other, without an eviction.

        Args:
          drawn: gets the unrolls that they name, by number.
        """
        if self.why_no_sample(table, batch_size):
            return []
        period = self.config.eviction_period_batches
        most = 1 if table in self._counters else min(most, period - self.num_batches % period)
        return self._draw(table, batch_size, self.tables[table].limiter.num_batches(batch_size, most), drawn)

    def numbers_of(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns the numbers of the unrolls that keys of a table name."""
        return keys // self._items_of(table)

    def delete(self, table: str, keys: np.ndarray | None) -> int:
        """Takes items out of a table for ever, or with None all, upon which its limiter begins anew.

        Returns: how many could be drawn before.
        """
        chosen = self.tables[table]
        count = chosen.delete(keys)
        if keys is None:
            chosen.limiter.resume(0, 0, 0)
        elif chosen.limiter.is_queue:  # whose items are due until they were handed out
            chosen.limiter.forgiven += count * chosen.limiter.samples_per_insert
        return count

    def why_no_insert(self) -> str:
        """Returns the reason why actors have to wait, or an empty string.

        They wait for the learners of `full_tables`, but not for ever: see `note_stall`.
        """
        return "learner" if self.full_tables() and not self._is_stalled else ""

    def full_tables(self) -> list[str]:
        """Returns the tables that hold more than enough for their learners.

        Those whose learners wait until another of their tables holds enough to begin are none of them.
        """
        return [name for name in self.tables if self._is_full(name) and not self._is_held_up(name)]

    def note_stall(self, is_stalled: bool) -> None:
        """Takes whether a learner waits for inserts while nobody draws from the full tables: actors go on then.

        Full tables forgive the samples that are due, which nobody can make up for. A queue gives all that it holds.
        """
        if is_stalled and not self._is_stalled:
            self.num_stalls += 1
            if self.num_stalls & (self.num_stalls - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
                logger.warning(
                    "nobody draws from %s while learners wait for actors: these go on (%d times so far); "
                    "--tables decides how often each table has to be sampled",
                    ", ".join(self.full_tables()), self.num_stalls,
                )  # fmt: skip
        self._is_stalled = is_stalled
        for name in self.full_tables() if is_stalled else ():
            if not self.tables[name].limiter.is_queue:
                self.tables[name].limiter.forgive()

    def why_no_sample(self, table: str, batch_size: int) -> str:
        """Returns the reason why a learner has to wait, or an empty string."""
        chosen = self.tables[table]
        if not chosen.limiter.has_begun:
            return "min_size"
        if not chosen.limiter.may_sample(batch_size):
            return "actors"
        if chosen.can_sample(batch_size):
            return ""
        kind = self._settings[table].kind
        return "priorities" if kind == "priority" else "actors" if kind in QUEUES else "min_size"

    def _draw(self, table: str, batch_size: int, most: int, drawn: dict[int, LogEntry] | None = None) -> list[Sample]:
        samples = self.tables[table].samples(batch_size, most)
        if drawn is not None:
            for sample in samples:
                for number in distinct(self.numbers_of(table, sample.keys)).tolist():
                    if (entry := self.log.get(number)) is not None:
                        drawn[number] = entry
        if (counter := self._counters.get(table)) is not None:
            for sample in samples:
                self.tables[table].delete(counter.count(sample.keys))
        self.num_batches += len(samples)
        if self.num_batches % self.config.eviction_period_batches == 0:
            self._evict_to(self.soft_unrolls)
        return samples

    def _items_of(self, table: str) -> int:
        """Returns how many keys of a table name one unroll."""
        return self.spec.unroll_starts if self.tables[table].granularity == "transitions" else 1

    def _batch_size(self, table: str) -> int:
        """Returns the largest batch that a learner asked for."""
        return max((sizes.get(table, 1) for sizes in self._learners), default=1)

    def _is_full(self, table: str) -> bool:
        """Returns whether a table has a batch to give and its learners are too far behind."""
        chosen = self.tables[table]
        return not chosen.limiter.may_insert() and chosen.can_sample(self._batch_size(table))

    def _is_held_up(self, table: str) -> bool:
        """Returns whether all learners of a table, of which there are some, wait for another one to begin."""
        readers = [sizes for sizes in self._learners if table in sizes]
        return bool(readers) and all(
            any(self.why_no_sample(name, size) == "min_size" for name, size in sizes.items()) for sizes in readers
        )

    def _evict_to(self, num_unrolls: int) -> None:
        """Removes the oldest unrolls until there are so few, and their bytes fit; the newest always stays."""
        while len(self.log) > num_unrolls or (self.log.num_bytes > self.max_bytes and len(self.log) > 1):
            number = self.log.evict()
            for table in self.tables.values():
                table.evict(number)
            for counter in self._counters.values():
                counter.evict(number)
        if self.journal is not None:
            self.journal.forget_before(self.log.first_number)


def max_bytes_of(config: ReplayConfig) -> float:
    """Returns the bound of the bytes that a log holds."""
    return max(round(config.max_gb * 1e9), 1) if config.max_gb else math.inf


def ring_unrolls(capacity: int, unroll_starts: int) -> int:
    """Returns how many unrolls server and learner must be able to hold: the capacity plus a sixteenth, at least 8."""
    soft = -(-capacity // unroll_starts)
    return soft + max(soft // 16, 8)
