import sys

import pytest

from apexrl.agents.families import family_of
from apexrl.errors import ConfigError
from apexrl.own_modules import import_own, own


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty current directory, whose modules the next test does not know."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_of_the_current_directory_finds_those_beside_it(directory):
    (directory / "my_helpers.py").write_text("def twice(x):\n    return 2 * x\n")
    (directory / "my_module.py").write_text("from my_helpers import twice\n")
    assert own("my_module:twice", "--wrapper")(4) == 8


def test_no_file_of_the_current_directory_takes_the_place_of_another(directory):
    for name in ("json", "gymnasium", "apexrl"):
        (directory / f"{name}.py").write_text("raise RuntimeError('not this one')\n")
    for name in ("json.tool", "gymnasium.wrappers", "apexrl.errors"):
        assert not import_own(name, "--agent").__file__.startswith(str(directory))
    assert str(directory) == sys.path[-1]


def test_an_algorithm_of_the_current_directory_is_found(directory):
    (directory / "my_agent.py").write_text("from apexrl.agents.families import FAMILIES\nassert 'mine' in FAMILIES\n")
    with pytest.raises(ConfigError, match=r"--agent my_agent:mine: my_agent cannot be imported: AssertionError"):
        family_of("my_agent:mine")
    with pytest.raises(ConfigError, match=f"No module named 'no_agent' .searched in {directory}, too"):
        family_of("no_agent:mine")


@pytest.mark.parametrize(("name", "complaint"), [("twice", "has no colon"), ("sys:twice", "sys has no twice")])
def test_a_name_that_names_nothing_is_refused(directory, name, complaint):
    with pytest.raises(ConfigError, match=complaint):
        own(name, "--wrapper")
