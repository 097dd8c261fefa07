"""The ports of a run on this machine.

Between the look at a port and the role that listens on it lie seconds. So a launcher reserves the ports of its run for
other launchers, by names that Linux frees with it: they may begin at the same moment.
"""

import contextlib
import errno
import random
import socket
from collections.abc import Collection, Iterable

from apexrl.config.commands import RunCommand
from apexrl.config.fields import values_of, with_values
from apexrl.config.flags import Asked
from apexrl.config.words import flag_of
from apexrl.errors import ConfigError
from apexrl.hosts import is_ipv6

# Below the ports that Linux gives to connections that go out (32,768 and up): one of those may be taken between the
# look at it and its use. Above those of Ray's workers (10,002 to 19,999).
SEARCHED_PORTS = range(20_000, 28_000)
# As --port-base gives them. Those of the replay's shards are the last: each has two more.
IN_ORDER = ("tensorboard_port", "parameter_port", "metrics_port", "meeting_port", "actor_port", "batch_port")


def from_base(asked: Asked[RunCommand], saved: RunCommand | None = None) -> Asked[RunCommand]:
    """Returns a command line to which --port-base gives the ports that it does not give itself.

    A run without actors has no replay server, and that of a guest's run keeps its ports.

    Args:
      saved: the configuration of the run that is resumed or forked.
    """
    base, has_servers = asked.command.port_base, asked.command.has_actors and (saved is None or saved.has_actors)
    names = IN_ORDER if has_servers else IN_ORDER[:-2]
    found = {name: base + i for i, name in enumerate(names) if name not in asked.given} if base else {}
    return asked._replace(command=with_values(asked.command, found), given=asked.given.union(found))


class Reserved:
    """The ports that this launcher reserves until a stack is closed."""

    def __init__(self, held: contextlib.ExitStack):
        self._held, self._own = held, set[int]()

    def take(self, port: int) -> bool:
        """Reserves a port; returns False when another launcher has it."""
        if port in self._own:
            return True
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0apexrl/port/{port}")  # of this network, as the port is
        except OSError as error:
            name.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._held.enter_context(name)
        self._own.add(port)
        return True

    def row(self, host: str, count: int, avoided: Collection[int]) -> int:
        """Reserves free ports in a row; returns the first. Raises as `free_row` does."""
        avoided = list(avoided)
        while not all(map(self.take, found := range(first := free_row(host, count, avoided), first + count))):
            avoided += found
        return first


def with_free_ports(command: RunCommand, given: Collection[str], held: contextlib.ExitStack) -> tuple[RunCommand, str]:
    """Returns a run with free ports in place of those that are taken, and a line about it, else an empty one.

    Args:
      given: names of the ports that stay, since somebody asked for them.
      held: the ports are reserved until it is closed.
    Raises: ConfigError, which names all of them, when given ports are taken or are the same.
    """
    needed, reserved = _needed(command), Reserved(held)
    faults = {name: fault for name, at in needed.items() if (fault := _fault(name, *at, reserved)) is not None}
    if wrong := [name for name in faults if name in given]:
        found = " and ".join(str(faults[name]) for name in wrong)
        cure = f"stop what listens there, give another {_flags(command, wrong)}, or leave that out"
        raise ConfigError(f"{found}: {cure}") from faults[wrong[0]].__cause__
    kept = [port for name, (_, ports) in needed.items() if name in given for port in ports]
    if len(set(kept)) < len(kept):
        flags = _flags(command, [name for name in needed if name in given])
        raise ConfigError(f"{flags} give the ports {sorted(kept)}: each has to be another one")
    others = dict[str, int]()
    for name, (host, ports) in needed.items():
        if name not in given:
            if name in faults or not set(kept).isdisjoint(ports):
                others[name] = reserved.row(host, 2 * len(ports), kept)
            kept += range(others[name], others[name] + 2 * len(ports)) if name in others else ports
    taken = " ".join(str(needed[name][1][0]) for name in others)
    said = f"ports {taken} are taken: this run has {' '.join(map(str, others.values()))}" if others else ""
    return with_values(command, others), said


def _flags(command: RunCommand, names: Iterable[str]) -> str:
    """Returns the flags that gave the ports of some names, in words; --port-base gives those of its row."""
    base, at = command.port_base, values_of(command)
    of_base = {name for i, name in enumerate(IN_ORDER) if base and at[name] == base + i}
    return " and ".join(dict.fromkeys("--port-base" if name in of_base else flag_of(name) for name in names))


def _needed(command: RunCommand) -> dict[str, tuple[str, range]]:
    """Returns where a run listens, by the names of its flags: a host, and a port or one of each shard."""
    wires, names, needed = command.wires, list[str](), dict[str, tuple[str, range]]()
    if not command.reproducible:
        names += ["parameter_port", "metrics_port", *(["actor_port", "batch_port"] if command.has_actors else [])]
    for name in names:
        first, shards = getattr(wires, name), wires.shards if name in ("actor_port", "batch_port") else 1
        needed[name] = wires.bind_host, range(first, first + 2 * shards, 2)
    if command.learning.num_learners > 1:
        needed["meeting_port"] = "127.0.0.1", range(wires.meeting_port, wires.meeting_port + 1)
    if command.tensorboard:
        board = command.tensorboard_port
        needed["tensorboard_port"] = command.tensorboard_host, range(board, board + 1)
    return needed


def _fault(name: str, host: str, ports: Iterable[int], reserved: Reserved) -> ConfigError | None:
    """Returns what is wrong with the first port that is taken, and why; None when all are free, and reserved.

    Raises: ConfigError when the host is none of this machine's.
    """
    for port in ports:
        if not reserved.take(port):
            return ConfigError(f"port {port} on {host} cannot be used (another run has it)")
        with _socket_for(host) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                fault = f"port {port} on {host} cannot be used ({error.strerror})"
                if not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
                    taken = ConfigError(fault)
                    taken.__cause__ = error
                    return taken
                flag = "--tensorboard-host" if name == "tensorboard_port" else "--bind-host"
                raise ConfigError(f"{fault}: give an address of this machine as {flag}") from None
    return None


def free_row(host: str, count: int, avoided: Collection[int] = ()) -> int:
    """Returns the first of some ports in a row on which nobody listens now, and of which none is avoided.

    Raises: OSError when the host is none of this machine's, ConfigError when there are none.
    """
    for first in random.sample(SEARCHED_PORTS[:-count], len(SEARCHED_PORTS) - count):
        row = range(first, first + count)
        if not any(port in avoided for port in row) and all(_is_free(host, port) for port in row):
            return first
    raise ConfigError(f"there are no {count} free ports in a row on {host}: end programs that listen there")


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
