"""Terraform in tests: the unmodified configurations, in a copy with a local state, and the offline provider."""

import base64
import copy
import fnmatch
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.deploy.commands import ran
from tests.deploy.needed import find_terraform
from tests.system.processes import ROOT

TERRAFORM = ROOT / "deploy" / "terraform"
USERS_OWN = (".venv", ".terraform", "*.tfstate*", "*.tfvars", "*.tfvars.json", "backend.hcl", "__pycache__")
"""Files that the steps of deploy/README.md leave in deploy/: a user's own cluster, and nothing to test."""
GIVEN = "test.auto.tfvars.json"
BUCKET = "apexrl-results-123456789012-us-east-1"
LOCAL_STATE = 'terraform {\n  backend "local" {}\n}\n'
SECONDS = 600  # only ends what hangs

Variables = dict[str, Any]
Case = tuple[Any, ...]
ROLES = ("replay", "learner", "actor")


def copy_of(directory: Path, target: Path) -> Path:
    """Copies a directory of deploy/ without what belongs to a user's cluster; returns the copy."""

    def own(folder: str, names: list[str]) -> list[str]:
        is_example = Path(folder).name == "examples"
        return [name for name in names if not is_example and any(fnmatch.fnmatch(name, own) for own in USERS_OWN)]

    return Path(shutil.copytree(directory, target, ignore=own))


