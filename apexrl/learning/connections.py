"""The learner's connections: the log, a server of parameters, and one for reports and evaluations of all roles."""

from collections.abc import Mapping

import torch

from apexrl.config import WireConfig
from apexrl.lifecycle import Stop
from apexrl.net.keyring import load_keyring
from apexrl.net.log_client import LogClient
from apexrl.net.metrics_channel import Evaluation, MetricsServer
from apexrl.net.parameter_channel import ParameterPublisher
from apexrl.net.sockets import address
from apexrl.networks.parameters import ParametersHeader, encode_parameters


class Connections:
    """Owns the keys, and two servers, which run in threads of their own.

    Called by the learner's thread.
    """

    def __init__(self, wires: WireConfig):
        """Binds the ports.

        Raises: ConfigError when a port cannot be had.
        """
        self._replay = address(wires.replay_host, wires.batch_port)
        self._keyring = load_keyring(wires.keys, "learner")
        self._publisher = ParameterPublisher(wires.bind_host, wires.parameter_port, self._keyring)
        self._metrics = MetricsServer(wires.bind_host, wires.metrics_port, self._keyring)

    def log(self, name: str, batch_sizes: Mapping[str, int], prefetch_batches: int) -> LogClient:
        """Connects to the replay server, and waits for nobody. The caller closes the client, before `close`.

        Args:
          name: for people to read.
          batch_sizes: rows of a batch, by wanted table.
          prefetch_batches: batches of each table that may be in flight or unused.
        """
        return LogClient(self._replay, name, batch_sizes, prefetch_batches, keyring=self._keyring)

    def start(self, stop: Stop) -> None:
        """Starts the threads."""
        stop.thread(self._metrics.run, "metrics")
        stop.thread(self._publisher.run, "parameters")

    def publish(self, header: ParametersHeader, tensors: dict[str, torch.Tensor]) -> None:
        """Publishes parameters.

        Raises: ApexError when a value is beyond float16.
        """
        encoded = encode_parameters(header, tensors)
        self._metrics.published(header.params_version, encoded)
        self._publisher.publish(encoded)

    def accept(self, *runs: str) -> None:
        """Takes reports of these runs and logs only: from roles that have our parameters, and from the replay."""
        self._metrics.runs = frozenset(runs) - {""}

    def latest(self) -> dict[str, float]:
        """Returns the latest metrics of the living processes by tag."""
        return self._metrics.latest()

    def evaluations(self) -> list[Evaluation]:
        """Returns the evaluations that came since the last call."""
        return self._metrics.evaluations()

    def close(self) -> None:
        """Ends the threads, and frees the keys."""
        self._metrics.close()
        self._publisher.close()
        if self._keyring is not None:
            self._keyring.close()
