"""The ports of a run on this machine."""

import errno
import itertools
import random
import socket

from apexrl.config.sections import RunCommand
from apexrl.errors import ConfigError
from apexrl.hosts import is_ipv6

# Below the ports that Linux gives to connections that go out (32,768 and up): one of those may be taken between the
# look at it and its use. Above those of Ray's workers (10,002 to 19,999).
SEARCHED_PORTS = range(20_000, 28_000)


def check_ports(command: RunCommand) -> None:
    """Raises ConfigError when a port that the run needs is taken."""
    wires = command.wires
    learner = () if command.reproducible else ("parameter_port", "metrics_port")
    needed = {name: (wires.bind_host, getattr(wires, name)) for name in learner}
    if command.learning.num_learners > 1:
        needed["meeting_port"] = ("127.0.0.1", wires.meeting_port)
    for shard in range(wires.shards if command.has_actors and not command.reproducible else 0):
        own, which = wires.of_shard(shard), f" (of shard {shard})" if shard else ""
        needed |= {f"{name}{which}": (wires.bind_host, getattr(own, name)) for name in ("actor_port", "batch_port")}
    if command.tensorboard:
        needed["tensorboard_port"] = (command.tensorboard_host, command.tensorboard_port)
    ports = [port for _, port in needed.values()]
    if len(set(ports)) < len(ports):
        raise ConfigError(f"ports {sorted(ports)}: each has to be another one")
    for name, (host, port) in needed.items():
        with _socket_for(host) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                fault = f"port {port} on {host} cannot be used ({error.strerror})"
                if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                    flag = "--tensorboard-host" if name == "tensorboard_port" else "--bind-host"
                    raise ConfigError(f"{fault}: give an address of this machine as {flag}") from None
                flag = "--" + name.replace("_port", "-port")
                raise ConfigError(f"{fault}: stop who uses it or give another {flag}") from error


def free_ports(host: str, count: int, searched: range = SEARCHED_PORTS) -> list[int]:
    """Returns ports on which nobody listens now.

    Raises: OSError when the host is none of this machine's, ConfigError when there are not as many.
    """
    candidates = random.sample(searched, len(searched))
    ports = list(itertools.islice((port for port in candidates if _is_free(host, port)), count))
    if len(ports) < count:
        first, last = searched[0], searched[-1]
        raise ConfigError(f"{host} has no {count} free ports from {first} to {last}: end programs that listen there")
    return ports


def _is_free(host: str, port: int) -> bool:
    with _socket_for(host) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def _socket_for(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET)
