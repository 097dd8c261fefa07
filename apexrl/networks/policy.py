"""A network as actors run it: frozen in the fastest precision, and fed one new frame of each environment at a time.

Nothing here knows sockets, environments or exploration. On a CPU the values are there when the call returns; on a GPU
one call is one captured CUDA graph, waited for without spinning.
"""

import copy
import functools
import logging
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from apexrl.errors import WireError, fault_of
from apexrl.networks.device import fastest_dtype, lay_out
from apexrl.networks.device_stream import capture, wait
from apexrl.networks.frame_layout import FrameLayout
from apexrl.networks.frame_stack import FrameStack
from apexrl.networks.normalizer import with_normalizer
from apexrl.networks.torsos import FrameNetwork
from apexrl.types import EnvironmentSpec

logger = logging.getLogger(__name__)

CHECKED_OBSERVATIONS = 32
# Of the features. Rounding to bfloat16 moves them by 1 %; hardware that computes it wrongly moves them by more.
TOLERANCE = 0.05


class Policy:
    """A network over stacks of frames as actors run it. Owned by one thread; `load` may come between any two calls."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        make: Callable[[], FrameNetwork],
        device: torch.device,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype | None = None,
        captures: bool | None = None,
    ):
        """Makes the network, gives it the tensors, and checks its precision on this machine.

        Args:
          make: returns a new network on torch's current device.
          dtype: of the computation; by default the fastest one of the device.
          captures: whether a call is a captured graph; by default on a GPU.
        Raises: WireError when the tensors are not those of the network, or not finite.
        """
        make = with_normalizer(make, spec.frame_shape, tensors)
        check_tensors(make, tensors)
        self.spec = spec
        self.device = device
        self._captures = device.type == "cuda" if captures is None else captures
        self._layout = FrameLayout.of(spec)
        self._exact = make().to(device).eval().requires_grad_(False)
        self._exact.load_state_dict(tensors)
        self._use(dtype or (fastest_dtype(device, spec) if self._exact.has_fast_layers else torch.float32))
        if self.dtype != torch.float32 and not self._is_close():
            logger.warning("%s gives other values than float32 on %s: acting in float32", self.dtype, device)
            self._use(torch.float32)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the parameters in place, or leaves them as they are when it raises.

        Raises: WireError when they are of another network, or not finite.
        """
        check_same(self._exact, tensors)
        self._exact.load_state_dict(tensors)
        self._freeze()

    @torch.no_grad()
    def frame_stack(self, num_envs: int) -> FrameStack:
        """Returns the memory of E environments, to be given to each call for them.

        On a GPU the calls for it are captured now, so that no game waits for that.
        """
        stack = self._new_stack(num_envs)
        if self._captures:
            stack.captured = _CapturedCalls(self, stack)
        return stack

    @torch.no_grad()
    def values(
        self, frames: np.ndarray, starts: np.ndarray, stack: FrameStack, memory: np.ndarray | None = None
    ) -> np.ndarray:
        """Takes the newest frames into the stack and returns the network's values of the present observations.

        Args:
          frames: [E, *frame]; starts: [E] bool, True where the frame is the first of its episode.
          memory: [E, memory_size] float32 of earlier steps, for a network that has a memory: see its module.
        Returns: [E, ..] float32.
        """
        if (memory is not None) != (self._fast.memory_size > 0):
            raise ValueError(
                f"the network takes a memory of {self._fast.memory_size} numbers (its memory_size), 0: none"
            )
        stack.advance()
        if self._captures:
            if not isinstance(stack.captured, _CapturedCalls) or stack.captured.policy is not self:
                stack.captured = _CapturedCalls(self, stack)  # another network has come
            return stack.captured(frames, starts, memory)
        stack.write(torch.from_numpy(np.ascontiguousarray(frames)), torch.from_numpy(starts))
        return self.values_of(stack, None if memory is None else torch.from_numpy(memory)).numpy()

    def values_of(self, stack: FrameStack, memory: Tensor | None = None) -> Tensor:
        """Returns [E, ..] float32 values of the stack; without a memory those of an episode's first step."""
        prepared = self._fast.normalized(self._layout.prepare_ring(stack.ring, stack.newest, self.dtype))
        return self._fast.values(prepared, memory, self._kernels[stack.newest])

    @property
    def network(self) -> FrameNetwork:
        """The network in float32, with the parameters of the last `load`."""
        return self._exact

    @property
    def reward_scale(self) -> float:
        """The scale of the rewards that the values were learned from."""
        normalizer = self._exact.normalizer
        return 1.0 if normalizer is None or normalizer.reward_scale is None else float(normalizer.reward_scale)

    def new_memory(self, num_envs: int) -> Tensor | None:
        """Returns zeros [E, memory_size] in this machine's memory, pinned for a GPU; None for a network without."""
        size = self._fast.memory_size
        return torch.zeros(num_envs, size, pin_memory=self.device.type == "cuda") if size else None

    @functools.cached_property
    def capture_stream(self) -> torch.cuda.Stream:
        """The stream on which all calls are captured: libraries keep memory for each stream."""
        return torch.cuda.Stream(self.device)

    def _new_stack(self, num_envs: int) -> FrameStack:
        return FrameStack(self._layout, num_envs, self.dtype, self.device)

    def _use(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._fast = copy.deepcopy(self._exact)
        if dtype != torch.float32:
            self._fast.compute_in(dtype)
        lay_out(self._fast)
        self._kernels = [kernel.to(dtype) for kernel in self._turned_kernels()]
        self._freeze()

    def _freeze(self) -> None:
        """Copies the parameters and buffers in place, so that captured graphs see them."""
        with torch.no_grad():
            fast = [*self._fast.parameters(), *self._fast.buffers(), *self._kernels]
            exact = [*self._exact.parameters(), *self._exact.buffers(), *self._turned_kernels()]
            for kept, new in zip(fast, exact, strict=True):
                kept.copy_(new)

    def _turned_kernels(self) -> list[Tensor]:
        return self._layout.turned_kernels(self._exact.torso.kernel().detach())

    @torch.no_grad()
    def _is_close(self) -> bool:
        """Whether the values differ by less than those of features with noise of the tolerance.

        A share of the values would not do: a new network's are near 0, and any rounding is a large share of them.
        """
        generator = torch.Generator().manual_seed(0)
        shape = (CHECKED_OBSERVATIONS, *self.spec.observation_shape)
        observations = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(self.device)
        stack = self._new_stack(CHECKED_OBSERVATIONS)
        nothing = torch.zeros(CHECKED_OBSERVATIONS, dtype=torch.bool, device=self.device)
        for frames in observations.unbind(1):
            stack.advance()
            stack.write(frames, nothing)
        prepared = self._exact.prepare(self._layout.store_stacks(observations))
        features = self._exact.torso.features(prepared, self._exact.torso.kernel())
        noise = TOLERANCE * torch.randn(features.shape, generator=generator).to(self.device)
        exact = self._exact.masked(self._exact.heads(features), prepared)
        allowed = self._exact.masked(self._exact.heads(features * (1 + noise)), prepared) - exact
        return bool((self.values_of(stack) - exact).norm() <= allowed.norm())


def check_tensors(make: Callable[[], nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Compares tensors with the network that a peer describes; a network takes no memory before it is known to fit.

    Args:
      make: returns a new network on torch's current device; any error says that there is no such network.
    Raises: WireError when names, shapes or sizes are others, or a number is not finite.
    """
    try:
        with torch.device("meta"):
            network = make()
    except Exception as error:  # sizes of a stranger: torch raises whatever it likes
        reason = fault_of(error)
        raise WireError(f"parameters come with the description of an impossible network: {reason}") from error
    check_same(network, tensors)


def check_same(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raises WireError when tensors are of another network than this one, or a number is not finite."""
    expected = {name: tensor.shape for name, tensor in network.state_dict().items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    others = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if others:
        raise WireError(f"parameters do not fit the network that they come with: {others[:5]} differ")
    strange = [name for name, tensor in tensors.items() if not _is_finite(tensor)]
    if strange:
        raise WireError(f"parameters are not finite: {strange[:5]}; has the learner diverged?")


def _is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite: then their sum is, too, unless it overflows, and it costs a twentieth."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


class _CapturedCalls:
    """A policy's call for one stack on a GPU: copy in, write, network, copy out; a graph for each ring position.

    The graphs share the memory of the first one, which lives as long as they do: one at a time is replayed, and copies
    its values out.
    """

    def __init__(self, policy: Policy, stack: FrameStack):
        self.policy = policy
        self._stack = stack
        spec, num_envs = policy.spec, len(stack.ring)
        dtype = getattr(torch, spec.frame_dtype)
        self._host_frames = torch.empty(num_envs, *spec.frame_shape, dtype=dtype, pin_memory=True)
        self._host_starts = torch.empty(num_envs, dtype=torch.bool, pin_memory=True)
        self._host_values = torch.empty(policy.values_of(stack).shape, pin_memory=True)
        self._host_memory = policy.new_memory(num_envs)
        self._memory = None if self._host_memory is None else torch.zeros_like(self._host_memory, device=policy.device)
        self._frames = torch.empty_like(self._host_frames, device=policy.device)
        self._starts = torch.empty_like(self._host_starts, device=policy.device)
        self._done = torch.cuda.Event()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        newest = stack.newest
        for position in range(spec.stacked_frames):
            stack.newest = position
            self._capture()
        stack.newest = newest

    def __call__(self, frames: np.ndarray, starts: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
        """Returns [E, ..] values; waits for the GPU, leaving the core to the emulator.

        Raises: ApexError when the GPU does not get there in time.
        """
        self._host_frames.numpy()[...] = frames
        self._host_starts.numpy()[...] = starts
        if self._host_memory is not None:
            self._host_memory.numpy()[...] = memory
        self._graphs[self._stack.newest].replay()
        self._done.record()
        wait(self._done)
        return self._host_values.numpy().copy()

    def _capture(self) -> None:
        """Records the work for the current ring position, after a warm-up that leaves the stack as it was."""
        before, side = self._stack.ring.clone(), self.policy.capture_stream
        side.wait_stream(torch.cuda.current_stream(self.policy.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                self._work()
        torch.cuda.current_stream(self.policy.device).wait_stream(side)
        self._stack.ring.copy_(before)
        torch.cuda.synchronize(self.policy.device)
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[0].pool() if self._graphs else None
        with capture(graph, pool, side):
            self._work()
        self._graphs.append(graph)

    def _work(self) -> None:
        self._frames.copy_(self._host_frames, non_blocking=True)
        self._starts.copy_(self._host_starts, non_blocking=True)
        self._stack.write(self._frames, self._starts)
        if self._memory is not None and self._host_memory is not None:
            self._memory.copy_(self._host_memory, non_blocking=True)
        self._host_values.copy_(self.policy.values_of(self._stack, self._memory), non_blocking=True)
