"""Checkpoints: one safetensors file each, replaced atomically; counters and configuration are text in its header.

Loading reads tensors and JSON and nothing else: no code of a file is ever run. Modules that it names are imported only
where a person trusts them (`own_modules.Trust`).
"""

from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from apexrl.errors import ConfigError, fault_of
from apexrl.files import replacing
from apexrl.memory import free_memory_bytes
from apexrl.networks.headers import CheckpointHeader, ParametersHeader, opened
from apexrl.networks.parameters import Parameters

ACTING = "acting."  # begins the names of the tensors that actors use


class Checkpoint(NamedTuple):
    """The content of a file. A `best` file holds only the `acting.` tensors."""

    header: CheckpointHeader
    tensors: dict[str, Tensor]

    def parameters(self) -> Parameters:
        """Returns the parameters that actors use."""
        updates, run = self.header.counters.updates, self.header.run
        header = ParametersHeader(updates, *self.header.identity, run)
        tensors = {n.removeprefix(ACTING): t for n, t in self.tensors.items() if n.startswith(ACTING)}
        return Parameters(header, tensors)


def save_checkpoint(path: Path, header: CheckpointHeader, tensors: dict[str, Tensor]) -> None:
    """Replaces a checkpoint: the file is the old one or the new one, never a part.

    Raises: OSError when the disk does not take it.
    """
    cpu, seen = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        cpu[name] = own.clone() if own.data_ptr() in seen else own  # a module that is used under two names
        seen.add(own.data_ptr())
    with replacing(path) as temporary:
        try:
            safetensors.torch.save_file(cpu, temporary, header.metadata)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint.

    Raises: ConfigError when there is no such file, it is no checkpoint of ours, or larger than the free memory.
    """
    if not path.is_file():
        raise ConfigError(f"no checkpoint at {path}")
    if (size := path.stat().st_size) > (free := free_memory_bytes()):
        raise ConfigError(f"{path} has {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free")
    with opened(path, "pt") as (header, file):
        try:
            return Checkpoint(header, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (TypeError, RuntimeError) as error:  # of torch: a shape that no tensor has
            raise ConfigError(f"{path} is no checkpoint of ours: {error}") from error


def all_finite(tensors: dict[str, Tensor]) -> bool:
    """Returns whether no tensor holds NaN or an infinity."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def random_state() -> dict[str, Tensor]:
    """Returns the state of torch's random generators as tensors."""
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(tensors: dict[str, Tensor]) -> None:
    """Restores the states that `random_state` returned.

    Raises: ConfigError when they are none.
    """
    try:
        if "random.cpu" in tensors:
            torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["random.cuda"])
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"the checkpoint has no state of a random generator: {fault_of(error)}") from error
