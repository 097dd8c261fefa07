"""The process that has torch for a launcher without."""

import contextlib
import subprocess
import sys

import pytest
import torch

from apexrl.agents.families import family_of
from apexrl.errors import ConfigError
from apexrl.networks.config import DuelingConfig
from apexrl.networks.headers import Identity, latest_path
from apexrl.running.torch_look import Question, asking, here
from apexrl.types import StreamSpec
from tests.system.processes import PORTS, ROOT

SPEC = StreamSpec("Catch-v0", (10, 5), "uint8", 1, 3, 1, unroll_starts=4, overlap_steps=2)
LARGE = Identity.of(SPEC, "apex-dqn", DuelingConfig(hidden_size=2**16))
OWN = "tests.own_agent:own"
MAIN = "from apexrl.__main__ import main; sys.exit(main())"
STATE = "import sys\nsys.argv = sys.argv[1:]\ntry:\n  {}\nfinally:\n  print('torch' in sys.modules, file=sys.stderr)"


@pytest.fixture
def ask(monkeypatch):
    """Asks another process, as a launcher does, which has no torch."""
    with contextlib.ExitStack() as held:
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torch")
            asked = held.enter_context(asking())
        yield asked


def test_another_process_tells_the_device_and_says_what_cannot_be_used(ask, tmp_path):
    found = ask(Question(device="cpu"))
    assert (found.device, found.free_bytes, found.header) == ("cpu", 0, None)
    with pytest.raises(ConfigError, match="device 'gpu' cannot be used"):
        ask(Question(device="gpu"))
    with pytest.raises(ConfigError, match="MiB of parameters in half precision"):
        ask(Question(network=LARGE))
    assert ask(Question(directory=str(tmp_path))).header is None
    latest_path(tmp_path).parent.mkdir()
    latest_path(tmp_path).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"latest\.safetensors cannot be continued"):
        ask(Question(directory=str(tmp_path)))
    assert ask(Question(device="auto")).device


def test_a_network_of_somebody_elses_module_may_raise_anything(ask):
    network = Identity.of(SPEC, OWN, family_of(OWN).network)
    ask(Question(network=network))
    with pytest.raises(ConfigError, match=r"the network cannot be made: RuntimeError"):
        ask(Question(network=network._replace(network='{"width": -1}')))


def test_a_process_with_torch_and_a_gpu_makes_no_context(monkeypatch):
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with asking() as ask:
            assert (ask is here) != has_gpu


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (MAIN, ["apexrl", "train", "--env", "Catch-v0", "--help"]),
        (MAIN, ["apexrl", "sweep", "--help"]),
        ("import replay; replay.run()", ["replay.py", "--help"]),
        ("import actor; actor.run()", ["actor.py", "--help"]),
    ],
)
def test_help_loads_no_torch(code, words):
    ended = subprocess.run(
        [sys.executable, "-c", STATE.format(code), *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0 and len(ended.stdout) > 200
    assert ended.stderr.splitlines()[-1] == "False", ended.stderr


def test_a_launcher_plans_and_supervises_a_run_without_torch(tmp_path, free_ports):
    ports = [word for flag, port in zip(PORTS, free_ports(4), strict=True) for word in (flag, str(port))]
    words = ["apexrl", "train", "--env", "Catch-v0", "--max-seconds", "1", "--no-tensorboard", *ports]
    code = STATE.format(MAIN)
    ended = subprocess.run(
        [sys.executable, "-c", code, *words, "--run-dir", tmp_path / "run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0 and (tmp_path / "run" / "summary.json").is_file(), ended.stdout + ended.stderr
    assert ended.stderr.splitlines()[-1] == "False", ended.stderr
