"""The ports of a run on this machine."""

import contextlib
import errno
import socket

from apexrl.config import RunCommand
from apexrl.errors import ConfigError


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
        with socket.socket() as probe:
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


def free_ports(host: str, count: int) -> list[int]:
    """Returns ports on which nobody listens now."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
