"""A journal in the place of a replay server: the learner's side of a log that nobody writes any more.

It reads the files of another run's journal, takes no lock on it and writes nothing into it.
"""

import contextlib
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import numpy as np

from apexrl.agents.families import FAMILIES, family_of
from apexrl.config.sections import ReplayConfig
from apexrl.config.tables import TableConfig, tables_of
from apexrl.errors import ConfigError, WireError
from apexrl.learning.experience.own_log import OwnLog
from apexrl.learning.experience.recutter import Fitting, Recutter
from apexrl.net import wire
from apexrl.net.log_client import LogAppend, LogEvent
from apexrl.replay.journal import held_numbers, identity_of, read_entries
from apexrl.replay.kinds import make_table
from apexrl.replay.replay import ring_unrolls
from apexrl.streams import why_not_cut
from apexrl.types import EnvironmentSpec, StreamSpec

logger = logging.getLogger(__name__)


class JournalClient(OwnLog):
    """Gives each unroll of a journal once, and then batches without end: nobody is waited for.

    A table that hands each unroll out once would soon be empty, so it is uniform here. Priorities begin as the actors
    gave them. Where the journal's unrolls are cut anew, they begin as 1.
    """

    def __init__(
        self,
        directory: Path,
        wanted: StreamSpec,
        config: ReplayConfig,
        batch_sizes: Mapping[str, int],
        prefetch_batches: int,
        seed: int | Sequence[int],
    ):
        """Reads the identity of the journal, and no unroll yet.

        Args:
          wanted: the unrolls that the learner needs.
        Raises: ConfigError when the directory is no journal, or its streams cannot become such unrolls.
        """
        identity = identity_of(directory)
        check_usable(directory, identity.spec, wanted)
        super().__init__(batch_sizes, prefetch_batches, "journal")
        self._directory = directory
        held = journal_transitions(directory, identity.spec)
        if config.capacity < held:
            logger.warning("the newest %d of %d transitions are used: --capacity says how many", config.capacity, held)
        self._ring_unrolls = ring_unrolls(min(config.capacity, held), wanted.unroll_starts)
        settings = tables_of(config, wanted.unroll_starts, wanted.has_unroll_priorities)
        exponents = config.priority_exponent, config.importance_exponent
        seeds = dict(zip(settings, np.random.SeedSequence(seed).spawn(len(settings)), strict=True))
        tables = {}
        for name in batch_sizes:
            kind, capacity = settings[name].kind, settings[name].capacity
            free = TableConfig("uniform" if kind == "fifo" else kind, 0.0, 1, capacity)
            tables[name] = make_table(free, self._ring_unrolls, wanted, exponents, seeds[name])
        self._begin(identity.log, wanted, self._ring_unrolls, tables, identity.ancestors)
        self._inserts = _inserts(directory, identity.spec, wanted)
        self._is_read = False
        self._end_number = 0

    def poll(self, timeout_milliseconds: int) -> LogEvent | None:
        """Returns the start, the next unroll, or the next batch; None when enough batches wait for their use.

        Raises: ConfigError when the journal holds too little for a batch.
        """
        if self._events:
            return super().poll(0)
        if not self._is_read:
            if (following := next(self._inserts, None)) is not None:
                return self._append(*following)
            self._is_read, self.waits_for = True, ""
            logger.info("read %d unrolls of %s", self._end_number, self._directory)
        for name, table in self._tables.items():
            size = self._batch_sizes[name]
            if not table.can_sample(size):
                raise ConfigError(f"{self._directory} holds too little for a batch of {size} of table {name}")
            if self._lacks(name):
                self._give(name, table.sample(size))
                return super().poll(0)
        time.sleep(timeout_milliseconds / 1000)
        return None

    def close(self) -> None:
        """Ends the reading."""
        self._inserts.close()

    def _append(self, log_number: int, fitting: Fitting) -> LogAppend:
        insert, block, priorities, valid = fitting
        number, self._end_number = self._end_number, self._end_number + 1
        for table in self._tables.values():
            if number >= self._ring_unrolls:
                table.evict(number - self._ring_unrolls)
            table.insert(number, priorities[None], valid[None])
        return LogAppend(number, insert, block, log_number)  # a run may have evicted others meanwhile


def check_usable(directory: Path, held: StreamSpec, wanted: StreamSpec) -> None:
    """Raises ConfigError when the streams of a journal cannot become the unrolls that a learner wants."""
    if reason := why_not_cut(held, wanted):
        names = EnvironmentSpec.__struct_fields__
        is_same = all(getattr(held, name) == getattr(wanted, name) for name in names)
        able = agents_for(held) if is_same else []
        cure = f"; --agent {' or '.join(able)} can learn from it" if able else ""
        raise ConfigError(f"the journal in {directory} does not fit: {reason}{cure}")


def agents_for(held: StreamSpec) -> list[str]:
    """Returns the algorithms that can learn from a log, with their usual numbers."""
    found = []
    for name, family in FAMILIES.items():
        with contextlib.suppress(ConfigError):  # it is for other actions
            if not why_not_cut(held, family.stream(family.algorithm, held)):
                found.append(name)
    return found


def recorded_stream(agent: str, environment: EnvironmentSpec) -> StreamSpec:
    """Returns the unrolls of an algorithm for steps that others have recorded, and nothing beside them.

    Args:
      agent: "" for the first one that can learn from them.
    Raises: ConfigError when it cannot.
    """
    steps = environment.streamed(1, 0)
    able = agents_for(steps)
    family = family_of(agent or able[0])
    spec = family.stream(family.algorithm, environment)
    if reason := why_not_cut(steps, spec):
        raise ConfigError(f"--agent {agent} cannot learn from recorded steps: {reason}; {' and '.join(able)} can")
    return spec


def journal_transitions(directory: Path, spec: StreamSpec) -> int:
    """Returns how many transitions a journal holds at most."""
    return max(len(held_numbers(directory)) * spec.unroll_starts, 1)


def _inserts(directory: Path, held: StreamSpec, wanted: StreamSpec) -> Generator[tuple[int, Fitting]]:
    """Yields the unrolls of a journal as those that are wanted, with their numbers; skips those that cannot be read."""
    recutter = Recutter(held, wanted)
    for entry in read_entries(directory):
        try:
            for part, fitting in enumerate(recutter.of(wire.decode_insert(entry.message), entry.block)):
                yield recutter.number(entry.number, part), fitting
        except WireError as error:
            logger.warning("unroll %d of %s is not used: %s", entry.number, directory, error)
