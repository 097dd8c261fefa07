import importlib
import os
import subprocess
import sys
import tomllib

import pytest

from apexrl import __version__
from apexrl.__main__ import COMMANDS, main, resuming
from apexrl.errors import ConfigError
from apexrl.tools import deploy
from tests.system.processes import ROOT
from tests.test_runs import make_run


def started(monkeypatch, *words, program="apexrl"):
    """Runs the command as the installed program, or as another one."""
    monkeypatch.setattr(sys, "argv", [f"/somewhere/{program}" if program == "apexrl" else program, *words])
    if program != "apexrl":
        monkeypatch.setenv("APEXRL_PROGRAM", program)
    return main()


def test_the_package_installs_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"apexrl": "apexrl.__main__:main"} and project["dynamic"] == ["version"]
    assert __version__ == "0.2.0" and (ROOT / "apexrl/py.typed").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_function(name):
    module, _, function = COMMANDS[name].function.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(("words", "status"), [((), 2), (("--help",), 0), (("-h",), 0), (("help",), 0)])
def test_the_commands_are_listed(monkeypatch, capsys, words, status):
    assert started(monkeypatch, *words) == status
    shown = capsys.readouterr().out
    assert shown.startswith("usage: apexrl COMMAND") and all(f"\n  {name} " in shown for name in COMMANDS)


def test_a_misspelt_command_is_answered_with_the_nearest(monkeypatch, capsys):
    assert started(monkeypatch, "wacth") == 2
    told = capsys.readouterr().err
    assert told == "apexrl wacth: there is no such command; did you mean watch? `apexrl help` lists them\n"


def test_a_card_of_no_run_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert started(monkeypatch, "card", "runs/nothing") == 2
    assert capsys.readouterr().err.startswith("cannot write a card: runs/nothing has no checkpoints/best.safetensors")
    (tmp_path / "file").touch()
    assert started(monkeypatch, "card", "file") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cannot write a card: file ")


def test_a_directory_that_is_gone_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (["runs"], ["watch"], ["compare"], ["resume"], ["train", "--env", "mine:Walk-v0"]):
        assert started(monkeypatch, *words) == 2
        assert capsys.readouterr().err == "cannot run: the current directory is gone: change to another one, by cd\n"
    assert started(monkeypatch, "help") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [(["keys", ""], "DIR is empty"), *((["keys", "keys", name], f"{name}: a key is of") for name in
                                       ("replay-", "replay-../x", "replay-a/b", "other", "replay-a b", ""))],
)  # fmt: skip
def test_keys_are_made_under_names_of_files_in_a_directory_that_is_named(monkeypatch, capsys, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    assert started(monkeypatch, *words) == 2
    assert capsys.readouterr().err.startswith(f"cannot make keys: {said}") and not list(tmp_path.iterdir())


def test_an_environment_in_the_place_of_a_command_is_answered_with_its_flag(monkeypatch, capsys):
    assert started(monkeypatch, "ALE/Pong-v5") == 2
    assert "there is no such command; did you mean --env ALE/Pong-v5? " in capsys.readouterr().err
    assert started(monkeypatch, "train", "CartPole-v1") == 2
    assert capsys.readouterr().err.endswith("train CartPole-v1: did you mean --env CartPole-v1?\n")


def test_runs_of_no_directory_are_told_from_none(monkeypatch, capsys, tmp_path):
    assert started(monkeypatch, "runs", str(tmp_path)) == 1 and "has no runs" in capsys.readouterr().err
    assert started(monkeypatch, "runs", str(tmp_path / "x")) == 1 and "x is no directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        *(["train", "--batchsize", "3"], ["actor", "--num-worker", "3"], ["learner", "--batchsize", "3"]),
        *(["resume", "runs/nowhere-at-all", "--capacity", "2.5"], ["train", "--learning-rate", "-1"]),
        *(
            ["watch", "--episode", "3"],
            ["replay", "--env", "3"],
            ["compare", "--thresh", "3"],
            ["train", "--agent", "apex"],
            ["resume"],
        ),
    ],
)
def test_a_mistake_is_answered_before_torch_is_loaded(tmp_path, words):
    code = (
        "import sys\nfrom apexrl.__main__ import main\ntry:\n    status = main()\n"
        "except SystemExit as ended:\n    status = ended.code\n"
        "print(*sys.modules)\nsys.exit(status)"
    )
    if words[1:2] == ["runs/nowhere-at-all"]:
        make_run(tmp_path / words[1], 1e9)
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert not {"torch", "gymnasium"} & set(done.stdout.split()) and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [
        ("bash run.sh", ["train"], "bash run.sh --help"),
        ("bash run.sh", ["learner"], "bash run.sh learner --help"),
        ("apexrl", ["train"], "apexrl train --help"),
    ],
)
def test_messages_name_the_command_as_it_was_typed(monkeypatch, capfd, program, words, named):
    try:
        status = started(monkeypatch, *words, "--batchsize", "3", program=program)
    except SystemExit as ended:
        status = ended.code
    told = "".join(capfd.readouterr())
    assert status == 2 and f"no flag --batchsize, did you mean --batch-size? All of them: {named}\n" in told


def test_resume_takes_the_newest_run_or_the_named_one(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has no run: begin one"):
        resuming(["--seed", "3"])
    make_run(tmp_path / "runs" / "a", 1e9)
    make_run(tmp_path / "runs" / "b", 2e9)
    assert resuming(["--seed", "3"]) == ["--resume", "runs/b", "--seed", "3"]
    assert capsys.readouterr().out == "resumes runs/b\n"
    assert resuming(["runs/a", "--seed", "3"]) == ["--resume", "runs/a", "--seed", "3"]
    assert started(monkeypatch, "resume", "--help") == 0
    assert "usage: apexrl resume [RUN] [FLAGS]" in capsys.readouterr().out


def test_a_cluster_is_made_from_a_checkout_alone(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        started(monkeypatch, "deploy", "--help")
    assert ended.value.code == 0 and "usage: apexrl deploy " in capsys.readouterr().out
    monkeypatch.setattr(deploy, "HOME", tmp_path)
    assert started(monkeypatch, "deploy", "up") == 2
    assert capsys.readouterr().err.startswith("cannot deploy: a cluster is made from a checkout")


@pytest.mark.parametrize("word", ["--version", "version"])
def test_the_version_names_torch_and_the_device(monkeypatch, capsys, word):
    assert started(monkeypatch, word) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"apexrl {__version__}, Python 3.") and "torch 2" in said and " on " in said
