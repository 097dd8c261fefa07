"""The shards that one learner follows: a replica of each log, in a thread of its own, and one queue of their draws."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from apexrl.errors import ConfigError
from apexrl.learning.experience.draw import Draw
from apexrl.learning.experience.replica import DrawQueue, Replica
from apexrl.learning.waiter import ABSENT
from apexrl.types import Episode, LogPosition, StreamSpec


class Replicas:
    """Draws come in the order in which they are complete: each shard's limiter keeps its own samples an insert.

    Used from the learner's thread.
    """

    def __init__(self, replicas: Sequence[Replica], draws: DrawQueue):
        """Takes replicas that put their draws into one queue."""
        self._replicas = {replica.shard: replica for replica in replicas}
        self._draws = draws

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def of(self, draw: Draw) -> Replica:
        """Returns the replica that a draw comes from."""
        return self._replicas[draw.shard]

    @property
    def spec(self) -> StreamSpec | None:
        """The spec of all logs; None while one is not known.

        Raises: ConfigError when they differ.
        """
        specs = [replica.spec for replica in self]
        if None in specs:
            return None
        if any(spec != specs[0] for spec in specs):
            raise ConfigError(f"the shards hold different streams ({specs}): give all actors the same flags")
        return specs[0]

    @property
    def waits_for(self) -> str:
        """Why there is no draw: the reasons of the shards, each once; empty when one of them has none.

        A shard that is away is the reason, also where others give draws: for how long, the patience says.
        """
        reasons = [replica.waits_for for replica in self]
        if ABSENT in reasons:
            return ABSENT
        return " ".join(dict.fromkeys(reasons)) if all(reasons) else ""

    @property
    def away(self) -> str:
        """Which servers are away, in words, where they are not all of them."""
        shards = [shard for shard, replica in self._replicas.items() if replica.waits_for == ABSENT]
        return f" of shard {' and '.join(map(str, shards))}" if 0 < len(shards) < len(self._replicas) else ""

    @property
    def counted(self) -> dict[int, LogPosition]:
        """The position up to which each log was counted, by shard."""
        return {shard: replica.counted for shard, replica in self._replicas.items()}

    @property
    def transitions(self) -> int:
        """Transitions that the logs have brought."""
        return sum(replica.counted.transitions for replica in self)

    @property
    def params_versions(self) -> list[int]:
        """The versions that made the newest unrolls."""
        return list(itertools.chain.from_iterable(list(replica.params_versions) for replica in self))

    @property
    def num_undecodable(self) -> int:
        """Unrolls that could not be decoded."""
        return sum(replica.num_undecodable for replica in self)

    @property
    def selection_metrics(self) -> Mapping[str, float]:
        """The metrics of the newest selections."""
        return dict(itertools.chain.from_iterable(replica.selection_metrics.items() for replica in self))

    def next_draw(self, timeout_seconds: float) -> Draw | None:
        """Returns the next draw of any shard, None when there is none in time."""
        draw = self._draws.get(timeout_seconds)
        if draw is not None:
            self.of(draw).draw_taken()
        return draw

    def upcoming_draw(self) -> Draw | None:
        """Returns the draw that `next_draw` returns next, where it is there already."""
        return self._draws.peek()

    def made(self, num_updates: int) -> None:
        """Says how many updates were made: candidates become fewer with them."""
        for replica in self:
            replica.num_updates = num_updates

    def drain_episodes(self) -> list[Episode]:
        """Returns the training games that ended since the last call."""
        return list(itertools.chain.from_iterable(replica.drain_episodes() for replica in self))
