"""Ape-X DQN: n-step double Q-learning with a dueling network and prioritized replay (arXiv:1803.00933).

Two halves, which share only the network: `ApexActor` chooses actions and computes the initial priorities,
`ApexLearner` updates the network from batches. Neither knows sockets, environments or files.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from apexrl.agents.exploration import epsilon_greedy
from apexrl.agents.optimizers import make_optimizer
from apexrl.config import AgentConfig, NetworkConfig, UpdateConfig
from apexrl.errors import ConfigError
from apexrl.learning.ahead import NextValues
from apexrl.learning.unroll_store import Batch, KeyBatch, TransitionBatch
from apexrl.learning.updater import BatchInputs, Inputs, KeyInputs, Pending, UpdateGraph
from apexrl.losses.value_learning import double_q_errors, huber, n_step_targets
from apexrl.losses.windows import n_step_windows, valid_starts
from apexrl.networks.device import fastest_dtype
from apexrl.networks.device_stream import DONE, Lane, Mark, wait
from apexrl.networks.dueling import make_network
from apexrl.networks.parameters import Parameters, ParametersHeader
from apexrl.networks.policy import FrameStack, Policy
from apexrl.types import StreamSpec, Unroll

SMALLEST_PRIORITY = 1e-6  # a transition that surprises nobody can still be drawn; 0 means that there is none
LEARNER_PARTS = ("online", "target", "optimizer")  # what the names of a learner's tensors begin with


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

    @property
    def run(self) -> str:
        """The run whose learner made the parameters in use."""
        return self._header.run

    def load(self, parameters: Parameters) -> None:
        """Replaces the network's parameters, and the network when the learner came back with another one.

        Raises: WireError when the tensors are not those that the header describes; the old ones stay.
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


FIGURES = ("loss", "td_error", "gradient_norm", "q_mean", "q_max", "importance_weight")  # of an update


