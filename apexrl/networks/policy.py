"""The network as actors use it: frozen in the fastest precision, and fed one new frame of each environment at a time.

Nothing here knows sockets, environments or exploration. On a CPU the values are there when the call returns; on a GPU
one call is one captured CUDA graph, waited for without spinning.
"""

import copy
import logging

import numpy as np
import torch
from torch import Tensor

from apexrl.config import NetworkConfig
from apexrl.errors import WireError
from apexrl.networks.device import fastest_dtype
from apexrl.networks.device_stream import wait
from apexrl.networks.dueling import DuelingNetwork, make_network
from apexrl.networks.screens import blocks, channels, stored_shape
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)

CHECKED_OBSERVATIONS = 32
LARGEST_LAYER = 65_536  # channels or units
# Of the greatest value. Rounding to bfloat16 makes up to 2 %; hardware that computes it wrongly makes more.
TOLERANCE = 0.05


class FrameStack:
    """The last H frames of E environments, in the layout that the network takes; frames of an older episode are zero.

    A ring over H: only the newest frame is converted, and the network's kernel is turned instead of the frames.
    """

    def __init__(self, spec: StreamSpec, num_envs: int, in_blocks: bool, dtype: torch.dtype, device: torch.device):
        """Begins with no frame seen."""
        self.newest = spec.stacked_frames - 1  # position in the ring
        self._in_blocks = in_blocks
        if in_blocks:
            height, width, pixels = stored_shape(spec)
            self.pixels = torch.zeros(num_envs, height, width, spec.stacked_frames, pixels, dtype=dtype)
            self._ring_axis = 3
        else:
            self.pixels = torch.zeros(num_envs, *spec.observation_shape, dtype=getattr(torch, spec.frame_dtype))
            self._ring_axis = 1
        self.pixels = self.pixels.to(device)
        self._spec = spec
        self.call: _CapturedCalls | None = None  # on a GPU

    def turn(self) -> None:
        """Makes the oldest position the one of the newest frame."""
        self.newest = (self.newest + 1) % self._spec.stacked_frames

    def write(self, frames: Tensor, starts: Tensor) -> None:
        """Puts frames [E, *frame] at the newest position; where starts [E], what was seen before is forgotten."""
        if self.pixels.device.type != "cpu" or bool(starts.any()):
            self.pixels.masked_fill_(starts.view(-1, *[1] * (self.pixels.dim() - 1)), 0)
        self.pixels.select(self._ring_axis, self.newest).copy_(blocks(frames) if self._in_blocks else frames)

    def in_order(self) -> Tensor:
        """Returns the observations [E, H, *frame], oldest frame first; not for blocks."""
        return self.pixels.roll(-1 - self.newest, self._ring_axis)


