"""The losses of rlax, in a process of its own: one that holds JAX cannot fork without a warning."""

import sys
from functools import partial

import jax
import numpy as np
import rlax

TRACE = ("v_tm1", "v_t", "r_t", "discount_t", "rho_tm1")
SEQUENCE = ("q", "q_target", "action", "best", "reward", "discount")
POLICY = ("logits", "actions", "advantages", "weights")


def main(source, target):
    """Writes the results for each setting (lambda, rho_bar, pg_rho_bar) of the columns in an npz file."""
    given = np.load(source)
    results = {}
    for index, (lambda_, rho_bar, pg_rho_bar) in enumerate(given["settings"].tolist()):
        numbers = {"lambda_": lambda_, "clip_rho_threshold": rho_bar}
        arrays = [given[name] for name in TRACE]
        traced = partial(rlax.vtrace_td_error_and_advantage, clip_pg_rho_threshold=pg_rho_bar, **numbers)
        output = jax.vmap(traced, 1, 1)(*arrays)
        results[f"errors {index}"], results[f"pg_advantages {index}"] = output.errors, output.pg_advantage
        results[f"vtrace {index}"] = jax.vmap(partial(rlax.vtrace, **numbers), 1, 1)(*arrays)
    logits, actions, advantages, weights = (given[name] for name in POLICY)
    losses = {
        "policy_gradient": lambda x: jax.vmap(rlax.policy_gradient_loss, 1)(x, actions, advantages, weights),
        "entropy": lambda x: jax.vmap(rlax.entropy_loss, 1)(x, weights),
    }
    for name, loss in losses.items():
        results[name] = loss(logits)
        results[f"{name} gradient"] = jax.grad(lambda x, loss=loss: loss(x).sum())(logits)
    quantiles, targets = given["quantiles"], given["targets"]

    def regression(values):
        middles = (np.arange(quantiles.shape[1], dtype=np.float32) + 0.5) / quantiles.shape[1]
        return jax.vmap(lambda ours, theirs: rlax.quantile_regression_loss(ours, middles, theirs, 1.0))(values, targets)

    results["quantiles"] = regression(quantiles)
    results["quantiles gradient"] = jax.grad(lambda values: regression(values).sum())(quantiles)
    q, q_target, action, best, reward, discount = (given[f"sequence {name}"] for name in SEQUENCE)
    ours = q[:-1], action, q_target[1:], best[1:], reward, discount
    results["n-step errors"] = rlax.transformed_n_step_q_learning(*ours, n=5, tx_pair=rlax.SIGNED_HYPERBOLIC_PAIR)
    ratios = np.exp(logits[..., 0])
    results["surrogate"] = jax.vmap(lambda r, a: rlax.clipped_surrogate_pg_loss(r, a, 0.4), 1)(ratios, advantages)
    actions, *moments = (given[f"gaussian {name}"] for name in ("actions", "means", "deviations"))
    results["gaussian log-probability"] = rlax.gaussian_diagonal().logprob(actions, *moments)
    results["gaussian entropy"] = rlax.gaussian_diagonal().entropy(*moments)
    project = jax.vmap(rlax.categorical_l2_project, (0, 0, None))
    results["projected"] = project(given["moved"], given["probabilities"], given["support"])
    np.savez(target, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
