"""A clone of the repository in which a person runs `python -m deploy`, with moto and stand-ins for its programs."""

import subprocess
import sys

import pytest

from tests.deploy import fake_tools
from tests.deploy.commands import ran
from tests.deploy.quotas import Account, serving
from tests.deploy.terraform import copy_of
from tests.system.processes import ROOT

QUOTAS = {"L-1216C47A": 32.0, "L-34B43A08": 32.0, "L-DB2E81BA": 4.0}
CLUSTER = "-chdir=deploy/terraform/cluster"
BOOTSTRAP = "-chdir=deploy/terraform/bootstrap"
UP = ("up", "smoke", "--email", "you@example.com", "--yes")
LOOKS = ("state pull", "output")


class Clone:
    """A clone of the repository of a person with a fresh account."""

    def __init__(self, directory, environment):
        self.directory = directory
        self.cluster = directory / "deploy" / "terraform" / "cluster"
        self.environment = environment

    def run(self, *words, status=0, **environment):
        """Runs `python -m deploy`; returns what it printed, and the commands that changed something."""
        result = ran(
            [sys.executable, "-m", "deploy", *words],
            cwd=self.directory,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
        )
        assert result.returncode == status, result.stdout + result.stderr
        self.said = result.stderr
        called = fake_tools.calls(self.environment)
        return result.stdout, [line for line in called if not any(look in line for look in LOOKS)]

    def fail_once(self, pattern):
        """Lets the next command of this form fail."""
        (self.directory / "tools" / "fails").write_text(pattern)


@pytest.fixture
def clone(aws, tmp_path):
    copy_of(ROOT / "deploy", tmp_path / "deploy")
    for name in ("LICENSE", "apexrl", "actor.py", "learner.py", "replay.py", "requirements.txt"):
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text() + "tools/\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"], ["tag", "v1.2"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True, timeout=30)
    with serving(Account(QUOTAS, {"L-F678F1CE": 5.0})) as account:
        tools = fake_tools.install(tmp_path / "tools")
        yield Clone(tmp_path, aws.environment | tools | account.environment)
