"""The steps of optax's RMSProp, in a process of its own: one that holds JAX cannot fork without a warning."""

import sys

import numpy as np
import optax


def main(source, target, rate, decay, epsilon, centered):
    """Writes the sum of all steps along each path [steps, size] of gradients in an npz file."""
    is_centered = centered == "centered"
    optimizer = optax.rmsprop(float(rate), float(decay), float(epsilon), centered=is_centered, eps_in_sqrt=True)
    sums = {}
    for name, gradients in np.load(source).items():
        total = np.zeros(gradients.shape[1:], np.float32)
        state = optimizer.init(total)
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state)
            total += np.asarray(updates)
        sums[name] = total
    np.savez(target, **sums)


if __name__ == "__main__":
    main(*sys.argv[1:])
