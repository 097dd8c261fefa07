"""The extras of the package: a missing one is one line, whose command fits the installation."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from apexrl.errors import ConfigError, reason_of
from apexrl.extras import MODULES, PIP_INSTALL, install, missing, why_missing
from tests.system.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Python finds no package of an extra then, as in an installation without them.
REFUSE = f"import sys\nsys.modules.update(dict.fromkeys({sorted(module for of in MODULES.values() for module in of)}))"


def without_extras(code, *words, cwd=ROOT):
    """Runs code where no extra is installed; returns the status and both outputs."""
    command = [sys.executable, "-c", f"{REFUSE}\n{code}", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout, done.stderr


def pins_of(name):
    """Returns the versions by package that a list of the repository pins, without those that it includes."""
    lines = (ROOT / name).read_text().split("\n")
    return dict(re.sub(r"\[.*\]", "", line.partition("#")[0].strip()).split("==") for line in lines if "==" in line)


def test_the_lists_have_a_version_in_the_range_of_each_requirement():
    wanted = {extra: [Requirement(text) for text in texts] for extra, texts in EXTRAS.items()}
    trained = [*map(Requirement, PROJECT["dependencies"]), *wanted["train"]]
    assert {one.name for one in trained} == pins_of("requirements.txt").keys()
    pins = {name: of for file in ("", "-dev", "-all") for name, of in pins_of(f"requirements{file}.txt").items()}
    for one in (*trained, *(one for of in wanted.values() for one in of)):
        assert one.name not in pins or pins[one.name] in one.specifier, one
    assert EXTRAS.keys() == MODULES.keys()


def test_a_command_fits_the_installation(tmp_path):
    assert install("plot", tmp_path) == f"{PIP_INSTALL} 'apexrl[plot]'" and sys.executable in PIP_INSTALL
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    for name in ("run.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout)
    assert install("train", checkout) == f"bash '{checkout}/run.sh'"
    for extra in EXTRAS.keys() - {"train"}:
        command = install(extra, checkout)
        assert command.startswith(f"{PIP_INSTALL} ") and shlex.split(command)[4:] == EXTRAS[extra]


def test_an_error_of_a_missing_extra_is_known_by_its_causes(monkeypatch):
    error = ImportError("no tracker")
    error.__cause__ = ModuleNotFoundError("No module named 'wandb.sdk'", name="wandb.sdk")
    assert why_missing(error) == reason_of(error) == f"wandb is not installed: say `{PIP_INSTALL} wandb`"
    for other in (None, ImportError("x"), ModuleNotFoundError(name="numpy"), ModuleNotFoundError("without a name")):
        assert not why_missing(other)
    assert not missing("train", "training")
    monkeypatch.setitem(sys.modules, "ale_py", None)
    line = f"training needs more packages: ale_py is not installed: say `bash {ROOT}/run.sh`"
    assert missing("train", "training") == line and str(ConfigError(line)) == line


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("apexrl", ("train", "--env", "CartPole-v1")),
        ("apexrl", ("sweep", "x.toml")),
        ("apexrl", ("learner",)),
        ("apexrl", ("actor", "--checkpoint", "nowhere")),
        ("apexrl.roles.learner", ()),
        ("apexrl.running.ray_cluster", ()),
    ],
)
def test_a_program_whose_extra_is_missing_says_so_in_a_line(module, words, tmp_path):
    code = f"sys.path.insert(0, {str(ROOT)!r})\nimport runpy\nrunpy.run_module({module!r}, run_name='__main__')"
    status, out, err = without_extras(code, *words, cwd=tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert re.search(rf"\w+ is not installed: say `(bash {ROOT}/run.sh|{PIP_INSTALL} 'ray.*)`$", err)


def test_the_library_says_so_with_an_error_of_imports():
    status, out, _ = without_extras("import apexrl\ntry: apexrl.train\nexcept ImportError as error: print(error)")
    assert status == 0 and re.fullmatch(rf"\w+ is not installed: say `bash {ROOT}/run.sh`\n", out)
