"""Versions of the wire protocol: two peers speak the highest one that both know."""

from typing import Protocol

PROTOCOLS = range(6, 7)  # that this version speaks; 6 is that of release 0.2.0
PROTOCOL = PROTOCOLS[-1]


class Greeting(Protocol):
    """The part of a greeting that tells which protocols a peer speaks."""

    @property
    def protocol(self) -> int:
        """The oldest one."""
        ...

    @property
    def newest_protocol(self) -> int:
        """The newest one; 0 of peers that name one alone."""
        ...


def agreed_protocol(greeting: Greeting, own: range = PROTOCOLS) -> int:
    """Returns the highest protocol that a peer and a server of `own` protocols speak, -1 when there is none."""
    newest = min(max(greeting.newest_protocol, greeting.protocol), own[-1])
    return newest if newest >= max(greeting.protocol, own[0]) else -1


def why_other_protocol(greeting: Greeting, own: range = PROTOCOLS) -> str:
    """Returns why a peer is refused with which a server of `own` protocols has none in common; else an empty string."""
    if agreed_protocol(greeting, own) >= 0:
        return ""
    theirs = _words_of(greeting.protocol, max(greeting.newest_protocol, greeting.protocol))
    way_out = "update this peer" if greeting.protocol < own[0] else "update the server first, then its peers"
    return f"this server speaks protocol {_words_of(own[0], own[-1])}, you speak {theirs}: {way_out}"


def _words_of(oldest: int, newest: int) -> str:
    return f"{oldest} to {newest}" if newest > oldest else f"{oldest}"
