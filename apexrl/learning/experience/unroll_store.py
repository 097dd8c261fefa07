"""The learner's decoded replica of the experience log: unrolls in a ring, batches gathered by key.

Each unroll is decoded once, into the ring position number % ring_unrolls; its row and the records of its transitions
are written then, with the numbers of the frames that observations show. A batch is gathered from keys alone. One thread
applies. Where the ring lies on a GPU, batches are gathered there as part of the update, by the thread that updates: it
holds the device stream while it checks the keys and launches the update, and the applying thread holds it while it
marks a position and copies into it.
"""

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from apexrl.agents.contract import Batch, TransitionBatch, Transitions, UnrollBatch, Unrolls, Want
from apexrl.agents.recurrence import LAST_REWARD
from apexrl.errors import ConfigError
from apexrl.learning.experience.draw import Gathered, SampledKeys, fill
from apexrl.learning.experience.row import Column
from apexrl.learning.experience.sizes import (
    NUMBERS,
    OBSERVATIONS,
    frame_bytes,
    record_layout,
    row_layout,
    transition_view,
)
from apexrl.losses.windows import n_step_windows
from apexrl.networks.device_stream import DeviceStream, Staging, wait
from apexrl.networks.frame_layout import FrameLayout
from apexrl.networks.frame_stack import frame_numbers
from apexrl.networks.normalizer import Normalizer
from apexrl.types import StreamSpec, Unroll

STAGED_UNROLLS = 8  # on their way to a GPU
MOST_FRAMES = 2**31 - 1  # of a ring: their numbers are int32
NO_UNROLL = -2  # a number that is none; -1 is that of the unroll before the first one of a stream


class Slot(NamedTuple):
    """The place of an unroll that is being decoded. Its earlier content is forgotten."""

    number: int
    frames: np.ndarray  # [F, *frame], to be written
    row: np.ndarray  # [words] int32
    records: np.ndarray  # [K, words] int32, of its transitions


