"""Environments that are not ours: each trains for a moment, and one of a user's own does from the user's directory."""

import os
import shutil
import subprocess
import sys

import pytest

from apexrl.config.commands import RunCommand
from apexrl.config.flags import parse
from apexrl.lifecycle import Stop
from apexrl.lockstep.loop import LockstepLoop
from apexrl.networks.headers import load_header
from tests.system.processes import ROOT, launch, read_json, wires_of, zygote

EXAMPLE = ROOT / "examples" / "own_environment.py"
TINY = [
    *("--preset", "small", "--no-evaluator", "--environments-per-worker", "2", "--unroll-starts", "8"),
    *("--total-updates", "3", "--batch-size", "8", "--min-size-to-sample", "32"),
    *("--channels", "4", "4", "4", "--hidden-size", "16"),
]
ROAD = ["--env", "CarRacing-v3", "--env-kwargs", '{"continuous": false}', "--grayscale", "--resize", "48"]
GRID = ["--env", "minigrid:MiniGrid-Empty-5x5-v0"]
RUDE = ["--env", "tests.system.rude_env:Rude-v0"]
OWN_WRAPPER = """
import gymnasium
import my_walk

def scaled(env):
    assert isinstance(env.unwrapped, my_walk.Walk)
    return gymnasium.wrappers.TransformReward(env, lambda reward: reward / 10)
"""


@pytest.mark.parametrize(
    ("flags", "shape", "num_actions"),
    [
        ([*GRID, "--frame-stack", "2"], (2, 4 + 7 * 7 * 3), 7),
        ([*GRID, "--wrapper", "minigrid.wrappers:ImgObsWrapper"], (1, 7, 7, 3), 7),
        ([*ROAD, "--frame-stack", "2"], (2, 48, 48), 5),
        (["--env", "tests.environments.odd_envs:Mission-v0"], (1, 16), 2),
    ],
    ids=["minigrid", "minigrid-pictures", "car-racing", "dictionary"],
)
@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # Box2D's; as an error it ends the process
def test_an_environment_of_others_trains_for_a_moment(tmp_path, flags, shape, num_actions):
    loop = LockstepLoop(parse(RunCommand, [*TINY, *flags, "--run-dir", str(tmp_path / "run")]), Stop())
    loop.run()
    spec = load_header(tmp_path / "run" / "checkpoints" / "latest.safetensors").spec
    assert (spec.observation_shape, spec.num_actions) == (shape, num_actions)


def test_an_environment_in_the_callers_directory_trains_there(tmp_path, free_ports):
    """As README tells it: the example, a wrapper beside it, two actor processes, paths from where the user stands."""
    assert f"```python\n{EXAMPLE.read_text()}```" in (ROOT / "README.md").read_text()
    shutil.copy(EXAMPLE, tmp_path / "my_walk.py")
    (tmp_path / "my_wrapper.py").write_text(OWN_WRAPPER)
    flags = ["--env", "my_walk:Walk-v0", "--wrapper", "my_wrapper:scaled", "--num-workers", "2", "--no-tensorboard"]
    ends = ["--run-dir", "runs/x", "--total-updates", "100", "--episodes", "2"]
    command = ["bash", str(ROOT / "run.sh"), *flags, *wires_of(free_ports(4)), *ends]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = read_json(tmp_path / "runs" / "x" / "summary.json")
    assert summary["updates"] == 100 and summary["roles_restarted"] == 0 and summary["env"] == "my_walk:Walk-v0"
    saved = read_json(tmp_path / "runs" / "x" / "config.json")["command"]["env"]
    assert saved["wrapper"] == ["my_wrapper:scaled"]


def test_an_environment_that_takes_its_process_over_trains_in_a_reproducible_run(tmp_path):
    """Directory, signals, log, warnings, number type, gradients, an endless thread; it ends its process when closed."""
    words = ["-m", "apexrl.lockstep", *TINY, *RUDE, "--evaluator", "--episodes", "2"]
    with (tmp_path / "log.txt").open("ab") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = zygote().start([*words, "--run-dir", "runs/x"], tmp_path, environment, log.fileno())
    try:
        assert process.wait(900) == 0, (tmp_path / "log.txt").read_text()
    finally:
        process.kill()
    said = (tmp_path / "log.txt").read_text()
    assert "update 3: 4 games, mean" in said and "cannot be closed: SystemExit: 3" in said
    assert load_header(tmp_path / "runs" / "x" / "checkpoints" / "latest.safetensors").counters.updates == 3


@pytest.mark.long("trainings")
def test_an_environment_that_takes_its_processes_over_trains_and_ends_in_order(tmp_path, free_ports):
    """As a user starts them, with a module and a run in the directory of the call."""
    shutil.copy(ROOT / "tests" / "system" / "rude_env.py", tmp_path / "my_rude.py")
    flags = ["--env", "my_rude:Rude-v0", "--num-workers", "2", "--no-tensorboard", *wires_of(free_ports(4))]
    ends = ["--run-dir", "runs/x", "--total-updates", "100", "--episodes", "2", "--min-size-to-sample", "500"]
    command = [sys.executable, "-P", "-m", "apexrl", "train", *flags, *ends]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed" not in done.stdout and (tmp_path / "runs" / "x" / "evaluations.csv").exists()
    summary = read_json(tmp_path / "runs" / "x" / "summary.json")
    assert summary["updates"] == 100 and summary["roles_restarted"] == 0


def test_a_step_that_hangs_is_named_on_the_screen_and_ends_the_run(tmp_path, free_ports):
    kwargs = '{"hangs": true, "sound_steps": 300}'  # behind those of the look at it
    flags = ["--env", "tests.environments.odd_envs:Given-v0", "--env-kwargs", kwargs, "--num-workers", "1"]
    with launch(tmp_path, free_ports(4), *flags, "--step-deadline-seconds", "1", "--no-evaluator") as run:
        assert run.popen.wait(900) == 1, run.text()
        assert (
            run.text().count("actors ended with status 1: environment 'tests.environments.odd_envs:Given-v0' has") >= 2
        )
        assert "has not returned from step for" in run.text().splitlines()[-1]
