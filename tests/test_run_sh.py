"""run.sh with a stand-in for Python, which notes how it is called."""

import fcntl
import os
import shutil
import subprocess

import pytest

from tests.system.processes import ROOT

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAND_IN = """#!/bin/sh
cd "$(dirname "$0")/../.."
echo "$APEXRL_PROGRAM: $*" >>calls
case "$*" in
  -V) echo "Python 3.$(cat version 2>/dev/null)" ;;
  "-m pip config list") cat pip-config 2>/dev/null ;;
  *urlopen*) test -e reachable ;;
esac
"""


def without_nvidia_smi(directory):
    """Returns the PATH of this machine, with links to all programs but nvidia-smi for the places that have it."""
    places = os.environ["PATH"].split(":")
    for number, place in enumerate(places):
        if os.path.exists(f"{place}/nvidia-smi"):
            places[number] = str(directory / f"links-{number}")
            os.makedirs(places[number], exist_ok=True)
            for name in set(os.listdir(place)).difference(os.listdir(places[number]), ["nvidia-smi"]):
                os.symlink(f"{place}/{name}", f"{places[number]}/{name}")
    return ":".join(places)


def run_sh(directory, *words, gpu=False, reachable=True, pip_config=""):
    """Runs the script in a checkout of its own; returns what it calls, without the probes, and what it prints."""
    programs = directory / "programs"
    for path in (directory / ".venv/bin", programs):
        path.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "run.sh", directory)
    for name in ("requirements.txt", "requirements-dev.txt"):
        (directory / name).write_text("torch==2.13.0\n")
    (directory / "pip-config").write_text(pip_config)
    (directory / "reachable").unlink(missing_ok=True)
    for name, is_there in (("reachable", reachable), ("programs/nvidia-smi", gpu)):
        if is_there:
            (directory / name).write_text("#!/bin/sh\n")
            (directory / name).chmod(0o755)
    (directory / ".venv/bin/python").write_text(STAND_IN)
    (directory / ".venv/bin/python").chmod(0o755)
    (directory / "calls").unlink(missing_ok=True)
    environment = {**os.environ, "PATH": f"{programs}:{without_nvidia_smi(directory)}"}
    done = subprocess.run(
        ["bash", directory / "run.sh", *words], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    calls = (directory / "calls").read_text().splitlines()
    probes = ("pip config", "urlopen", "pip --version", ": -V")
    return [call for call in calls if not any(probe in call for probe in probes)], done.stdout


@pytest.mark.parametrize(
    ("machine", "is_cpu", "says"),
    [
        ({}, True, "torch comes without CUDA"),
        ({"gpu": True}, False, ""),
        ({"reachable": False}, False, "cannot be reached: torch comes from PyPI"),
        ({"pip_config": "global.index-url='https://mirror.example/simple'"}, False, ""),
        ({"pip_config": ":env:.find-links='/wheels'"}, False, ""),
        ({"pip_config": "global.timeout='60'"}, True, "torch comes without CUDA"),
    ],
)
def test_torch_comes_without_cuda_where_there_is_no_gpu(tmp_path, machine, is_cpu, says):
    calls, printed = run_sh(tmp_path, **machine)
    (install,) = [call for call in calls if "pip install" in call]
    assert (f"--extra-index-url {CPU_INDEX}" in install) == is_cpu
    assert f"--requirement {tmp_path}/requirements.txt" in install
    assert says in printed and ("no NVIDIA GPU" in printed) == bool(says)
    calls, printed = run_sh(tmp_path, **machine)  # installed already
    assert calls == [f"bash {tmp_path}/run.sh: -P -m apexrl train"] and not printed


@pytest.mark.parametrize(
    ("words", "called"),
    [
        ((), "bash RUN: -P -m apexrl train"),
        (("--env", "Catch-v0"), "bash RUN: -P -m apexrl train --env Catch-v0"),
        (("--help",), "bash RUN: -P -m apexrl train --help"),
        (("watch", "runs/x"), "bash RUN: -P -m apexrl watch runs/x"),
        (("test", "-k", "index"), ": -m pytest -k index"),
    ],
)
def test_flags_train_and_a_word_is_a_command(tmp_path, words, called):
    """Messages name the script as it was typed."""
    assert run_sh(tmp_path, *words)[0][-1] == called.replace("RUN", f"{tmp_path}/run.sh")


def test_another_python_installs_again(tmp_path):
    assert any("pip install" in call for call in run_sh(tmp_path)[0])
    assert not any("pip install" in call for call in run_sh(tmp_path)[0])
    (tmp_path / "version").write_text("13")
    assert any("pip install" in call for call in run_sh(tmp_path)[0])


def test_a_link_and_an_exported_cdpath_lead_to_the_checkout(tmp_path):
    checkout, others = tmp_path / "a checkout", tmp_path / "bin"
    run_sh(checkout)
    others.mkdir()
    (others / "apx").symlink_to("../a checkout/run.sh")
    (checkout / "calls").unlink()
    for start, place in (("bin/apx", tmp_path), ("a checkout/run.sh", tmp_path), ("./run.sh", checkout)):
        environment = {**os.environ, "CDPATH": f"{tmp_path}:{checkout}"}
        call = {"cwd": place, "env": environment, "capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(["bash", start], check=True, **call)
        assert not done.stdout + done.stderr
    calls = [call for call in (checkout / "calls").read_text().splitlines() if not call.endswith(": -V")]
    assert len(calls) == 3 and all(call.endswith("-P -m apexrl train") for call in calls)
    assert [path.name for path in others.iterdir()] == ["apx"]


def test_a_start_waits_for_another_one_that_installs(tmp_path):
    run_sh(tmp_path)
    (tmp_path / "requirements.txt").write_text("torch==2.14.0\n")
    other = os.open(tmp_path / ".venv", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    (tmp_path / "calls").unlink()
    call = ["bash", tmp_path / "run.sh"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout.readline() == f"run.sh: another one installs into {tmp_path}/.venv: waiting for it\n"
        assert "pip install" not in (tmp_path / "calls").read_text()
        (tmp_path / ".venv/installed-requirements.txt").write_text("Python 3.\n" + 2 * "torch==2.14.0\n")
        os.close(other)
        assert waiting.stdout.read() == "" and waiting.wait(60) == 0
    assert "pip install" not in (tmp_path / "calls").read_text(), "the other one has installed it"


INTERRUPTED = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
  for place; do :; done
  mkdir -p "$place/bin"
  if [ -e interrupted ]; then cp "$0" "$place/bin/python"; touch "$place/pip"; else
    printf '#!/bin/sh\\ntest "$*" = -V\\n' >"$place/bin/python"
    chmod +x "$place/bin/python"
    touch interrupted
    kill -INT $PPID $$
  fi
fi
"""


def test_an_environment_whose_making_was_interrupted_is_made_anew(tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    shutil.copy(ROOT / "run.sh", tmp_path)
    for name in ("requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text("")
    (programs / "python3").write_text(INTERRUPTED)
    (programs / "python3").chmod(0o755)
    call = {"cwd": tmp_path, "env": {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}, "timeout": 60}
    assert subprocess.run(["bash", "run.sh", "--help"], check=False, **call).returncode
    assert (tmp_path / ".venv/bin/python").exists() and not (tmp_path / ".venv/pip").exists()
    subprocess.run(["bash", "run.sh", "--help"], check=True, **call)
    assert (tmp_path / ".venv/pip").exists()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (("notes.txt", "rl/bin/python"), "has files, but no Python that runs"),
        (("pyvenv.cfg", "installed-requirements.txt"), "has files, but no Python that runs"),
        (("bin/python", "pyvenv.cfg", "mine.txt"), "is an environment without pip"),
    ],
)
@pytest.mark.parametrize("name", [".venv", "envs"])
def test_a_directory_that_it_has_not_made_stays_as_it_is(tmp_path, files, says, name):
    programs, venv = tmp_path / "programs", tmp_path / name
    programs.mkdir()
    for path in (programs / "python3", *(venv / file for file in files)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\ntest "$1 $2" != "-m pip" || exit 1\n')
        path.chmod(0o755)
    for file in ("run.sh", "requirements.txt"):
        shutil.copy(ROOT / file, tmp_path)
    before = {path: path.read_bytes() for path in venv.rglob("*") if path.is_file()}
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    environment |= {"APEXRL_VENV": str(venv)} if name == "envs" else {}
    call = ["bash", tmp_path / "run.sh", "--help"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False, timeout=60)
    cure = f"say {venv}/bin/python -m ensurepip" if "without pip" in says else "empty this one"
    line = f"run.sh: {venv} {says}: give APEXRL_VENV=DIR, a new directory, or {cure}\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert {path: path.read_bytes() for path in venv.rglob("*") if path.is_file()} == before


def test_an_environment_that_cannot_be_written_is_named_with_the_cure(tmp_path):
    shutil.copy(ROOT / "run.sh", tmp_path)
    (tmp_path / "file").touch()
    environment = {**os.environ, "APEXRL_VENV": str(tmp_path / "file/venv")}
    done = subprocess.run(["bash", tmp_path / "run.sh"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"{tmp_path}/file/venv cannot be written: give APEXRL_VENV=DIR" in done.stderr


def test_the_environments_python_finds_the_package_of_this_checkout(tmp_path):
    """The stand-in is in a place of its own, and so is what it would install."""
    venv, packages = tmp_path / "venv", tmp_path / "venv/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin/python").write_text("#!/bin/sh\n")
    (venv / "bin/python").chmod(0o755)
    environment = {**os.environ, "APEXRL_VENV": str(venv)}
    subprocess.run(["bash", ROOT / "run.sh", "--help"], env=environment, capture_output=True, check=True, timeout=60)
    assert (packages / "apexrl.pth").read_text() == f"{ROOT}\n"
    (packages / "apexrl.pth").write_text("/where/the/checkout/was\n")
    subprocess.run(["bash", ROOT / "run.sh", "--help"], env=environment, capture_output=True, check=True, timeout=60)
    assert (packages / "apexrl.pth").read_text() == f"{ROOT}\n"
