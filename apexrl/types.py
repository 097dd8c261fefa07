"""Records that cross borders between the parts of the system. No behaviour beyond derived sizes.

Shape letters: E environments, K transition starts in an unroll, n steps of the return, T = K + n steps,
H stacked frames, F = H - 1 + T + 1 frames of an unroll, B batch, A actions.
"""

import math
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

# What a peer may say in a message: the bounds are checked when it is decoded.
Name = Annotated[str, msgspec.Meta(max_length=200)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
SmallCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class StreamSpec(msgspec.Struct, frozen=True):
    """What the unrolls of one run hold. Every peer of a replay server must bring an equal one."""

    env: Name
    frame_shape: Annotated[tuple[SmallCount, ...], msgspec.Meta(max_length=8)]
    frame_dtype: Literal["uint8", "float32"]
    stacked_frames: SmallCount  # H
    num_actions: SmallCount
    frames_per_step: SmallCount  # emulator frames in one agent step, 4 for Atari
    unroll_starts: SmallCount = 80  # K
    n_steps: SmallCount = 3  # n

    @property
    def unroll_steps(self) -> int:
        """T, the steps held by one unroll."""
        return self.unroll_starts + self.n_steps

    @property
    def unroll_frames(self) -> int:
        """F, the frames held by one unroll."""
        return self.stacked_frames + self.unroll_steps

    @property
    def frame_size(self) -> int:
        """Numbers in one frame."""
        return math.prod(self.frame_shape)

    @property
    def unroll_bytes(self) -> int:
        """Bytes of one decoded unroll: frames, actions, rewards, discounts and starts."""
        frames = self.unroll_frames * self.frame_size * np.dtype(self.frame_dtype).itemsize
        return frames + 12 * self.unroll_steps + self.unroll_steps + 1

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation: [H, *frame_shape]."""
        return (self.stacked_frames, *self.frame_shape)


class Episode(msgspec.Struct, frozen=True, array_like=True):
    """A finished game: raw return (not clipped), agent steps, and the epsilon it was played with."""

    episode_return: Finite
    steps: Count
    epsilon: Share


class TimeSteps(NamedTuple):
    """What a vector of E environments gives back for one vector of actions."""

    frames: np.ndarray  # [E, *frame]: the newest; stacks are made where they are needed
    rewards: np.ndarray  # [E] float32, clipped when the configuration says so
    discounts: np.ndarray  # [E] float32, 0 where terminated (a lost life too), else 1
    starts: np.ndarray  # [E] bool: the newest frame begins an episode, so this step was a reset
    episode_returns: np.ndarray  # [E] float64: raw return of the game that this step ended, else NaN
    episode_steps: np.ndarray  # [E] int64: steps of the game that this step ended, else 0


class Unroll(NamedTuple):
    """T consecutive steps of one stream, or of E streams side by side (then axis 1 is E)."""

    frames: np.ndarray  # [F, *frame]; observation k is frames[k : k + H]
    actions: np.ndarray  # [T] int32
    rewards: np.ndarray  # [T] float32
    discounts: np.ndarray  # [T] float32, the environment's own: 1, or 0 where terminated
    starts: np.ndarray  # [T + 1] bool: the newest frame of observation k begins an episode


class UnrollHeader(NamedTuple):
    """What the actor says of an unroll beside its content."""

    stream: int
    first_step: int  # position of the first step in its stream; the next unroll of the stream begins K later
    params_version: int
    epsilon: float
    priorities: np.ndarray  # [K] float32, 0 where no transition starts
    episodes: tuple[Episode, ...]  # games of this stream that ended since its last unroll


class LogPosition(msgspec.Struct, frozen=True):
    """How far a learner has counted a log: which one, up to which unroll, what it had by then."""

    log: str = ""
    next_number: int = 0
    transitions: int = 0


class Sample(NamedTuple):
    """A batch as the replay service names it."""

    keys: np.ndarray  # [B] int64
    probabilities: np.ndarray  # [B] float64
    weights: np.ndarray  # [B] float32 importance weights, at most 1
