"""CURVE keys decide which roles may talk to each other.

A directory holds `ROLE.public` of all roles, and `ROLE.secret` of the roles of its host. Roles are replay, learner and
actor (evaluators are actors). A role may have further keys, named `ROLE-anything.public`. A server that accepts a role
accepts all of its public keys. A key is a line of 40 characters (Z85).
"""

import logging
import os
import struct
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from apexrl.errors import UNREADABLE, ConfigError, fault_of
from apexrl.files import read_whole

logger = logging.getLogger(__name__)

MAX_KEY_BYTES = 4096
ROLES = ("replay", "learner", "actor")


class Keyring:
    """The keys of one process, and the guards of its server sockets. Only the thread that makes the sockets uses it.

    `read_again_or_tell` is for any thread, such as the one that hears SIGHUP.
    """

    def __init__(self, directory: Path, role: str):
        """Reads the keys.

        Raises: ConfigError when one is missing or malformed.
        """
        self.directory = directory
        self.role = role
        self._public = read_key(directory / f"{role}.public")
        self._secret = read_key(directory / f"{role}.secret")
        self._guards: dict[zmq.Context, ThreadAuthenticator] = {}
        self._allowed: list[_Allowed] = []

    def guard(self, socket: zmq.Socket, clients: tuple[str, ...]) -> None:
        """Makes a socket, before it binds, accept only clients that own a key of these roles."""
        socket.curve_server = 1
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        domain = "-".join(clients)
        socket.zap_domain = domain.encode()
        allowed = _Allowed(self.directory, clients)
        self._allowed.append(allowed)
        context = socket.context
        if context not in self._guards:
            self._guards[context] = ThreadAuthenticator(context)
            self._guards[context].start()
        self._guards[context].configure_curve_callback(domain=domain, credentials_provider=allowed)

    def read_again(self) -> None:
        """Reads again which keys may connect. Connections that stand stay.

        Raises: ConfigError when a key is missing or malformed; the old ones count then.
        """
        found = [allowed.read() for allowed in self._allowed]
        for allowed, keys in zip(self._allowed, found, strict=True):
            allowed.keys = keys

    def read_again_or_tell(self) -> None:
        """Reads the keys again, and says so. Where they cannot be read the old ones count."""
        try:
            self.read_again()
            logger.info("the keys in %s were read again: they count for new connections", self.directory)
        except ConfigError as error:
            logger.error("the keys stay as they are: %s", error)

    def introduce(self, socket: zmq.Socket, server: str) -> None:
        """Makes a socket, before it connects, show our key and talk only to the owner of the server role's key."""
        socket.curve_serverkey = read_key(self.directory / f"{server}.public")
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret

    def close(self) -> None:
        """Ends the guards. Call it after the servers are closed."""
        for guard in self._guards.values():
            guard.stop()
        self._guards = {}


class _Allowed:
    """The public keys that a guard accepts, in the form that zmq.auth asks for."""

    def __init__(self, directory: Path, clients: tuple[str, ...]):
        self._directory, self._clients = directory, clients
        self.keys = self.read()

    def read(self) -> frozenset[bytes]:
        """Returns the keys that are in the directory now."""
        return frozenset(key for client in self._clients for key in public_keys(self._directory, client))

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns whether the owner of a key may connect."""
        return key in self.keys


def load_keyring(directory: str, role: str) -> Keyring | None:
    """Returns the keyring of a role; None when no directory is given.

    Raises: ConfigError when a key is missing or malformed, or this libzmq knows no CURVE.
    """
    if not directory:
        return None
    if not zmq.has("curve"):
        raise ConfigError("--keys: this build of libzmq has no CURVE: install pyzmq from its wheel")
    return Keyring(Path(directory), role)


def public_keys(directory: Path, role: str) -> list[bytes]:
    """Returns all public keys of a role.

    Raises: ConfigError when there is none or one is malformed.
    """
    paths = sorted({*directory.glob(f"{role}.public"), *directory.glob(f"{role}-*.public")})
    if not paths:
        raise ConfigError(f"{directory} has no {role}.public: make keys with `apexrl keys {directory}`")
    return [read_key(path) for path in paths]


def read_key(path: Path) -> bytes:
    """Returns one key, 40 characters.

    Raises: ConfigError when it is missing, malformed, or a secret that others may read.
    """
    try:
        text = read_whole(path, MAX_KEY_BYTES).decode("ascii").strip()
        is_open = path.suffix == ".secret" and bool(path.stat().st_mode & 0o077)
    except UNREADABLE as error:
        reason = fault_of(error)
        raise ConfigError(f"{path} cannot be read as a key ({reason}): `apexrl keys DIR` makes keys") from error
    if len(text) != 40 or not _is_z85(text):
        raise ConfigError(f"{path} is not a key: 40 characters of Z85 were expected")
    if is_open:
        raise ConfigError(f"{path} can be read by others: chmod 600 {path}")
    return text.encode()


def make_keys(directory: Path, names: tuple[str, ...]) -> list[Path]:
    """Writes a new pair of keys for each name; returns the files.

    Raises: ConfigError when one exists already, or the directory cannot be written.
    """
    paths = [directory / f"{name}{suffix}" for name in names for suffix in (".public", ".secret")]
    existing = [path for path in paths if path.exists()]
    if existing:
        raise ConfigError(f"{existing[0]} exists already: remove it to make a new one")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in names:
            public, secret = zmq.curve_keypair()
            for suffix, key, mode in ((".public", public, 0o644), (".secret", secret, 0o600)):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with os.fdopen(os.open(directory / f"{name}{suffix}", flags, mode), "wb") as file:
                    file.write(key + b"\n")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written ({error.strerror})") from error
    return paths


def _is_z85(text: str) -> bool:
    try:
        z85.decode(text)
    except (ValueError, KeyError, struct.error):
        return False
    return True
