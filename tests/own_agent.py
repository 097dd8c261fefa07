"""An algorithm of somebody's own, as `--agent tests.own_agent:own` names it: its configuration only."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

from apexrl.agents.contract import Family, Unrolls, Want
from apexrl.agents.families import FAMILIES
from apexrl.config.sections import AlgorithmConfig, NetworkConfig, Range, UpdateConfig
from apexrl.config.tables import TableSpec
from apexrl.errors import ConfigError
from apexrl.types import StreamSpec

if TYPE_CHECKING:
    from torch import nn


@dataclasses.dataclass(frozen=True)
class OwnAlgorithm(AlgorithmConfig):
    """The numbers of my own algorithm."""

    overlap_steps: Annotated[int, Range(0)] = 2
    """Steps that unrolls share."""
    trace_length: Annotated[float, Range(0, 1)] = 0.9
    """Share of a trace that is left a step later."""


@dataclasses.dataclass(frozen=True)
class OwnNetwork(NetworkConfig):
    """The sizes of my own network."""

    width: int = 16
    """Units of the one layer."""


@dataclasses.dataclass(frozen=True)
class OwnUpdate(UpdateConfig):
    """My own update."""

    queue: str = "queue"
    """The table that unrolls come from."""


OWN = FAMILIES["own"] = Family(
    algorithm=OwnAlgorithm(unroll_starts=20),
    network=OwnNetwork(),
    update=OwnUpdate(batch_size=32),
    presets={
        "gpu": {"update": {"batch_size": 16}},
        "two-cores": {"update": {"batch_size": 4}},
        "small": {"update": {"batch_size": 2}, "network": {"width": 3}, "replay": {"capacity": 60_000}},
    },
    stream=lambda algorithm, environment: environment.streamed(algorithm.unroll_starts, algorithm.overlap_steps),
    wants=lambda algorithm, update: (Want(update.queue, update.batch_size, Unrolls()),),
    tables=lambda update: (TableSpec(update.queue, "fifo"),),
    module="tests.own_agent",
)


def make_network(spec: StreamSpec, network: OwnNetwork) -> "nn.Module":
    """Raises ConfigError when the network is too wide."""
    from torch import nn

    if network.width > 100:
        raise ConfigError(f"--width {network.width}: this network for {spec.env} has at most 100 units")
    return nn.Linear(spec.frame_size, network.width)


def make_actor(*arguments: object) -> None:
    """Nobody plays with it."""
    raise NotImplementedError


make_learner = make_actor