class Policy:
    """Q-values of what E environments show. Owned by one thread; `load` may be called between any two calls."""

    def __init__(self, spec: StreamSpec, config: NetworkConfig, device: torch.device, tensors: dict[str, Tensor]):
        """Makes the network and checks its precision on this machine.

        Raises: WireError when the tensors are not those of the network, or not finite.
        """
        check_tensors(spec, config, tensors)
        self.spec = spec
        self._config = config
        self.device = device
        self._exact = make_network(spec, config).to(device).eval().requires_grad_(False)
        self._exact.load_state_dict(tensors)
        self._use(fastest_dtype(device, spec))
        if self.dtype != torch.float32 and not self._is_close():
            logger.warning("%s gives other values than float32 on %s: acting in float32", self.dtype, device)
            self._use(torch.float32)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Replaces the parameters in place, or leaves them as they are when it raises.

        Raises: WireError when they are of another network, or not finite.
        """
        check_tensors(self.spec, self._config, tensors)
        self._exact.load_state_dict(tensors)
        self._freeze()

    def frame_stack(self, num_envs: int) -> FrameStack:
        """Returns the memory of E environments, to be given to each call for them."""
        return FrameStack(self.spec, num_envs, self._exact.torso.in_blocks, self.dtype, self.device)

    @torch.no_grad()
    def q_values(self, frames: np.ndarray, starts: np.ndarray, stack: FrameStack) -> np.ndarray:
        """Takes the newest frames into the stack and returns the values of what is seen now.

        Args:
          frames: [E, *frame]; starts: [E] bool, True where the frame is the first of its episode.
        Returns: [E, A] float32.
        """
        stack.turn()
        if self.device.type == "cuda":
            if stack.call is None or stack.call.policy is not self:
                stack.call = _CapturedCalls(self, stack)
            return stack.call(frames, starts)
        stack.write(torch.from_numpy(np.ascontiguousarray(frames)), torch.from_numpy(starts))
        return self.values(stack).numpy()

    def values(self, stack: FrameStack) -> Tensor:
        """Returns [E, A] float32 values of what the stack holds."""
        torso = self._fast.torso
        if torso.in_blocks:
            features = torso.features(channels(stack.pixels).to(self.dtype), self._kernels[stack.newest])
        else:
            prepared = torso.prepare(stack.in_order()).to(self.dtype)
            features = torso.features(prepared, self._kernels[0])
        return self._fast.heads(features)

    def _use(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._fast: DuelingNetwork = copy.deepcopy(self._exact)
        self._fast.torso.to(dtype)
        self._fast.hidden.to(dtype)
        self._fast.torso.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._kernels = [kernel.to(dtype) for kernel in self._turned_kernels()]
        self._freeze()

    def _freeze(self) -> None:
        """Copies the parameters in place, so that captured graphs see them."""
        with torch.no_grad():
            fast = [*self._fast.parameters(), *self._kernels]
            exact = [*self._exact.parameters(), *self._turned_kernels()]
            for kept, new in zip(fast, exact, strict=True):
                kept.copy_(new)

    def _turned_kernels(self) -> list[Tensor]:
        """Returns the first kernel for each position of the newest frame; one only where stacks are put in order."""
        torso = self._exact.torso
        kernel = torso.kernel().detach()
        if not torso.in_blocks:
            return [kernel]
        depth = self.spec.stacked_frames
        by_frame = kernel.unflatten(1, (depth, 16))  # [C, H, 16, 2, 2], oldest frame first
        turned = (by_frame.roll(1 + newest, 1).flatten(1, 2) for newest in range(depth))
        return [kernel.contiguous(memory_format=torch.channels_last) for kernel in turned]

    @torch.no_grad()
    def _is_close(self) -> bool:
        generator = torch.Generator().manual_seed(0)
        shape = (CHECKED_OBSERVATIONS, *self.spec.observation_shape)
        observations = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        stack = self.frame_stack(CHECKED_OBSERVATIONS)
        nothing = torch.zeros(CHECKED_OBSERVATIONS, dtype=torch.bool, device=self.device)
        for frames in observations.to(self.device).unbind(1):
            stack.turn()
            stack.write(frames, nothing)
        exact = self._exact(observations.to(self.device))
        return bool((self.values(stack) - exact).abs().max() <= TOLERANCE * exact.abs().max())


def check_tensors(spec: StreamSpec, config: NetworkConfig, tensors: dict[str, Tensor]) -> None:
    """Compares tensors with the network that a peer describes; a network takes no memory before it is known to fit.

    Raises: WireError when names, shapes or sizes are others, or a number is not finite.
    """
    if not all(1 <= size <= LARGEST_LAYER for size in (*config.channels, config.hidden_size)):
        raise WireError(f"a network of {config} makes no sense: sizes are 1 to {LARGEST_LAYER}")
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in make_network(spec, config).state_dict().items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    others = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if others:
        raise WireError(f"parameters do not fit the network of {config}: {others[:5]} differ")
    strange = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if strange:
        raise WireError(f"parameters are not finite: {strange[:5]}; has the learner diverged?")


class _CapturedCalls:
    """A policy's call for one stack on a GPU: copy in, write, network, copy out; a graph for each ring position."""

    def __init__(self, policy: Policy, stack: FrameStack):
        self.policy = policy
        self._stack = stack
        spec, num_envs = policy.spec, len(stack.pixels)
        dtype = getattr(torch, spec.frame_dtype)
        self._host_frames = torch.empty(num_envs, *spec.frame_shape, dtype=dtype, pin_memory=True)
        self._host_starts = torch.empty(num_envs, dtype=torch.bool, pin_memory=True)
        self._host_values = torch.empty(num_envs, spec.num_actions, pin_memory=True)
        self._frames = torch.empty_like(self._host_frames, device=policy.device)
        self._starts = torch.empty_like(self._host_starts, device=policy.device)
        self._done = torch.cuda.Event()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, frames: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Returns [E, A] values; waits for the GPU, leaving the core to the emulator.

        Raises: ApexError when the GPU does not get there in time.
        """
        self._host_frames.numpy()[...] = frames
        self._host_starts.numpy()[...] = starts
        position = self._stack.newest
        if position not in self._graphs:
            self._graphs[position] = self._capture()
        self._graphs[position].replay()
        self._done.record()
        wait(self._done)
        return self._host_values.numpy().copy()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Records the work for the current ring position, after a warm-up that leaves the stack as it was."""
        before = self._stack.pixels.clone()
        side = torch.cuda.Stream(self.policy.device)
        side.wait_stream(torch.cuda.current_stream(self.policy.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                self._work()
        torch.cuda.current_stream(self.policy.device).wait_stream(side)
        self._stack.pixels.copy_(before)
        torch.cuda.synchronize(self.policy.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._work()
        return graph

    def _work(self) -> None:
        self._frames.copy_(self._host_frames, non_blocking=True)
        self._starts.copy_(self._host_starts, non_blocking=True)
        self._stack.write(self._frames, self._starts)
        self._host_values.copy_(self.policy.values(self._stack), non_blocking=True)
