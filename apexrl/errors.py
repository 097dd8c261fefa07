"""The exception tree: the errors that a caller of this package may have to catch.

ApexError
|-- ConfigError   a flag, an environment or a machine makes the request impossible
|-- WireError     bytes from a peer or a file are malformed
|-- PeerError     a peer is gone, refuses us, or let a deadline pass
|   |-- PeerTimeout  the time that the caller gave is up: the same call may succeed later
|   |-- PeerRefused  it does not take what we ask or send: the same call fails again
|   `-- KilledError  a process that we started was killed
`-- JournalError  the disk does not take experience that has to be kept
"""

import contextlib
import re
from collections.abc import Iterator

import msgspec

from apexrl.extras import PIP_INSTALL, why_missing
from apexrl.lines import printable

MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)
"""The errors of msgspec for bytes of a stranger."""
UNREADABLE = (OSError, *MALFORMED)
"""The errors of reading a file of a stranger."""


class ApexError(Exception):
    """The base of all errors that this package raises on purpose. Its text may hold words of peers and files."""

    def __init__(self, text: str = ""):
        super().__init__(printable(str(text)))


class ConfigError(ApexError):
    """The configuration cannot work. The message says what to change."""


class WireError(ApexError):
    """A message or file is malformed, or has another version or size than agreed."""


class PeerError(ApexError):
    """Another role is gone, refused the request, or did not answer before the deadline."""


class PeerTimeout(PeerError):  # noqa: N818 - its base says that it is an error
    """The time that the caller gave is up. The message says what was waited for."""


class PeerRefused(PeerError):  # noqa: N818
    """Another role does not take what we ask or send. The message has its reason."""


class JournalError(ApexError):
    """The journal cannot be written. No acknowledged unroll is lost."""


class KilledError(PeerError):
    """A process that we started was killed by a signal: nothing is wrong with it."""


def fault_of(error: BaseException) -> str:
    """Returns why something cannot be read, as one line."""
    reason = error.strerror if isinstance(error, OSError) else None
    return " ".join((reason or str(error) or type(error).__name__).split())


def reason_of(error: BaseException) -> str:
    """Returns an error of foreign code as one line. A command that installs packages is one for our Python."""
    if cure := why_missing(error):
        return cure
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return re.sub(r"(?<!-m )\bpip install", lambda _: PIP_INSTALL, line)


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Makes an error of foreign code a ConfigError that begins with some words; what we refuse stays as it is."""
    try:
        yield
    except (ConfigError, JournalError):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: {reason_of(error)}") from error
