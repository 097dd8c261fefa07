"""The script for SLURM, on a real SLURM of two hosts on this machine."""

import os
import shutil

import pytest

from apexrl.networks.headers import latest_path
from tests.deploy.needed import require_tool
from tests.deploy.slurm_cluster import HOSTS, SlurmCluster
from tests.system.processes import ROOT, updates_of, wait_for

pytestmark = pytest.mark.long("clusters of machines")

TOOLS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
ROLES = ("replay.py", "learner.py", "actor.py")


@pytest.fixture
def slurm(tmp_path):
    """A cluster without jobs."""
    for tool, package in TOOLS.items():
        require_tool(tool, package)
    if not shutil.which("ip") or os.geteuid():
        pytest.skip("needs root and iproute2, for network namespaces")
    with SlurmCluster(tmp_path) as cluster:
        yield cluster


def test_jobs_train_on_all_nodes_and_end_with_a_checkpoint(slurm, tmp_path):
    """The end of a job's time and `scancel` leave a last checkpoint and no process; the next job goes on with it."""
    time_is_up, cancelled = ["--batch", "--signal=TERM"], []
    run_a_job(slurm, tmp_path, time_is_up, "COMPLETED")
    run_a_job(slurm, tmp_path, cancelled, "CANCELLED")


def run_a_job(slurm, tmp_path, end, final_state):
    """Submits the script, and lets `scancel` end it."""
    run, log = tmp_path / "run", tmp_path / "job.log"
    where = [f"--nodes={len(HOSTS)}", "--cpus-per-task=5", f"--output={log}", f"--export=ALL,RUN={run},PRESET=small"]
    flags = ["--env", "Catch-v0", "--environments-per-worker", "4"]
    begun = updates_of(run)
    job = slurm.run("sbatch", "--parsable", *where, ROOT / "deploy" / "examples" / "slurm.sbatch", *flags)

    def is_in(*states):
        words = slurm.run("scontrol", "--oneliner", "show", "job", job).split()
        return any(f"JobState={state}" in words for state in states)

    def trains():
        assert is_in("PENDING", "RUNNING"), log.read_text()
        return updates_of(run) > begun

    wait_for(trains, 60, "updates")
    checkpoint = latest_path(run).stat().st_mtime_ns
    assert [slurm.runs(role) for role in ROLES] == [[HOSTS[0]], [HOSTS[0]], list(HOSTS)]
    slurm.run("scancel", *end, job)
    wait_for(lambda: not any(map(slurm.runs, ROLES)), 60, "the end")
    wait_for(lambda: not is_in("RUNNING", "COMPLETING"), 60, "SLURM's word")
    assert latest_path(run).stat().st_mtime_ns > checkpoint, log.read_text()
    assert is_in(final_state) and "Traceback" not in log.read_text()
