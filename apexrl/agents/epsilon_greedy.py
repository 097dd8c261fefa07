"""Epsilon-greedy actors on Ape-X's ladder, for values of actions."""

import numpy as np

from apexrl.agents.contract import Exploration, Extras
from apexrl.agents.engine.plain import Acting
from apexrl.agents.exploration import epsilon_greedy, epsilon_ladder


class EpsilonGreedyActing(Acting):
    """The greatest value's action, or with an environment's own epsilon a random one (arXiv:1803.00933, section 4)."""

    def explore(self, slots: np.ndarray, ladder_size: int) -> Exploration:
        """Returns the epsilons [E] of the ladder."""
        return epsilon_ladder(slots, ladder_size, self.algorithm.epsilon_base, self.algorithm.epsilon_exponent)

    @property
    def evaluation_exploration(self) -> float:
        return self.algorithm.evaluation_epsilon

    def act(self, values: np.ndarray, exploration: Exploration, rng: np.random.Generator) -> tuple[np.ndarray, Extras]:
        return epsilon_greedy(values, exploration, rng), {}
