"""Kills parts of a run with several learners at random: `python -m tests.system.kill_learners [SECONDS] [SEED]`.

Every few seconds kill -9 hits a learner, a shard's replay or an actor process. At the end the run is stopped, and the
journals are compared with the counters. For people: docs/reliability.md has the figures.
"""

import collections
import contextlib
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import psutil

from apexrl.networks.checkpoint import load_checkpoint
from apexrl.networks.headers import latest_path
from apexrl.replay.journal import held_numbers, identity_of, read_entries
from tests.system.processes import launch, read_json, updates_of, wait_for

PAUSE_SECONDS = (4.0, 15.0)
FLAGS = ("--env", "CartPole-v1", "--preset", "small", "--num-learners", 2, "--num-workers", 4)
FLAGS += ("--capacity", 2_000_000, "--no-evaluator")
LIMITS = ("--checkpoint-period-seconds", 5, "--max-restarts", 1000)


def victims(pid):
    """Processes that may be killed, by kind."""
    found = collections.defaultdict(list)
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command, variables = " ".join(process.cmdline()), process.environ()
            if "learner.py" in command:
                found[f"learner {variables['RANK']}" if "RANK" in variables else "torchrun"].append(process)
            elif "replay.py" in command:
                found["replay"].append(process)
            elif "--worker-index" in command:
                found["actor"].append(process)
    return found


def main(seconds, seed):
    """Runs, kills and reports."""
    rng, killed = random.Random(seed), collections.Counter()
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(4)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
        held.close()
        directory = Path(temporary) / "run"
        flags = (*FLAGS, *LIMITS, "--meeting-port", ports[3])
        with launch(Path(temporary), [43201, 43202, *ports[:2]], *flags, is_copy=False) as run:
            wait_for(lambda: updates_of(directory) > 100, 60, "updates")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(rng.uniform(*PAUSE_SECONDS))
                assert run.popen.poll() is None, run.text()
                found = victims(run.popen.pid)
                kind = rng.choice(sorted(found))
                rng.choice(found[kind]).kill()
                killed[kind] += 1
                passed = seconds - (end - time.monotonic())
                print(f"{passed:5.0f} s  killed {kind:10}  update {updates_of(directory):,}", flush=True)
            before = updates_of(directory)
            wait_for(lambda: updates_of(directory) > before + 500, 60, "updates after the last kill")
            run.signal(signal.SIGINT)
            assert run.popen.wait(300) == 0, run.text()
        summary, counters = (
            read_json(directory / "summary.json"),
            load_checkpoint(latest_path(directory)).header.counters,
        )
        print(f"killed {dict(killed)}; {summary['roles_restarted']} restarts; {summary['updates']:,} updates")
        for shard, log in enumerate(counters.logs):
            journal = directory / "journal" / f"shard-{shard}"
            numbers, starts = held_numbers(journal), identity_of(journal).spec.unroll_starts
            read = [entry.number for entry in read_entries(journal)]
            assert log.log == identity_of(journal).log and log.next_number <= numbers.stop
            assert read == sorted(set(read)) and log.transitions <= len(read) * starts
            lives, gaps = len(identity_of(journal).lives), numbers.stop - numbers.start - len(read)
            counted = f"{log.transitions:,} transitions counted, {gaps} gaps"
            print(f"shard {shard}: {len(read):,} unrolls in {lives} lives, {counted}")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 300.0, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