class ApexLearner:
    """Updates the online network from batches, on a GPU by a captured graph. Owned by one thread."""

    def __init__(
        self,
        agent: AgentConfig,
        update: UpdateConfig,
        network: NetworkConfig,
        spec: StreamSpec,
        device: torch.device,
        lane: Lane | None = None,
    ):
        """Makes new networks; `lane` is that of the frame store, which updates from keys read."""
        self._agent = agent
        self._config = update
        self._header = ParametersHeader(0, spec, network)
        self._lane = lane or Lane(device)
        self._precision = precision_for(device, spec)
        with self._lane.turn():
            self._online = make_network(spec, network).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self._target = copy.deepcopy(self._online).requires_grad_(False)
            self._optimizer = make_optimizer(update, self._online)
        self._graph: UpdateGraph | None = None
        self._next_values = None if device.type == "cuda" else NextValues(self._online, self._target, self._precision)
        self.num_updates = 0

    def update(self, batch: Batch, upcoming: Batch | None = None) -> Pending | None:
        """Takes one optimizer step; returns what comes of it, None when nothing of the batch is left to learn from.

        `upcoming` is the batch of the next call, where it is known: on a CPU its values are begun with.

        Source: arXiv:1803.00933, algorithm 2. The loss is the mean over the batch of weight * Huber(TD error).
        """
        if self._next_values is not None and isinstance(batch, TransitionBatch):
            next_values = self._next_values.begin(batch, upcoming if isinstance(upcoming, TransitionBatch) else None)
            pending: Pending | None = Pending(batch.keys, self._step(batch, next_values), FIGURES, DONE)
        else:
            with self._lane.turn():
                pending = self._update_by_graph(batch)
        if pending is None:
            return None
        self.num_updates += 1
        if self.num_updates % self._config.target_period_updates == 0:
            self._networks_change()
            with self._lane.turn(), torch.no_grad():
                torch._foreach_copy_(list(self._target.parameters()), list(self._online.parameters()))
        return pending

    def _update_by_graph(self, batch: Batch) -> Pending | None:
        """Starts an update by the graph, which is made first where there is none for such batches."""
        if self._graph is None or not self._graph.takes(batch):
            if isinstance(batch, KeyBatch) and not batch.held().any():
                return None  # its store may be given up already
            wait(self._lane.mark())
            self._graph = None  # its memory is needed
            self._optimizer.zero_grad(set_to_none=True)
            size, lane = self._config.batch_size, self._lane
            if isinstance(batch, KeyBatch):
                inputs: Inputs = KeyInputs(lane, batch.store, size)
            else:
                inputs = BatchInputs(lane, self._header.spec, size)
            trained = [tensor for name, tensor in self._tensors().items() if not name.startswith("target.")]
            self._graph = UpdateGraph(lane, inputs, self._step, FIGURES, trained)
        return self._graph.update(batch)

    def _step(self, batch: TransitionBatch, next_values: Callable[[], tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """Takes one optimizer step; returns the priorities [B] and then the figures. Nothing here waits for a GPU.

        `next_values` gives the online and the target network's values of the next observations, computed elsewhere.
        """
        with self._precision():
            q_tm1 = self._online(batch.observation).float()
            if next_values is not None:
                q_online_t, q_target_t = next_values()
            else:
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
        # With a gradient that is not finite the step changes nothing: the batch is at fault, as its priorities say.
        self._optimizer.found_inf = (~gradient_norm.isfinite()).float()  # type: ignore[attr-defined]
        self._optimizer.step()
        with torch.no_grad():
            magnitude, q_tm1 = errors.abs(), q_tm1.detach()
            real = (batch.weight > 0).float()  # the other rows only fill the batch
            share = real / real.sum()
            figures = [
                loss,
                (share * magnitude).sum(),
                gradient_norm,
                (share * q_tm1.mean(dim=1)).sum(),
                q_tm1.amax(dim=1).masked_fill(real == 0, -torch.inf).max(),
                batch.weight.mean(),
            ]
            return torch.cat([magnitude + SMALLEST_PRIORITY, torch.stack(figures)])

    def fetch_parameters(self) -> tuple[Parameters, Mark]:
        """Returns the online network as it is to be published, good from the mark on; on a CPU no copies."""
        tensors, mark = self._lane.fetch(self._online.state_dict())
        header = ParametersHeader(self.num_updates, self._header.spec, self._header.network)
        return Parameters(header, tensors), mark

    def parameters(self) -> Parameters:
        """Returns the online network as it is to be published; on a CPU the tensors are not copies."""
        parameters, mark = self.fetch_parameters()
        wait(mark)
        return parameters

    def state_dict(self) -> dict[str, Tensor]:
        """Returns all tensors of the learner under flat names: networks and optimizer; on a CPU they are not copies."""
        tensors, mark = self._lane.fetch(self._tensors())
        wait(mark)
        return tensors

    def load_state_dict(self, state: dict[str, Tensor], num_updates: int) -> None:
        """Restores what `state_dict` returned, in place: a captured update goes on with it.

        Raises: ConfigError when networks or optimizer are of another kind or size.
        """
        own = self._tensors()
        state = {name: tensor for name, tensor in state.items() if name.split(".")[0] in LEARNER_PARTS}
        others = [name for name in own.keys() | state.keys() if _shape(own, name) != _shape(state, name)]
        if others:
            raise ConfigError(
                f"the checkpoint is of another network or optimizer ({sorted(others)[:3]} differ): "
                "go on with the flags with which it was begun, such as --optimizer"
            )
        self._networks_change()
        with self._lane.turn(), torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])
        self.num_updates = num_updates

    def _networks_change(self) -> None:
        if self._next_values is not None:
            self._next_values.forget()

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"online.{name}": tensor for name, tensor in self._online.state_dict().items()}
        tensors |= {f"target.{name}": tensor for name, tensor in self._target.state_dict().items()}
        for index, parameter in enumerate(self._online.parameters()):
            slots = self._optimizer.state[parameter]
            tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in slots.items()}
        return tensors


def precision_for(device: torch.device, spec: StreamSpec) -> Callable[[], torch.autocast]:
    """Returns a maker of the autocast context: bfloat16 for pictures where the hardware has it, else float32."""
    enabled = fastest_dtype(device, spec) == torch.bfloat16
    return lambda: torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def _shape(tensors: dict[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None
