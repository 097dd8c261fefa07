"""A wait for the replay server that names its reason, and ends."""

import dataclasses
import logging
import time

from apexrl.errors import PeerTimeout

logger = logging.getLogger(__name__)

SAID_SECONDS = 10.0


@dataclasses.dataclass
class Waiter:
    """Gives up when the replay has been away for longer than the patience; other waits may take as long as they do."""

    patience_seconds: float
    since: float = dataclasses.field(default_factory=time.monotonic)
    said: float = dataclasses.field(default_factory=time.monotonic)

    def reset(self) -> None:
        """Something came."""
        self.since = time.monotonic()

    def check(self, waits_for: str) -> None:
        """Nothing came; says now and then what is missing.

        Raises: PeerTimeout when the replay server has been away for too long.
        """
        now = time.monotonic()
        if waits_for != "replay_connection":
            self.since = now
        if now - self.since > self.patience_seconds:
            seconds = f"{self.patience_seconds:.0f} s (--patience-seconds)"
            raise PeerTimeout(f"the replay server was away for {seconds}: is it running?")
        if now - self.said > SAID_SECONDS:
            self.said = now
            logger.info("waiting for %s", waits_for or "a batch")
