"""Runs the learners of this host by torch's elastic launcher: when one dies, all of them end, also on other hosts."""

import contextlib
import logging
import os
import signal
import tempfile

import psutil
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from apexrl.children import PARENT_VARIABLE, child_environment, role_script
from apexrl.config.commands import LearnerCommand
from apexrl.config.flags import to_flags
from apexrl.errors import ConfigError, KilledError, PeerError, PeerTimeout, reason_of
from apexrl.hosts import is_loopback
from apexrl.leftovers import MARK_VARIABLE, new_mark
from apexrl.lifecycle import (
    OWN_SIGNAL_SECONDS,
    PATIENCE_STATUS,
    PERMANENT_STATUS,
    TEMPORARY_STATUS,
    TOLD_STATUS,
    Stop,
    end_at_once,
)
from apexrl.running.meeting import BACKEND

logger = logging.getLogger(__name__)

THIS_HOST = "127.0.0.1"
LAST_CHECKPOINT_SECONDS = 140  # a little less than systemd gives; a supervisor gives less


def run_learners(command: LearnerCommand, stop: Stop) -> None:
    """Runs `num_learners` learner processes until they end or are told to stop. Who calls it may start them again.

    Raises: ConfigError when one cannot work, KilledError when one was killed, PeerTimeout when the replay was away for
      longer than its patience, PeerError when one has failed, or the other hosts do not come in time.
    """
    learning, wires = command.learning, command.wires
    hosts, host_rank = command.learner_hosts, command.learner_host_rank
    meeting, listens_at = (wires.learner_host, wires.bind_host) if hosts > 1 else (THIS_HOST, THIS_HOST)
    if host_rank == 0 and is_loopback(listens_at) and not is_loopback(meeting):
        raise ConfigError(f"no other host reaches --bind-host {listens_at}: give the address of this host, or 0.0.0.0")
    is_kept = PARENT_VARIABLE in os.environ  # before we write ourselves there, for the learners
    os.environ |= child_environment() | {MARK_VARIABLE: new_mark(), "PYTHONSAFEPATH": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", str(learning.learner_threads))
    os.environ.setdefault("TORCHELASTIC_LOG_LEVEL", "ERROR")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    arguments = [f"--nproc-per-node={learning.num_learners}", f"--nnodes={hosts}", "--max-restarts=0"]
    arguments += [f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={meeting}:{wires.meeting_port}"]
    arguments += [f"--rdzv-conf=rank={host_rank},listens_at={listens_at},timeout={wires.patience_seconds:.0f}"]
    arguments += ["--monitor-interval=0.2"]
    # By variables: an older torch has not these options.
    os.environ.setdefault("PET_SHUTDOWN_TIMEOUT", str(LAST_CHECKPOINT_SECONDS))
    if wires.keys:
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT")
        stop.on_hang_up(_read_keys_again)
    if hosts > 1:
        logger.info("learner host %d of %d; they meet at %s:%d", host_rank, hosts, meeting, wires.meeting_port)
        logger.warning("learners exchange gradients without --keys: only their hosts may reach each other's ports")

    def pass_on() -> None:
        stop.wait()
        if not psutil.Process().children():  # it waits for the other hosts inside of torch, where it hears no signal
            end_at_once(TOLD_STATUS if is_kept and stop.num_signals else 0)
        if not stop.num_signals:  # torchrun has got the signals itself
            os.kill(os.getpid(), signal.SIGTERM)

    stop.thread(pass_on, "stop")
    try:
        with contextlib.suppress(SignalException), tempfile.TemporaryDirectory(prefix="apexrl-learners-") as logs:
            # After a signal it has passed that on, and waited for the learners.
            program = [f"--log-dir={logs}", role_script("learner.py"), *to_flags(command)]
            torchrun.run(torchrun.parse_args([*arguments, *program]))
    except ChildFailedError as error:
        # Who lost another one may be first: torch's files tell whole seconds.
        rank, failure = min(error.failures.items(), key=lambda found: (_order(found[1].exitcode), found[1].timestamp))
        if failure.exitcode == TOLD_STATUS and stop.wait(OWN_SIGNAL_SECONDS):  # all of us were told, as by Ctrl-C
            return
        kinds = {PERMANENT_STATUS: ConfigError, PATIENCE_STATUS: PeerTimeout}
        kinds |= dict.fromkeys((TOLD_STATUS, TEMPORARY_STATUS), KilledError)  # nothing is wrong with it
        kind = KilledError if failure.exitcode < 0 else kinds.get(failure.exitcode, PeerError)
        raise kind(f"learner {rank}: {failure.message}") from None
    except RuntimeError as error:  # of torch.distributed
        raise PeerError(
            f"the learners of {hosts} hosts do not meet at {meeting}:{wires.meeting_port} ({reason_of(error)[:200]}): "
            "does learner.py run on each host, with its own --learner-host-rank, and is that port open to them?"
        ) from error


def _read_keys_again() -> None:
    for learner in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            learner.send_signal(signal.SIGHUP)


def _order(status: int) -> int:
    """Returns how much an exit status tells of the cause of a failure: the least tells most."""
    telling = (PERMANENT_STATUS, PATIENCE_STATUS)
    return telling.index(status) if status in telling else len(telling) + (status >= 0)
