"""The names of the library: a run, its records, and its agent in a loop of one's own."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

import apexrl
from apexrl.config.schedules import Schedule
from apexrl.errors import ApexError, ConfigError
from tests.examples import commands_of, python_words
from tests.system.processes import ROOT, Process, is_gone, wait_for


@pytest.fixture(scope="module")
def run(tmp_path_factory, free_ports):
    """A short run of Catch."""
    names = ("actor_port", "batch_port", "parameter_port", "metrics_port")
    return apexrl.train(
        env="Catch-v0",
        preset="small",
        total_frames=15_000,
        tensorboard=False,
        evaluation_period_seconds=2.0,
        run_dir=tmp_path_factory.mktemp("runs") / "catch",
        **dict(zip(names, free_ports(4), strict=True)),
    )


def play(agent, num_games, seed=0):
    """The mean return of games that we step ourselves."""
    env, total = gymnasium.make("Catch-v0"), 0.0
    for game in range(num_games):
        observation, _ = env.reset(seed=seed + game)
        agent.reset()
        over = False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(agent.act(observation))
            total, over = total + float(reward), terminated or truncated
    env.close()
    return total / num_games


def test_a_run_tells_its_evaluations_and_its_agent_plays(run):
    assert run.summary["frames"] >= 15_000 and run.checkpoint.name == "best.safetensors"
    assert run.evaluations[0].frames < run.evaluations[-1].frames <= run.summary["frames"]
    agent = apexrl.load(run.directory)
    assert -1 <= play(agent, 5) <= 1  # how well, tests/test_loaded_agent.py compares
    best = max(run.evaluations, key=lambda evaluation: (evaluation.updates > 0, evaluation.mean, evaluation.updates))
    shown = f"{run.checkpoint}, update {best.updates:,}, mean {best.mean:.2f} over {best.episodes} games"
    assert repr(agent) == f"<apex-dqn on Catch-v0: {shown} with exploration {best.exploration:g}>"
    latest = repr(apexrl.load(run.directory, which="latest"))
    assert f"latest.safetensors, update {run.summary['updates']:,}, " in latest


def test_a_run_goes_on(run, free_ports):
    ports = dict(zip(("actor_port", "batch_port", "parameter_port", "metrics_port"), free_ports(4), strict=True))
    before = run.summary["frames"]
    more = apexrl.train("Catch-v0", resume=run.directory, total_frames=before + 2_000, **ports)
    assert more.directory == run.directory and more.summary["frames"] >= before + 2_000


def test_a_vector_of_observations_gives_the_actions_of_each(run):
    """Environments that begin at other times have other starts; each action is that of the environment alone."""
    envs = gymnasium.make_vec("Catch-v0", 3, vectorization_mode="sync")
    together, alone = apexrl.load(run.checkpoint), [apexrl.load(run.checkpoint) for _ in range(3)]
    observations, _ = envs.reset(seed=4)
    starts = np.ones(3, bool)
    for _ in range(25):
        actions = together.act(observations, starts)
        assert actions.tolist() == [alone[i].act(observations[i], starts[i : i + 1]) for i in range(3)]
        observations, _, terminated, truncated, _ = envs.step(actions)
        starts = terminated | truncated
    envs.close()
    with pytest.raises(ValueError, match="2 observations came, 3 before"):
        together.act(observations[:2])
    with pytest.raises(ValueError, match=r"neither an observation of Box.* nor a batch of them"):
        together.act(np.zeros((2, 2, 2)))
    with pytest.raises(ValueError, match=r"neither an observation of Box.* nor a batch of them"):
        together.act((observations[0], {}))  # all that `reset` returns


def test_what_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"has no checkpoints/best\.safetensors or"):
        apexrl.load(tmp_path)
    with pytest.raises(ConfigError, match=r"has no checkpoints/latest\.safetensors: give"):
        apexrl.load(tmp_path, which="latest")
    with pytest.raises(ConfigError, match="which='last' is neither of best, latest"):
        apexrl.load(tmp_path, which="last")
    with pytest.raises(ConfigError, match="give the directory of a run, or a checkpoint"):
        apexrl.load(tmp_path / "x.safetensors")
    with pytest.raises(ApexError, match=r"exit status 2: its output says why$"):
        apexrl.train("NoSuchGame-v5", run_dir=tmp_path / "run")


@pytest.mark.parametrize("has_logs", [False, True])
def test_a_run_that_failed_names_its_logs_where_it_has_some(tmp_path, monkeypatch, has_logs):
    class Failed:
        """A launcher that fails at once, or when it has begun."""

        def __init__(self, *_, **__):
            if has_logs:
                (tmp_path / "run/logs").mkdir(parents=True)

        def wait(self):
            return 2

    monkeypatch.setattr("apexrl.library.start_child", Failed)
    with pytest.raises(ApexError) as raised:
        apexrl.train("Catch-v0", run_dir=tmp_path / "run")
    where = f", and {tmp_path}/run/logs" if has_logs else ""
    assert str(raised.value) == f"the run ended with exit status 2: its output says why{where}"


def test_an_interrupted_run_that_does_not_end_is_killed(tmp_path, monkeypatch):
    class Stuck:
        """A launcher that ends for nothing but a SIGKILL."""

        def __init__(self, *_, **__):
            self.got = []
            started.append(self)

        def wait(self, timeout=None):
            if not self.got:
                raise KeyboardInterrupt
            if "kill" not in self.got:
                raise subprocess.TimeoutExpired("apexrl", timeout)

        def send_signal(self, number):
            self.got.append(number)

        def kill(self):
            self.got.append("kill")

    started = []
    monkeypatch.setattr("apexrl.library.start_child", Stuck)
    with pytest.raises(KeyboardInterrupt):
        apexrl.train("Catch-v0", run_dir=tmp_path / "run")
    assert started[0].got == [signal.SIGINT, signal.SIGINT, "kill"]


def test_the_names_are_loaded_when_they_are_asked_for():
    code = "import sys, apexrl; print('torch' in sys.modules, 'zmq' in sys.modules); print(sorted(apexrl.__all__))"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        "False False",
        "['InsertClient', 'RecordClient', 'ReplayClient', 'Run', 'load', 'train']",
    ]
    assert apexrl.ReplayClient.__name__ == "ReplayClient" and apexrl.InsertClient.__name__ == "InsertClient"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = apexrl.nothing


def test_the_example_of_curves_draws_a_run(run, tmp_path):
    (command,) = commands_of("curves")
    script, *runs = python_words(command)
    assert runs == ["RUN", "RUN"]
    program = [sys.executable, ROOT / script, run.directory, run.directory]
    subprocess.run(program, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_example_of_play_plays(tmp_path, monkeypatch, capsys, run):
    """With the run that is there: the training is another test's."""
    monkeypatch.setattr(apexrl.library, "train", lambda *arguments, **flags: run)
    (command,) = commands_of("train_and_play")
    (script,) = python_words(command)
    runpy.run_path(str(ROOT / script), run_name="__main__")
    said = capsys.readouterr().out
    assert f"{run.evaluations[0].frames:8,} frames" in said and said.count("game ") == 5


