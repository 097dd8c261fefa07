"""The commands of the examples, as their docstrings tell them to a person in a checkout who has called run.sh once."""

import ast
import shlex

from tests.system.processes import ROOT

EXAMPLES = ROOT / "examples"
PYTHON, TRAIN = ".venv/bin/python", "cd examples; bash ../run.sh"
PORTS = ("51001", "51002")  # of a replay server


def commands_of(name: str) -> list[str]:
    """Returns the commands in the docstring of an example, but for those that install a package."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    lines = [line.strip() for line in docstring.splitlines()]
    return [line for line in lines if line.startswith((f"{PYTHON} ", f"{TRAIN} ")) and "-m pip install" not in line]


def python_words(command: str, ports: list[int] | None = None) -> list[str]:
    """Returns the words of a command behind the environment's Python, with the ports of a server that runs."""
    first, *words = shlex.split(command)
    assert first == PYTHON, command
    others = dict(zip(PORTS, map(str, ports or PORTS), strict=True))
    return [others.get(word, word) for word in words]


def train_flags(name: str) -> list[str]:
    """Returns the flags with which an example tells to train."""
    (command,) = commands_of(name)
    assert command.startswith(f"{TRAIN} "), command
    return shlex.split(command.removeprefix(TRAIN))
