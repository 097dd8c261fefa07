"""The replay service without its sockets: messages in, messages out. No clock, no torch.

Feed it messages and the time with `receive`, call `advance` once for all that came, send the messages of
`outbox.drain`, and call `expire` every second.
"""

import contextlib
import logging
from pathlib import Path

import msgspec

from apexrl.config.sections import ReplayConfig
from apexrl.config.tables import tables_of
from apexrl.errors import ConfigError, JournalError, WireError
from apexrl.net import wire
from apexrl.net.insert_checks import checked_arrays, why_impossible
from apexrl.net.open_log import Advanced, OpenLog
from apexrl.net.outbox import Outbox
from apexrl.net.protocols import why_other_protocol
from apexrl.net.statistics import Vitals, metrics_of, peers_of
from apexrl.replay.journal import Journal, Lock, new_identity
from apexrl.replay.log import LogEntry
from apexrl.replay.recovery import recover
from apexrl.replay.replay import RecoveredUnroll, Replay
from apexrl.streams import difference
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)

PEER_TIMEOUT_SECONDS = 15.0
STALLED_SECONDS = 5.0  # between two calls of `expire`, which should be one
STATISTICS_PERIOD_SECONDS = 0.1  # all requests within it get the same answer
OTHER_PORT = {
    "actor": "this is the port for actors (--actor-port): a learner or reader connects to --batch-port",
    "learner": "this is the port for learners and readers (--batch-port): an actor connects to --actor-port",
}


