"""IMPALA's parts for tests: small learners and actors, random batches, and the loss of a batch once more, slowly."""

import functools

import numpy as np
import torch

from apexrl.agents import impala
from apexrl.agents.contract import UnrollBatch
from apexrl.agents.impala_config import ImpalaAlgorithm, ImpalaUpdate, stream, wants
from apexrl.agents.replaying.unroll_batches import history_of
from apexrl.learning.experience.keeping import Keeping
from apexrl.networks.config import ActorCriticConfig, to_text
from apexrl.networks.device_stream import DeviceStream
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import Parameters
from apexrl.types import EnvironmentSpec
from tests.losses.test_vtrace import by_definition
from tests.losses.unrolls import T, Unrolls, random_unrolls

CPU = torch.device("cpu")
NUM_ACTIONS, LSTM_SIZE = 3, 5
VECTORS = EnvironmentSpec("Vectors-v0", (4,), "float32", 2, NUM_ACTIONS, 1)
NETWORK = ActorCriticConfig("shallow", (4, 4, 4), 8)
LASER = ("queue=1/4", "uniform=3/4")
SIZES = {"queue": 20, "uniform": 60}


def algorithm_of(lstm):
    return ImpalaAlgorithm(gamma=0.9, unroll_starts=T, lstm=lstm, lstm_size=LSTM_SIZE)


def spec_of(lstm=False, environment=VECTORS):
    return stream(algorithm_of(lstm), environment)


def make_learner(update, lstm=False, environment=VECTORS, seed=7, network=NETWORK, device=CPU):
    """Returns a learner whose policy is not nearly uniform, as a new one's is."""
    torch.manual_seed(seed)
    learner = impala.make_learner(algorithm_of(lstm), network, update, spec_of(lstm, environment), device)
    with torch.no_grad():
        learner.online["network"].policy.weight.mul_(4)
    return learner


def parameters_of(learner, spec, version=3, network=NETWORK):
    """Returns the parameters of a learner as they are: not in half precision."""
    tensors = {name: tensor.detach().clone() for name, tensor in learner.acting_tensors().items()}
    return Parameters(ParametersHeader(version, spec, "impala", to_text(network)), tensors)


def make_actor(learner, spec):
    return impala.make_actor(algorithm_of(True), parameters_of(learner, spec), CPU)


def random_batches(seed, sizes, lstm=False, weights=(1.0,)):
    """Returns batches by table whose episodes end at every position; their behaviour is off the policy."""
    rng = np.random.default_rng(seed)
    unrolls = random_unrolls(rng)
    columns = torch.from_numpy(rng.permutation(unrolls.values.shape[1])[: sum(sizes.values())])
    size = len(columns)

    def normal(*shape):
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    extras = {
        "behavior_log_probs": normal(T, size, NUM_ACTIONS).log_softmax(-1).half(),
        "behavior_value": normal(T, size).half(),
    }
    if lstm:
        extras |= {
            "core_state": normal(size, 2, LSTM_SIZE).half(),
            "last_action": torch.from_numpy(rng.integers(NUM_ACTIONS, size=size).astype(np.int32)),
            "last_reward": normal(size),
        }
    batch = UnrollBatch(
        normal(T + 1, size, *VECTORS.observation_shape),
        torch.from_numpy(rng.integers(NUM_ACTIONS, size=(T, size))),
        unrolls.rewards[:, columns].float(),
        (unrolls.discounts[:, columns] > 0).float(),
        unrolls.starts[:, columns],
        extras,
        torch.from_numpy(rng.choice(weights, size).astype(np.float32)),
    )
    ends = np.cumsum(list(sizes.values()))
    return {
        name: rows_of(batch, slice(end - count, end)) for (name, count), end in zip(sizes.items(), ends, strict=True)
    }


def rows_of(batch, rows):
    """Returns some rows of a batch."""
    *steps, extras, weight = batch
    firsts = ("core_state", "last_action", "last_reward")
    extras = {name: value[rows] if name in firsts else value[:, rows] for name, value in extras.items()}
    return UnrollBatch(*(tensor[:, rows] for tensor in steps), extras, weight[rows])