class UnrollStore:
    """A ring of decoded unrolls. Memory is touched only as the ring fills.

    An unroll takes F frames; a row where whole unrolls are wanted; and K records where transitions are.
    """

    def __init__(
        self,
        spec: StreamSpec,
        ring_unrolls: int,
        wants: Sequence[Want],
        device: torch.device,
        num_batches: int,
        device_stream: DeviceStream | None = None,
        normalizer: Normalizer | None = None,
    ):
        """Allocates the ring.

        Args:
          wants: the batches to be gathered; they decide which columns are kept.
          device: where the frames lie.
          num_batches: a gathered batch is good until so many more of its table are gathered; then its memory is used
            again.
          device_stream: the stream of the device that learns, which may be another one; that of `device` when None.
          normalizer: on `device`: batches have its observations and rewards.
        Raises: torch.OutOfMemoryError or RuntimeError when the device cannot hold it; ConfigError when the wants
          contradict each other, or the ring has more frames than MOST_FRAMES.
        """
        self.spec = spec
        self.ring_unrolls = ring_unrolls
        self.generation = 0  # counts the logs that were held
        self.device = device
        self._device_stream = device_stream or DeviceStream(device)
        self._wants = {want.table: want for want in wants}
        self._frame_layout = FrameLayout.of(spec)
        self._normalizer = normalizer or Normalizer((), ())
        self._row_layout, self._record_layout = row_layout(spec, wants), record_layout(spec, wants)
        self._transitions = transition_view(spec, wants)
        self._numbers = np.full(ring_unrolls, -1, np.int64)
        self._zero_frame = ring_unrolls * spec.unroll_frames
        if self._zero_frame > MOST_FRAMES:
            raise ConfigError(f"a ring of {self._zero_frame:,} frames is too large: give a smaller --capacity")
        with self._device_stream.exclusive():
            self._allocate()
        # Where the device that learns works on meanwhile, and the ring lies on it.
        is_there = self._device_stream.cuda is not None and device.type == self._device_stream.device.type
        self._staging = self._make_staging() if is_there else None
        # Batches are gathered into a few buffers in turn: fresh memory for each would cost more than the copy.
        self._buffers = {want.table: collections.deque[Tensor](maxlen=num_batches) for want in wants}

    def _allocate(self) -> None:
        spec, device = self.spec, self.device
        num_bytes, dtype = frame_bytes(spec), torch.uint8
        for wider in (torch.int64, torch.int32):  # a GPU copies words faster than bytes
            if num_bytes % wider.itemsize == 0:
                dtype = wider
                break
        # One more frame, all zeros: stacks show it in the place of frames from before their episode.
        self._frames = torch.empty((self._zero_frame + 1, num_bytes // dtype.itemsize), dtype=dtype, device=device)
        self._frames[self._zero_frame] = 0
        # An unroll of screens waits here for its way into the ring in blocks: memory that a CPU's cache keeps.
        shape = spec.unroll_frames, self._frames.shape[1]
        self._screens = torch.empty(shape, dtype=dtype, device=device) if self._frame_layout.in_blocks else None
        # Zeros: a row that was never written may be gathered, and has to point inside the ring.
        self._rows = torch.zeros((self.ring_unrolls, self._row_layout.words), dtype=torch.int32, device=device)
        records = self.ring_unrolls, spec.unroll_starts, self._record_layout.words
        self._records = torch.zeros(records, dtype=torch.int32, device=device)  # [ring, K, words]

    def _make_staging(self) -> Staging:
        frames = (self.spec.unroll_frames, self._frames.shape[1]), self._frames.dtype
        words = ((memory.shape[1:], torch.int32) for memory in (self._rows, self._records))
        return Staging(self._device_stream, STAGED_UNROLLS, frames, *words)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on the device."""
        return self._frames.nbytes + self._rows.nbytes + self._records.nbytes

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables of which batches can be gathered."""
        return tuple(self._wants)

    @property
    def names_samples(self) -> bool:
        """Whether a sample is named by keys, and the update gathers it: where the ring lies on a GPU."""
        return self._staging is not None

    def numbers(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns [B] int64: the numbers of the unrolls of a table's keys."""
        return keys // self.spec.unroll_starts if isinstance(self._wants[table].view, Transitions) else keys

    def num_rows(self, table: str) -> int:
        """Returns the rows of the batches of a table that updates get."""
        return self._wants[table].num_rows

    def holds(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns [B] bool: whether the unrolls of a table's keys are here."""
        numbers = self.numbers(table, keys)
        return self._numbers[numbers % self.ring_unrolls] == numbers

    def clear(self, generation: int) -> None:
        """Forgets everything: the log is another one, of this generation."""
        with self._device_stream.exclusive():
            self.generation = generation
            self._numbers[:] = -1

    def release(self) -> None:
        """Forgets everything and gives the memory back, when no update reads it any more."""
        with self._device_stream.memory_kept(), self._device_stream.exclusive():
            self.clear(self.generation + 1)
            wait(self._device_stream.event())
            self._frames = self._rows = self._records = torch.empty(0)
            self._staging = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def begin(self, number: int) -> Slot:
        """Returns the place of an unroll, whose frames are to be written before `commit`.

        The unroll at its position is forgotten, even if `commit` is not called after all. The place is good until the
        next call of `begin`.
        """
        spec = self.spec
        position = number % self.ring_unrolls
        with self._device_stream.exclusive():
            self._numbers[position] = -1
        if self._staging is None:
            frames, row, records = self._place_of(position)
            if "number" in self._row_layout.columns:  # a later unroll may look for it as the one before it
                self._row_layout.write(row.numpy(), "number", np.array(NO_UNROLL))
        else:
            frames, row, records = self._staging.next_piece()
        shaped = frames.numpy().view(spec.frame_dtype).reshape(spec.unroll_frames, *spec.frame_shape)
        return Slot(number, shaped, row.numpy(), records.numpy())

    def commit(self, slot: Slot, unroll: Unroll, previous: int = -1) -> None:
        """Stores an unroll in place of the one that is ring_unrolls older; its frames may lie in the slot.

        Args:
          previous: number of the unroll before it in its stream; -1: none.
        """
        if unroll.frames is not slot.frames:
            np.copyto(slot.frames, unroll.frames)
        position = slot.number % self.ring_unrolls
        self._fill(slot, unroll, previous)
        place = self._place_of(position)
        with self._device_stream.exclusive():
            if self._staging is not None:
                for there, staged in zip(place, self._staging.next_piece(), strict=True):
                    there.copy_(staged, non_blocking=True)
                self._staging.sent()
            if self._screens is not None:  # once here instead of in every batch
                screens = self._screens.view(torch.uint8).view(-1, *self.spec.frame_shape)
                self._frame_layout.store_in(self._frames[self._frames_of(position)], screens)
            self._numbers[position] = slot.number

    def sample(self, table: str, keys: np.ndarray, weights: np.ndarray) -> SampledKeys | Gathered | None:
        """Returns a sample of a table as far as it is here; None when nothing is.

        Where the ring lies on a GPU it is named, not gathered.
        """
        named = SampledKeys(self, table, self.generation, keys, weights)
        if self.names_samples:
            return named
        held = named.held()
        return self.gather(table, keys[held], weights[held]) if held.any() else None

    def gather(self, table: str, keys: np.ndarray, weights: np.ndarray) -> Gathered:
        """Returns the batch of M keys of a table, filled up to the rows that its updates get.

        Raises: KeyError when a key's unroll is not held.
        """
        held = self.holds(table, keys)
        if not held.all():
            raise KeyError(f"the unrolls of keys {keys[~held][:5]} are not in the store")
        size = max(self.num_rows(table), len(keys))
        all_keys, all_weights = np.empty(size, np.int64), np.empty(size, np.float32)
        fill(all_keys, all_weights, keys, weights)
        key, weight = (torch.from_numpy(array).to(self.device) for array in (all_keys, all_weights))
        return Gathered(keys, self.batch(table, key, weight, reuses_memory=True))

    def batch(self, table: str, key: Tensor, weight: Tensor, reuses_memory: bool = False) -> Batch:
        """Returns the batch of keys [B] int64 on the device, whatever lies there: only kernels, nothing is read.

        Args:
          reuses_memory: gather observations into memory that later batches are gathered into as well.
        """
        if isinstance(self._wants[table].view, Unrolls):
            return self._unrolls(table, key, weight, reuses_memory)
        return self._transition_batch(table, key, weight, reuses_memory)

    def _transition_batch(self, table: str, key: Tensor, weight: Tensor, reuses_memory: bool) -> TransitionBatch:
        spec, records = self.spec, self._records.flatten(0, 1)
        found = records.index_select(0, key % len(records))
        columns = self._record_layout.columns.values()
        shown, action, n_step_return, discount = (words_of(found, column) for column in columns)
        memory = self._buffer(table, OBSERVATIONS * len(key)) if reuses_memory else None
        numbers = shown.unflatten(1, (OBSERVATIONS, -1)).transpose(0, 1).flatten()
        frames = torch.index_select(self._frames, 0, numbers, out=memory)
        stacks = frames.view(OBSERVATIONS, len(key), spec.stacked_frames, -1)
        observation, next_observation = self._normalizer(self._frame_layout.as_frames(stacks))
        action = action.reshape(len(key), *spec.action.shape)
        action = action.long() if spec.num_actions else action
        n_step_return = self._normalizer.rewards(n_step_return[:, 0])
        return TransitionBatch(observation, action, n_step_return, discount[:, 0], next_observation, weight)

    def _unrolls(self, table: str, key: Tensor, weight: Tensor, reuses_memory: bool) -> UnrollBatch:
        """Returns whole unrolls, time first."""
        view, size = self._wants[table].view, len(key)
        assert isinstance(view, Unrolls)
        for _ in range(view.burn_in_unrolls):
            key, weight = self._with_previous(key, weight, size)
        spec = self.spec
        rows = self._rows.index_select(0, key % self.ring_unrolls)
        columns = {name: whole(rows, column).transpose(0, 1) for name, column in self._row_layout.columns.items()}
        shown = columns["shown"]  # [T + 1, B, H]
        memory = self._buffer(table, shown[..., 0].numel()) if reuses_memory else None
        frames = torch.index_select(self._frames, 0, shown.flatten(), out=memory)
        observation = self._frame_layout.as_frames(frames.view(*shown.shape, -1))
        extras = {field.name: columns[f"extra.{field.name}"] for field in spec.extras}
        extras |= {field.name: extras[field.name][0] for field in spec.extras if field.at == "first"}
        if LAST_REWARD in extras:
            extras[LAST_REWARD] = self._normalizer.rewards(extras[LAST_REWARD])
        if view.is_named:
            extras |= {name: columns[name][0] for name in NUMBERS}
        action = columns["action"]
        return UnrollBatch(
            self._normalizer(observation),
            action.long() if spec.num_actions else action,
            self._normalizer.rewards(columns["reward"]),
            columns["discount"],
            columns["start"] != 0,
            extras,
            weight,
        )

    def _with_previous(self, key: Tensor, weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Returns keys and weights with the unrolls before the first `size` ones in front."""
        earliest = key[:size]
        previous = self._column("previous", earliest)
        is_held = self._column("number", previous) == previous
        return torch.cat([torch.where(is_held, previous, earliest), key]), torch.cat([is_held.float(), weight])

    def _column(self, name: str, numbers: Tensor) -> Tensor:
        """Returns a column of one entry [B] of the rows of unrolls."""
        return whole(self._rows.index_select(0, numbers % self.ring_unrolls), self._row_layout.columns[name])[:, 0]

    def _place_of(self, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns where the frames, the row and the records of a ring position are written."""
        frames = self._frames[self._frames_of(position)] if self._screens is None else self._screens
        return frames, self._rows[position], self._records[position]

    def _frames_of(self, position: int) -> slice:
        return slice(position * self.spec.unroll_frames, (position + 1) * self.spec.unroll_frames)

    def _fill(self, slot: Slot, unroll: Unroll, previous: int) -> None:
        """Writes those columns of an unroll and of its transitions that the store has."""
        spec = self.spec
        first_frame = slot.number % self.ring_unrolls * spec.unroll_frames
        shown = frame_numbers(unroll.starts, spec.stacked_frames, first_frame, self._zero_frame)
        values = {
            "number": np.array(slot.number),
            "previous": np.array(previous),
            "shown": shown,
            "action": unroll.actions,
            "reward": unroll.rewards,
            "discount": unroll.discounts,
            "start": unroll.starts,
        }
        values |= {f"extra.{name}": array for name, array in unroll.extras.items()}
        for name in self._row_layout.columns:
            self._row_layout.write(slot.row, name, values[name])
        if self._transitions is None:
            return
        gamma, n_steps = self._transitions.gamma, self._transitions.n_steps
        windows = n_step_windows(unroll.rewards, unroll.discounts, unroll.starts, gamma, n_steps)
        returns, discounts, offsets = (window[: spec.unroll_starts] for window in windows)
        begins = np.arange(spec.unroll_starts)
        values = {
            "shown": np.stack([shown[begins], shown[begins + offsets]], axis=1),
            "action": unroll.actions[: len(begins)],
            "n_step_return": returns,
            "discount": discounts,
        }
        for name in self._record_layout.columns:
            self._record_layout.write(slot.records, name, values[name])

    def _buffer(self, table: str, num_observations: int) -> Tensor:
        """Returns the oldest buffer of a table, or a new one while there are few or when it is too small."""
        buffers = self._buffers[table]
        num_frames = num_observations * self.spec.stacked_frames
        oldest = buffers[0] if len(buffers) == buffers.maxlen else None
        if oldest is None or len(oldest) < num_frames:
            shape = (num_frames, self._frames.shape[1])
            if self.device.type == "cpu":
                oldest = self._device_stream.host_memory(shape, self._frames.dtype)
            else:
                oldest = torch.empty(shape, dtype=self._frames.dtype, device=self.device)
        buffers.append(oldest)
        return oldest[:num_frames]


def words_of(rows: Tensor, column: Column) -> Tensor:
    """Returns a column [B, words] of gathered rows [B, words], of numbers of one word; a view of them."""
    return rows[:, column.start : column.start + column.words].view(getattr(torch, column.dtype))


def whole(rows: Tensor, column: Column) -> Tensor:
    """Returns a column [B, entries, *shape] of gathered rows [B, words]."""
    words = rows[:, column.start : column.start + column.words].clone(memory_format=torch.contiguous_format)
    size = column.entries * math.prod(column.shape)
    return words.view(getattr(torch, column.dtype))[:, :size].reshape(len(rows), column.entries, *column.shape)
