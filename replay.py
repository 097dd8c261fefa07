"""The replay server keeps the log of experience and draws the learners' batches. See `python replay.py --help`."""

from apexrl.roles.replay import run

if __name__ == "__main__":
    run()
