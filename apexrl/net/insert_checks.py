"""Checks of inserts and of the specs behind them: sizes first, then the numbers of many inserts at once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import zstandard

from apexrl.bounds import needed_of
from apexrl.errors import WireError
from apexrl.net import wire
from apexrl.replay.priority_table import drawable
from apexrl.types import StreamSpec

MAX_MESSAGE_OVERHEAD_BYTES = 1024
EPISODE_BYTES = 40
MAX_BLOCK_OVERHEAD_BYTES = 1024  # bytes that do not compress grow a little
INFINITE_BITS = 0x7F800000  # of a float32: those of a finite number from 0 are below, of all others not
BUILT_IN_FIELDS = ("frame", "action", "reward", "discount", "start")


class InsertSizes:
    """The sizes of a log's inserts, computed once from its spec."""

    def __init__(self, spec: StreamSpec):
        self.unroll_bytes = spec.unroll_bytes
        self.unroll_starts = spec.unroll_starts
        self.num_priorities = spec.num_priorities
        self.valid_bytes = wire.num_valid_bytes(spec.unroll_starts)
        self._all_valid = np.packbits(np.ones(spec.unroll_starts, bool)).tobytes()
        steps = spec.unroll_steps + 1
        arrays = 4 * self.num_priorities + self.valid_bytes
        self.max_message_bytes = MAX_MESSAGE_OVERHEAD_BYTES + arrays + EPISODE_BYTES * steps
        self.max_block_bytes = self.unroll_bytes + MAX_BLOCK_OVERHEAD_BYTES + self.unroll_bytes // 128

    def why_malformed(self, insert: wire.Insert, message: bytes, block: bytes, num_streams: int) -> str:
        """Returns the fault of an insert, or an empty string. Looks at sizes only, and decompresses nothing."""
        if len(message) > self.max_message_bytes:
            return f"a message of {len(message)} bytes, at most {self.max_message_bytes} are allowed"
        if insert.stream >= num_streams:
            return f"stream {insert.stream} of {num_streams}"
        return self.why_wrong(insert) or self.why_wrong_block(block)

    def why_wrong(self, insert: wire.Insert) -> str:
        """Returns which array of an insert has a wrong size, or an empty string."""
        if len(insert.priorities) != 4 * self.num_priorities:
            return f"{len(insert.priorities)} bytes of priorities, not 4 * {self.num_priorities}"
        if len(insert.valid) != self.valid_bytes:
            return f"{len(insert.valid)} bytes of valid for {self.unroll_starts} starts, not {self.valid_bytes}"
        return ""

    def why_wrong_numbers(self, insert: wire.Insert) -> str:
        """Returns the fault of the numbers of an insert whose sizes are right, or an empty string.

        Where every start is valid, as nearly always, it takes a tenth of the time of `insert_arrays`.
        """
        bits = np.frombuffer(insert.priorities, np.uint32)
        if insert.valid == self._all_valid and bits.max() < INFINITE_BITS:
            return ""
        return insert_arrays([insert], self).faults.get(0, "")

    def why_wrong_block(self, block: bytes) -> str:
        """Returns the fault of a block's size, or an empty string. Decompresses nothing."""
        if len(block) > self.max_block_bytes:
            return f"a block of {len(block)} bytes for an unroll of {self.unroll_bytes}"
        try:
            size = zstandard.frame_content_size(block)
        except zstandard.ZstdError:
            size = -1
        return "" if size == self.unroll_bytes else f"a block that holds {size} bytes, not {self.unroll_bytes}"


class InsertArrays(NamedTuple):
    """The arrays of M inserts."""

    priorities: np.ndarray  # [M, P] float32
    valid: np.ndarray  # [M, K] bool
    faults: dict[int, str]  # by position among the M: the fault of a malformed insert


def insert_arrays(inserts: Sequence[wire.Insert], sizes: InsertSizes) -> InsertArrays:
    """Returns the arrays of inserts whose sizes are right, and the faults of their numbers."""
    many = len(inserts)
    priorities = np.frombuffer(b"".join([insert.priorities for insert in inserts]), np.float32)
    priorities = priorities.reshape(many, sizes.num_priorities)
    packed = np.frombuffer(b"".join([insert.valid for insert in inserts]), np.uint8)
    bits = np.unpackbits(packed.reshape(many, sizes.valid_bytes), axis=1).view(bool)
    valid, padding = bits[:, : sizes.unroll_starts], bits[:, sizes.unroll_starts :]
    wrong = {
        "a priority is negative or not finite": ~(np.isfinite(priorities) & (priorities >= 0)).all(axis=1),
        "a bit of valid behind the last start is set": padding.any(axis=1),
        "a priority above 0 where nothing is valid": ((priorities > 0) & ~drawable(valid, priorities)).any(axis=1),
    }
    faults = {i: reason for reason, found in wrong.items() for i in np.flatnonzero(found).tolist()}
    return InsertArrays(priorities, valid, faults)


def checked_arrays(insert: wire.Insert, sizes: InsertSizes) -> tuple[np.ndarray, np.ndarray]:
    """Returns the priorities [P] and valid [K] of an insert out of a journal.

    Raises: WireError when its sizes or its numbers are wrong.
    """
    if wrong := sizes.why_wrong(insert):
        raise WireError(wrong)
    priorities, valid, faults = insert_arrays([insert], sizes)
    if faults:
        raise WireError(faults[0])
    return priorities[0], valid[0]


def why_impossible(spec: StreamSpec) -> str:
    """Returns why no log can hold the unrolls of a spec, or an empty string."""
    if not (spec.unroll_starts >= 1 and spec.stacked_frames >= 1):
        return f"counts below 1 in {spec}"
    if min(spec.frame_shape, default=1) < 1:
        return f"{spec.env} has observations {spec.frame_shape}, which are no numbers at all"
    if bool(spec.num_actions) == bool(spec.action_bounds):
        return f"{spec.env} needs either num_actions from 1 or action_bounds, not both or neither"
    if spec.action_bounds and (needed := needed_of(spec.action_bounds)):
        return f"{spec.env} has action_bounds that no log takes: actions need {needed}"
    if spec.action_names and not len(set(spec.action_names)) == len(spec.action_names) == spec.num_actions:
        return f"{spec.env} needs {spec.num_actions} different action_names, or none: it has {spec.action_names}"
    if not all(name and name.isprintable() for name in spec.action_names):
        return f"{spec.env} has action_names that are empty or not printable: {spec.action_names}"
    names = [*BUILT_IN_FIELDS, *(field.name for field in spec.extras)]
    if len(set(names)) < len(names) or "" in names:
        return f"extras need names, all of them distinct and none of {', '.join(BUILT_IN_FIELDS)}"
    if any(min(field.shape, default=1) < 1 for field in spec.extras):
        return "an extra has an empty shape: each of its numbers must be 1 or more"
    return why_too_large(spec)


def why_too_large(spec: StreamSpec) -> str:
    """Returns why no message can hold an unroll of a spec, or an empty string."""
    if spec.unroll_bytes > wire.MAX_MESSAGE_BYTES // 2 or spec.unroll_starts > wire.MAX_BATCH:
        return f"an unroll of {spec.unroll_bytes} bytes is larger than a message may be: lower --unroll-starts"
    return ""
