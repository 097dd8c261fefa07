"""Routing ids: each connection has a secret one, and a mark of it that everybody may see.

The server knows a peer by the routing id of its connection. No other peer learns it, so no other peer can speak in its
name. An actor's name ends in the mark. The mark proves on every server, and after every restart, who owns the name.
"""

import hashlib
import secrets

MIN_ID_BYTES = 16  # fewer could be guessed
MARK_BYTES = 12


def new_routing_id() -> bytes:
    """Returns a routing id that nobody can guess."""
    return secrets.token_hex(16).encode()


def mark_of(routing_id: bytes) -> str:
    """Returns the mark of a routing id: 24 hexadecimal digits. Nobody can find an id with a given mark."""
    return hashlib.blake2b(routing_id, digest_size=MARK_BYTES).hexdigest()


def marked(prefix: str, routing_id: bytes) -> str:
    """Returns the name of the actor that has this routing id."""
    return f"{prefix}-{mark_of(routing_id)}"


def why_not_named(name: str, routing_id: bytes) -> str:
    """Returns the reason why a connection may not use an actor's name, or an empty string."""
    if len(routing_id) < MIN_ID_BYTES:
        return f"the routing id of your connection has {len(routing_id)} bytes: make one of {MIN_ID_BYTES} or more"
    if not name.endswith("-" + mark_of(routing_id)):
        return f"the name {name} is another connection's: end yours in the mark of your routing id"
    return ""