def test_the_notebook_plots_and_plays(monkeypatch, capsys, run):
    """With the run that is there, as a script of its cells."""
    monkeypatch.setattr(apexrl.library, "train", lambda *arguments, **flags: run)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    text = (ROOT / "examples" / "train_plot_play.ipynb").read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    assert len(sources) == 4
    assert len(text) < 200_000 and not re.search(r"/(?:home|root|tmp|Users)/", text)
    shown = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", ()) for output in shown) == 2, "the curve and the game"
    exec("\n".join(sources), {})
    assert re.fullmatch(r"return \S+ after \d+ steps\n", capsys.readouterr().out)


def test_the_example_of_a_search_reports_evaluations_and_prunes(monkeypatch, run):
    """With the run that is there, whose evaluations it hears."""
    optuna, heard = pytest.importorskip("optuna"), []

    def train(env, on_evaluation, **flags):
        heard.extend(on_evaluation(evaluation) for evaluation in run.evaluations)
        assert flags["batch_size"] in (32, 64, 128) and 1e-4 <= Schedule.of(flags["learning_rate"]).start <= 3e-3
        return run

    monkeypatch.setattr(apexrl.library, "train", train)
    monkeypatch.setattr(apexrl, "train", train, raising=False)
    (command,) = commands_of("optuna_search")
    script, trials = python_words(command)
    assert trials == "20"
    objective = runpy.run_path(str(ROOT / script))["objective"]
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(upper=-2.0))
    study.optimize(objective, n_trials=1)
    assert all(heard) and study.trials[0].state == optuna.trial.TrialState.PRUNED
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    study.optimize(objective, n_trials=1)
    assert study.best_value == run.evaluations[-1].mean


