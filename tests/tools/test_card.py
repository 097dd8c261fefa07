"""The card of a run."""

import ast
import sys

import pytest
import torch

from apexrl.config.commands import RunCommand
from apexrl.config.flags import default_command
from apexrl.errors import ConfigError
from apexrl.files import read_json, write_json
from apexrl.networks.checkpoint import save_checkpoint
from apexrl.networks.config import to_text
from apexrl.networks.headers import CheckpointHeader, Counters
from apexrl.runs import CONFIG_FILE
from apexrl.tools import card
from apexrl.types import StreamSpec
from tests.system.processes import call
from tests.tools.run_directories import write_run

NETWORK = to_text(default_command(RunCommand).network)


def with_network(directory, name, updates, env="Catch-v0", network=NETWORK):
    (directory / "checkpoints").mkdir(exist_ok=True)
    spec = StreamSpec(env, (2,), "float32", 1, 2, 1)
    header = CheckpointHeader(spec, "apex-dqn", network, Counters(updates=updates))
    save_checkpoint(directory / "checkpoints" / name, header, {"a": torch.ones(1)})


def test_a_card_tells_training_evaluation_flags_versions_and_use(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", [0.0, 0.5, 1.0, 0.75], seed=3, learning_rate=0.5)
    with_network(run, "latest.safetensors", 30)
    with_network(run, "best.safetensors", 20)
    text = card.card_of(run)
    lines = text.splitlines()
    assert lines[0] == "# Catch-v0, played by apex-dqn"
    for row in (
        "| network | `best.safetensors`, update 20 |", "| the whole run | 3,000 frames, 30 updates, 3.0 minutes |",
        "| samples an insert | 4.00 |", "| games | 10 |", "| mean | 1.00 |", "| min | 0.00 |", "| max | 2.00 |",
        "| frames until then | 2,000 |", "| learning-rate | 0.5 |", "| seed | 3 |",
        'agent = apexrl.load("best.safetensors")',
    ):  # fmt: skip
        assert row in lines, row
    assert "| torch |" in text and "batch-size" not in text and "trust" not in text
    latest = card.card_of(run / "checkpoints" / "latest.safetensors")
    assert "`latest.safetensors`, update 30" in latest and "| mean | 0.75 |" in latest
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["apexrl card", "run", "--output", "card.md"])
    for _ in range(2):  # it replaces an earlier card
        assert card.main() == 0 and (tmp_path / "card.md").read_text() == text
    monkeypatch.setattr(sys, "argv", ["apexrl card", "run"])
    assert card.main() == 0 and capsys.readouterr().out == text + "\n"


def test_a_card_of_modules_says_to_trust_them_and_one_without_games_says_so(tmp_path):
    run = write_run(tmp_path / "run", [], env="my_walk:Walk-v0")
    with_network(run, "latest.safetensors", 7, env="my_walk:Walk-v0")
    text = card.card_of(run)
    assert "This network was not evaluated." in text and "trust=True" in text and "--trust`" in text


def test_a_card_of_a_file_with_a_strange_name_is_a_program(tmp_path):
    with_network(write_run(tmp_path / "run", []), "latest.safetensors", 7)
    alone = (tmp_path / "run/checkpoints/latest.safetensors").rename(tmp_path / """a "b" 'c\\.safetensors""")
    program = card.card_of(alone).split("```python\n")[1].split("```")[0]
    (loaded,) = [line for line in program.splitlines() if line.startswith("agent = ")]
    call = ast.parse(loaded).body[0].value
    assert call.args[0].value == alone.name


def test_a_card_of_a_network_of_ones_own_says_to_trust_its_module(tmp_path):
    run = write_run(tmp_path / "run", [])
    with_network(run, "latest.safetensors", 7, network='{"network": "my_network:Torso"}')
    assert "trust=True" in card.card_of(run)


def test_a_card_of_a_checkpoint_alone_says_what_is_unknown_and_trusts_nothing(tmp_path):
    (tmp_path / "downloads").mkdir()
    with_network(tmp_path / "downloads", "best.safetensors", 7, env="my_walk:Walk-v0")
    alone = (tmp_path / "downloads" / "checkpoints" / "best.safetensors").rename(tmp_path / "best.safetensors")
    text = card.card_of(alone)
    assert "trust=True" in text and text.count(card.UNKNOWN) == 3
    assert "None." not in text and "not evaluated" not in text


@pytest.mark.parametrize("changes", [{"env": "CartPole-v1"}, {"agent": ["x"]}, {"preset": ["x"]}, {"preset": "huge"}])
def test_a_configuration_of_others_makes_no_traceback(tmp_path, changes):
    run = write_run(tmp_path / "run", [1.0])
    with_network(run, "latest.safetensors", 0)
    config = read_json(run / CONFIG_FILE, dict)
    write_json(run / CONFIG_FILE, {**config, "command": config["command"] | changes})
    text = card.card_of(run)
    is_read = changes == {"preset": "huge"}
    assert ("| batch-size |" in text) == is_read == (card.UNKNOWN not in text)


def test_no_value_of_a_run_leaves_its_cell_or_controls_a_terminal(tmp_path):
    run = write_run(tmp_path / "run", [1.0])
    with_network(run, "latest.safetensors", 0)
    write_json(run / CONFIG_FILE, read_json(run / CONFIG_FILE, dict) | {"revision": "\x1b[31mred\n# fake | heading"})
    assert "| revision | \\x1b[31mred # fake   heading |" in card.card_of(run).splitlines()


@pytest.mark.parametrize("content", ["# apexrl\n\nOff-policy\n", "", b"\x93\xff", None])
def test_a_file_that_is_no_card_is_not_replaced(tmp_path, content):
    with_network(write_run(tmp_path / "run", []), "latest.safetensors", 7)
    output = tmp_path / "README.md"
    if content is None:
        output.mkdir()
    else:
        output.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = None if content is None else output.read_bytes()
    status, said = call(card.main, tmp_path / "run", "--output", output)
    assert status == 2 and f"--output {output} is no card of a run: give another file, or remove that" in said
    assert output.is_dir() if content is None else output.read_bytes() == before


def test_a_directory_without_a_network_has_no_card(tmp_path):
    with pytest.raises(ConfigError, match="has no checkpoints/best"):
        card.card_of(write_run(tmp_path / "run", [1.0]))
    status, said = call(card.main, tmp_path / "run")
    assert status == 2 and said.startswith("cannot write a card: ") and said.count("\n") == 1
