"""The seam for algorithms: another family goes through the real processes, and its numbers come out bit for bit."""

from tests.system.processes import launch, read_json, wait_for

FLAGS = ["--agent", "tests.system.counting_agent:counting", "--env", "tests.system.counting_env:Counting-v0"]


def test_another_family_goes_through_all_processes_and_comes_back(tmp_path, free_ports):
    sizes = ["--environments-per-worker", 3, "--episodes", 2, "--evaluation-period-seconds", 1]
    with launch(tmp_path, free_ports(4), *FLAGS, *sizes, "--total-updates", 200) as run:
        wait_for(lambda: run.popen.poll() is not None, 120, "the end of the run")
        assert run.popen.returncode == 0, run.text()
    first = read_json(tmp_path / "run" / "summary.json")
    status = read_json(tmp_path / "run" / "status.json")["metrics"]
    assert (first["probability_0"], first["probability_1"]) == (0.25, 0.75)
    assert first["updates"] == 200 and status["learner/checked"] == 5 * 200

    with launch(
        tmp_path, free_ports(4), "--resume", tmp_path / "run", "--trust", "--total-updates", 300, name="again"
    ) as run:
        wait_for(lambda: run.popen.poll() is not None, 120, "the end of the resumed run")
        assert run.popen.returncode == 0, run.text()
    status = read_json(tmp_path / "run" / "status.json")["metrics"]
    assert status["learner/updates_total"] == 300 and status["learner/checked"] == 5 * 300
