"""A wait for the replay server that names its reason, and ends."""

import dataclasses
import logging
import time

from apexrl.clocks import Absence
from apexrl.errors import PeerTimeout

logger = logging.getLogger(__name__)

SAID_SECONDS = 10.0
ABSENT = "replay_connection"  # the reason for which one waits where a replay server is away


@dataclasses.dataclass
class Waiter:
    """Gives up when the replay has been away for longer than the patience; other waits may take as long as they do."""

    patience_seconds: float
    absence: Absence = dataclasses.field(default_factory=Absence)
    said: float = dataclasses.field(default_factory=time.monotonic)

    def check(self, waits_for: str, something_came: bool = False, which: str = "") -> None:
        """Says now and then what is missing, where nothing came, or a server is away for long.

        Args:
          which: of several servers, " of shard N", where one is away.
        Raises: PeerTimeout when a replay server has been away for too long, also where we have something without it.
        """
        absent_seconds = self.absence.look(waits_for == ABSENT)
        if absent_seconds > self.patience_seconds:
            seconds = f"{self.patience_seconds:.0f} s (--patience-seconds)"
            raise PeerTimeout(f"the replay server{which} was away for {seconds}: is it running?")
        now = time.monotonic()
        if now - self.said > SAID_SECONDS and (not something_came or absent_seconds > SAID_SECONDS):
            self.said = now
            logger.info("waiting for %s%s", waits_for or "a batch", which)
