"""A learner's connections: the logs of its shards, and a server of parameters and one for the metrics of all roles.

Of several learners only the first has the servers; the others send their metrics to it.
"""

from collections.abc import Mapping

import torch

from apexrl.config.sections import WireConfig
from apexrl.errors import ConfigError
from apexrl.lifecycle import Stop
from apexrl.net.keyring import load_keyring
from apexrl.net.log_client import LogClient
from apexrl.net.metrics_channel import MetricsClient, MetricsServer
from apexrl.net.parameter_channel import ParameterPublisher
from apexrl.net.sockets import address
from apexrl.net.wire import MAX_MESSAGE_BYTES
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import encode_halves, halved

MAX_PARAMETER_BYTES = MAX_MESSAGE_BYTES - 2 * 2**20  # an evaluation sends them back, with a picture


class Logs:
    """Owns the keys, and connects to the replay servers. Called by the learner's thread."""

    def __init__(self, wires: WireConfig):
        """Reads the keys, where there are any."""
        self._wires = wires
        self._keyring = load_keyring(wires.keys, "learner")

    def log(self, name: str, batch_sizes: Mapping[str, int], prefetch_batches: int, shard: int = 0) -> LogClient:
        """Connects to a replay server, and waits for nobody. The caller closes the client, before `close`.

        Args:
          name: for people to read.
          batch_sizes: rows of a batch, by wanted table.
          prefetch_batches: batches of each table that may be in flight or unused.
        """
        replay = address(self._wires.replay_host, self._wires.of_shard(shard).batch_port)
        return LogClient(replay, name, batch_sizes, prefetch_batches, keyring=self._keyring)

    def start(self, stop: Stop) -> None:
        """Starts the threads of the servers, where there are any. SIGHUP makes them read again who may connect."""
        if self._keyring is not None:
            stop.on_hang_up(self._keyring.read_again_or_tell)

    def close(self) -> None:
        """Frees the keys."""
        if self._keyring is not None:
            self._keyring.close()


class Connections(Logs):
    """Owns two servers besides, which run in threads of their own: the connections of the first learner."""

    def __init__(self, wires: WireConfig, publish_megabytes_per_second: float = 0.0):
        """Binds the ports.

        Raises: ConfigError when a port cannot be had.
        """
        super().__init__(wires)
        self._publisher = ParameterPublisher(
            wires.bind_host, wires.parameter_port, self._keyring, bytes_per_second=1e6 * publish_megabytes_per_second
        )
        self.metrics = MetricsServer(wires.bind_host, wires.metrics_port, self._keyring)

    def start(self, stop: Stop) -> None:
        """Starts the threads."""
        super().start(stop)
        stop.thread(self.metrics.run, "metrics")
        stop.thread(self._publisher.run, "parameters")

    def publish(self, header: ParametersHeader, tensors: dict[str, torch.Tensor]) -> None:
        """Publishes parameters as they are now. The publisher's thread encodes them.

        That thread ends the learner with an ApexError when a value is beyond float16.

        Raises: ConfigError when they are too large for a message: no actor would ever get them.
        """
        halves = halved(tensors)
        check_size(halves)

        def encode() -> bytes:
            encoded = encode_halves(header, halves)
            self.metrics.published(header.params_version, encoded)
            return encoded

        self._publisher.publish_later(encode)

    def accept(self, *runs: str) -> None:
        """Takes reports of these runs and logs only: from roles that have our parameters, and from the replay."""
        self.metrics.runs = frozenset(runs) - {""}

    def close(self) -> None:
        """Ends the threads, and frees the keys."""
        self.metrics.close()
        self._publisher.close()
        super().close()


class OtherConnections(Logs):
    """Sends metrics to the first learner: the connections of any other one."""

    def __init__(self, wires: WireConfig, name: str):
        """Connects, and waits for nobody."""
        super().__init__(wires)
        self._metrics = MetricsClient(address(wires.learner_host, wires.metrics_port), name, self._keyring)

    def report(self, run: str, scalars: dict[str, float]) -> None:
        """Sends the newest metrics of this learner."""
        self._metrics.run = run
        self._metrics.report(scalars)

    def close(self) -> None:
        """Closes the connection, and frees the keys."""
        self._metrics.close()
        super().close()


def check_size(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ConfigError when parameters are too large for a message, which holds them in half precision."""
    num_bytes = sum(2 * tensor.numel() for tensor in tensors.values())
    if num_bytes > MAX_PARAMETER_BYTES:
        raise ConfigError(
            f"the network has {num_bytes / 2**20:.0f} MiB of parameters in half precision, and a message to the "
            f"actors holds {MAX_PARAMETER_BYTES // 2**20}: make it smaller, as with --hidden-size, or what it sees, as "
            "with --resize"
        )
