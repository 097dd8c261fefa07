"""Networks as ONNX graphs, for programs without torch. A graph takes observations as an environment's spec shows them.

An observation is a stack of whole frames in the type in which they are stored, the oldest first. The scaling of its
pixels, or its normalizer, is inside the graph. Frames from before the episode are zeros.
"""

import dataclasses
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apexrl.errors import ConfigError
from apexrl.files import replacing
from apexrl.networks.actor_critic import ActorCriticNetwork
from apexrl.networks.dueling import DuelingNetwork, RecurrentDuelingNetwork
from apexrl.networks.recurrent import History, RecurrentNetwork, memory_of
from apexrl.networks.torsos import FrameNetwork
from apexrl.networks.vector_policies import DeterministicPolicy, GaussianPolicy
from apexrl.types import EnvironmentSpec

OUTPUTS = {
    DuelingNetwork: "q_values", RecurrentDuelingNetwork: "q_values", GaussianPolicy: "moments",
    DeterministicPolicy: "actions",
}  # fmt: skip
EXAMPLES = 2  # rows of the observations with which a network is traced; a graph takes any number


class Graph(NamedTuple):
    """A network between named arrays, whose first axis counts environments."""

    network: nn.Module
    inputs: dict[str, Tensor]  # examples
    outputs: tuple[str, ...]


class _PolicyAndValue(nn.Module):
    """[B, A] logits or moments, and [B] values."""

    def __init__(self, network: ActorCriticNetwork):
        super().__init__()
        self.network = network

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.network(observation)
        return outputs[:, :-1], outputs[:, -1]


class _Recurrent(nn.Module):
    """[B, ..] outputs of the last layers, and the state [B, 2, lstm_size] for the next step."""

    def __init__(self, network: RecurrentNetwork):
        super().__init__()
        self.network = network

    def forward(
        self, observation: Tensor, start: Tensor, last_action: Tensor, last_reward: Tensor, state: Tensor
    ) -> tuple[Tensor, ...]:
        network = self.network
        if network.normalizer is not None:
            last_reward = network.normalizer.rewards(last_reward)
        memory = memory_of(History(start, last_action, last_reward, state), network.num_actions)
        values = network.values(network.prepare(observation), memory)
        values, after = values.tensor_split([-state[0].numel()], dim=1)
        after = after.unflatten(1, state.shape[1:])
        if isinstance(network, ActorCriticNetwork):
            return values[:, : network.num_actions], values[:, network.num_actions], after
        return values, after


def graph_of(network: nn.Module, spec: EnvironmentSpec) -> Graph:
    """Returns the graph of a network, which it changes: frames do not lie in blocks any more.

    Raises: ConfigError when it is not of a kind that has a graph.
    """
    if not isinstance(network, FrameNetwork) or (network.memory_size and not isinstance(network, RecurrentNetwork)):
        raise ConfigError(
            f"{type(network).__name__} has no ONNX graph: it is no FrameNetwork, or has a memory of its own"
        )
    network.requires_grad_(False)
    network.torso.layout = dataclasses.replace(network.torso.layout, in_blocks=False)
    dtype = getattr(torch, spec.frame_dtype)
    inputs = {"observation": torch.zeros(EXAMPLES, *spec.observation_shape, dtype=dtype)}
    outputs: tuple[str, ...] = (next((name for kind, name in OUTPUTS.items() if isinstance(network, kind)), "values"),)
    wrapped: nn.Module = network
    if isinstance(network, ActorCriticNetwork):
        outputs, wrapped = ("logits" if spec.num_actions else "moments", "value"), _PolicyAndValue(network)
    if not isinstance(network, RecurrentNetwork) or network.lstm is None:
        return Graph(wrapped, inputs, outputs)
    inputs |= {
        "start": torch.ones(EXAMPLES, dtype=torch.bool),
        "last_action": torch.zeros(EXAMPLES, dtype=torch.int64),
        "last_reward": torch.zeros(EXAMPLES),
        "state": torch.zeros(EXAMPLES, 2, network.lstm.size),
    }
    return Graph(_Recurrent(network), inputs, (*outputs, "next_state"))


def write_onnx(graph: Graph, path: Path, notes: dict[str, str]) -> None:
    """Writes a graph, with notes for its users, into one file. Needs the packages onnx and onnxscript."""
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's exporter uses parts of torch that it gives up
        warnings.filterwarnings("ignore", "# The axis name", UserWarning)  # all inputs have one
        program = torch.onnx.export(
            graph.network.eval(),
            tuple(graph.inputs.values()),
            input_names=list(graph.inputs),
            output_names=graph.outputs,
            dynamic_shapes=tuple({0: batch} for _ in graph.inputs),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props.update(notes)
    with replacing(path) as temporary:
        program.save(str(temporary), external_data=False)
