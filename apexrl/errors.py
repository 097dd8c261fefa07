"""The exception tree: what a caller of this package may have to catch.

ApexError
|-- ConfigError   a flag, an environment or a machine cannot do what was asked
|-- WireError     bytes from a peer or a file that are not what they claim to be
|-- PeerError     a peer is gone, refuses us, or let a deadline pass
`-- JournalError  the disk does not take what has to be kept
"""


class ApexError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(ApexError):
    """The configuration cannot work; the message says what to change."""


class WireError(ApexError):
    """A message or file is malformed, of another version, or of another size than agreed."""


class PeerError(ApexError):
    """Another role is gone, refused the request, or did not answer before the deadline."""


class JournalError(ApexError):
    """The journal cannot be written; nothing that was acknowledged is lost."""
