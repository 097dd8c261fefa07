"""The learner updates the network from sampled batches and publishes it: `apexrl learner`, `python learner.py`."""

import contextlib
import os
import sys
import time
from pathlib import Path

from apexrl.children import PARENT_VARIABLE
from apexrl.config.commands import LearnerCommand, OfflineCommand
from apexrl.config.flags import parse
from apexrl.config.words import value_given
from apexrl.errors import ConfigError, PeerError
from apexrl.files import locked
from apexrl.learning.devices import is_rank
from apexrl.lifecycle import ORPHAN_SECONDS, OWN_SIGNAL_SECONDS, Stop, process_name, run_role


def main(stop: Stop) -> None:
    """Learns as the command line says. The parts load after it is parsed: a mistake is answered at once."""
    is_offline = value_given("--from-journal", sys.argv) or "--guest" in sys.argv
    command = parse(OfflineCommand if is_offline else LearnerCommand)
    if isinstance(command, OfflineCommand) and command.guest and command.from_journal:
        raise ConfigError("--guest and --from-journal begin differently: give one of them")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a spinning thread would take the core from the actors
    if command.team_size > 1 and not is_rank(command.team_size):
        from apexrl.running.learners import run_learners

        run_learners(command, stop)
        return
    from apexrl.learning.loop import LearnerLoop
    from apexrl.learning.updates.team import join_team
    from apexrl.networks.device import prepare_for_updates

    prepare_for_updates(command.learning.learner_threads)
    command, team = join_team(command)
    # A learner that was started again may meet the one before, which ends soon.
    patience_seconds = ORPHAN_SECONDS + 2 if PARENT_VARIABLE in os.environ else 0.0
    lock = Path(command.run_dir) / "learner.lock"
    first = locked(lock, "a learner that runs", patience_seconds=patience_seconds)
    with first if team.is_first else contextlib.nullcontext():
        is_complete = LearnerLoop(command, process_name(team.rank), team).run(stop)
    if team.spans_hosts and not is_complete and stop.error is None:
        time.sleep(OWN_SIGNAL_SECONDS)
        if not stop.num_signals:
            raise PeerError("a learner of another host was stopped: all begin again from the last checkpoint")


def run() -> None:
    """Runs the role, and exits."""
    run_role("learner", main, finalizes="RANK" not in os.environ)


if __name__ == "__main__":
    run()
