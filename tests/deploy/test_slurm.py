"""The script for SLURM, on a real SLURM of two hosts on this machine."""

import os
import shutil

import pytest

from apexrl.running.run_directory import latest_path
from tests.deploy.needed import require_tool
from tests.deploy.slurm_cluster import HOSTS, SlurmCluster
from tests.system.processes import ROOT, updates_of, wait_for

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


@pytest.mark.parametrize("end", [["--batch", "--signal=TERM"], []], ids=["time-limit", "scancel"])
def test_a_job_trains_on_all_nodes_and_ends_with_a_checkpoint(slurm, tmp_path, end):
    """Its time limit, as SLURM signals it, and `scancel` leave a last checkpoint and no process."""
    run, log = tmp_path / "run", tmp_path / "job.log"
    where = [f"--nodes={len(HOSTS)}", "--cpus-per-task=5", f"--output={log}", f"--export=ALL,RUN={run},PRESET=small"]
    flags = ["--env", "Catch-v0", "--environments-per-worker", "4"]
    job = slurm.run("sbatch", "--parsable", *where, ROOT / "deploy" / "examples" / "slurm.sbatch", *flags)

    def state():
        return slurm.run("scontrol", "--oneliner", "show", "job", job)

    def trains():
        assert "JobState=RUNNING" in state() or "JobState=PENDING" in state(), log.read_text()
        return updates_of(run)

    wait_for(trains, 60, "updates")
    first = latest_path(run).stat().st_mtime_ns
    assert [slurm.runs(role) for role in ROLES] == [[HOSTS[0]], [HOSTS[0]], list(HOSTS)]
    slurm.run("scancel", *end, job)
    wait_for(lambda: not any(map(slurm.runs, ROLES)), 60, "the end")
    wait_for(lambda: "JobState=COMPLETING" not in state() and "JobState=RUNNING" not in state(), 60, "SLURM's word")
    assert latest_path(run).stat().st_mtime_ns > first, log.read_text()
    assert ("JobState=COMPLETED" if end else "JobState=CANCELLED") in state()
    assert "Traceback" not in log.read_text()
