"""Actors and evaluators play environments with the learner's parameters. See `python actor.py --help`."""

from apexrl.roles.actor import run

if __name__ == "__main__":
    run()
