"""Records that cross borders between the parts of the system. No behaviour beyond derived sizes.

Shape letters: E environments, K transition starts in an unroll, T = K + overlap steps, H stacked frames,
F = H - 1 + T + 1 frames of an unroll, P priorities of an unroll, B batch, A actions.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

MAX_ACTION_SIZE = 1024
MAX_EXTRAS = 32
SMALL_FRAME_SIZE = 1024  # numbers
FORBIDDEN = -1e9  # the value or logit of an action that a mask forbids: finite, so that no sum with it is NaN
NO_EXTRAS: Mapping[str, np.ndarray] = MappingProxyType({})

# The types of text in a peer's message or a file: its bounds are checked when it is decoded. None has a character that
# controls a terminal, begins a line or turns the direction of writing, since it is shown in logs and on screens.
SHOWN = r"\A[^\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]*\Z"
Name = Annotated[str, msgspec.Meta(max_length=200, pattern=SHOWN)]
Text = Annotated[str, msgspec.Meta(max_length=2000, pattern=SHOWN)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
SmallCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Granularity = Literal["transitions", "unrolls"]  # the items that a table's keys name and its limiter counts


class _Settings(msgspec.Struct):
    """The part of a `variant` that this module knows."""

    action_mask: str = ""


class EnvironmentSpec(msgspec.Struct, frozen=True):
    """One environment's side of a stream: its frames, its actions, and how frames are stacked."""

    env: Name
    frame_shape: Annotated[tuple[SmallCount, ...], msgspec.Meta(max_length=8)]
    frame_dtype: Literal["uint8", "float32"]
    stacked_frames: SmallCount  # H
    num_actions: SmallCount  # A; 0 where an action is a vector of numbers
    frames_per_step: SmallCount  # emulator frames in one agent step, 4 for Atari
    action_bounds: Annotated[tuple[tuple[Finite, Finite], ...], msgspec.Meta(max_length=MAX_ACTION_SIZE)] = ()
    """Least and greatest value of each number of an action; empty where actions are discrete."""
    action_names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_ACTION_SIZE)] = ()
    """Names of the discrete actions, for people; empty where the environment gives none."""
    variant: Text = ""
    """The settings that make it another environment than `env` alone, as JSON; empty without any."""

    @property
    def has_small_frames(self) -> bool:
        """Whether networks for it are small: the preset `small` is meant for it."""
        return self.frame_size <= SMALL_FRAME_SIZE

    @property
    def frame_size(self) -> int:
        """Numbers in one frame."""
        return math.prod(self.frame_shape)

    @property
    def mask_size(self) -> int:
        """Numbers at the end of a frame that say which actions are allowed: A, or 0 without --action-mask."""
        try:
            has_mask = bool(msgspec.json.decode(self.variant, type=_Settings).action_mask)
        except (msgspec.MsgspecError, RecursionError):  # of a stranger, or none
            has_mask = False
        return self.num_actions if has_mask and self.frame_shape and self.frame_shape[-1] >= self.num_actions else 0

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation: [H, *frame_shape]."""
        return (self.stacked_frames, *self.frame_shape)

    def streamed(self, unroll_starts: int, overlap_steps: int, extras: "tuple[Field, ...]" = (),
                 has_unroll_priorities: bool = False) -> "StreamSpec":  # fmt: skip
        """Returns the spec of streams of this environment that are cut into unrolls."""
        own = {name: getattr(self, name) for name in EnvironmentSpec.__struct_fields__}
        return StreamSpec(**own, unroll_starts=unroll_starts, overlap_steps=overlap_steps, extras=extras,
                          has_unroll_priorities=has_unroll_priorities)  # fmt: skip

    @property
    def action(self) -> "Field":
        """The field of the actions: an int32 each, or a vector of float32."""
        if self.num_actions:
            return Field("action", "step", "int32")
        return Field("action", "step", "float32", (len(self.action_bounds),))


class Field(msgspec.Struct, frozen=True):
    """One named array of an unroll."""

    name: Name
    at: Literal["step", "observation", "first"]  # has T entries, T + 1, or 1: the one of the first observation
    dtype: Literal["uint8", "int32", "float16", "float32"]
    shape: Annotated[tuple[SmallCount, ...], msgspec.Meta(max_length=8)] = ()  # the shape of one entry

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class StreamSpec(EnvironmentSpec, frozen=True):
    """Everything that the unrolls of one log hold. Every peer of a replay server must bring an equal one.

    The log knows fields; only an agent knows their meaning.
    """

    unroll_starts: SmallCount = 80  # K
    overlap_steps: SmallCount = 3  # steps that an unroll shares with the next one of its stream
    extras: Annotated[tuple[Field, ...], msgspec.Meta(max_length=MAX_EXTRAS)] = ()
    """Fields that the agent adds to each unroll, such as the log-probabilities of its actions."""
    has_unroll_priorities: bool = False
    """Whether an unroll has one priority; else each of its K transitions has one."""

    @property
    def unroll_steps(self) -> int:
        """T, the steps held by one unroll."""
        return self.unroll_starts + self.overlap_steps

    @property
    def unroll_frames(self) -> int:
        """F, the frames held by one unroll."""
        return self.stacked_frames + self.unroll_steps

    @property
    def num_priorities(self) -> int:
        """P, the priorities of one unroll: K or 1."""
        return 1 if self.has_unroll_priorities else self.unroll_starts

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of an unroll after its frames, in the order in which its block holds them."""
        reward, discount = Field("reward", "step", "float32"), Field("discount", "step", "float32")
        return (self.action, reward, discount, *self.extras, Field("start", "observation", "uint8"))

    def num_entries(self, field: Field) -> int:
        """Returns how many entries of a field an unroll holds."""
        return {"step": self.unroll_steps, "observation": self.unroll_steps + 1, "first": 1}[field.at]

    @property
    def unroll_bytes(self) -> int:
        """Bytes of one decoded unroll: its frames and its fields."""
        frames = self.unroll_frames * self.frame_size * np.dtype(self.frame_dtype).itemsize
        return frames + sum(self.num_entries(field) * field.entry_bytes for field in self.fields)


