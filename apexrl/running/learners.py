"""Runs several learners on this host by torch's elastic launcher: when one dies, all of them end."""

import contextlib
import logging
import os
import signal

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from apexrl.config import LearnerCommand
from apexrl.errors import ConfigError, KilledError, PeerError
from apexrl.flags import to_flags
from apexrl.lifecycle import PARENT_VARIABLE, PERMANENT_STATUS, Stop, child_environment, role_script

HOST = "127.0.0.1"


def run_learners(command: LearnerCommand, stop: Stop) -> None:
    """Runs `num_learners` learner processes until they end or are told to stop. Who calls it may start them again.

    Raises: ConfigError when one cannot work, KilledError when one was killed, PeerError when one has failed.
    """
    learning = command.learning
    os.environ |= {**child_environment(), PARENT_VARIABLE: str(os.getpid()), "PYTHONSAFEPATH": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", str(learning.learner_threads))
    os.environ.setdefault("TORCHELASTIC_LOG_LEVEL", "ERROR")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    arguments = [f"--nproc-per-node={learning.num_learners}", "--nnodes=1", "--node-rank=0", "--max-restarts=0"]
    arguments += [f"--master-addr={HOST}", f"--master-port={command.wires.meeting_port}", "--monitor-interval=0.2"]

    def pass_on() -> None:
        stop.wait()
        if not stop.num_signals:  # torchrun has got the signals itself
            os.kill(os.getpid(), signal.SIGTERM)

    stop.thread(pass_on, "stop")
    try:
        with contextlib.suppress(SignalException):  # it has passed the signal on, and waited for the learners
            torchrun.run(torchrun.parse_args([*arguments, role_script("learner.py"), *to_flags(command)]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        kind = (
            KilledError if failure.exitcode < 0 else ConfigError if failure.exitcode == PERMANENT_STATUS else PeerError
        )
        raise kind(f"learner {rank}: {failure.message}") from None
