"""One log of a replay server, from before its first actor on. No sockets, no clock, no torch."""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from apexrl.config.sections import ReplayConfig
from apexrl.config.tables import tables_of
from apexrl.errors import ConfigError, JournalError, WireError
from apexrl.memory import free_memory_bytes
from apexrl.net import wire
from apexrl.net.insert_checks import insert_arrays, why_impossible
from apexrl.net.open_log import Advanced, OpenLog
from apexrl.net.outbox import Outbox
from apexrl.net.protocols import why_other_protocol
from apexrl.net.records import ENV as RECORDS
from apexrl.net.statistics import Vitals, metrics_of, peers_of
from apexrl.replay.journal import Journal, Lock, new_identity
from apexrl.replay.log import LogEntry
from apexrl.replay.priority_index import row_bytes
from apexrl.replay.recovery import recover
from apexrl.replay.replay import RecoveredUnroll, Replay, max_bytes_of, ring_unrolls
from apexrl.replay.segment import Entry
from apexrl.streams import difference
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)

RECOVERED_AT_ONCE = 4096  # unrolls of a journal whose numbers are checked together
UNROLL_BYTES = 32  # of an unroll in the ring and in its tables' books, beside its priorities
OTHER_PORT = {
    "actor": "this is the port for actors (--actor-port): a learner or reader connects to --batch-port",
    "learner": "this is the port for learners and readers (--batch-port): an actor connects to --actor-port",
}


class ServedLog:
    """Owns the log that is open, and the right to its journal; answers its peers also before there is one."""

    def __init__(
        self,
        name: str,
        config: ReplayConfig,
        seed: int,
        journal_dir: Path | None,
        now: float,
        stream: StreamSpec | None,
        outbox: Outbox,
    ):
        """Starts with the journal's content. Without any, the spec of the first actor with an unroll is the log's.

        Args:
          stream: the only spec that is served, where it is known.
        Raises: ConfigError when the journal cannot be used or is of another stream.
        """
        self.open_log: OpenLog | None = None
        self.vitals = Vitals(synced_seconds=now)
        self._name = name
        self._config = config
        self._seed = seed
        self._stream = stream
        self._journal_dir = journal_dir
        self._outbox = outbox
        self._lock: Lock | None = None
        if journal_dir is None:
            return
        self._lock = Lock(journal_dir)
        try:
            self._recover(journal_dir, now)
        except ConfigError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise ConfigError(f"--journal-dir {journal_dir} cannot be read or mended ({error})") from error

    def close(self) -> None:
        """Syncs the journal and gives it back; snapshots are the owner's."""
        if self.open_log is not None:
            self.open_log.close()
        if self._lock is not None:
            self._lock.close()

    def knows(self, role: str, peer: bytes) -> bool:
        """Returns whether a peer has a session."""
        log = self.open_log
        return log is not None and peer in (log.actors.sessions if role == "actor" else log.learners.sessions)

    def receive(self, role: str, peer: bytes, message: wire.ToReplay, frames: list[bytes], now: float) -> None:
        """Takes a message that is no greeting of its port.

        Raises: WireError when it is malformed.
        """
        log = self.open_log
        if log is not None and role == "actor" and peer in log.actors.sessions:
            log.actors.receive(peer, message, frames, now)
        elif log is not None and role == "learner" and peer in log.learners.sessions:
            log.learners.receive(peer, message, now)
        elif isinstance(message, wire.Hello | wire.Subscribe):
            self._outbox.refuse(role, peer, OTHER_PORT[role])
        elif not isinstance(message, wire.Goodbye):
            self._outbox.send(role, peer, wire.Stranger())

    def hello(self, peer: bytes, message: wire.Hello, now: float) -> None:
        """Welcomes an actor, for whose spec the log may begin, or refuses it."""
        open_log, spec = self.open_log, message.spec
        is_unused = open_log is None or (open_log.is_empty and not open_log.actors.are_here)
        held = self._stream if open_log is None or is_unused else open_log.spec
        refusal = why_other_protocol(message) or why_refuse(spec, held)
        if refusal and held not in (None, spec):
            refusal += f"; {self._way_out()}"
        if not refusal and (open_log is None or open_log.spec != spec):
            try:
                open_log = self._begin(spec)
            except ConfigError as error:
                refusal = f"the server cannot begin a log: {error}"
        if refusal or open_log is None:
            self._outbox.refuse("actor", peer, refusal)
            return
        open_log.actors.hello(peer, message, now)

    def subscribe(self, peer: bytes, message: wire.Subscribe, now: float) -> None:
        """Begins a subscription, refuses it, or lets it wait for the log."""
        if other := why_other_protocol(message):
            self._outbox.refuse("learner", peer, other)
        elif self.open_log is None:
            self._outbox.send("learner", peer, wire.Waiting(0, "actors"))
        else:
            self.open_log.learners.subscribe(peer, message, now)

    def advance(self) -> Advanced:
        """Stores the inserts that came, and sends all that may go now: acknowledgements, unrolls, batches."""
        return Advanced() if self.open_log is None else self.open_log.advance()

    def count_waits(self, now: float, elapsed: float) -> None:
        """Takes note that so many seconds have passed for all who wait."""
        for standing in self.peers(now):
            if standing.waits_for:
                self.vitals.waited_seconds[f"{standing.role}_{standing.waits_for}"] += elapsed

    def peers(self, now: float) -> tuple[wire.PeerStanding, ...]:
        """Returns all peers, and why each has to wait."""
        return () if self.open_log is None else peers_of(self.open_log, now)

    def statistics(self, now: float) -> dict[str, float]:
        """Returns the metrics of the log; totals count from its start or that of this process."""
        return metrics_of(self.open_log, self.vitals, now)

    def _recover(self, directory: Path, now: float) -> None:
        recovered = recover(directory, self._config.capacity, max_bytes_of(self._config))
        if recovered is None:
            return
        identity = recovered.identity
        if self._stream is not None and identity.spec != self._stream:
            if recovered.end_number == 0:
                return
            raise ConfigError(
                f"--journal-dir {directory} holds another stream than this run's "
                f"({difference(identity.spec, self._stream)}): move it away, or give another one"
            )
        if fault := why_impossible(identity.spec):
            raise ConfigError(f"--journal-dir {directory} holds a stream that nobody can serve ({fault}): move it away")
        self._check_memory(identity.spec)
        journal = Journal(directory, identity, self._config.journal_flush_seconds == 0)
        replay = Replay(self._config, identity, self._seed, journal)
        open_log, unrolls = OpenLog(replay, self._outbox), []
        for start in range(0, len(recovered.entries), RECOVERED_AT_ONCE):
            unrolls += _recovered(recovered.entries[start : start + RECOVERED_AT_ONCE], open_log, directory, now)
        if recovered.entries and not unrolls:  # which would delete them
            count = len(recovered.entries)
            raise ConfigError(f"--journal-dir {directory}: none of its {count} unrolls can be used: move it away")
        replay.restore(unrolls, recovered.end_number, directory)
        self.open_log = open_log
        logger.info(
            "recovered %d unrolls (%d transitions) from %s, up to number %d, life %d of log %s",
            len(unrolls), replay.log.num_transitions, directory, recovered.end_number, identity.life, identity.log,
        )  # fmt: skip

    def _begin(self, spec: StreamSpec) -> OpenLog:
        """Makes the log for the first actor's spec, in the place of none, or of an empty one without actors.

        The learners of an empty one come anew.

        Raises: ConfigError when the tables make no sense for it, or take more memory than is free.
        """
        self._check_memory(spec)
        identity = new_identity(spec)
        journal = None
        if self._journal_dir is not None:
            journal = Journal(self._journal_dir, identity, self._config.journal_flush_seconds == 0)
        replay = Replay(self._config, identity, self._seed, journal)
        by_bytes = f" and {self._config.max_gb:g} GB" if self._config.max_gb else ""
        named = f" {self._name}" if self._name else ""
        logger.info("the log%s holds %s, %d transitions%s at most", named, spec.env, self._config.capacity, by_bytes)
        if self.open_log is not None:
            replay.set_batch_sizes(*self.open_log.learners.batch_sizes)
            with contextlib.suppress(JournalError):  # it holds nothing
                self.open_log.close()
            for peer in self.open_log.learners.sessions:
                self._outbox.send("learner", peer, wire.Stranger())
        self.open_log = OpenLog(replay, self._outbox)
        return self.open_log

    def _check_memory(self, spec: StreamSpec) -> None:
        """Raises ConfigError when the tables take more memory than is free; they make all of it at their start."""
        tables = tables_of(self._config, spec.unroll_starts, spec.has_unroll_priorities).values()
        each = UNROLL_BYTES + sum(row_bytes(spec.num_priorities) for table in tables if table.kind == "priority")
        if (needed := each * ring_unrolls(self._config.capacity, spec.unroll_starts)) > (free := free_memory_bytes()):
            fault = f"the tables take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            raise ConfigError(f"--capacity {self._config.capacity:,} does not fit for {spec.env}: {fault}")

    def _way_out(self) -> str:
        """Returns how a log of another stream can begin."""
        if self._stream is not None:
            return "this server is for that stream alone: start one of your own"
        if self.open_log is not None and self.open_log.is_empty:
            return "it is empty, and takes yours when the actors of the other one have left"
        if self._name:
            return f"a log of yours needs a name of its own in --tables, beside {self._name}"
        if self._journal_dir is None:
            return "a log of yours begins when the server is started again"
        return f"a log of yours begins when the server is started with another --journal-dir than {self._journal_dir}"


