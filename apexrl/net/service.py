"""The replay service without its sockets: messages in, messages out. No clock, no torch.

Feed it messages and the time with `receive`, call `advance` once for all that came, send the messages of
`outbox.drain`, and call `expire` every second.
"""

import contextlib
import logging
from pathlib import Path

import msgspec

from apexrl.config.fields import check_ranges
from apexrl.config.sections import ReplayConfig
from apexrl.config.tables import logs_of
from apexrl.errors import ConfigError, WireError
from apexrl.memory import free_memory_bytes
from apexrl.net import wire
from apexrl.net.open_log import Advanced, OpenLog
from apexrl.net.outbox import Outbox
from apexrl.net.served_log import ServedLog
from apexrl.replay.journal import IDENTITY_FILE
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)

PEER_TIMEOUT_SECONDS = 15.0
PLACE_BYTES = 8  # of a transition, in the ring of its log or in a table
STALLED_SECONDS = 5.0  # between two calls of `expire`, which should be one
STATISTICS_PERIOD_SECONDS = 0.1  # all requests within it get the same answer
GREETINGS = {"actor": frozenset({wire.Hello}), "learner": frozenset({wire.Subscribe, wire.AskStatistics})}  # of a port


class ReplayService:
    """Owns the logs of a server by name: one without a name, or any number with names. A greeting chooses one.

    Later messages of a peer are for the log where it has a session, which is one.
    """

    def __init__(
        self,
        config: ReplayConfig,
        seed: int,
        journal_dir: Path | None = None,
        now: float = 0.0,
        stream: StreamSpec | None = None,
    ):
        """Starts with the journals' content: that of a log with a name is in a directory of this name.

        Args:
          stream: the only spec that is served, where it is known.
        Raises: ConfigError when a journal cannot be used or is of another stream, or numbers or tables make no sense.
        """
        check_ranges(config)
        configs = logs_of(config)
        needed, free = PLACE_BYTES * sum(own.capacity for own in configs.values()), free_memory_bytes()
        if needed > free:
            words = f"it takes {needed / 1e9:.1f} GB of memory beside its data, and {free / 1e9:.1f} GB are free"
            raise ConfigError(f"--capacity {config.capacity:,} does not fit: {words}")
        self.logs: dict[str, ServedLog] = {}
        self.outbox = Outbox()
        self.memory_bytes = 0  # of the process, as its owner measures it
        self._expired_seconds = now
        self._answers: dict[str, tuple[float, wire.Statistics]] = {}  # by log: the last one, and when it was made
        if journal_dir is None:
            logger.warning("no --journal-dir: experience is kept in memory only, and lost with this process")
        elif "" not in configs and (journal_dir / IDENTITY_FILE).exists():
            names = ", ".join(configs)
            raise ConfigError(f"--journal-dir {journal_dir} holds a log without a name: give another one for {names}")
        try:
            for name, own in configs.items():
                directory = None if journal_dir is None else journal_dir / name
                self.logs[name] = ServedLog(name, own, seed, directory, now, stream, self.outbox)
        except ConfigError:
            self.close()
            raise
        self._first = next(iter(self.logs.values()))
        self._others = list(self.logs.values())[1:]

    @property
    def open_logs(self) -> list[OpenLog]:
        """Those that have begun."""
        return [log.open_log for log in self.logs.values() if log.open_log is not None]

    @property
    def open_log(self) -> OpenLog | None:
        """The log of a server that has one without a name, once it has begun."""
        return self.logs[""].open_log if "" in self.logs else None

    def close(self) -> None:
        """Syncs the journals and gives them back; snapshots are the owner's."""
        with contextlib.ExitStack() as stack:  # an error of one keeps no other open
            for log in self.logs.values():
                stack.callback(log.close)

    def receive(self, role: str, peer: bytes, frames: list[bytes], now: float) -> None:
        """Takes one message. One that is malformed or out of place is dropped, counted, and answered."""
        try:
            message = wire.decode_to_replay(frames)
            if type(message) in GREETINGS[role]:
                self._greet(role, peer, message, now)
            else:
                log = self._first
                if self._others:
                    log = next((other for other in self._others if other.knows(role, peer)), log)
                log.receive(role, peer, message, frames, now)
        except WireError as error:
            self.outbox.drop(role, peer, "malformed", str(error))

    def advance(self) -> Advanced:
        """Stores the inserts that came, and sends all that may go now: acknowledgements, unrolls, batches."""
        advanced = [log.advance() for log in self.logs.values()]
        return Advanced(any(log.has_more for log in advanced), any(log.has_stalled for log in advanced))

    def expire(self, now: float) -> None:
        """Gives up peers that were silent for too long, and frees all that they held."""
        elapsed, self._expired_seconds = now - self._expired_seconds, now
        for log in self.logs.values():
            log.count_waits(now, elapsed)
        if elapsed < STALLED_SECONDS:  # else it was this process that stood still, and their messages wait to be read
            for open_log in self.open_logs:
                open_log.give_up_silent_peers(now, PEER_TIMEOUT_SECONDS)

    def statistics(self, now: float) -> dict[str, float]:
        """Returns the server's metrics, those of a log with a name behind NAME/."""
        metrics = self._metrics_of_process()
        for name, log in self.logs.items():
            metrics |= {f"{name}/{metric}" if name else metric: value for metric, value in log.statistics(now).items()}
        return metrics

    def statistics_of(self, name: str, now: float) -> dict[str, float]:
        """Returns the metrics of the server and of one log."""
        return self._metrics_of_process() | self.logs[name].statistics(now)

    def _metrics_of_process(self) -> dict[str, float]:
        dropped = {f"dropped_{kind}": float(count) for kind, count in self.outbox.dropped.items()}
        return {"memory_bytes": self.memory_bytes} | dropped

    def _greet(self, role: str, peer: bytes, message: wire.ToReplay, now: float) -> None:
        assert isinstance(message, wire.Hello | wire.Subscribe | wire.AskStatistics)
        name = message.log_name or ""
        if (log := self.logs.get(name)) is None:
            has = "one log, which has no name" if "" in self.logs else f"the logs {', '.join(self.logs)}"
            given = f"none is named {name}" if name else "name one of them"
            self.outbox.refuse(role, peer, f"this server has {has}: {given}")
            return
        if isinstance(message, wire.AskStatistics):
            self._tell(peer, message, name, now)
            return
        for other in self.logs.values():
            if other is not log and other.knows(role, peer):
                other.receive(role, peer, wire.Goodbye(), [], now)
        if isinstance(message, wire.Hello):
            log.hello(peer, message, now)
        else:
            log.subscribe(peer, message, now)

    def _tell(self, peer: bytes, message: wire.AskStatistics, name: str, now: float) -> None:
        made, answer = self._answers.get(name, (-1e9, wire.Statistics(0, {}, ())))
        if now - made >= STATISTICS_PERIOD_SECONDS:
            answer = wire.Statistics(0, self.statistics_of(name, now), self.logs[name].peers(now))
            self._answers[name] = now, answer
        self.outbox.send("learner", peer, msgspec.structs.replace(answer, request=message.request))
