"""The means and deviations of a run's observations and returns, and the normalizer that follows them.

Each learner takes them of the unrolls that its logs bring, each once; the learners of a team add theirs up.
"""

import copy
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from apexrl.agents.contract import check_normalizable
from apexrl.config.sections import LearningConfig
from apexrl.learning.updates.team import Team
from apexrl.networks.device_stream import DeviceStream
from apexrl.networks.headers import MOMENTS
from apexrl.networks.normalizer import PREFIX, Normalizer
from apexrl.types import EnvironmentSpec, Unroll

OBSERVATION, RETURN = "observation", "return"
Known = Mapping[str, Sequence[float]]  # by kind: `Moments.numbers`
NOTHING_KNOWN: Known = MappingProxyType({})
LEAST_VARIANCE = 1e-24  # of numbers that have changed, as a share of their squared mean; the rest is rounding


class Moments(NamedTuple):
    """The number of rows of numbers, their means, and their summed squared deviations.

    Source: Chan, Golub and LeVeque, The American Statistician 37, 242 (1983).
    """

    num_rows: float
    mean: np.ndarray  # [N] float64
    squares: np.ndarray  # [N] float64

    @classmethod
    def of(cls, rows: np.ndarray) -> "Moments":
        """Returns the moments of rows [M, N]."""
        if not len(rows):
            return cls(0.0, np.zeros(rows.shape[1]), np.zeros(rows.shape[1]))
        rows = rows.astype(np.float64)
        mean = rows.mean(axis=0)
        return cls(float(len(rows)), mean, np.square(rows - mean).sum(axis=0))

    @classmethod
    def of_numbers(cls, numbers: np.ndarray) -> "Moments":
        """Returns the moments that `numbers` made numbers of."""
        return cls(float(numbers[0]), *np.split(numbers[1:], 2))

    @property
    def numbers(self) -> np.ndarray:
        """The moments as numbers [2 N + 1] float64."""
        return np.concatenate([[self.num_rows], self.mean, self.squares])

    @property
    def scale(self) -> np.ndarray:
        """One over the deviations [N], and 1 for numbers that have not changed."""
        variance = self.squares / max(self.num_rows, 1.0)
        has_changed = variance > LEAST_VARIANCE * np.square(self.mean) + np.finfo(np.float32).tiny
        return 1 / np.sqrt(np.where(has_changed, variance, 1.0))

    def joined(self, other: "Moments") -> "Moments":
        """Returns the moments of all rows of both."""
        if not (self.num_rows and other.num_rows):
            return self if self.num_rows else other
        num_rows, step = self.num_rows + other.num_rows, other.mean - self.mean
        share = other.num_rows / num_rows
        squares = self.squares + other.squares + np.square(step) * (self.num_rows * share)
        return Moments(num_rows, self.mean + step * share, squares)


def running_returns(unroll: Unroll, num_steps: int, gamma: float, before: float) -> tuple[np.ndarray, float]:
    """Returns the discounted sums [M] of the rewards of an episode so far, at each step but resets, and the last one.

    Args:
      num_steps: of the unroll, from its first on.
      before: the sum before the first step.
    """
    sums, so_far = [], before
    steps = zip(unroll.rewards.tolist(), unroll.discounts.tolist(), unroll.starts[1:].tolist(), strict=True)
    for reward, discount, is_reset in list(steps)[:num_steps]:
        so_far = 0.0 if is_reset else gamma * so_far + reward
        if not is_reset:
            sums.append(so_far)
        so_far *= discount
    return np.array(sums), so_far


