"""Sizes of the networks. They travel with the parameters as text. Loads no torch."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from apexrl.config.sections import NetworkConfig, Range
from apexrl.errors import MALFORMED, WireError

T = TypeVar("T", bound=NetworkConfig)
TorsoKind = Literal["shallow", "deep"]
CriticNorm = Literal["none", "layer", "batch"]
Activation = Literal["relu", "tanh"]
LATER: Mapping[str, Any] = {
    "network": "",
    "inputs": (),
    "initial_priorities": "equal",
    "activation": "relu",
    "first_deviation": 1.0,
}
FIRST_DEVIATIONS = Range(0.01, 7)  # a policy learns from those that losses/gaussian.py does not cut


@dataclasses.dataclass(frozen=True)
class NormalizedConfig(NetworkConfig):
    """Sizes of a dueling network with normalized layers."""

    channels: tuple[int, int, int] = (32, 64, 64)
    """Channels of the three convolutions (DQN)."""
    hidden_size: int = 512
    """Units of each dueling stream (DQN), and of the layers of a perceptron."""


@dataclasses.dataclass(frozen=True)
class DuelingConfig(NormalizedConfig):
    """Sizes of a dueling network."""

    quantiles: Annotated[int, Range(0, 512)] = 0
    """Quantiles that are learned of each action's return (QR-DQN: 200); 0: its mean alone (Ape-X)."""


@dataclasses.dataclass(frozen=True)
class VectorConfig(NetworkConfig):
    """Sizes of a policy that chooses a vector, and of critics that value it."""

    channels: tuple[int, int, int] = (32, 64, 64)
    """Channels of the three convolutions (DQN), where observations are pictures."""
    hidden_size: int = 256
    """Units of each layer of the policy and of each critic (TD3, SAC)."""
    critics: Annotated[int, Range(1, 16)] = 2
    """Critics that learn apart; targets take the least of their values (TD3, SAC: 2, Ape-X DPG: 1)."""


@dataclasses.dataclass(frozen=True)
class DeterministicConfig(VectorConfig):
    """Sizes of a deterministic policy and of its critics."""

    layer_norm: bool = True
    """Normalize the hidden layers of critics (LayerNorm), which TD3 does not."""
    atoms: Annotated[int, Range(0, 512)] = 0
    """Atoms of the distribution of returns that critics learn (D4PG: 51 or 101); 0: its mean alone (Ape-X DPG)."""
    least_return: Annotated[float, Range(-1e9, 1e9)] = -150.0
    """Return of the first atom (D4PG on dm_control)."""
    most_return: Annotated[float, Range(-1e9, 1e9)] = 150.0
    """Return of the last atom (D4PG on dm_control)."""
    initial_priorities: Literal["equal", "critic"] = "equal"
    """Priorities of new experience. critic: actors have the critics, too, and give their errors (Ape-X DPG)."""


@dataclasses.dataclass(frozen=True)
class GaussianConfig(VectorConfig):
    """Sizes of a squashed Gaussian policy and of its critics."""

    critic_norm: CriticNorm = "none"
    """Normalization of the layers of critics. batch: CrossQ's, over this and the next step together; then there are no
    target networks."""


@dataclasses.dataclass(frozen=True)
class ActorCriticConfig(NetworkConfig):
    """Sizes of a network with a policy and a value. The defaults are IMPALA's for Atari."""

    torso: TorsoKind = "deep"
    """Layers that look at screens. shallow: the three convolutions of DQN. deep: the residual network of IMPALA.
    Small pictures and vectors have layers of their own."""
    channels: tuple[int, int, int] = (16, 32, 32)
    """Channels of the three convolutions of a shallow torso, or of the three sections of a deep one (IMPALA)."""
    hidden_size: int = 256
    """Units of the layer after the torso (IMPALA), and of the layers of a perceptron."""
    activation: Activation = "relu"
    """Function behind the layers of a perceptron and those after the torso (IMPALA: relu, PPO on MuJoCo: tanh)."""
    first_deviation: Annotated[float, FIRST_DEVIATIONS] = 1.0
    """Where actions are vectors, the deviations with which a policy begins, of actions from -1 to 1 (PPO: 1)."""


def to_text(config: NetworkConfig) -> str:
    """Returns a configuration as JSON. Texts are compared, so new fields change none that is older than they are."""
    return msgspec.json.encode(chosen_fields(config)).decode()


def chosen_fields(config: NetworkConfig) -> dict[str, Any]:
    """Returns the fields of a configuration by name, without those that came later and have their defaults.

    An author's class may have other defaults, which a reader of the text would take.
    """
    usual = {field.name: field.default for field in dataclasses.fields(config)}
    later = {name: default for name, default in LATER.items() if usual.get(name) == default}
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if name not in later or value != later[name]}


def own_network(text: str) -> str:
    """Returns the --network of a configuration as JSON; empty where there is none, or the text is no configuration."""
    try:
        return from_text(text, NetworkConfig).network
    except WireError:
        return ""


def from_text(text: str, kind: type[T]) -> T:
    """Returns the configuration that a peer or a checkpoint describes.

    Raises: WireError when it is of another kind.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except MALFORMED as error:
        raise WireError(f"{text[:200]} does not describe a {kind.__name__}: {error}") from error
