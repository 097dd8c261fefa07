"""PQN: Q(lambda) on new unrolls, with a normalized network and without targets (arXiv:2407.04811)."""

from collections.abc import Callable

from torch import nn

from apexrl.agents.apex_dqn import EpsilonGreedyActing
from apexrl.agents.contract import Batches
from apexrl.agents.engine.plain import Learning, Losses, Networks
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.engine.plain_learner import learner_of
from apexrl.agents.pqn_config import PqnAlgorithm, PqnUpdate
from apexrl.agents.replaying.mix import parts_of
from apexrl.agents.replaying.unroll_batches import joined
from apexrl.losses.policy_gradient import sum_losses
from apexrl.losses.returns import lambda_returns
from apexrl.networks.config import NormalizedConfig
from apexrl.networks.dueling import make_normalized_network as make_network


class PqnLearning(Learning):
    """Algorithm 1 of the paper: squared errors of Q(lambda), whose targets come from the network that learns."""

    algorithm: PqnAlgorithm
    update: PqnUpdate
    acting = called_once = ("q",)

    def parts(self) -> dict[str, nn.Module]:
        return {"q": make_network(self.spec, self.network)}

    def losses(self, online: Networks, batches: Batches, known: Callable[[], None]) -> Losses:
        """Returns half the squared errors of all steps that are no resets."""
        batch = joined([batches[part.name] for part in parts_of(self.update.mix)])
        values = online["q"](batch.observation.flatten(0, 1)).float().unflatten(0, batch.observation.shape[:2])
        greatest = values.detach().max(dim=-1).values[1:]
        discounts = self.algorithm.gamma * batch.discount
        returns = lambda_returns(batch.reward, discounts, greatest, batch.start, self.update.trace_lambda)
        errors = returns - values[:-1].gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
        valid = ~batch.start[1:]  # a reset ignored its action
        loss, count = sum_losses(errors.square() / 2, valid, batch.weight)
        real = valid & (batch.weight > 0)
        metrics = {name: (values * real).sum() / real.sum().clamp(min=1) for name, values in {
            "loss": errors.detach().square() / 2, "td_error": errors.detach().abs(), "q_mean": greatest,
        }.items()}  # fmt: skip
        return Losses({"q": loss}, count, metrics=metrics)


make_actor, make_learner = actor_of(EpsilonGreedyActing, NormalizedConfig, make_network), learner_of(PqnLearning)
