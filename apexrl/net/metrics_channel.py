"""Metrics of all roles on their way to the learner: the messages, the sending and the receiving end. No torch.

A message names the run that it is of: actors and evaluators say the run of the parameters they use, the replay says its
log. The learner drops the reports of other runs, so two runs may use one port by mistake. An evaluation also brings the
checksum of the parameters that were played, and counts only when the learner has published just these.
"""

import collections
import hashlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np
import zmq

from apexrl.clocks import Allowance
from apexrl.errors import MALFORMED
from apexrl.lines import Repeats
from apexrl.net.keyring import Keyring
from apexrl.net.listener import Listener
from apexrl.net.sockets import connect_watched, make_socket, receive, send
from apexrl.net.wire import MAX_MESSAGE_BYTES
from apexrl.types import SHOWN, Count, Finite, Name

logger = logging.getLogger(__name__)

REPORT_PERIOD_SECONDS = 5.0
FORGET_SECONDS = 30.0  # a process that has not reported for so long is gone
ADDED_UP = re.compile(
    r".*(_per_second|_bytes|_steps|_total|_cores)"
    r"|replay/(actors|slots|size|transitions_(inserted|sampled)|unrolls_not_applied|dropped_.*)"  # of all shards
    r"|replay/table/.*/(inserted|sampled|missed|stale_priorities)"
)
MAX_REPORT_BYTES = 16_384
MAX_FRAME_BYTES = 65_536  # so little memory does a sender get before it has shown a key
PIECE_BYTES = 65_000  # of a message, a frame each: encryption adds to a frame
MAX_SENDERS = 8_192
MAX_NUMBERS = 2**18  # that all senders together may hold: 25 MB
MAX_TAGS = 512  # of the living senders
MAX_TAGS_EVER = 2_048  # TensorBoard and trackers keep each of them
MAX_PICTURE_BYTES = 2**20
MAX_PATH_CHARACTERS = 4_096
MAX_GAMES = 10_000
MAX_EVALUATIONS = 8  # that wait for the learner to take them
EVALUATIONS_AT_ONCE, EVALUATIONS_PER_SECOND = 16, 2
MAX_VERSIONS = 65_536  # published versions whose evaluation is waited for: 22 minutes of 50 a second
MAX_FRESH = 4_096  # of them, that wait for their checksums
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
WARN_SECONDS = 60.0

Tag = Annotated[str, msgspec.Meta(min_length=1, max_length=100, pattern=SHOWN)]
Games = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class Report(msgspec.Struct, tag=True, frozen=True):
    """The metrics of one process, by tag."""

    sender: Name
    run: Name  # the run of the parameters in use, or the replay's log
    scalars: Annotated[dict[Tag, float], msgspec.Meta(max_length=MAX_TAGS)]


class Evaluation(msgspec.Struct, tag=True, frozen=True):
    """Whole games played with one version of the parameters."""

    params_version: Count
    exploration: Finite  # in the agent's own measure
    returns: Annotated[tuple[Finite, ...], msgspec.Meta(min_length=1, max_length=MAX_GAMES)]
    steps: Annotated[tuple[Games, ...], msgspec.Meta(min_length=1, max_length=MAX_GAMES)]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    run: Name = ""
    checksum: Annotated[bytes, msgspec.Meta(max_length=64)] = b""  # for the parameters as they were published
    parameters: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)] = b""  # so that the best can be kept
    picture: Annotated[bytes, msgspec.Meta(max_length=MAX_PICTURE_BYTES)] = b""  # PNG
    video: Annotated[str, msgspec.Meta(max_length=MAX_PATH_CHARACTERS)] = ""  # where it lies, for people

    def metrics(self) -> dict[str, float]:
        """Returns the scalars of this evaluation by tag."""
        returns = np.array(self.returns)
        mean = math.fsum(self.returns) / len(returns)  # the same games give the same mean in any order
        values = (mean, np.median(returns), returns.min(), returns.max(), np.mean(self.steps))
        others = self.seconds, self.params_version, self.exploration
        return dict(zip(EVALUATION_TAGS, map(float, (*values, *others)), strict=True))

    @property
    def words(self) -> str:
        """One line about the games."""
        mean, median, low, high, *_, exploration = self.metrics().values()
        returns = f"mean {mean:.2f}, median {median:.2f}, min {low:.2f}, max {high:.2f}"
        games = "1 game" if len(self.returns) == 1 else f"{len(self.returns)} games"
        return f"{games}, {returns}, exploration {exploration:g}"


