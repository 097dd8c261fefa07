import os
import re
import sys
from pathlib import Path

import pytest

import apexrl
from apexrl.agents.families import family_of
from apexrl.errors import ConfigError
from apexrl.own_modules import NOBODY, Trust, import_own, own


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty current directory, whose modules the next test does not know."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
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


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("twice", "has no colon"), ("sys:twice", "sys has no twice"), (":x", "an empty part"), ("sys:", "an empty part")],
)
def test_a_name_that_names_nothing_is_refused(directory, name, complaint):
    with pytest.raises(ConfigError, match=complaint):
        own(name, "--wrapper")


@pytest.mark.parametrize(
    "call",
    [
        "import apexrl; apexrl.train('my_script:Mine-v0')",
        "from apexrl.running.launch import main; main()",
        "from apexrl.__main__ import main; main()",
        "from apexrl.tools.sweep import main; main()",
        "from apexrl.roles.actor import run; run()",
    ],
)
def test_a_module_that_begins_a_run_when_a_run_imports_it_is_refused(directory, call):
    """It would begin itself without end."""
    (directory / "my_script.py").write_text(f"import my_part\n{call}\n")
    (directory / "my_part.py").write_text("from apexrl.own_modules import import_own\nimport_own('json', '--agent')\n")
    guard = 'my_script starts a run when it is imported: put that below `if __name__ == "__main__":`'
    with pytest.raises(ConfigError, match=re.escape(guard)):
        own("my_script:wrapper", "--wrapper")
    (directory / "my_other.py").write_text("import os\nassert 'APEXRL_IMPORTS' in os.environ\nx = 1\n")
    assert own("my_other:x", "--wrapper") == 1 and "APEXRL_IMPORTS" not in os.environ


def test_a_process_of_a_run_begins_none(monkeypatch):
    monkeypatch.setenv("APEXRL_PARENT", "1")
    with pytest.raises(ConfigError, match=r"apexrl\.train is called inside of a run.*if __name__"):
        apexrl.train("Catch-v0")


def test_an_algorithm_that_changes_the_directory_does_so_for_itself(directory):
    (directory / "my_agent.py").write_text("import os\nos.chdir('/')\n")
    with pytest.raises(ConfigError, match="there is no such algorithm"):
        family_of("my_agent:mine")
    assert Path.cwd() == directory


def test_a_file_may_name_what_the_person_has_named_or_the_program_has_imported():
    words = ["--env", "my_walk:Walk-v0", "--wrapper=my_own.wrappers:a", "--wrapper", "b:x", "c:y", "--run-dir", "d:e"]
    trust = Trust.of(words, "this")
    trust.check("file", env="my_walk:Another-v0", wrapper=("my_own.wrappers:z", "b:z", "c:z"), agent="b:z")
    trust.check("file", wrapper=("my_walk.more:a", "my_own.wrappers.fast:a"))  # parts of what was named
    trust.check("file", env="Catch-v0", wrapper=("gymnasium.wrappers:ClipReward", f"{__name__}:own"), agent="impala")
    for module in ("d", "my_own", "my_walking.more", "this", "os", "builtins", "importlib.util", "apexrl_no_module"):
        for named in ({"env": f"{module}:x"}, {"wrapper": ("b:x", f"{module}:x")}, {"agent": f"{module}:x"}):
            with pytest.raises(ConfigError, match=f"^file names the module {module} .*whose code .*, say this$"):
                trust.check("file", **named)
            Trust.of([*words, "--trust"], "").check("file", **named)
    for module in ("\x1b[31m", "a b", "../x", ".", "a..b"):
        with pytest.raises(ConfigError, match=r"^file names a module in --env that can be none$"):
            NOBODY.check("file", env=f"{module}:x")
