"""The device that a process computes on, the number type that is fastest there, and what a CPU needs for updates."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from apexrl.errors import ConfigError
from apexrl.memory import keep_freed_memory
from apexrl.types import EnvironmentSpec

PROCESSORS = Path("/proc/cpuinfo")


def choose_device(name: str) -> torch.device:
    """Returns the device to compute on, and makes it this process's own; auto takes a GPU when there is one.

    Raises: ConfigError when the named device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {error}") from error
    return device


@contextlib.contextmanager
def usual_defaults() -> Iterator[None]:
    """Has torch's usual number type and device for a while, whatever the program around us has chosen."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def prepare_for_updates(num_threads: int) -> None:
    """Prepares this process to update networks on a CPU with so many threads. Call it before there are other threads.

    Numbers below 1.2e-38, the smallest that float32 holds in full precision, become zeros: some processors take up to
    a hundred times as long for them. Where a gradient is zero, an optimizer's moments decay to such numbers and stay
    there: most of them after a thousand updates (measured: docs/log/learner.md). Later threads do the same.
    """
    keep_freed_memory()
    torch.set_flush_denormal(True)
    torch.set_num_threads(num_threads)


def cpu_has_bfloat16() -> bool:
    """Returns whether products in bfloat16 are faster than in float32 on this processor: with AMX, and on AMD.

    An Intel that has AVX512-BF16 alone, as where a host hides AMX, takes twice as long for them (docs/log/learner.md).
    It is not measured here, because runs that have to be equal would differ by it.
    """
    return torch.cpu._is_amx_tile_supported() or (torch.cpu._is_avx512_bf16_supported() and not _is_intel())


def _is_intel() -> bool:
    """Returns whether the processor says so, as far as this system tells."""
    try:
        with PROCESSORS.open() as lines:
            return "GenuineIntel" in next((line for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return False


def fastest_dtype(device: torch.device, spec: EnvironmentSpec) -> torch.dtype:
    """Returns the type to compute in: bfloat16 for pictures where the hardware has it, else float32."""
    if len(spec.frame_shape) <= 1:
        return torch.float32
    on_gpu = device.type == "cuda"
    fast = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else cpu_has_bfloat16()
    return torch.bfloat16 if fast else torch.float32


def copied_dtype(device: torch.device, spec: EnvironmentSpec) -> torch.dtype | None:
    """Returns the type in which updates keep a copy of the layers; None: autocast casts them, as cheaply on a CPU."""
    dtype = fastest_dtype(device, spec) if device.type == "cuda" else torch.float32
    return None if dtype == torch.float32 else dtype


def autocast_for(device: torch.device, spec: EnvironmentSpec) -> Callable[[], torch.autocast]:
    """Returns a maker of the autocast context: bfloat16 for pictures where the hardware has it, else float32.

    Cast weights are not kept within the context: those of a computation without a gradient would be taken by the next
    one, which needs theirs. Older versions of torch would also take those of another thread.
    """
    enabled = fastest_dtype(device, spec) == torch.bfloat16
    return lambda: torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


def in_full_precision(device: torch.device) -> torch.autocast:
    """Returns the context in which autocast casts nothing, within one in which it does."""
    return torch.autocast(device.type, enabled=False)


def lay_out(module: nn.Module) -> None:
    """Puts kernels [out, in, height, width] in memory as convolutions read them fastest, and others without gaps."""
    for tensor in (*module.parameters(), *module.buffers()):
        spanned = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
        elif spanned != tensor.numel() > 0:
            tensor.data = tensor.data.contiguous()