EVALUATION_TAGS = (
    *(f"evaluation/return_{name}" for name in ("mean", "median", "min", "max")),
    *("evaluation/game_steps", "evaluation/seconds", "evaluation/params_version", "evaluation/exploration"),
)
EVALUATED_FRAMES = "evaluation/frames"  # at which the run was when the parameters were published
LEARNER_TAGS = frozenset((*EVALUATION_TAGS, EVALUATED_FRAMES))
_decoder = msgspec.msgpack.Decoder(Report | Evaluation)


def checksum(encoded: bytes) -> bytes:
    """Returns the checksum of parameters as they were published; nobody finds others with the same one."""
    return hashlib.blake2b(encoded, digest_size=16).digest()


class MetricsClient:
    """Sends reports and never waits: without a learner it keeps a few and drops the rest. Owned by one thread."""

    def __init__(self, endpoint: str, sender: str, keyring: Keyring | None = None, context: zmq.Context | None = None):
        self.run = ""  # reports begin when their run is known
        self._sender = sender
        self._socket = make_socket(context or zmq.Context.instance(), zmq.PUSH)
        self._socket.sndhwm = 16
        self._monitor = connect_watched(self._socket, endpoint, keyring, "learner")

    def report(self, scalars: dict[str, float]) -> None:
        """Sends the newest metrics of this process."""
        if self.run:
            self._send(Report(self._sender, self.run, {tag: float(value) for tag, value in scalars.items()}))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Sends the outcome of an evaluation; a picture that is too large stays behind."""
        if len(evaluation.picture) > MAX_PICTURE_BYTES:
            logger.warning("a picture of %d bytes is left out: %d at most", len(evaluation.picture), MAX_PICTURE_BYTES)
            evaluation = msgspec.structs.replace(evaluation, picture=b"")
        self._send(evaluation)

    def close(self) -> None:
        """Closes the socket; gives the last report a moment to leave."""
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close(linger=500)

    def _send(self, message: Report | Evaluation) -> None:
        if self._monitor is not None:
            self._monitor.fault()
        try:
            encoded = memoryview(msgspec.msgpack.encode(message))
            send(self._socket, [bytes(encoded[i : i + PIECE_BYTES]) for i in range(0, len(encoded), PIECE_BYTES)])
        except zmq.Again:
            logger.debug("the learner takes no reports: one dropped")


class MetricsServer:
    """Receives the reports of all processes in a thread of its own, and drops by reason those that do not fit."""

    def __init__(self, host: str, port: int, keyring: Keyring | None = None, context: zmq.Context | None = None,
                 clock: Callable[[], float] = time.monotonic):  # fmt: skip
        """Binds the port; with a keyring only the roles of the run may report.

        Raises: ConfigError when it cannot be had.
        """
        self.runs: frozenset[str] = frozenset()  # whose reports are taken: none before the learner knows its own
        self.dropped: collections.Counter[str] = collections.Counter()
        self._socket = make_socket(context or zmq.Context.instance(), zmq.PULL)
        self._socket.rcvhwm = 8  # for each sender
        clients = ("actor", "replay", "learner")
        self._listener = Listener(self._socket, host, port, MAX_FRAME_BYTES, keyring, clients)
        self.endpoint = self._listener.endpoint
        self._lock = threading.Lock()
        self._latest: dict[str, tuple[float, dict[str, float]]] = {}
        self._num_numbers = 0  # in `_latest`
        self._tags: dict[str, str] = {}  # all that were ever taken
        self._living_tags: set[str] = set()
        self._evaluations: list[Evaluation] = []
        self._fresh: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=MAX_FRESH)
        self._published: collections.OrderedDict[int, bytes] = collections.OrderedDict()  # checksums by version
        self._clock = clock
        self._allowance = Allowance(EVALUATIONS_AT_ONCE, EVALUATIONS_PER_SECOND, clock)  # each is written to the disk
        self._repeats = {kind: Repeats(WARN_SECONDS, clock=clock) for kind in ("crowded", "not finite", "others")}
        self._closed = threading.Event()

    def run(self) -> None:
        """Receives until closed; the body of the thread."""
        while not self._closed.is_set():
            frames = receive(self._socket, 200)
            self._sum_up()
            if frames is None:
                continue
            num_bytes = sum(map(len, frames))
            if num_bytes > MAX_MESSAGE_BYTES:
                self._drop("too large", f"of {num_bytes} bytes")
                continue
            try:
                message = _decoder.decode(b"".join(frames))
            except MALFORMED as error:
                self._drop("malformed", str(error))
                continue
            self.take(message, num_bytes)
        self._listener.close()

    def published(self, params_version: int, encoded: bytes) -> None:
        """Says which parameters an evaluation of a version has to have played."""
        self._fresh.append((params_version, encoded))

    def take(self, message: Report | Evaluation, num_bytes: int = 0) -> None:
        """Takes one message of so many bytes, or drops it by reason."""
        if not self.runs:
            return  # too early
        if message.run not in self.runs:
            reason = "foreign"
        elif isinstance(message, Evaluation):
            reason = self._take_evaluation(message)
        else:
            reason = self._take_report(message, num_bytes)
        if reason:
            self._drop(reason, f"of run {message.run[:40]!r}")

    def evaluations(self) -> list[Evaluation]:
        """Returns the evaluations that came since the last call."""
        with self._lock:
            evaluations, self._evaluations = self._evaluations, []
        return evaluations

    def latest(self) -> dict[str, float]:
        """Returns the latest metrics of the living processes, combined by tag, and counts of dropped messages."""
        values = collections.defaultdict(list)
        with self._lock:
            self._forget_the_dead()
            for _, scalars in self._latest.values():
                for tag, value in scalars.items():
                    values[tag].append(value)
        metrics = {tag: sum(v) if ADDED_UP.fullmatch(tag) else sum(v) / len(v) for tag, v in values.items()}
        return metrics | {f"system/dropped_reports/{reason}": float(n) for reason, n in dict(self.dropped).items()}

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _take_evaluation(self, evaluation: Evaluation) -> str:
        if len(evaluation.returns) != len(evaluation.steps):
            return "malformed"
        if evaluation.picture and not evaluation.picture.startswith(PNG_MAGIC):
            return "malformed"
        self._sum_up()
        published = self._published.get(evaluation.params_version)
        if published is None or published != evaluation.checksum:
            return "unpublished"
        if evaluation.parameters and checksum(evaluation.parameters) != published:
            return "unpublished"
        with self._lock:
            if len(self._evaluations) >= MAX_EVALUATIONS or not self._allowance.takes(1):
                return "crowded"
            self._evaluations.append(evaluation)
        return ""

    def _take_report(self, report: Report, num_bytes: int) -> str:
        if num_bytes > MAX_REPORT_BYTES:
            return "too large"
        if any(tag.startswith("learner/") or tag in LEARNER_TAGS for tag in report.scalars):
            return "malformed"  # the learner alone says these
        with self._lock:
            tags, (_, known) = report.scalars.keys(), self._latest.get(report.sender, (0.0, {}))
            num_senders = len(self._latest) + (report.sender not in self._latest)
            num_numbers = self._num_numbers + len(tags) - len(known)
            if num_senders > MAX_SENDERS or num_numbers > max(MAX_NUMBERS, self._num_numbers):
                return "crowded"
            unheard, new = tags - self._living_tags, tags - self._tags.keys()
            if len(self._living_tags) + len(unheard) > MAX_TAGS or len(self._tags) + len(new) > MAX_TAGS_EVER:
                return "crowded"
            self._living_tags |= tags
            self._tags |= {tag: tag for tag in new}
            # One string for all senders. A number that is not finite would hide those of all others.
            scalars = {self._tags[tag]: value for tag, value in report.scalars.items() if math.isfinite(value)}
            self._latest[report.sender] = (self._clock(), scalars)
            self._num_numbers += len(scalars) - len(known)
        if strange := sorted(report.scalars.keys() - scalars.keys()):
            self.dropped["not finite"] += len(strange)
            self._warn("not finite", "%s of %s is not finite: left out", strange[0], report.sender)
        return ""

    def _forget_the_dead(self) -> None:
        now = self._clock()
        self._latest = {s: (t, v) for s, (t, v) in self._latest.items() if now - t < FORGET_SECONDS}
        self._living_tags = {tag for _, scalars in self._latest.values() for tag in scalars}
        self._num_numbers = sum(len(scalars) for _, scalars in self._latest.values())

    def _sum_up(self) -> None:
        """Replaces published parameters by their checksums, in this thread instead of the learner's."""
        while self._fresh:
            params_version, encoded = self._fresh.popleft()
            self._published.pop(params_version, None)
            self._published[params_version] = checksum(encoded)
            if len(self._published) > MAX_VERSIONS:
                self._published.popitem(last=False)

    def _drop(self, reason: str, details: str) -> None:
        self.dropped[reason] += 1
        if reason == "crowded":
            self._warn(reason, "%d processes report as much as fits here, and %d reports were left out so far: is "
                       "--metrics-port open to strangers?", len(self._latest), self.dropped[reason])  # fmt: skip
            return
        self._warn("others", "reports are dropped, %s so far; the last %s: does another run use this --metrics-port?",
                   dict(self.dropped), details)  # fmt: skip

    def _warn(self, kind: str, message: str, *details: object) -> None:
        """Says something, each kind at most once in WARN_SECONDS."""
        if self.runs and self._repeats[kind].let_through():
            logger.warning(message, *details)
