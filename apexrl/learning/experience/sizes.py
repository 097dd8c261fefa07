"""The memory of an unroll store, by the stream and the wanted batches. Loads no torch: the launcher plans with it."""

from collections.abc import Sequence

import numpy as np

from apexrl.agents.contract import Transitions, Unrolls, Want
from apexrl.errors import ConfigError
from apexrl.learning.experience.row import WORD_BYTES, RowLayout
from apexrl.types import StreamSpec

DEVICE_RESERVE_BYTES = 2e9  # kept free on a GPU for networks, optimizer, an update and libraries
OBSERVATIONS = 2  # of a transition: that left, and that where its window ends
NUMBERS = ("number", "previous")  # of an unroll, and of the one before it in its stream


def row_layout(spec: StreamSpec, wants: Sequence[Want]) -> RowLayout:
    """Returns the columns that batches of whole unrolls need; none where no such batch is wanted."""
    views = [want.view for want in wants if isinstance(want.view, Unrolls)]
    layout = RowLayout()
    if any(view != Unrolls() for view in views):
        for name in NUMBERS:  # the first columns: a torch view of int64 needs an even position
            layout.add(name, 1, "int64")
    if views:
        layout.add("shown", spec.unroll_steps + 1, "int32", (spec.stacked_frames,))  # numbers of frames, oldest first
        for field in spec.fields:
            name = f"extra.{field.name}" if field in spec.extras else field.name
            layout.add(name, spec.num_entries(field), field.dtype, field.shape)
    return layout


def transition_view(spec: StreamSpec, wants: Sequence[Want]) -> Transitions | None:
    """Returns the transitions that batches need; None where none are wanted.

    Raises: ConfigError when wants ask for two kinds of transitions, or for windows longer than unrolls overlap.
    """
    views = {want.view for want in wants if isinstance(want.view, Transitions)}
    for view in views:
        if len(views) > 1 or view.n_steps > spec.overlap_steps:
            raise ConfigError(
                f"transitions of {view.n_steps} steps do not fit unrolls that overlap by {spec.overlap_steps}, "
                f"or differ from others that are wanted: {sorted(views)}"
            )
    return views.pop() if views else None


def record_layout(spec: StreamSpec, wants: Sequence[Want]) -> RowLayout:
    """Returns the columns of each transition that batches of them need; none where no such batch is wanted.

    Raises: ConfigError when the wants contradict each other.
    """
    layout = RowLayout()
    if transition_view(spec, wants) is not None:
        layout.add("shown", OBSERVATIONS, "int32", (spec.stacked_frames,))
        layout.add("action", 1, spec.action.dtype, spec.action.shape)
        layout.add("n_step_return", 1, "float32")
        layout.add("discount", 1, "float32")
    return layout


def frame_bytes(spec: StreamSpec) -> int:
    """Returns the bytes of a frame."""
    return spec.frame_size * np.dtype(spec.frame_dtype).itemsize


def bytes_needed(spec: StreamSpec, ring_unrolls: int, wants: Sequence[Want]) -> int:
    """Returns the bytes that a full store of so many unrolls takes.

    Raises: ConfigError when the wants contradict each other.
    """
    words = row_layout(spec, wants).words + spec.unroll_starts * record_layout(spec, wants).words
    return ring_unrolls * (spec.unroll_frames * frame_bytes(spec) + WORD_BYTES * words)