@contextmanager
def offline_provider() -> Iterator[dict[str, str]]:
    """Serves hashicorp/aws; yields the environment of commands that shall use it."""
    command = [sys.executable, "-m", "tests.deploy.offline_provider", "--serve"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stdin is not None
            yield (
                os.environ | json.loads(server.stdout.readline()) | {"CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
            )
            server.stdin.close()
            server.wait(SECONDS)
        finally:
            server.kill()


class Workspace:
    """A copy of one configuration, where Terraform can write."""

    def __init__(self, configuration: str, directory: Path, environment: dict[str, str], local_state: bool = True):
        self.directory = copy_of(TERRAFORM / configuration, directory / configuration)
        self._environment = environment
        if local_state and configuration == "cluster":
            (self.directory / "backend_override.tf").write_text(LOCAL_STATE)

    def copy(self, directory: Path) -> "Workspace":
        """Returns another one in the same state, with no variable set."""
        other = copy.copy(self)
        other.directory = directory / self.directory.name
        shutil.copytree(self.directory, other.directory, ignore=shutil.ignore_patterns(GIVEN, "plan"))
        return other

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        """Runs Terraform. Its output has one line for each error, so that texts can be found in it."""
        result = ran(
            [find_terraform(), *arguments, *(["-no-color"] if arguments[0] != "output" else [])],
            cwd=self.directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            seconds=SECONDS,
        )
        result.stderr = re.sub(r"\s+", " ", result.stderr)
        return result

    def must(self, *arguments: str) -> str:
        """Runs Terraform, which has to succeed; returns its output."""
        result = self.run(*arguments)
        assert result.returncode == 0, f"terraform {' '.join(arguments)}\n{result.stdout[-3000:]}\n{result.stderr}"
        return result.stdout

    def give(self, variables: Variables) -> None:
        """Sets the variables of what is run from now on."""
        (self.directory / GIVEN).write_text(json.dumps(variables, indent=1))

    def plan(self, variables: Variables, *arguments: str) -> subprocess.CompletedProcess:
        """Plans with these variables."""
        self.give(variables)
        return self.run("plan", "-input=false", "-lock=false", *arguments)

    def planned(self, variables: Variables) -> dict[str, Any]:
        """Plans with these variables, which has to succeed; returns the plan as `terraform show -json` gives it."""
        result = self.plan(variables, "-out=plan")
        assert result.returncode == 0, result.stderr
        return json.loads(self.must("show", "-json", "plan"))

    def changes(self, variables: Variables) -> dict[str, list[str]]:
        """Returns what a plan with these variables changes."""
        return changes_in(self.planned(variables))

    def apply(self, variables: Variables, *arguments: str) -> dict[str, Any]:
        """Applies with these variables; returns the state as `terraform show -json` gives it."""
        self.give(variables)
        self.must("apply", "-input=false", "-auto-approve", *arguments)
        return self.state()

    def state(self) -> dict[str, Any]:
        """Returns what there is, as `terraform show -json` gives it."""
        return json.loads(self.must("show", "-json"))


def changes_in(plan: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the actions of a plan by address, of all resources that change."""
    actions = {change["address"]: change["change"]["actions"] for change in plan["resource_changes"]}
    return {address: what for address, what in actions.items() if what not in (["no-op"], ["read"])}


def as_flags(variables: Variables) -> list[str]:
    """Returns variables as the command line gives them."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in variables.items()}
    return [word for name, text in texts.items() for word in ("-var", f"{name}={text}")]


def resources(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the values of each resource and data source of a plan or state, by address."""
    root = values.get("planned_values") or values["values"]
    return {resource["address"]: resource["values"] for resource in root["root_module"]["resources"]}


def of_learners(state: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Returns the resources of a type of which each learner host has one, by the host's name: learner, learner-1 ..."""
    found = resources(state)
    addresses = sorted(address for address in found if address.startswith(f"{kind}.learner["))
    names = ["learner", *(f"learner-{rank}" for rank in range(1, len(addresses)))]
    return dict(zip(names, (found[address] for address in addresses), strict=True))


def templates(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the launch template of each learner host, and that of all actor hosts."""
    return of_learners(state, "aws_launch_template") | {"actor": resources(state)["aws_launch_template.actor"]}


def user_data(state: dict[str, Any]) -> dict[str, str]:
    """Returns the user-data of each host, and of all actor hosts: replay, learner, learner-1 ..., actor."""
    texts = {name: base64.b64decode(made["user_data"]).decode() for name, made in templates(state).items()}
    return {"replay": resources(state)["aws_instance.replay"]["user_data"]} | texts


def fixed_addresses(state: dict[str, Any]) -> dict[str, str]:
    """Returns the private addresses by which hosts are known, by name: replay, learner, learner-1 ..."""
    environments = {name: role_environment(text) for name, text in user_data(state).items()}
    known = {name: found["APEXRL_ADDRESS"] for name, found in environments.items() if name.startswith("learner")}
    return {"replay": str(resources(state)["aws_instance.replay"]["private_ip"])} | known


def role_environment(text: str) -> dict[str, str]:
    """Returns the variables in the role.env that user-data writes."""
    file = yaml.safe_load(text)["write_files"][0]
    return dict(line.split("=", 1) for line in file["content"].splitlines())


@functools.cache
def variable_names(configuration: str) -> tuple[str, ...]:
    """Returns the variables that a configuration declares."""
    texts = [path.read_text() for path in sorted((TERRAFORM / configuration).glob("*.tf"))]
    return tuple(name for text in texts for name in re.findall(r'^variable "(\w+)"', text, re.M))


class Flow(NamedTuple):
    """TCP connections that a role may make, or makes."""

    source: str
    target: str
    port: int
    last_port: int = 0  # of a range


def rules_of(state: dict[str, Any], direction: str) -> list[dict[str, Any]]:
    """Returns the rules of one direction, with the roles of their groups in place of the groups' ids."""
    found = resources(state)
    roles = {found[f'aws_security_group.role["{role}"]']["id"]: role for role in ROLES}
    return [
        values | {"own": roles[values["security_group_id"]], "peer": roles.get(values["referenced_security_group_id"])}
        for address, values in found.items()
        if address.startswith(f"aws_vpc_security_group_{direction}_rule.")
    ]


def flows_of(state: dict[str, Any], direction: str) -> set[Flow]:
    """Returns the flows between roles that the rules of one direction let through."""
    flows = set()
    for rule in rules_of(state, direction):
        if rule["peer"] is None:
            continue
        assert rule["ip_protocol"] == "tcp" and rule["from_port"] <= rule["to_port"], rule
        ends = (rule["peer"], rule["own"]) if direction == "ingress" else (rule["own"], rule["peer"])
        is_range = rule["from_port"] < rule["to_port"]
        flows.add(Flow(*ends, rule["from_port"], rule["to_port"] if is_range else 0))
    return flows


def rounds(cases: list[Case]) -> list[list[Case]]:
    """Returns wrong values in as few lists as will do when the first item of each is different in a list.

    One run tells of a list together, so that there are fewer runs.
    """
    made: list[list[Case]] = []
    for case in cases:
        fitting = next((one for one in made if case[0] not in {other[0] for other in one}), None)
        if fitting is None:
            made.append(fitting := [])
        fitting.append(case)
    return made