class Episode(msgspec.Struct, frozen=True, array_like=True):
    """A finished game: raw return (not clipped), agent steps, and the exploration it was played with."""

    episode_return: Finite
    steps: Count
    exploration: Finite  # in the agent's own measure: an epsilon, a noise scale


class TimeSteps(NamedTuple):
    """One step of E environments, seen from behind: the newest frames, and the results of the last actions."""

    frames: np.ndarray  # [E, *frame]: the newest; stacks are made where they are needed
    rewards: np.ndarray  # [E] float32, clipped when the configuration says so
    discounts: np.ndarray  # [E] float32, 0 where terminated (a lost life too), else 1
    starts: np.ndarray  # [E] bool: the newest frame begins an episode, so this step was a reset
    episode_returns: np.ndarray  # [E] float64: raw return of the game that this step ended, else NaN
    episode_steps: np.ndarray  # [E] int64: steps of the game that this step ended, else 0


class Unroll(NamedTuple):
    """T consecutive steps of one stream."""

    frames: np.ndarray  # [F, *frame]; observation k is frames[k : k + H]
    actions: np.ndarray  # [T] int32, or [T, action size] float32
    rewards: np.ndarray  # [T] float32
    discounts: np.ndarray  # [T] float32, the environment's own: 1, or 0 where terminated
    starts: np.ndarray  # [T + 1] bool: the newest frame of observation k begins an episode
    extras: Mapping[str, np.ndarray] = NO_EXTRAS  # by name: [entries, *shape], see StreamSpec.extras


class StreamUnrolls(NamedTuple):
    """T consecutive steps of E streams side by side: the arrays of an Unroll with the streams as axis 1."""

    frames: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    discounts: np.ndarray
    starts: np.ndarray
    extras: Mapping[str, np.ndarray] = NO_EXTRAS

    def stream(self, index: int) -> Unroll:
        """Returns the unroll of one stream; its arrays are views."""
        return Unroll(
            self.frames[:, index],
            self.actions[:, index],
            self.rewards[:, index],
            self.discounts[:, index],
            self.starts[:, index],
            {name: values[:, index] for name, values in self.extras.items()},
        )


class UnrollHeader(NamedTuple):
    """An actor's account of an unroll, besides its content."""

    stream: int
    first_step: int  # position of the first step in its stream; the next unroll of the stream begins K later
    params_version: int  # of the parameters that chose the first action; later ones may be newer
    exploration: float
    valid: np.ndarray  # [K] bool: whether a transition starts there; else that step is a reset
    priorities: np.ndarray  # [P] float32, 0 where nothing may be drawn
    episodes: tuple[Episode, ...]  # games of this stream that ended since its last unroll


class LogPosition(msgspec.Struct, frozen=True):
    """A learner's count of a log: which one, up to which unroll, and how many transitions by then."""

    log: Name = ""
    next_number: Count = 0
    transitions: Count = 0


class Sample(NamedTuple):
    """A batch as the replay service names it: keys of transitions, or numbers of unrolls."""

    keys: np.ndarray  # [B] int64
    probabilities: np.ndarray  # [B] float64; [0] from a server that was not asked for them
    weights: np.ndarray  # [B] float32 importance weights, at most 1
    largest_weight: float = 1.0  # probability ** -exponent of the least probable, by which the weights are divided
