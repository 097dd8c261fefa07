"""Figures of all roles on their way to the learner: the messages, the sending and the receiving end. No torch."""

import collections
import logging
import threading
import time

import msgspec
import numpy as np
import zmq

from apexrl.net.keyring import Keyring
from apexrl.net.sockets import bind, connect, make_socket, receive
from apexrl.net.wire import MALFORMED

logger = logging.getLogger(__name__)

REPORT_PERIOD_SECONDS = 5.0
FORGET_SECONDS = 30.0  # a process that has not reported for so long is gone
ADDED_UP = ("_per_second", "_bytes", "_steps", "_total")


class Report(msgspec.Struct, tag=True, frozen=True):
    """The figures of one process, by tag."""

    sender: str
    scalars: dict[str, float]


class Evaluation(msgspec.Struct, tag=True, frozen=True):
    """Whole games played with one version of the parameters."""

    params_version: int
    epsilon: float
    returns: tuple[float, ...]
    steps: tuple[int, ...]
    seconds: float
    parameters: bytes = b""  # the ones that were played, so that the learner can keep the best
    picture: bytes = b""  # PNG

    def figures(self) -> dict[str, float]:
        """Returns the scalars of this evaluation by tag."""
        returns = np.array(self.returns)
        return {
            "evaluation/return_mean": float(returns.mean()),
            "evaluation/return_median": float(np.median(returns)),
            "evaluation/return_min": float(returns.min()),
            "evaluation/return_max": float(returns.max()),
            "evaluation/game_steps": float(np.mean(self.steps)),
            "evaluation/seconds": self.seconds,
            "evaluation/params_version": float(self.params_version),
        }


_decoder = msgspec.msgpack.Decoder(Report | Evaluation)


class MetricsClient:
    """Sends reports and never waits: while the learner is away a few are kept, the rest dropped. Of one thread."""

    def __init__(self, endpoint: str, sender: str, keyring: Keyring | None = None, context: zmq.Context | None = None):
        self._sender = sender
        self._socket = make_socket(context or zmq.Context.instance(), zmq.PUSH)
        self._socket.sndhwm = 16
        connect(self._socket, endpoint, keyring, "learner")

    def report(self, scalars: dict[str, float]) -> None:
        """Sends the newest figures of this process."""
        self._send(Report(self._sender, {tag: float(value) for tag, value in scalars.items()}))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Sends the outcome of an evaluation."""
        self._send(evaluation)

    def close(self) -> None:
        """Closes the socket; gives the last report a moment to leave."""
        self._socket.close(linger=500)

    def _send(self, message: Report | Evaluation) -> None:
        try:
            self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.debug("the learner takes no reports: one dropped")


class MetricsServer:
    """Receives the reports of all processes in a thread of its own."""

    def __init__(self, host: str, port: int, keyring: Keyring | None = None, context: zmq.Context | None = None):
        """Binds the port; with a keyring only actors and the replay may report.

        Raises: ConfigError when it cannot be had.
        """
        self._socket = make_socket(context or zmq.Context.instance(), zmq.PULL)
        self._socket.rcvhwm = 1000
        self.endpoint = bind(self._socket, host, port, keyring, ("actor", "replay"))
        self._lock = threading.Lock()
        self._latest: dict[str, tuple[float, dict[str, float]]] = {}
        self._evaluations: list[Evaluation] = []
        self._num_malformed = 0
        self._closed = threading.Event()

    def run(self) -> None:
        """Receives until closed; the body of the thread."""
        while not self._closed.is_set():
            frames = receive(self._socket, 200)
            if frames is None:
                continue
            try:
                message = _decoder.decode(b"".join(frames))
            except MALFORMED as error:
                self._num_malformed += 1
                logger.debug("a malformed report: %s", error)
                continue
            self.take(message)
        self._socket.close()

    def take(self, message: Report | Evaluation) -> None:
        """Takes one report."""
        with self._lock:
            if isinstance(message, Evaluation):
                if message.returns and len(message.returns) == len(message.steps) and len(self._evaluations) < 100:
                    self._evaluations.append(message)
                return
            self._latest[message.sender] = (time.monotonic(), message.scalars)

    def evaluations(self) -> list[Evaluation]:
        """Returns the evaluations that came since the last call."""
        with self._lock:
            evaluations, self._evaluations = self._evaluations, []
        return evaluations

    def figures(self) -> dict[str, float]:
        """Returns the latest figures of the living processes, combined by tag."""
        values = collections.defaultdict(list)
        with self._lock:
            now = time.monotonic()
            self._latest = {s: (t, v) for s, (t, v) in self._latest.items() if now - t < FORGET_SECONDS}
            for _, scalars in self._latest.values():
                for tag, value in scalars.items():
                    values[tag].append(value)
        figures = {tag: sum(v) if tag.endswith(ADDED_UP) else sum(v) / len(v) for tag, v in values.items()}
        return figures | {"system/malformed_reports_total": float(self._num_malformed)}

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
