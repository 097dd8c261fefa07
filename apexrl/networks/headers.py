"""Headers of parameters and of checkpoints: everything of them that is no tensor, and a run's checkpoints as files.

Loads no torch: the launcher reads headers, and copies files, in a fraction of a second.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import safetensors

from apexrl.config.schedules import Shape
from apexrl.config.sections import LONGEST_VARIANT, NetworkConfig
from apexrl.errors import UNREADABLE, ConfigError, fault_of
from apexrl.files import open_regular, replacing
from apexrl.networks.config import to_text
from apexrl.types import Count, Finite, LogPosition, Name, StreamSpec, Text

CHECKPOINTS = "checkpoints"  # the directory of a run that holds them
LATEST = "latest.safetensors"
BEST = "best.safetensors"
LEARNING = "learning."  # begins the names of a checkpoint's tensors that are not for acting
MOMENTS = "moments."  # behind it, those of the run's observations and rewards
NUMBERED = "update-{:012d}.safetensors"
DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})  # as safetensors writes them
LENGTH_BYTES = 8  # of a file: the length of its header, little-endian; the header is JSON, the tensors follow it


class Identity(NamedTuple):
    """The environment, the algorithm and the network that tensors belong to."""

    spec: StreamSpec
    agent: str  # the family's name
    network: str  # its configuration as JSON, see `networks.config`

    @classmethod
    def of(cls, spec: StreamSpec, agent: str, network: NetworkConfig) -> "Identity":
        """Returns the identity of a network with this configuration.

        Raises: ConfigError when it is too long for checkpoints and messages.
        """
        text = to_text(network)
        if len(text) > LONGEST_VARIANT:
            raise ConfigError(
                f"--network and --inputs make {len(text)} characters, {LONGEST_VARIANT} are the most: give the "
                "observations fewer parts by a --wrapper module:name"
            )
        return cls(spec, agent, text)


class ParametersHeader(msgspec.Struct, frozen=True):
    """Everything that an actor must know to use the tensors."""

    params_version: Count  # learner updates
    spec: StreamSpec
    agent: Name  # the family's name
    network: Text  # its configuration as JSON, see `networks.config`
    run: Name = ""  # the learner's run, which reports and evaluations repeat
    is_last: bool = False  # the learner is at the end of its run, and waits for the evaluation


class Progress(msgspec.Struct, frozen=True):
    """The way of a number over a run, see `learning.goal`: the wish, where it began, and how far it is."""

    rate: Finite  # where it starts
    total_frames: Count
    over_frames: Count  # of its schedule
    ends_at: Finite  # seconds since 1970; 0: not by time
    end_frames: Count = 0  # of the run, at which those have passed
    begun_frames: Count = 0
    begun_share: Finite = 0.0
    begun_number: Finite | None = None  # from which the way goes; None: from where it starts
    began_at: Finite = 0.0  # the run, its earlier starts included
    share: Finite = 0.0  # of the way from start to end
    total_updates: Count = 0
    begun_late: Finite = 0.0  # of the run's time or updates, by then
    end: Finite = 0.0  # where the number ends
    shape: Shape = "linear"

    @property
    def asked(self) -> tuple[float | str, ...]:
        """The wish, by which a restart is known from a run that goes on otherwise."""
        ends = self.total_frames, self.over_frames, self.ends_at, self.total_updates
        return self.rate, self.end, self.shape, *ends


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
    progress: dict[Name, Progress] = {}  # of the numbers that may change, by field

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

    @property
    def metadata(self) -> dict[str, str]:
        """The header as a file holds it."""
        return {"header": msgspec.json.encode(self).decode()}


def latest_path(directory: Path) -> Path:
    """Returns the path of the checkpoint that a later start of a run continues."""
    return directory / CHECKPOINTS / LATEST


def numbered_checkpoints(directory: Path) -> list[Path]:
    """Returns the checkpoints of a run directory that are kept under their updates, oldest first."""
    return sorted((directory / CHECKPOINTS).glob(NUMBERED.format(0).replace("0" * 12, "[0-9]" * 12)))


def load_header(path: Path) -> CheckpointHeader:
    """Reads the header of a checkpoint, without its tensors.

    Raises: ConfigError when it is no checkpoint of ours.
    """
    with opened(path, "np") as (header, _):
        return header


@contextlib.contextmanager
def opened(path: Path, framework: str) -> Iterator[tuple[CheckpointHeader, safetensors.safe_open]]:
    """Opens a checkpoint, whose length and types of numbers are as its header says.

    Args:
      framework: of its tensors, as safetensors names it: "pt" for torch, "np" for numpy.
    Raises: ConfigError when it is none of ours, which its reader may find out.
    """
    try:
        open_regular(path).close()  # safetensors would wait for a pipe
        with safetensors.safe_open(path, framework=framework) as file:
            header = msgspec.json.decode((file.metadata() or {}).get("header", ""), type=CheckpointHeader)
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
                    raise ValueError(f"{name} holds numbers of the type {dtype}")
            yield header, file
    except (safetensors.SafetensorError, *UNREADABLE) as error:
        raise ConfigError(f"{path} is no checkpoint of this program: {fault_of(error)}") from error


def copy_checkpoint(source: Path, target: Path, header: CheckpointHeader) -> None:
    """Copies the tensors of a checkpoint that can be read into a file with another header.

    Raises: OSError when the disk does not take it.
    """
    with open_regular(source) as file, replacing(target) as temporary, temporary.open("wb") as copy:
        entries = json.loads(file.read(int.from_bytes(file.read(LENGTH_BYTES), "little")))
        text = json.dumps({**entries, "__metadata__": header.metadata}).encode()
        text += b" " * (-len(text) % LENGTH_BYTES)  # the tensors begin at a whole word
        copy.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        shutil.copyfileobj(file, copy)
