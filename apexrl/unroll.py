"""Time steps into unrolls, and unrolls into one compressed block of bytes.

An unroll holds T = K + overlap steps of one stream. Its last overlap steps are the first ones of the next unroll, so
that each of the K starts finds its whole window inside. The arrays of an unroll are the fields of the stream's spec.
Everything here is numpy, single-threaded, without clock or socket.
"""

from collections.abc import Mapping

import numpy as np
import zstandard

from apexrl.casts import exactly
from apexrl.errors import ApexError, WireError
from apexrl.types import Field, StreamSpec, StreamUnrolls, TimeSteps, Unroll

LARGEST_VALUE = 1e12  # bound of every float: far from where a sound network's sums and squares leave float32
ATTRIBUTES = {"action": "actions", "reward": "rewards", "discount": "discounts", "start": "starts"}
"""By field: the attribute of an `Unroll` that holds it. All other fields are extras."""


class UnrollBuilder:
    """Collects the steps of E streams that advance together. Owns its buffers.

    Besides the steps it keeps the agent's extras: named arrays [E, ...], computed from each observation. Extras that
    the spec names become fields of the unrolls. All others are private to the agent and come back with the unrolls.
    """

    def __init__(self, spec: StreamSpec, frames: np.ndarray):
        """Starts E streams at their first frames [E, *frame].

        Raises: ApexError when they are no frames of the spec.
        """
        self._spec = spec
        num_streams = len(frames)
        self._frames = np.zeros((spec.unroll_frames, num_streams, *spec.frame_shape), spec.frame_dtype)
        self._starts = np.zeros((spec.unroll_frames, num_streams), bool)  # by frame, older ones included
        self._actions = np.zeros((spec.unroll_steps, num_streams, *spec.action.shape), spec.action.dtype)
        self._rewards = np.zeros((spec.unroll_steps, num_streams), np.float32)
        self._discounts = np.zeros((spec.unroll_steps, num_streams), np.float32)
        self._extras = {field.name: np.zeros(self._extent(field, num_streams), field.dtype) for field in spec.extras}
        self._firsts = {field.name for field in spec.extras if field.at == "first"}
        self._private: dict[str, np.ndarray] | None = None  # not known before the first observation
        self._length = 0
        _put("frame", self._frames[spec.stacked_frames - 1], frames)
        self._starts[spec.stacked_frames - 1] = True

    def observe(self, extras: Mapping[str, np.ndarray]) -> tuple[StreamUnrolls, dict[str, np.ndarray]] | None:
        """Takes the agent's extras [E, ...] of the current observations, before it acts on them.

        Returns: every K steps, when T steps are held and their last observation has its extras, the unrolls of all
          streams, and the private extras [T + 1, E, ...]. All arrays are copies that the caller may keep.
        Raises: ApexError when extras are missing, or when one has another shape or type than before.
        """
        self._keep(extras)
        if self._length < self._spec.unroll_steps:
            return None
        oldest = self._spec.stacked_frames - 1
        for j in range(1, oldest + 1):  # frames of the game before are not seen by a stack of this one
            self._frames[:j, self._starts[j]] = 0
        num_entries = {field.name: self._spec.num_entries(field) for field in self._spec.extras}
        complete = StreamUnrolls(
            self._frames.copy(),
            self._actions.copy(),
            self._rewards.copy(),
            self._discounts.copy(),
            self._starts[oldest:].copy(),
            {name: self._extras[name][:count].copy() for name, count in num_entries.items()},
        )
        private = {name: values.copy() for name, values in (self._private or {}).items()}
        self._shift()
        return complete, private

    def add(self, actions: np.ndarray, step: TimeSteps) -> None:
        """Appends one step of every stream: the actions taken ([E], or [E, action size]) and their results.

        Raises: ApexError when an array has another shape than the spec, or a number would become another one.
        """
        t = self._length
        newest = t + self._spec.stacked_frames
        _put("action", self._actions[t], actions)
        _put("reward", self._rewards[t], step.rewards)
        _put("discount", self._discounts[t], step.discounts)
        _put("frame", self._frames[newest], step.frames)
        _put("start", self._starts[newest], step.starts)
        self._length += 1

    def _extent(self, field: Field, num_streams: int) -> tuple[int, ...]:
        """Returns the shape of the buffer of an extra.

        A "first" field is kept only where an unroll may begin: at every K-th observation. The others are kept for all
        T + 1 observations, because the last one of "step" belongs to the next unroll.
        """
        spec = self._spec
        entries = spec.unroll_steps // spec.unroll_starts if field.at == "first" else spec.unroll_steps
        return (entries + 1, num_streams, *field.shape)

    def _keep(self, extras: Mapping[str, np.ndarray]) -> None:
        if self._private is None:
            self._private = {
                name: np.zeros((self._spec.unroll_steps + 1, *np.shape(values)), values.dtype)
                for name, values in extras.items()
                if name not in self._extras
            }
        expected = self._extras.keys() | self._private.keys()
        if extras.keys() != expected:
            raise ApexError(f"the agent gives the extras {sorted(extras)}, not {sorted(expected)}")
        first, between = divmod(self._length, self._spec.unroll_starts)
        for name, values in extras.items():
            if name in self._firsts and between:
                continue
            buffer = self._private[name] if name in self._private else self._extras[name]
            array = np.asarray(values)
            if array.shape != buffer.shape[1:]:
                raise ApexError(f"the extra {name!r} of the agent has shape {array.shape}, not {buffer.shape[1:]}")
            if array.dtype.kind == "f" != buffer.dtype.kind:
                raise ApexError(f"the extra {name!r} of the agent is no {buffer.dtype}, but {array.dtype}")
            _put(f"value of extra {name!r}", buffer[first if name in self._firsts else self._length], array)

    def _shift(self) -> None:
        """Makes the last overlap steps the first ones."""
        k = self._spec.unroll_starts
        by_step = [self._frames, self._starts, self._actions, self._rewards, self._discounts]
        by_step += (self._private or {}).values()
        by_step += (array for name, array in self._extras.items() if name not in self._firsts)
        for array in by_step:
            array[: len(array) - k] = array[k:].copy()
        for name in self._firsts:
            array = self._extras[name]
            array[:-1] = array[1:].copy()
        self._length = self._spec.overlap_steps