def test_a_name_becomes_part_of_the_directory(monkeypatch, tmp_path):
    words = []

    def start(arguments, environment):
        words.extend(arguments)
        raise ApexError("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(apexrl.library, "start_child", start)
    with pytest.raises(ApexError, match="enough"):
        apexrl.train("Catch-v0", name="mine")
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert "mine" in flags["--run-dir"] and flags["--name"] == ""


@pytest.fixture
def program(tmp_path, free_ports):
    """A program of somebody's own that trains, and whose run has begun to learn."""
    names = ("actor_port", "batch_port", "parameter_port", "metrics_port")
    flags = dict(zip(names, free_ports(4), strict=True)) | {"tensorboard": False, "preset": "small", "evaluator": False}
    code = f"import apexrl; apexrl.train('Catch-v0', run_dir={str(tmp_path / 'run')!r}, **{flags})"
    with Process(["-c", code], tmp_path / "log.txt") as program:
        wait_for((tmp_path / "run" / "status.json").exists, 60, "the learner's status")
        yield program


def test_ctrl_c_ends_a_training_with_a_checkpoint(program):
    """From a terminal, which sends the signal to all processes of its group."""
    run = program.descendants()
    os.killpg(program.popen.pid, signal.SIGINT)
    assert program.popen.wait(300)
    assert "KeyboardInterrupt" in program.text() and "checkpoint written" in program.text()
    assert all(is_gone(process.pid) for process in run)


def test_a_training_ends_with_the_program_that_began_it(program, tmp_path):
    run = program.descendants()
    program.kill()
    wait_for(lambda: all(is_gone(process.pid) for process in run), 60, "the end of the run")
    assert (tmp_path / "run" / "checkpoints" / "latest.safetensors").exists()


def test_functions_hear_of_a_run_and_end_it(tmp_path, free_ports, monkeypatch):
    """Also where one of them goes to another directory."""
    monkeypatch.chdir(tmp_path)
    means, frames = [], []
    names = ("actor_port", "batch_port", "parameter_port", "metrics_port")

    def heard(evaluation):
        means.append(evaluation.mean)
        os.chdir("/")
        return len(means) == 2

    flags = {"preset": "small", "tensorboard": False, "evaluation_period_seconds": 1.0, "run_dir": "run"}
    ports = dict(zip(names, free_ports(4), strict=True))
    ended = apexrl.train("Catch-v0", on_evaluation=heard, on_status=lambda s: frames.append(s.frames), **flags, **ports)
    assert means == [evaluation.mean for evaluation in ended.evaluations[:2]] and ended.summary["updates"] >= 0
    assert frames == sorted(frames) and ended.checkpoint.exists()


def test_what_a_function_raises_comes_out_when_the_run_has_ended(tmp_path, free_ports):
    def heard(evaluation):
        raise KeyError("not mine")

    names = ("actor_port", "batch_port", "parameter_port", "metrics_port")
    with pytest.raises(KeyError, match="not mine"):
        apexrl.train(
            "Catch-v0", on_evaluation=heard, preset="small", tensorboard=False, run_dir=tmp_path / "run",
            **dict(zip(names, free_ports(4), strict=True)),
        )  # fmt: skip
    assert (tmp_path / "run" / "summary.json").exists()
