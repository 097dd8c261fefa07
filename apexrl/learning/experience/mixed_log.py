"""The log of a run with a journal beside it: both lie in one unroll store, and batches are of both.

The journal is only read, and drawn uniformly. A replica follows this as it follows a server: numbers of unrolls are
places in one ring, of which the journal's have a part that the run's never overwrite.

Source: arXiv:2302.02948 (RLPD), whose share is a half.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from apexrl.agents.families import family_of
from apexrl.config.commands import LearnerCommand, OfflineCommand
from apexrl.config.flags import wants_of
from apexrl.config.sections import LearningConfig, ReplayConfig
from apexrl.errors import ConfigError
from apexrl.learning.experience.journal_client import JournalClient, journal_transitions
from apexrl.net.log_client import LogAppend, LogBatch, LogClient, LogEvent, LogStart
from apexrl.replay.journal import identity_of
from apexrl.types import Sample

REPLAYING = ("priority", "uniform")  # kinds of table of whose batches a journal may have a share
ANY_SIZE = 2**53
OF_NO_LOG = -1
WITH_ACTORS = "is for a run with actors, in processes of their own: leave out --from-journal, --guest"


class Share(NamedTuple):
    """The share of a batch that comes from a journal."""

    directory: Path
    share: Fraction

    @classmethod
    def of(cls, learning: LearningConfig) -> "Share | None":
        """Returns the one that --mix-journal asks for, if any.

        Raises: ConfigError when that is no DIR=SHARE.
        """
        if not learning.mix_journal:
            return None
        directory, _, text = learning.mix_journal.rpartition("=")
        try:
            share = Fraction(text)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not directory or not 0 < share < 1:
            raise ConfigError(f"--mix-journal {learning.mix_journal}: give DIR=SHARE, as in runs/a/journal=1/2")
        return cls(Path(directory), share)

    @property
    def transitions(self) -> int:
        """The transitions that the journal holds at most."""
        return journal_transitions(self.directory, identity_of(self.directory).spec)


def mixed_rows(command: LearnerCommand, num_learners: int = 1) -> dict[str, int]:
    """Returns by table how many rows of a learner's batch come from the journal; none without one.

    Raises: ConfigError when no table can be mixed so, or the learner does not follow one server alone.
    """
    if (mixed := Share.of(command.learning)) is None:
        return {}
    if isinstance(command, OfflineCommand):
        raise ConfigError(f"--mix-journal {WITH_ACTORS}")
    if max(num_learners, command.wires.shards) > 1:
        raise ConfigError("--mix-journal is for one learner and one replay server: leave out --num-learners, --shards")
    wants = [want for want in wants_of(command) if _kinds(command).get(want.table) in REPLAYING]
    wants = [want for want in wants if not want.num_chosen and not want.is_replaced]
    if not wants:
        raise ConfigError(
            "--mix-journal has a share of what is drawn from the replay by priority or uniformly: "
            "give --mix a part uniform=SHARE, and with an LSTM another --replay-state than walk"
        )
    rows = {want.table: want.batch_size * mixed.share for want in wants}
    if not all(number.denominator == 1 for number in rows.values()):
        sizes = " and ".join(str(want.batch_size) for want in wants)
        raise ConfigError(f"--mix-journal {mixed.directory}={mixed.share}: {sizes} rows cannot be divided so")
    return {table: int(number) for table, number in rows.items()}


def with_journal(
    command: LearnerCommand,
    batch_sizes: Mapping[str, int],
    connect: Callable[[Mapping[str, int]], LogClient],
    seed: Sequence[int],
) -> "LogClient | MixedLog":
    """Returns the log that a learner of a run follows: the server's, and the journal's beside it if it wants that.

    Args:
      connect: from the rows that the server gives of each batch.
      seed: of what is drawn from the journal.
    Raises: ConfigError as `mixed_rows` does.
    """
    rows, mixed = mixed_rows(command), Share.of(command.learning)
    if mixed is None:
        return connect(batch_sizes)
    config = ReplayConfig(
        capacity=ANY_SIZE, min_size_to_sample=1, samples_per_insert=0.0, priority_exponent=0.0, importance_exponent=0.0,
        tables=tuple(f"{table}={_kinds(command)[table]}" for table in rows),
    )  # fmt: skip
    directory, prefetch = mixed.directory, command.learning.prefetch_batches

    def open_journal(start: LogStart) -> JournalClient:
        return JournalClient(directory, start.spec, config, rows, prefetch, seed)

    server = connect({table: size - rows.get(table, 0) for table, size in batch_sizes.items()})
    return MixedLog(server, open_journal, tuple(rows))


def _kinds(command: LearnerCommand) -> dict[str, str]:
    return {table.name: table.kind for table in family_of(command.agent).tables(command.update)}


class _Places(NamedTuple):
    """A ring of the run's R unrolls and the journal's J: in each lap of R + J numbers, the run's come first."""

    run: int
    journal: int

    def of_run(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the places of numbers of the run's log."""
        return numbers // self.run * sum(self) + numbers % self.run

    def of_journal(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the places of numbers of the journal."""
        return numbers // self.journal * sum(self) + self.run + numbers % self.journal

    def are_run(self, places: np.ndarray) -> np.ndarray:
        """Returns which places are of the run's log."""
        return places % sum(self) < self.run

    def back(self, places: np.ndarray) -> np.ndarray:
        """Returns the numbers of places in their own log."""
        laps, rest = places // sum(self), places % sum(self)
        return np.where(rest < self.run, laps * self.run + rest, laps * self.journal + rest - self.run)


class MixedLog:
    """Has the methods of a `LogClient` that a replica calls. Belongs to one thread.

    The journal is read again where the run's log begins again.
    """

    def __init__(
        self, client: LogClient, open_journal: Callable[[LogStart], JournalClient], mixed_tables: tuple[str, ...]
    ):
        """Takes the connection to the run's server, and what opens the journal for a log."""
        self.waits_for = client.waits_for
        self._client = client
        self._open_journal = open_journal
        self._mixed_tables = mixed_tables
        self._journal: JournalClient | None = None
        self._is_read = False
        self._is_its_turn = False
        self._places = _Places(0, 0)
        self._starts: dict[str, int] = {}  # keys of an unroll, by table
        # Batches of a table that wait for their other part: of the run, and of the journal.
        self._waiting = {table: (collections.deque[Sample](), collections.deque[Sample]()) for table in mixed_tables}

    def poll(self, timeout_milliseconds: int) -> LogEvent | None:
        """Returns the next event of either log, or a batch of both; None when there is neither in time.

        Raises: as the clients do; ConfigError when the journal does not fit the run.
        """
        if (whole := self._whole()) is not None:
            return whole
        self._is_its_turn = not self._is_its_turn
        event: LogEvent | None = None
        if self._journal is not None and self._is_its_turn:
            event = self._journal.poll(0)
            self._is_read = self._is_read or not isinstance(event, LogAppend)
            event = self._of_journal(event)
        if event is None:
            event = self._of_run(self._client.poll(timeout_milliseconds if self._is_read or not self._journal else 0))
        self.waits_for = self._client.waits_for or ("" if self._is_read else "journal")
        return event or self._whole()

    def batch_used(self, table: str) -> None:
        """A batch was used, or nothing of it could be: another one may follow."""
        self._client.batch_used(table)
        if self._journal is not None and table in self._mixed_tables:
            self._journal.batch_used(table)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray, table: str) -> None:
        """Sets the priorities [B] of sampled keys [B]: those of the run."""
        unit = self._starts[table]
        places, offsets = keys // unit, keys % unit
        own = self._places.back(places) * unit + offsets
        is_run = self._places.are_run(places)
        if is_run.any():
            self._client.update_priorities(own[is_run], priorities[is_run], table)
        if self._journal is not None and table in self._mixed_tables:  # there 0 alone means something: not again
            self._journal.update_priorities(own[~is_run], priorities[~is_run], table)

    def close(self) -> None:
        """Says goodbye to the server, and ends the reading."""
        self._client.close()
        if self._journal is not None:
            self._journal.close()

    def _of_run(self, event: LogEvent | None) -> LogEvent | None:
        match event:
            case LogStart():
                return self._begin(event)
            case LogAppend():
                place = int(self._places.of_run(np.array(event.number)))
                return dataclasses.replace(event, number=place, log_number=event.number)
            case LogBatch():
                sample = self._placed(event, self._places.of_run)
                if event.table not in self._waiting:
                    return dataclasses.replace(event, sample=sample)
                self._waiting[event.table][0].append(sample)
                return None
        return event

    def _of_journal(self, event: LogEvent | None) -> LogEvent | None:
        match event:
            case LogAppend():
                place = int(self._places.of_journal(np.array(event.number)))
                actor = f"journal/{event.insert.actor}"[:200]  # the run may have one of the same name
                insert = msgspec.structs.replace(event.insert, actor=actor, params_version=-1)
                return LogAppend(place, insert, event.block, OF_NO_LOG)
            case LogBatch():
                self._waiting[event.table][1].append(self._placed(event, self._places.of_journal))
        return None

    def _begin(self, start: LogStart) -> LogStart:
        """Opens the journal, unless the run's log goes on as it was."""
        if self._journal is None or not start.continues or start.ring_unrolls != self._places.run:
            if self._journal is not None:
                self._journal.close()
            for table, (run, journal) in self._waiting.items():
                for _ in run:
                    self._client.batch_used(table)
                run.clear()
                journal.clear()
            self._journal, self._is_read = self._open_journal(start), False
            begun = self._journal.poll(0)
            assert isinstance(begun, LogStart)
            self._places = _Places(start.ring_unrolls, begun.ring_unrolls)
            in_unroll = {"transitions": start.spec.unroll_starts, "unrolls": 1}
            self._starts = {table: in_unroll[granularity] for table, granularity in start.granularity.items()}
        return dataclasses.replace(start, ring_unrolls=sum(self._places))

    def _placed(self, batch: LogBatch, place: Callable[[np.ndarray], np.ndarray]) -> Sample:
        unit, keys = self._starts[batch.table], batch.sample.keys
        return batch.sample._replace(keys=place(keys // unit) * unit + keys % unit)

    def _whole(self) -> LogBatch | None:
        """Returns a batch of both parts, where they are there."""
        for table, (run, journal) in self._waiting.items():
            if run and journal:
                own, other = run.popleft(), journal.popleft()
                keys = np.concatenate([own.keys, other.keys])
                # A row of the journal counts as much as one of the run's on average, whatever priorities that has.
                weights = np.concatenate([own.weights, other.weights * own.weights.mean()])
                whole = own._replace(keys=keys, weights=weights)
                return LogBatch(table, whole, journal_share=len(other.keys) / len(keys))
        return None
