"""The replay server: asyncio and two ROUTER sockets around `ReplayService`. One task owns the sockets and all state."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import zmq

from apexrl.config.sections import ReplayConfig
from apexrl.config.tables import QUEUES, table_spec
from apexrl.errors import JournalError
from apexrl.lifecycle import resident_bytes
from apexrl.net.calls import Closing
from apexrl.net.keyring import Keyring
from apexrl.net.listener import Listener
from apexrl.net.open_log import OpenLog
from apexrl.net.served_log import ServedLog
from apexrl.net.service import ReplayService
from apexrl.net.sockets import COPIED_BYTES, make_socket, send
from apexrl.net.statistics import summary
from apexrl.replay.journal import SNAPSHOT_FILE, sync
from apexrl.replay.snapshot import write_snapshot
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)

_EVENTS, _READABLE, _NO_WAIT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)  # pyzmq's enums are slow
EXPIRY_PERIOD_SECONDS = 1.0
TRY_PERIOD_SECONDS = 1.0  # of a disk that has failed
SUMMARY_PERIOD_SECONDS = 60.0
LINGER_SECONDS = 0.05
CROWD_LINGER_SECONDS = 0.1  # of CROWD actors or more
CROWD = 16  # actors, so many that their inserts come together, and that none waits for an acknowledgement
QUEUE_LINGER_SECONDS = 0.02  # where a fifo table stands: its unrolls are used once, and soon
BUSY_MESSAGES = 2000
HURRY_SECONDS = 1.0  # for so long no insert waits for others, when an actor had sent all that it might
MAX_MESSAGES_AT_ONCE = 1024
MAX_BYTES_AT_ONCE = 32 * 2**20
ACTOR_FRAME_BYTES = 768 * 2**10  # as much as a greeting needs, and an unroll of Atari; the log's spec may need more
LEARNER_FRAME_BYTES = 512 * 2**10  # more than the largest message of a learner
ENCRYPTION_BYTES = 256  # more than encryption adds to a frame
MAX_QUEUED_BY_PEER = 128  # messages; further ones stay in the peer's own queue
MAX_QUEUED_FOR_ACTOR = 256
MAX_QUEUED_FOR_LEARNER = 1024  # more than demand allows in flight


class ReplayServer(Closing):
    """Moves messages between the sockets and the service. Further threads sync the journals, one at a time of each.

    In a program: `with ReplayServer(config) as server` serves in a thread until the end of the block. A program with
    an event loop calls `run` there and then `close`.
    """

    def __init__(
        self,
        config: ReplayConfig,
        host: str = "127.0.0.1",
        actor_port: int = 0,
        learner_port: int = 0,
        seed: int = 0,
        journal_dir: str | Path | None = None,
        keyring: Keyring | None = None,
        stream: StreamSpec | None = None,
    ):
        """Recovers the journal, then binds both ports; 0 is any free one.

        Args:
          journal_dir: by default that of the configuration, whose auto is off.
          stream: the only one that it takes; without, that of the first actor.
        Raises: ConfigError when a number of the configuration, a port or the journal cannot be used; everything is
          released then.
        """
        kept = config.journal_dir if journal_dir is None else journal_dir
        directory = None if kept in ("auto", "off") else Path(kept)
        self.service = ReplayService(config, seed, directory, time.monotonic(), stream)
        self._has_queue = any(table.kind in QUEUES for table in map(table_spec, config.tables))
        self._config = config
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] = lambda: None
        self._fault: BaseException | None = None  # that ended the thread
        self._keyring = keyring
        self._failure: asyncio.Future[None] | None = None
        self._writing: set[asyncio.Future[Any]] = set()  # what the threads of the journals do
        self._comes_again = False
        self._linger: asyncio.TimerHandle | None = None  # until it ends, inserts wait in the socket
        self._descriptors: dict[str, int] = {}
        self._num_received = 0  # messages of this second, plus half of the count a second ago
        self._hurries_until = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._listeners: list[Listener] = []  # that of the actors first
        self._fitted = self.service.open_logs  # the actors' port takes their unrolls
        ports = (
            ("actor", actor_port, actor_frame_bytes(self._fitted), MAX_QUEUED_FOR_ACTOR),
            ("learner", learner_port, LEARNER_FRAME_BYTES, MAX_QUEUED_FOR_LEARNER),
        )
        try:
            for role, port, frame_bytes, most_queued in ports:
                socket = self._sockets[role] = make_socket(self._context, zmq.ROUTER)
                socket.rcvhwm, socket.sndhwm = MAX_QUEUED_BY_PEER, most_queued
                self._listeners.append(Listener(socket, host, port, frame_bytes, keyring, (role,)))
        except BaseException:
            self.close()
            raise
        self.actor_endpoint, self.learner_endpoint = (listener.endpoint for listener in self._listeners)
        self.endpoints = self.actor_endpoint, self.learner_endpoint
        logger.info("actors at %s, learners at %s", self.actor_endpoint, self.learner_endpoint)

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then writes everything to the disk."""
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()
        for role, wake in (("actor", self._wake_for_actors), ("learner", self._wake_for_learners)):
            self._descriptors[role] = int(self._sockets[role].getsockopt(zmq.FD))
            loop.add_reader(self._descriptors[role], wake, loop)
        journals = map(self._keep_journal, self.service.logs.values())
        bodies = self._keep_house(loop), *journals, stop.wait()
        running: list[asyncio.Future[Any]] = [self._failure, *map(asyncio.ensure_future, bodies)]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._linger is not None:
                self._linger.cancel()
            for descriptor in self._descriptors.values():
                loop.remove_reader(descriptor)
            for task in running:
                task.cancel()
            outcomes = await asyncio.gather(*running, return_exceptions=True)
            writing = [future for future in self._writing if not future.done()]
            for last in await asyncio.gather(*writing, return_exceptions=True):  # an older snapshot would replace ours
                if isinstance(last, Exception) and not isinstance(last, JournalError):  # that is written again now
                    logger.error("what was being written is lost: %s", last)
            for open_log in self.service.open_logs:
                _save(open_log)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    def __enter__(self) -> Self:
        begun = threading.Event()
        self._thread = threading.Thread(target=self._serve_in_thread, args=(begun,), name="replay server", daemon=True)
        self._thread.start()
        begun.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        """Serves no more.

        Raises: what ended the thread before, where the block itself raises nothing.
        """
        self.close()
        if self._fault is not None and exception[0] is None:
            raise self._fault

    def close(self) -> None:
        """Ends the thread of a `with`, and closes the sockets and the journal. Does nothing at the second call."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread is not None:
            self._stop()
            self._thread.join()
        for listener in self._listeners:
            listener.close(linger_ms=200)
        for socket in self._sockets.values():
            socket.close()
        if self._keyring is not None:
            self._keyring.close()
        self._context.term()
        self.service.close()

    def _serve_in_thread(self, begun: threading.Event) -> None:
        """Serves until `close`. This is the body of the thread."""

        async def serve() -> None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()

            def stop() -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                    loop.call_soon_threadsafe(ended.set)

            self._stop = stop
            begun.set()
            await self.run(ended)

        try:
            asyncio.run(serve())
        except BaseException as error:
            logger.exception("the replay server has ended")
            self._fault = error
        finally:
            begun.set()

    def _wake_for_actors(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets inserts wait for others under low load, because waking for each is most of their cost."""
        if self._is_busy:
            self._wake(loop)
            return
        loop.remove_reader(self._descriptors["actor"])
        self._begin_linger(loop)

    def _wake_for_learners(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serves the actors, too, so the next inserts wait from now on; under high load they wait no more."""
        if self._linger is not None:
            self._linger.cancel()
            if self._is_busy:
                self._end_linger(loop)
                return
            self._begin_linger(loop)
        self._wake(loop)

    @property
    def _is_busy(self) -> bool:
        """Whether inserts wait for no others: so many come anyway, or an actor stands still meanwhile."""
        return self._num_received > BUSY_MESSAGES or time.monotonic() < self._hurries_until

    def _begin_linger(self, loop: asyncio.AbstractEventLoop) -> None:
        is_crowd = sum(len(open_log.actors.sessions) for open_log in self.service.open_logs) >= CROWD
        seconds = CROWD_LINGER_SECONDS if is_crowd else LINGER_SECONDS
        self._linger = loop.call_later(QUEUE_LINGER_SECONDS if self._has_queue else seconds, self._end_linger, loop)

    def _end_linger(self, loop: asyncio.AbstractEventLoop) -> None:
        self._linger = None
        loop.add_reader(self._descriptors["actor"], self._wake_for_actors, loop)
        self._wake(loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serves the waiting messages. The descriptor signals a change only once, so we return while there are more."""
        if self._comes_again:
            return
        try:
            self._comes_again = self._serve()
        except Exception as error:
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)
            return
        if self._comes_again:
            loop.call_soon(self._come_again, loop)

    def _come_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._comes_again = False
        self._wake(loop)

    def _serve(self) -> bool:
        """Receives waiting messages and sends allowed ones; returns whether there is more to do."""
        now = time.monotonic()
        for role, socket in self._sockets.items():
            self._drain(role, socket, now)
        if (open_logs := self.service.open_logs) != self._fitted:
            self._fitted = open_logs
            self._listeners[0].take_frames(actor_frame_bytes(self._fitted))
        has_more, has_stalled = self.service.advance()
        if has_stalled:
            self._hurries_until = now + HURRY_SECONDS
        for role, peer, frames in self.service.outbox.drain():
            with contextlib.suppress(zmq.Again):
                send(self._sockets[role], (peer, *frames))
        return has_more or any(int(socket.getsockopt(_EVENTS)) & _READABLE for socket in self._sockets.values())

    def _drain(self, role: str, socket: zmq.Socket, now: float) -> None:
        num_bytes = size = 0
        for _ in range(MAX_MESSAGES_AT_ONCE):
            try:
                # Behind a large message there are often others. They stay where ZeroMQ has received them.
                peer, *frames = _receive_in_place(socket) if size >= COPIED_BYTES else socket.recv_multipart(_NO_WAIT)
            except zmq.Again:
                return
            self.service.receive(role, peer, frames, now)
            self._num_received += 1
            size = sum(map(len, frames))
            num_bytes += size
            if num_bytes > MAX_BYTES_AT_ONCE:
                return

    async def _keep_house(self, loop: asyncio.AbstractEventLoop) -> None:
        """Expires silent peers once a second, and logs a summary every SUMMARY_PERIOD_SECONDS."""
        reported = time.monotonic()
        metrics = {name: self.service.statistics_of(name, reported) for name in self.service.logs}
        while True:
            await asyncio.sleep(EXPIRY_PERIOD_SECONDS)
            now = time.monotonic()
            with contextlib.suppress(OSError):  # no descriptor is left to measure it
                self.service.memory_bytes = resident_bytes()
            self.service.expire(now)
            self._num_received //= 2
            self._wake(loop)
            if now - reported >= SUMMARY_PERIOD_SECONDS:
                for name, before in metrics.items():
                    metrics[name] = self.service.statistics_of(name, now)
                    log = f"{name}: " if name else ""
                    logger.info("%s%s", log, summary(metrics[name], before, now - reported))
                reported = now

    async def _keep_journal(self, log: ServedLog) -> None:
        """Syncs a log's journal, writes snapshots and tries a failed disk in a thread: no log waits for another's."""
        config = self._config
        next_snapshot = time.monotonic() + config.journal_snapshot_seconds
        period = min(config.journal_flush_seconds or 1.0, config.journal_snapshot_seconds)
        next_sync = time.monotonic() + period
        while True:
            await asyncio.sleep(min(period, TRY_PERIOD_SECONDS))
            open_log = log.open_log
            if open_log is None or (journal := open_log.replay.journal) is None:
                continue
            await open_log.try_journal(self._in_thread)
            if period > TRY_PERIOD_SECONDS and time.monotonic() < next_sync:
                continue
            next_sync = time.monotonic() + period
            try:
                await self._in_thread(sync, journal.take_unsynced())
                journal.synced()
                log.vitals.synced_seconds = time.monotonic()
                if time.monotonic() >= next_snapshot:
                    next_snapshot = time.monotonic() + config.journal_snapshot_seconds
                    await self._in_thread(write_snapshot, journal.directory / SNAPSHOT_FILE, open_log.replay.snapshot())
            except JournalError as error:
                open_log.journal_failed(str(error))
            except OSError as error:
                logger.error("the priorities could not be written (%s): the last ones stay", error)

    async def _in_thread(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Runs a function in another thread, which goes on when this task is cancelled; returns its result."""
        writing = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        return await asyncio.shield(writing)


def _save(open_log: OpenLog) -> None:
    """Writes all of a log to the disk, as well as that is possible."""
    if (journal := open_log.replay.journal) is None:
        return
    try:
        journal.save(open_log.replay.log)
        write_snapshot(journal.directory / SNAPSHOT_FILE, open_log.replay.snapshot())
    except (JournalError, OSError) as error:
        logger.error("the last state was not written: %s", error)


def actor_frame_bytes(open_logs: Sequence[OpenLog]) -> int:
    """Returns the bytes of the largest frame that an actor of these logs sends, or before there is one."""
    sizes = [max(log.sizes.max_message_bytes, log.sizes.max_block_bytes) + ENCRYPTION_BYTES for log in open_logs]
    return max([ACTOR_FRAME_BYTES, *sizes])


def _receive_in_place(socket: zmq.Socket) -> list[Any]:
    """Returns the frames of the next message: bytes, and memoryviews for those of COPIED_BYTES and more.

    Raises: zmq.Again when there is none.
    """
    frames = socket.recv_multipart(_NO_WAIT, copy=False)
    return [frame.bytes if len(frame) < COPIED_BYTES else frame.buffer for frame in frames]