class UnrollCodec:
    """Unrolls to one zstd block and back. Not thread-safe: one codec per thread.

    The block holds the frames and then the fields of the spec, in its order, little-endian and without padding. Its
    decompressed size is known from the spec and is checked before memory is taken.
    """

    def __init__(self, spec: StreamSpec, level: int = 1):
        self._spec = spec
        self._num_bytes = spec.unroll_bytes
        self._compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
        self._decompressor = zstandard.ZstdDecompressor()
        self._frames_shape = (spec.unroll_frames, *spec.frame_shape)
        self._frames_dtype = np.dtype(spec.frame_dtype).newbyteorder("<")
        self._extras = {field.name for field in spec.extras}
        self._layout: list[_Place] = []
        self._field_bytes = 0
        for field in spec.fields:
            self._layout.append(_Place(field, spec, self._field_bytes))
            self._field_bytes += self._layout[-1].num_bytes

    def encode(self, unroll: Unroll) -> bytes:
        """Returns the compressed block of one stream's unroll.

        Raises: WireError when its arrays are not those of the spec, or a learner would refuse their content.
        """
        if strange := sorted(unroll.extras.keys() - self._extras):
            raise WireError(f"an unroll of {self._spec.env} has the extras {strange}, which its spec does not name")
        fields = [self._exactly(p.name, _array_of(unroll, p.name), p.shape, p.dtype) for p in self._layout]
        frames = self._exactly("frame", unroll.frames, self._frames_shape, self._frames_dtype)
        self._check(frames, fields)
        # The frames alone: a copy of all arrays would cost more than the compression.
        stream = self._compressor.compressobj(size=self._num_bytes)
        start = stream.compress(frames.reshape(-1).view(np.uint8).data)
        rest = stream.compress(b"".join([array.tobytes() for array in fields]))
        return b"".join((start, rest, stream.flush()))

    def decode(self, block: bytes, frames: np.ndarray | None = None) -> Unroll:
        """Returns the unroll of a block.

        Args:
          frames: writable memory [F, *frame] that the frames are decompressed into; new memory when None.
        Raises: WireError when the block is not a zstd frame of exactly the size that the spec gives, or its content
          cannot be; `frames` may be half written then.
        """
        spec, num_bytes = self._spec, self._num_bytes
        if frames is None:
            frames = np.empty(self._frames_shape, spec.frame_dtype)
        rest = np.empty(self._field_bytes, np.uint8)
        try:
            size = zstandard.frame_content_size(block)
            if size != num_bytes:
                raise WireError(f"an unroll of {spec.env} has {num_bytes} bytes, this block says {size}")
            with self._decompressor.stream_reader(block) as reader:
                if not (_fill(reader, frames) and _fill(reader, rest)) or reader.read(1):
                    raise WireError(f"an unroll's block does not hold the {num_bytes} bytes that it says")
        except zstandard.ZstdError as error:
            raise WireError(f"an unroll's block does not decompress: {error}") from error
        fields = [place.view(rest) for place in self._layout]
        self._check(frames, fields)
        action, reward, discount, *extras, start = fields
        names = (field.name for field in spec.extras)
        return Unroll(frames, action, reward, discount, start != 0, dict(zip(names, extras, strict=True)))

    def _exactly(self, name: str, array: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an array as the block holds it. Raises WireError when it is not that of the spec."""
        if array is None or array.shape != shape:
            found = "none" if array is None else str(array.shape)
            raise WireError(f"an unroll of {self._spec.env} has a {name} of shape {found}, not {shape}")
        try:
            array = exactly(array, np.bool_).view(np.uint8) if name == "start" else array
            return np.ascontiguousarray(exactly(array, dtype))
        except ValueError as error:
            raise WireError(f"an unroll of {self._spec.env} has a {name} of {array.dtype} with {error}") from error

    def _check(self, frames: np.ndarray, fields: list[np.ndarray]) -> None:
        """Raises WireError when an unroll holds numbers that no environment or agent of the spec can give."""
        spec = self._spec
        if spec.frame_dtype == "float32":
            self._check_finite("frame", frames)
        for place, array in zip(self._layout, fields, strict=True):
            if place.name == "discount":
                if not (array.min() >= 0 and array.max() <= 1):
                    raise WireError(f"an unroll of {spec.env} holds a discount outside 0..1")
            elif place.is_float:
                self._check_finite(place.name, array)
            elif place.name == "action" and not (array.min() >= 0 and array.max() < spec.num_actions):
                raise WireError(f"an unroll of {spec.env} names an action outside 0..{spec.num_actions - 1}")

    def _check_finite(self, name: str, values: np.ndarray) -> None:
        if not float(np.abs(values).max()) <= LARGEST_VALUE:  # NaN is no number and no less
            raise WireError(
                f"an unroll of {self._spec.env} holds a value of {name} that is not finite, or beyond {LARGEST_VALUE:g}"
            )


class _Place:
    """The place of one field in the bytes behind the frames of a block."""

    def __init__(self, field: Field, spec: StreamSpec, start: int):
        self.name = field.name
        self.dtype = np.dtype(field.dtype).newbyteorder("<")
        self.is_float = self.dtype.kind == "f"
        entries = spec.num_entries(field)
        self.shape = (entries, *field.shape)
        self.num_bytes = entries * field.entry_bytes
        self._start = start

    def view(self, data: np.ndarray) -> np.ndarray:
        """Returns the field in the bytes of all fields; a copy where another field leaves it unaligned."""
        view = data[self._start : self._start + self.num_bytes].view(self.dtype).reshape(self.shape)
        return view if view.flags.aligned else view.copy()


def _array_of(unroll: Unroll, name: str) -> np.ndarray | None:
    array: np.ndarray | None = getattr(unroll, ATTRIBUTES[name]) if name in ATTRIBUTES else unroll.extras.get(name)
    return array


def _put(name: str, place: np.ndarray, values: np.ndarray) -> None:
    """Copies values to their place. Raises ApexError when they have another shape, or would become other numbers."""
    if type(values) is not np.ndarray or values.dtype != place.dtype or values.shape != place.shape:
        try:
            values = exactly(values, place.dtype, place.shape)
        except ValueError as error:
            raise ApexError(f"a step has a {name} of {error}") from error
    place[...] = values


def _fill(reader: zstandard.ZstdDecompressionReader, array: np.ndarray) -> bool:
    """Reads an array; False when there is not so much."""
    view = array.data.cast("B")
    while view:
        count = reader.readinto(view)
        if count == 0:
            return False
        view = view[count:]
    return True
