"""Long streams of a game with memory: their unrolls, and an LSTM's results for the whole of each at once."""

import numpy as np
import torch

from apexrl.agents.impala_config import ImpalaAlgorithm, stream
from apexrl.networks.actor_critic import ActorCriticNetwork
from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.recurrent import History
from apexrl.types import EnvironmentSpec, Unroll

T, LSTM_SIZE = 4, 5
ALGORITHM = ImpalaAlgorithm(unroll_starts=T, lstm=True, lstm_size=LSTM_SIZE)
SPEC = stream(ALGORITHM, EnvironmentSpec("Vectors-v0", (4,), "float32", 1, 3, 1))


class LongStream:
    """A stream of N unrolls whose episodes begin at the observations given. The log's states are random numbers."""

    def __init__(self, num_unrolls, starts, seed=0):
        rng = np.random.default_rng(seed)
        steps = num_unrolls * T
        self.observations = rng.normal(size=(steps + 1, 4)).astype(np.float32)
        self.actions = rng.integers(0, 3, steps).astype(np.int32)
        self.rewards = rng.normal(size=steps).astype(np.float32)
        self.starts = np.isin(np.arange(steps + 1), starts)
        self.states = rng.normal(size=(num_unrolls, 2, LSTM_SIZE)).astype(np.float16)

    def unroll(self, index):
        """Returns one unroll as actors send it."""
        first = index * T
        rows = slice(first, first + T)
        extras = {
            "behavior_log_probs": np.full((T, 3), -1, np.float16),
            "behavior_value": np.zeros(T, np.float16),
            "core_state": self.states[index : index + 1],
            "last_action": self.actions[first - 1 : first] if first else np.zeros(1, np.int32),
            "last_reward": self.rewards[first - 1 : first] if first else np.zeros(1, np.float32),
        }
        frames, starts = self.observations[first : first + T + 1], self.starts[first : first + T + 1]
        return Unroll(frames, self.actions[rows], self.rewards[rows], np.ones(T, np.float32), starts, extras)

    def whole(self, network):
        """Returns logits [N T + 1, A] and states [N T + 1, 2, size] before each observation, step by step."""
        state, logits, states = torch.zeros(1, 2, LSTM_SIZE), [], []
        actions, rewards = np.insert(self.actions, 0, 0), np.insert(self.rewards, 0, 0)  # those that led to each
        for observation, start, action, reward in zip(self.observations, self.starts, actions, rewards, strict=True):
            states.append(state[0])
            past = (torch.from_numpy(np.asarray(values))[None, None] for values in (start, action, reward))
            output = network.unroll(torch.from_numpy(observation)[None, None, None], History(*past, state))
            state = output.state
            logits.append(output.logits[0, 0])
        return torch.stack(logits).detach(), torch.stack(states).detach()


def new_network():
    """Returns a network whose logits depend on its state."""
    torch.manual_seed(0)
    network = ActorCriticNetwork(SPEC, ActorCriticConfig("shallow", (4, 4, 4), 8), LSTM_SIZE)
    with torch.no_grad():
        network.policy.weight.mul_(4)
    return network
