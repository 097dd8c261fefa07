"""Ape-X DQN: n-step double Q-learning with a dueling network and prioritized replay (arXiv:1803.00933).

Two halves, which share only the network: `ApexActor` chooses actions and computes the initial priorities,
`ApexLearner` updates the network from batches. Neither knows sockets, environments or files.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from apexrl.config import AgentConfig, NetworkConfig, UpdateConfig
from apexrl.device import fastest_dtype
from apexrl.exploration import epsilon_greedy
from apexrl.frame_store import TransitionBatch
from apexrl.losses.value_learning import double_q_errors, huber, n_step_targets
from apexrl.networks import make_network
from apexrl.parameters import Parameters, ParametersHeader
from apexrl.policy import FrameStack, Policy
from apexrl.types import StreamSpec, Unroll
from apexrl.unroll import n_step_windows, valid_starts

SMALLEST_PRIORITY = 1e-6  # a transition that surprises nobody can still be drawn; 0 means that there is none


class ApexActor:
    """Acts epsilon-greedily with vectors of environments. Owned by one thread."""

    def __init__(self, config: AgentConfig, parameters: Parameters, device: torch.device):
        self._config = config
        self._device = device
        self._header = parameters.header
        self._policy = self._make_policy(parameters)

    @property
    def params_version(self) -> int:
        """The learner's updates that made the parameters in use."""
        return self._header.params_version

    def load(self, parameters: Parameters) -> None:
        """Replaces the network's parameters, and the network when the learner came back with another one.

        Raises: RuntimeError when the tensors are not those that the header describes.
        """
        header = parameters.header
        if header.network == self._header.network:
            self._policy.load(parameters.tensors)
        else:
            self._policy = self._make_policy(parameters)
        self._header = header

    def initial_state(self, num_envs: int) -> FrameStack:
        """Returns what to give to `act` for a vector of environments that begins now: the frames it has seen."""
        return self._policy.frame_stack(num_envs)

    def act(
        self,
        frames: np.ndarray,
        starts: np.ndarray,
        epsilons: np.ndarray,
        state: FrameStack,
        rng: np.random.Generator,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns actions [E], and the extras that `priorities` needs of each observation.

        Args:
          frames: [E, *frame] that the environments show now; starts: [E] bool, whether it begins an episode.
          epsilons: [E] probability of a uniform action.
          state: of these environments; takes the frames in.
        """
        q_values = self._policy.q_values(frames, starts, state)
        actions = epsilon_greedy(q_values, epsilons, rng)
        taken = q_values[np.arange(len(actions)), actions]
        return actions, {"q_taken": taken, "q_max": q_values.max(axis=1)}

    def priorities(self, unrolls: Unroll, extras: dict[str, np.ndarray]) -> np.ndarray:
        """Returns the initial priorities [K, E]: |n-step TD error| by the actor's own values, 0 where none starts.

        Args:
          unrolls: E streams side by side; extras: [T + 1, E] of each observation, as `act` gave them.
        """
        config = self._config
        returns, discounts, offsets = n_step_windows(
            unrolls.rewards, unrolls.discounts, unrolls.starts, config.gamma, config.n_steps
        )
        num_starts = len(returns)
        ends = np.arange(num_starts)[:, None] + offsets
        bootstrap = np.take_along_axis(extras["q_max"], ends, axis=0)
        tensors = (torch.from_numpy(array) for array in (returns, discounts, bootstrap))
        targets = n_step_targets(*tensors, rescaling=config.value_rescaling).numpy()
        errors = np.abs(targets - extras["q_taken"][:num_starts]) + SMALLEST_PRIORITY
        return np.where(valid_starts(unrolls.starts, num_starts), errors, 0).astype(np.float32)

    def _make_policy(self, parameters: Parameters) -> Policy:
        header = parameters.header
        return Policy(header.spec, header.network, self._device, parameters.tensors)


class ApexLearner:
    """Updates the online network from batches. Owned by one thread."""

    def __init__(
        self, agent: AgentConfig, update: UpdateConfig, network: NetworkConfig, spec: StreamSpec, device: torch.device
    ):
        self._agent = agent
        self._config = update
        self._header = ParametersHeader(0, spec, network)
        self._device = device
        self._precision = precision_for(device, spec)
        self._online = make_network(spec, network).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._target = copy.deepcopy(self._online).requires_grad_(False)
        self._optimizer = make_optimizer(update, self._online)
        self.num_updates = 0

    def update(self, batch: TransitionBatch) -> tuple[np.ndarray, dict[str, Tensor]]:
        """Takes one optimizer step; returns the new priorities [B] and figures of this update.

        Source: arXiv:1803.00933, algorithm 2. The loss is the mean over the batch of weight * Huber(TD error).
        """
        with self._precision():
            q_tm1 = self._online(batch.observation).float()
            with torch.no_grad():
                prepared = self._online.prepare(batch.next_observation)
                q_online_t = self._online.values(prepared).float()
                q_target_t = self._target.values(prepared).float()
        errors = double_q_errors(
            q_tm1,
            batch.action,
            batch.n_step_return,
            batch.discount,
            q_target_t,
            q_online_t,
            rescaling=self._agent.value_rescaling,
        )
        loss = (batch.weight * huber(errors)).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        gradient_norm = nn.utils.clip_grad_norm_(self._online.parameters(), self._config.max_gradient_norm)
        self._optimizer.step()
        self.num_updates += 1
        if self.num_updates % self._config.target_period_updates == 0:
            self._target.load_state_dict(self._online.state_dict())
        magnitude = errors.detach().abs()
        figures = {
            "loss": loss.detach(),
            "td_error": magnitude.mean(),
            "gradient_norm": gradient_norm.detach(),
            "q_mean": q_tm1.detach().mean(),
            "q_max": q_tm1.detach().max(),
            "importance_weight": batch.weight.mean(),
        }
        return magnitude.cpu().numpy() + SMALLEST_PRIORITY, figures

    def parameters(self) -> Parameters:
        """Returns the online network as it is to be published; the tensors are not copies."""
        header = ParametersHeader(self.num_updates, self._header.spec, self._header.network)
        return Parameters(header, self._online.state_dict())

    def state_dict(self) -> dict[str, Tensor]:
        """Returns all tensors of the learner under flat names: networks and optimizer."""
        state = {f"online.{name}": tensor for name, tensor in self._online.state_dict().items()}
        state |= {f"target.{name}": tensor for name, tensor in self._target.state_dict().items()}
        for index, slots in self._optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in slots.items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor], num_updates: int) -> None:
        """Restores what `state_dict` returned.

        Raises: RuntimeError when networks or optimizer are of another kind or size.
        """
        self._online.load_state_dict(_under("online.", state))
        self._target.load_state_dict(_under("target.", state))
        parameters = list(self._online.parameters())
        slots: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _under("optimizer.", state).items():
            index, slot = name.split(".", 1)
            parameter = parameters[int(index)].detach()
            # The fused optimizer wants its tensors in the parameter's layout in memory.
            fits = tensor.shape == parameter.shape
            slots.setdefault(int(index), {})[slot] = torch.empty_like(parameter).copy_(tensor) if fits else tensor
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": slots, "param_groups": groups})
        self.num_updates = num_updates


def precision_for(device: torch.device, spec: StreamSpec) -> Callable[[], torch.autocast]:
    """Returns a maker of the autocast context: bfloat16 for pictures where the hardware has it, else float32."""
    enabled = fastest_dtype(device, spec) == torch.bfloat16
    return lambda: torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def make_optimizer(config: UpdateConfig, network: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer that the configuration names."""
    parameters = list(network.parameters())
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, config.learning_rate, eps=config.optimizer_epsilon, fused=True)
    return torch.optim.RMSprop(
        parameters, config.learning_rate, alpha=0.95, eps=config.optimizer_epsilon, centered=True
    )


def _under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