def gradients_of(learner, batches):
    """Returns the gradient of a batch's loss as one vector, and the metrics, whose loss is a mean."""
    metrics = learner.gradients(batches, lambda: None).metrics
    flat = torch.cat([parameter.grad.flatten() for parameter in learner.online["network"].parameters()])
    if learner.learning.is_mean:
        flat = flat / learner.gradient[-1]
    return flat, {name: float(value) for name, value in metrics.items()}


def slow_gradients(learner, update, batches, gamma):
    """Returns the same by the papers' definitions: state by state, in float64, behind the learner's own network."""
    shares = {"queue": 1.0} if update.mix == ("queue=1",) else {"queue": 0.25, "uniform": 0.75}
    network, total, count = learner.online["network"], torch.zeros((), dtype=torch.float64), 0.0
    for table, batch in batches.items():
        output = network.unroll(batch.observation, history_of(batch))
        logits, values = output.logits.double(), output.values.double()
        entropy_cost = update.entropy_cost / shares["queue"] if table == "queue" else 0.0
        is_replayed = table != "queue"
        for b in range(len(batch.weight)):
            mu = batch.extras["behavior_log_probs"][:, b].double().softmax(-1)
            column = slow_column(logits[:-1, b], values[:, b], mu, batch, b, update, gamma, len(shares) > 1)
            for t in range(T):
                if batch.start[t + 1, b]:
                    continue  # a reset
                weight = batch.weight[b].item()
                count += weight
                pi, value = logits[t, b].softmax(-1), values[t, b]
                target, advantage, learned = column[t]
                if learned:
                    total = total - weight * advantage * pi[batch.action[t, b]].log()
                    total = total + weight * update.value_cost * 0.5 * (target - value) ** 2
                    total = total + weight * entropy_cost * (pi * pi.log()).sum()
                if is_replayed:
                    mu_value = batch.extras["behavior_value"][t, b].double()
                    total = total + weight * update.policy_cloning_cost * (mu[t] * (mu[t] / pi).log()).sum()
                    total = total + weight * update.value_cloning_cost * (mu_value - value) ** 2
    loss = total / count if update.reduction == "mean" else total
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]), (total / count).item()


def slow_column(logits, values, mu, batch, b, update, gamma, has_region):
    """Returns the target, the advantage and whether the state is learned, of each step of one row."""
    pi = logits.detach().softmax(-1)
    taken = torch.arange(T), batch.action[:, b]
    rewards = [slow_transform(r, update) for r in batch.reward[:, b].tolist()]
    accept = []
    for t in range(T):
        implied = torch.minimum(update.rho_bar * mu[t], pi[t])
        implied = implied / implied.sum()
        divergence = sum(p * np.log(p / q) for p, q in zip(pi[t].tolist(), implied.tolist(), strict=True))
        accept.append(not has_region or not update.trust_region or divergence < update.trust_region)
    unroll = Unrolls(
        log_rhos=(pi[taken] / mu[taken]).log()[:, None],
        discounts=gamma * batch.discount[:, b, None].double(),
        rewards=torch.tensor(rewards, dtype=torch.float64)[:, None],
        values=values.detach()[:-1, None],
        bootstrap_value=values.detach()[-1:],
        valid=~batch.start[1:, b, None],
        accept=torch.tensor(accept)[:, None],
        starts=batch.start[:, b, None],
    )
    numbers = {
        "lambda_": update.trace_lambda,
        "rho_bar": update.rho_bar,
        "c_bar": update.c_bar,
        "pg_rho_bar": update.pg_rho_bar,
    }
    return list(zip(*by_definition(unroll, 0, **numbers), strict=True))


def slow_transform(reward, update):
    """The reward as the learner sees it."""
    if update.reward_transform == "none":
        return reward
    return 0.3 * min(np.tanh(reward), 0) + 5 * max(np.tanh(reward), 0)


def updates(**changes):
    """Returns an update's numbers, all of them at work, but for the changes."""
    usual = {"batch_size": 80, "optimizer": "adam", "learning_rate": 1e-3, "entropy_cost": 0.3, "value_cost": 0.7,
             "replay_state": "stored"}  # fmt: skip
    return ImpalaUpdate(**(usual | changes))


def keeping(algorithm, update):
    """Returns the settings of a replica for IMPALA's learner on a CPU."""
    make_rows = functools.partial(impala.make_rows, algorithm, update)
    return Keeping(wants(algorithm, update), DeviceStream(CPU), 4, make_rows=make_rows)