class RunMoments:
    """The moments of all that the learners of a run have seen, over all its starts. `begin` comes before all else.

    Threads that follow logs add unrolls. The learner's thread says when the normalizer follows: the learners of a team
    at the same update, so that they have the same numbers. Until the first time it follows each unroll of our own.
    """

    def __init__(
        self, learning: LearningConfig, gamma: float, device_stream: DeviceStream, known: Known = NOTHING_KNOWN
    ):
        """Takes what is to be normalized.

        Args:
          known: the moments of earlier starts: batches may be normalized before the tensors of those are restored.
        """
        self._learning, self._gamma, self._device_stream, self._known = learning, gamma, device_stream, known
        self.has_followed = False
        self._lock = threading.Lock()
        self._earlier: dict[str, Moments] = {}  # of earlier starts
        self._own: dict[str, Moments] = {}  # of this start, and of our logs
        self._total: dict[str, Tensor] = {}
        self._normalizers: dict[torch.device, Normalizer] = {}

    def begin(self, spec: EnvironmentSpec) -> None:
        """Begins without any, at the first call.

        Raises: ConfigError when observations are no vectors and have to be normalized.
        """
        with self._lock:
            if self._total:
                return
            check_normalizable(spec, self._learning)
            sizes, names, device = dict[str, int](), list[str](), self._device_stream.device
            if self._learning.normalize_observations:
                sizes, names = {OBSERVATION: spec.frame_size}, ["mean", "scale"]
            if self._learning.scale_rewards:
                sizes, names = {**sizes, RETURN: 1}, [*names, "reward_scale"]
            self._older_frames, self._mask_size = spec.stacked_frames - 1, spec.mask_size
            self._own = {kind: Moments.of(np.empty((0, size))) for kind, size in sizes.items()}
            self._earlier = dict(self._own)
            for kind, own in self._own.items():
                if len(numbers := self._known.get(kind, ())) == len(own.numbers):
                    self._earlier[kind] = Moments.of_numbers(np.array(numbers))
            with self._device_stream.exclusive():
                self._total = {kind: self._tensor(moments) for kind, moments in self._earlier.items()}
                self._normalizers = {device: Normalizer(spec.frame_shape, names).to(device)}
            self._fill(self._earlier)

    @property
    def acting_tensors(self) -> dict[str, Tensor]:
        """The tensors that actors need, by name."""
        normalizer = self.normalizer_on(self._device_stream.device)
        return {PREFIX + name: tensor for name, tensor in normalizer.state_dict().items()}

    @property
    def learning_tensors(self) -> dict[str, Tensor]:
        """The tensors that a later start needs besides, by name."""
        return {MOMENTS + kind: tensor for kind, tensor in self._total.items()}

    def normalizer_on(self, device: torch.device) -> Normalizer:
        """Returns the normalizer on a device."""
        with self._lock, self._device_stream.exclusive():
            if device not in self._normalizers:
                self._normalizers[device] = copy.deepcopy(self._normalizers[self._device_stream.device]).to(device)
            return self._normalizers[device]

    def add(self, unroll: Unroll, num_steps: int, before: float, is_new: bool) -> float:
        """Takes the first steps of an unroll; returns the discounted sum of rewards after them.

        Args:
          before: that sum before them.
          is_new: no start of the learner has taken the unroll before.
        """
        found, after = {}, 0.0
        if OBSERVATION in self._own and is_new:
            # Nobody acts on an observation after which another episode begins, such as one of a copy that rests.
            is_seen = ~(unroll.starts[:num_steps] & unroll.starts[1 : num_steps + 1])
            frames = unroll.frames[self._older_frames :][:num_steps].reshape(num_steps, -1)[is_seen]
            if self._mask_size:  # as if it never changed from 0: it is shown as it is
                frames[:, -self._mask_size :] = 0
            found[OBSERVATION] = Moments.of(frames)
        if RETURN in self._own:
            sums, after = running_returns(unroll, num_steps, self._gamma, before)
            found[RETURN] = Moments.of(sums[:, None])
        if not is_new:
            return after
        with self._lock:
            self._own = {kind: moments.joined(found[kind]) for kind, moments in self._own.items()}
            if not self.has_followed:
                self._fill({kind: moments.joined(self._own[kind]) for kind, moments in self._earlier.items()})
        return after

    def follow(self, team: Team) -> None:
        """Has the normalizer of every learner follow what all of them have seen. Called by all of them at once.

        Raises: PeerError when a learner is gone or says nothing in time.
        """
        own = self._own
        rows = team.gather(np.concatenate([moments.numbers for moments in own.values()]).tolist())
        with self._lock:
            total, ends = dict(self._earlier), np.cumsum([len(moments.numbers) for moments in own.values()])
            for row in rows:
                for kind, numbers in zip(own, np.split(row, ends[:-1]), strict=True):
                    total[kind] = total[kind].joined(Moments.of_numbers(numbers))
            self.has_followed = True
            self._fill(total)
            with self._device_stream.exclusive():
                for kind, moments in total.items():
                    self._total[kind].copy_(self._tensor(moments))

    def restored(self) -> None:
        """Says that the tensors have been replaced by those of an earlier start."""
        with self._lock, self._device_stream.exclusive():
            totals = {kind: total.cpu().numpy().copy() for kind, total in self._total.items()}
            self._earlier = {kind: Moments.of_numbers(numbers) for kind, numbers in totals.items()}

    def _fill(self, moments: dict[str, Moments]) -> None:
        values: dict[str, np.ndarray] = {}
        if OBSERVATION in moments:
            values |= {"mean": moments[OBSERVATION].mean, "scale": moments[OBSERVATION].scale}
        if RETURN in moments:
            values["reward_scale"] = moments[RETURN].scale
        with self._device_stream.exclusive(), torch.no_grad():
            for normalizer in self._normalizers.values():
                for name, buffer in normalizer.named_buffers():
                    buffer.copy_(torch.from_numpy(values[name]).view(buffer.shape))

    def _tensor(self, moments: Moments) -> Tensor:
        return torch.from_numpy(moments.numbers).to(self._device_stream.device)