class ReplayService:
    """Owns the log that is open, and answers all others until there is one."""

    def __init__(
        self,
        config: ReplayConfig,
        seed: int,
        journal_dir: Path | None = None,
        now: float = 0.0,
        stream: StreamSpec | None = None,
    ):
        """Starts with the journal's content. Without any, the spec of the first actor with an unroll is the log's.

        Args:
          stream: the only spec that is served, where it is known.
        Raises: ConfigError when the journal cannot be used or is of another stream, or the tables make no sense.
        """
        tables_of(config, 1)
        self.open_log: OpenLog | None = None
        self.outbox = Outbox()
        self.vitals = Vitals(synced_seconds=now, dropped=self.outbox.dropped)
        self._expired_seconds = now
        self._answered_seconds = -1e9
        self._answer = wire.Statistics(0, {}, ())
        self._config = config
        self._seed = seed
        self._stream = stream
        self._journal_dir = journal_dir
        self._lock: Lock | None = None
        if journal_dir is None:
            logger.warning("no --journal-dir: experience is kept in memory only, and lost with this process")
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

    def receive(self, role: str, peer: bytes, frames: list[bytes], now: float) -> None:
        """Takes one message. One that is malformed or out of place is dropped, counted, and answered."""
        try:
            self._receive(role, peer, wire.decode_to_replay(frames), frames, now)
        except WireError as error:
            self.outbox.drop(role, peer, "malformed", str(error))

    def advance(self) -> Advanced:
        """Stores the inserts that came, and sends all that may go now: acknowledgements, unrolls, batches."""
        return Advanced() if self.open_log is None else self.open_log.advance()

    def expire(self, now: float) -> None:
        """Gives up peers that were silent for too long, and frees all that they held."""
        elapsed, self._expired_seconds = now - self._expired_seconds, now
        if self.open_log is None:
            return
        for standing in peers_of(self.open_log, now):
            if standing.waits_for:
                self.vitals.waited_seconds[f"{standing.role}_{standing.waits_for}"] += elapsed
        if elapsed < STALLED_SECONDS:  # else it was this process that stood still, and their messages wait to be read
            self.open_log.give_up_silent_peers(now, PEER_TIMEOUT_SECONDS)

    def statistics(self, now: float) -> dict[str, float]:
        """Returns the server's metrics; totals count from the start of the log or of this process."""
        return metrics_of(self.open_log, self.vitals, now)

    def _recover(self, directory: Path, now: float) -> None:
        recovered = recover(directory)
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
        journal = Journal(directory, identity, self._config.journal_flush_seconds == 0)
        replay = Replay(self._config, identity, self._seed, journal)
        open_log, unrolls = OpenLog(replay, self.outbox), []
        for number, message, block in recovered.entries:
            try:
                insert = wire.decode_insert(message)
                open_log.actors.recover(insert.actor, insert.sequence)
                priorities, valid = checked_arrays(insert, open_log.sizes)
            except WireError as error:
                logger.error("unroll %d in %s is not used: %s", number, directory, error)
                continue
            entry = LogEntry(message, block, int(valid.sum()), now)
            unrolls.append(RecoveredUnroll(number, entry, priorities, valid))
        replay.restore(unrolls, recovered.end_number, directory)
        self.open_log = open_log
        logger.info(
            "recovered %d unrolls (%d transitions) from %s, up to number %d, life %d of log %s",
            len(unrolls), replay.log.num_transitions, directory, recovered.end_number, identity.life, identity.log,
        )  # fmt: skip

    def _begin(self, spec: StreamSpec) -> OpenLog:
        """Makes the log for the first actor's spec, in the place of none, or of an empty one without actors.

        The learners of an empty one come anew.

        Raises: ConfigError when the tables make no sense for it.
        """
        identity = new_identity(spec)
        journal = None
        if self._journal_dir is not None:
            journal = Journal(self._journal_dir, identity, self._config.journal_flush_seconds == 0)
        replay = Replay(self._config, identity, self._seed, journal)
        by_bytes = f" and {self._config.max_gb:g} GB" if self._config.max_gb else ""
        logger.info("the log holds %s, %d transitions%s at most", spec.env, self._config.capacity, by_bytes)
        if self.open_log is not None:
            replay.set_batch_sizes(*self.open_log.learners.batch_sizes)
            with contextlib.suppress(JournalError):  # it holds nothing
                self.open_log.close()
            for peer in self.open_log.learners.sessions:
                self.outbox.send("learner", peer, wire.Stranger())
        self.open_log = OpenLog(replay, self.outbox)
        return self.open_log

    def _receive(self, role: str, peer: bytes, message: wire.ToReplay, frames: list[bytes], now: float) -> None:
        open_log = self.open_log
        match message:
            case wire.Hello() if role == "actor":
                self._hello(peer, message, now)
            case wire.Subscribe() if role == "learner":
                if other := why_other_protocol(message):
                    self.outbox.refuse(role, peer, other)
                elif open_log is None:
                    self.outbox.send(role, peer, wire.Waiting(0, "actors"))
                else:
                    open_log.learners.subscribe(peer, message, now)
            case wire.AskStatistics() if role == "learner":
                if now - self._answered_seconds >= STATISTICS_PERIOD_SECONDS:
                    self._answered_seconds = now
                    peers = () if open_log is None else peers_of(open_log, now)
                    self._answer = wire.Statistics(0, self.statistics(now), peers)
                answer = msgspec.structs.replace(self._answer, request=message.request)
                self.outbox.send(role, peer, answer)
            case _ if open_log is not None and role == "actor" and peer in open_log.actors.sessions:
                open_log.actors.receive(peer, message, frames, now)
            case _ if open_log is not None and role == "learner" and peer in open_log.learners.sessions:
                open_log.learners.receive(peer, message, now)
            case wire.Goodbye():
                pass
            case wire.Hello() | wire.Subscribe():
                self.outbox.refuse(role, peer, OTHER_PORT[role])
            case _:
                self.outbox.send(role, peer, wire.Stranger())

    def _hello(self, peer: bytes, message: wire.Hello, now: float) -> None:
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
            self.outbox.refuse("actor", peer, refusal)
            return
        open_log.actors.hello(peer, message, now)

    def _way_out(self) -> str:
        """Returns how a log of another stream can begin."""
        if self._stream is not None:
            return "this server is for that stream alone: start one of your own"
        if self.open_log is not None and self.open_log.is_empty:
            return "it is empty, and takes yours when the actors of the other one have left"
        if self._journal_dir is None:
            return "a log of yours begins when the server is started again"
        return f"a log of yours begins when the server is started with another --journal-dir than {self._journal_dir}"


def why_refuse(spec: StreamSpec, held: StreamSpec | None) -> str:
    """Returns why an actor with a spec cannot be served by a server that holds another, or an empty string."""
    if held is not None and spec != held:
        return (
            f"the log holds another stream than yours ({difference(held, spec)}): "
            "use the same --env with its settings, --agent and algorithm flags everywhere"
        )
    return why_impossible(spec)
