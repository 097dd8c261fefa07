"""The learner updates the network from sampled batches and publishes it. See `python learner.py --help`."""

from apexrl.roles.learner import run

if __name__ == "__main__":
    run()