def _recovered(entries: Sequence[Entry], open_log: OpenLog, directory: Path, now: float) -> list[RecoveredUnroll]:
    """Returns the unrolls of a journal that can be used, and tells their actors' conversations which it holds."""
    decoded: list[tuple[Entry, wire.Insert]] = []
    faults: dict[int, str] = {}
    for entry in entries:
        try:
            insert = wire.decode_insert(entry.message)
            open_log.actors.recover(insert.actor, insert.sequence)
            faults[entry.number] = open_log.sizes.why_wrong(insert)
        except WireError as error:
            faults[entry.number] = str(error)
        if not faults[entry.number]:
            decoded.append((entry, insert))
    arrays = insert_arrays([insert for _, insert in decoded], open_log.sizes)
    faults |= {decoded[i][0].number: fault for i, fault in arrays.faults.items()}
    for number, fault in faults.items():
        if fault:
            logger.error("unroll %d in %s is not used: %s", number, directory, fault)
    rows = zip(decoded, arrays.priorities, arrays.valid, arrays.valid.sum(axis=1).tolist(), strict=True)
    return [
        RecoveredUnroll(number, LogEntry(message, block, transitions, now), priorities, valid)
        for ((number, message, block), _), priorities, valid, transitions in rows
        if not faults[number]
    ]


def why_refuse(spec: StreamSpec, held: StreamSpec | None) -> str:
    """Returns why an actor with a spec cannot be served by a server that holds another, or an empty string."""
    if held is not None and spec != held:
        cure = "use the same --env with its settings, --agent and algorithm flags everywhere"
        if held.env == RECORDS:
            cure = "give the fields that its records have"
        return f"the log holds another stream than yours ({difference(held, spec)}): {cure}"
    return why_impossible(spec)
