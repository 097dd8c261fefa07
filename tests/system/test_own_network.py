"""examples/two_inputs.py: a network of one's own trains, and all that reads the run takes it."""

import shutil
import sys

import gymnasium
import numpy as np
import pytest

import apexrl
from apexrl.errors import ApexError, ConfigError
from apexrl.networks.config import own_network
from apexrl.networks.headers import load_header
from apexrl.own_modules import Trust
from apexrl.roles.export import export
from tests.captured_runs import check_captured_run
from tests.examples import train_flags
from tests.system.processes import ROOT, launch, read_json
from tests.system.test_training import learn

EXAMPLE = ROOT / "examples" / "two_inputs.py"
*FLAGS, _, _ = train_flags("two_inputs")  # without the total
INPUTS = ["--inputs", "map=5x5x3", "wish=2"]  # a run finds them itself
SHORT = ["--preset", "small", "--total-updates", "12", "--min-size-to-sample", "200", "--no-evaluator"]


def forget():
    sys.modules.pop("two_inputs", None)
    gymnasium.registry.pop("Errand-v0", None)


@pytest.fixture
def example(monkeypatch):
    """Makes the example importable, and forgets it in the end."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    yield
    forget()


@pytest.mark.parametrize("agent", ["apex-dqn", "impala"])
def test_a_captured_graph_learns_the_same_network(tmp_path, monkeypatch, example, agent):
    check_captured_run(monkeypatch, tmp_path, [*SHORT, *FLAGS, *INPUTS, "--agent", agent])


def test_a_run_finds_the_parts_and_its_files_are_read_where_the_module_is(tmp_path, free_ports, monkeypatch):
    """Two actor processes, an evaluator, the library, ONNX."""
    shutil.copy(EXAMPLE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = [*FLAGS, "--num-workers", "2", "--episodes", "2", "--total-updates", "60"]
    with launch(tmp_path, free_ports(4), *flags) as run:
        assert run.popen.wait(900) == 0, run.text()
    (path,) = tmp_path.rglob("latest.safetensors")
    assert read_json(path.parents[1] / "summary.json")["roles_restarted"] == 0
    header = load_header(path)
    assert own_network(header.network) == FLAGS[-1] and '"inputs":["map=5x5x3","wish=2"]' in header.network
    with pytest.raises(ConfigError, match="names the module two_inputs"):
        apexrl.load(path.parents[1])
    agent = apexrl.load(path.parents[1], trust=True)
    assert agent.act({"map": np.zeros((5, 5, 3), np.uint8), "wish": 1}) in (0, 1)
    assert "it gives q_values" in export(path, tmp_path / "network.onnx")
    forget()
    (tmp_path / "two_inputs.py").unlink()
    monkeypatch.setattr(sys, "path", [name for name in sys.path if name != str(tmp_path)])
    with pytest.raises(ApexError, match="--network two_inputs:TwoInputs: two_inputs cannot be imported"):
        export(path, tmp_path / "network.onnx", Trust(is_blind=True))


def test_the_page_shows_the_example():
    page, text = (ROOT / "docs" / "own-network.md").read_text(), EXAMPLE.read_text()
    network = text[text.index("class TwoInputs") : text.index("class Errand")].rstrip()
    assert network in page and network.count("\n") < 30
    assert " ".join(["bash ../run.sh", *train_flags("two_inputs")]) in page


@pytest.mark.long("trainings")
@pytest.mark.timeout(1600)
def test_the_example_learns(tmp_path, free_ports, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE.parent))
    flags = [*FLAGS, "--reproducible", "--seed", "1", "--total-frames", "8000", "--evaluation-period-updates", "100"]
    summary = learn(tmp_path, free_ports(4), *flags, enough=0.79)
    assert summary["evaluation_best_return"] == pytest.approx(0.8)  # the shortest way has two steps
