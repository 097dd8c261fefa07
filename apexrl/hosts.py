"""Hosts as flags and endpoints name them: a name, an IPv4 address or an IPv6 address."""

import ipaddress
import re
import socket

from apexrl.config.commands import ActorCommand, LearnerCommand, ReplayCommand, RunCommand
from apexrl.config.words import flag_of
from apexrl.errors import ConfigError

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}
"""Addresses on which a server listens for all hosts, and where its own host reaches it then."""
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_MAX_CHARACTERS = 253
FLAGS = ("replay_host", "learner_host", "bind_host")


def check_hosts(command: ActorCommand | LearnerCommand | ReplayCommand | RunCommand) -> None:
    """Raises ConfigError when a flag of a command names a host that is none."""
    hosts = {name: getattr(command.wires, name) for name in FLAGS}
    if isinstance(command, RunCommand):
        hosts["tensorboard_host"] = command.tensorboard_host
    for name, host in hosts.items():
        if not is_host(host) and (name, host) != ("bind_host", "*"):
            examples = "replay.example, 10.0.0.1 or fd00::1"
            raise ConfigError(
                f"{flag_of(name)} {host!r} is no host: give a name or an address alone, such as {examples}"
            )
    if isinstance(command, LearnerCommand) and command.learner_hosts > 1 and is_ipv6(command.wires.learner_host):
        raise ConfigError(
            f"--learner-host {command.wires.learner_host}: learners of several hosts meet over IPv4 alone"
        )


def is_host(text: str) -> bool:
    """Returns whether a text is a host's name or address; whether there is such a host is not asked."""
    labels = text.removesuffix(".").split(".")
    if is_ipv6(text) or labels[-1].isdecimal():
        try:
            ipaddress.ip_address(text)
        except ValueError:
            return False
        return True
    return len(text) <= _MAX_CHARACTERS and all(_LABEL.fullmatch(label) for label in labels)


def is_ipv6(host: str) -> bool:
    """Returns whether a host is an IPv6 address; only these have colons."""
    return ":" in host


def at_port(host: str, port: int | str) -> str:
    """Returns HOST:PORT, as URLs and endpoints write it."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether only programs of this machine reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def knock(address: str, timeout_seconds: float) -> None:
    """Raises OSError when nobody listens at HOST:PORT; other texts are no addresses, and not tried."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "//" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds).close()
