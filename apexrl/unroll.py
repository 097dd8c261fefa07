"""Time steps into unrolls, and unrolls into one compressed block of bytes.

An unroll holds T = K + n steps of one stream; its last n steps are the first n of the next one, so that each of the
K starts finds its whole n-step window inside. Everything here is numpy, single-threaded, without clock or socket.
"""

from collections.abc import Mapping

import numpy as np
import zstandard

from apexrl.errors import WireError
from apexrl.types import StreamSpec, TimeSteps, Unroll

LARGEST_VALUE = 1e12  # of a frame or reward: far from where a sound network's sums and squares leave float32


class UnrollBuilder:
    """Collects the steps of E streams that advance together; owns the buffers, which the next `add` overwrites.

    Beside the steps it keeps `extras`, named [E] arrays that the agent computes from each observation (an Ape-X actor
    its Q-values), for all T + 1 observations of an unroll.
    """

    def __init__(self, spec: StreamSpec, frames: np.ndarray):
        """Starts E streams at their first frames [E, *frame]."""
        self._spec = spec
        num_streams = len(frames)
        self._frames = np.zeros((spec.unroll_frames, num_streams, *spec.frame_shape), spec.frame_dtype)
        self._actions = np.zeros((spec.unroll_steps, num_streams), np.int32)
        self._rewards = np.zeros((spec.unroll_steps, num_streams), np.float32)
        self._discounts = np.zeros((spec.unroll_steps, num_streams), np.float32)
        self._starts = np.zeros((spec.unroll_frames, num_streams), bool)  # by frame, older ones included
        self._extras: dict[str, np.ndarray] = {}
        self._length = 0
        self._frames[spec.stacked_frames - 1] = frames
        self._starts[spec.stacked_frames - 1] = True

    def observe(self, extras: Mapping[str, np.ndarray]) -> tuple[Unroll, dict[str, np.ndarray]] | None:
        """Takes what the agent computed from the current observations, before it acts on them.

        Returns: every K steps, when T steps are held and their last observation has its extras, the unrolls of all
          streams ([.., E, ..], axis 1) and their extras [T + 1, E]: views, to be used before the next call.
        """
        spec = self._spec
        for name, values in extras.items():
            if name not in self._extras:
                self._extras[name] = np.zeros((spec.unroll_steps + 1, *values.shape), values.dtype)
            self._extras[name][self._length] = values
        if self._length < spec.unroll_steps:
            return None
        oldest = spec.stacked_frames - 1
        for j in range(1, oldest + 1):  # frames of the game before are not seen by a stack of this one
            self._frames[:j, self._starts[j]] = 0
        complete = Unroll(self._frames, self._actions, self._rewards, self._discounts, self._starts[oldest:])
        complete = Unroll(*(array.copy() for array in complete))
        extras_seen = {name: values.copy() for name, values in self._extras.items()}
        self._shift()
        return complete, extras_seen

    def add(self, actions: np.ndarray, step: TimeSteps) -> None:
        """Appends one step of every stream: the actions taken and what came of them."""
        t = self._length
        newest = t + self._spec.stacked_frames
        self._actions[t] = actions
        self._rewards[t] = step.rewards
        self._discounts[t] = step.discounts
        self._frames[newest] = step.frames
        self._starts[newest] = step.starts
        self._length += 1

    def _shift(self) -> None:
        """Makes the last n steps the first n."""
        k = self._spec.unroll_starts
        for array in (
            self._frames,
            self._starts,
            self._actions,
            self._rewards,
            self._discounts,
            *self._extras.values(),
        ):
            kept = len(array) - k
            array[:kept] = array[k:].copy()
        self._length = self._spec.n_steps


class UnrollCodec:
    """Unrolls to one zstd block and back. Not thread-safe: one codec per thread.

    The block holds frames, actions, rewards, discounts and starts, in this order, little-endian and without padding,
    so its decompressed size is known from the spec and is checked before memory is taken.
    """

    def __init__(self, spec: StreamSpec, level: int = 1):
        self._spec = spec
        self._compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, unroll: Unroll) -> bytes:
        """Returns the compressed block of one stream's unroll.

        Raises: WireError when a learner would refuse its content.
        """
        check_content(unroll, self._spec)
        # Array by array: a copy of all of them would cost more than the compression.
        stream = self._compressor.compressobj(size=self._spec.unroll_bytes)
        pieces = [stream.compress(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) for array in unroll]
        return b"".join((*pieces, stream.flush()))

    def decode(self, block: bytes, frames: np.ndarray | None = None) -> Unroll:
        """Returns the unroll of a block.

        Args:
          frames: writable memory [F, *frame] that the frames are decompressed into; of our own when None.
        Raises: WireError when the block is not a zstd frame of exactly the size that the spec gives, or its content
          cannot be; `frames` may be half written then.
        """
        spec = self._spec
        if frames is None:
            frames = np.empty((spec.unroll_frames, *spec.frame_shape), spec.frame_dtype)
        rest = np.empty(spec.unroll_bytes - frames.nbytes, np.uint8)
        try:
            size = zstandard.frame_content_size(block)
            if size != spec.unroll_bytes:
                raise WireError(f"an unroll of {spec.env} has {spec.unroll_bytes} bytes, this block says {size}")
            with self._decompressor.stream_reader(block) as reader:
                if not (_fill(reader, frames) and _fill(reader, rest)) or reader.read(1):
                    raise WireError(f"an unroll's block does not hold the {spec.unroll_bytes} bytes that it says")
        except zstandard.ZstdError as error:
            raise WireError(f"an unroll's block does not decompress: {error}") from error
        steps = spec.unroll_steps
        actions, rewards, discounts = (
            rest[4 * steps * i : 4 * steps * (i + 1)].view(dtype) for i, dtype in enumerate(("<i4", "<f4", "<f4"))
        )
        unroll = Unroll(frames, actions, rewards, discounts, rest[12 * steps :] != 0)
        check_content(unroll, spec)
        return unroll


def check_content(unroll: Unroll, spec: StreamSpec) -> None:
    """Raises WireError when an unroll holds numbers that no environment of the spec can give."""
    if not (0 <= unroll.actions.min() and unroll.actions.max() < spec.num_actions):
        raise WireError(f"an unroll of {spec.env} names an action outside 0..{spec.num_actions - 1}")
    floats = {"reward": unroll.rewards} | ({"frame": unroll.frames} if spec.frame_dtype == "float32" else {})
    for name, values in floats.items():
        if not np.abs(values).max() <= LARGEST_VALUE:  # NaN is no number and no less
            raise WireError(f"an unroll of {spec.env} holds a {name} that is not finite, or beyond {LARGEST_VALUE:g}")
    if not (unroll.discounts.min() >= 0 and unroll.discounts.max() <= 1):
        raise WireError(f"an unroll of {spec.env} holds a discount outside 0..1")


def _fill(reader: zstandard.ZstdDecompressionReader, array: np.ndarray) -> bool:
    """Reads an array; False when there is not so much."""
    view = array.data.cast("B")
    while view:
        count = reader.readinto(view)
        if count == 0:
            return False
        view = view[count:]
    return True
