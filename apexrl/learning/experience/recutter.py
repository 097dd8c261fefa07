"""The unrolls of a log as a learner wants them: as they came where they fit, else cut anew."""

from collections.abc import Iterator

import msgspec
import numpy as np

from apexrl.losses.windows import valid_starts
from apexrl.net import wire
from apexrl.net.insert_checks import InsertSizes, checked_arrays
from apexrl.replay.priority_table import drawable
from apexrl.streams import StreamCutter
from apexrl.types import Episode, StreamSpec
from apexrl.unroll import UnrollCodec

Fitting = tuple[wire.Insert, bytes, np.ndarray, np.ndarray]  # its block, priorities [P], and what can be drawn [K]


class Recutter:
    """Takes the unrolls of a log in order. Where it cuts them anew, their priorities are 1."""

    def __init__(self, held: StreamSpec, wanted: StreamSpec):
        """Takes the spec of the log and that of the learner, of which `why_not_cut` says nothing."""
        self.is_needed = held != wanted
        self._most_parts = held.unroll_steps // wanted.unroll_starts + 1 if self.is_needed else 1
        self.wanted = wanted
        self._cutter = StreamCutter(held, wanted)
        self._sizes = InsertSizes(held)
        self._codec, self._own_codec = UnrollCodec(held), UnrollCodec(wanted)
        self._episodes: tuple[Episode, ...] = ()  # that ended since the last unroll

    def number(self, number: int, part: int) -> int:
        """Returns the number of a part that an unroll of the log completes, greater than those of all before it."""
        return number * self._most_parts + part

    def of(self, insert: wire.Insert, block: bytes) -> Iterator[Fitting]:
        """Yields the unrolls that one of the log completes.

        Raises: WireError when it cannot be read.
        """
        priorities, valid = checked_arrays(insert, self._sizes)
        if not self.is_needed:
            yield insert, block, priorities, valid
            return
        unroll = self._codec.decode(block)
        self._episodes += insert.episodes
        for first_step, cut in self._cutter.add((insert.actor, insert.stream), insert.first_step, unroll):
            valid = valid_starts(cut.starts, self.wanted.unroll_starts)
            priorities = drawable(valid[None], np.ones((1, self.wanted.num_priorities))).astype(np.float32)
            arrays = {"valid": np.packbits(valid).tobytes(), "priorities": priorities.tobytes()}
            made = msgspec.structs.replace(insert, first_step=first_step, episodes=self._episodes, **arrays)
            self._episodes = ()
            yield made, self._own_codec.encode(cut), priorities[0], valid
