"""Checkpoints: one safetensors file each, replaced atomically; counters and configuration are text in its header.

Loading reads tensors and JSON and nothing else: no code of a file is ever run. Modules that it names are imported only
where a person trusts them (`own_modules.Trust`).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from apexrl.errors import UNREADABLE, ConfigError, fault_of
from apexrl.files import open_regular, replacing
from apexrl.memory import free_memory_bytes
from apexrl.networks.parameters import Identity, Parameters, ParametersHeader
from apexrl.types import Count, Finite, LogPosition, Name, StreamSpec, Text

LATEST = "latest.safetensors"
BEST = "best.safetensors"
ACTING = "acting."  # begins the names of the tensors that actors use
DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL"})  # as safetensors writes them


class Counters(msgspec.Struct, frozen=True):
    """The progress of a run, in totals over all its starts."""

    updates: Count = 0
    logs: tuple[LogPosition, ...] = ()  # by shard
    transitions_sampled: Count = 0
    episodes: Count = 0
    evaluation_episodes: Count = 0
    best_evaluation_return: Finite | None = None
    last_evaluation_return: Finite | None = None
    seconds: Finite = 0.0

    @property
    def transitions_inserted(self) -> int:
        """Transitions that the logs have brought; one for each step of an environment but the resets."""
        return sum(log.transitions for log in self.logs)


class CheckpointHeader(msgspec.Struct, frozen=True):
    """Everything of a checkpoint that is no tensor."""

    spec: StreamSpec
    agent: Name
    network: Text  # the configuration of the agent's network as JSON, see `networks.config`
    counters: Counters
    run: Name = ""  # the run's id, which its parameters and reports carry

    @property
    def identity(self) -> Identity:
        """The environment, the algorithm and the network of the tensors."""
        return Identity(self.spec, self.agent, self.network)


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
    metadata = {"header": msgspec.json.encode(header).decode()}
    cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        try:
            safetensors.torch.save_file(cpu, temporary, metadata)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error


def load_header(path: Path) -> CheckpointHeader:
    """Reads the header of a checkpoint, without its tensors.

    Raises: ConfigError when it is no checkpoint of ours.
    """
    with _opened(path) as file:
        return _header(file)


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint.

    Raises: ConfigError when there is no such file, it is no checkpoint of ours, or larger than the free memory.
    """
    if not path.is_file():
        raise ConfigError(f"no checkpoint at {path}")
    if (size := path.stat().st_size) > (free := free_memory_bytes()):
        raise ConfigError(f"{path} has {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free")
    with _opened(path) as file:
        header, names = _header(file), list(file.keys())
        for name in names:
            if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
                raise ValueError(f"{name} holds numbers of the type {dtype}")
        return Checkpoint(header, {name: file.get_tensor(name) for name in names})


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[safetensors.safe_open]:
    """Opens a checkpoint.

    Raises: ConfigError when it is none of ours, which its reader may find out.
    """
    try:
        open_regular(path).close()  # safetensors would wait for a pipe
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (safetensors.SafetensorError, *UNREADABLE) as error:
        raise ConfigError(f"{path} is no checkpoint of this program: {fault_of(error)}") from error


def _header(file: safetensors.safe_open) -> CheckpointHeader:
    return msgspec.json.decode((file.metadata() or {}).get("header", ""), type=CheckpointHeader)


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
