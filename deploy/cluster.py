"""The description of a cluster, as Terraform reads it: types, ranges, defaults and precedence are variables.tf's alone.

Terraform evaluates the declarations alone, in a directory of their own: it needs no `init`, no provider and no AWS.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploy.steps import ROOT, TOOLS, DeployError

CONFIGURATION = ROOT / "deploy" / "terraform" / "cluster"
DECLARING = ("variables.tf", "account.tf", "flags.tf", "flags.json")
"""The files of the configuration that ask nothing of AWS."""
PACKER_VARIABLES = ROOT / "deploy" / "packer" / "variables.pkr.hcl"
NO_BUCKET = "not-made-yet"
"""The results bucket while none is given: bootstrap makes it, after the first questions."""
NEWEST = "latest"
"""The image_version that follows new images."""
EVALUATE = ("apply", "-auto-approve", "-input=false", "-json", "-state=state")
EVALUATE_SECONDS = 60.0
UNDECLARED = "Value for undeclared variable"


class Cluster(NamedTuple):
    """The variables that the commands use. Where Terraform's value is null, the text is empty."""

    name: str
    region: str
    availability_zone: str
    image_version: str
    release: str
    replay_instance_type: str
    learner_instance_types: tuple[str, ...]
    learner_hosts: int
    actor_instance_types: tuple[str, ...]
    actor_hosts: int
    actor_on_demand_hosts: int
    replay_volume_gib: int
    learner_volume_gib: int
    results_bucket: str
    max_hours: int
    agent: str
    preset: str
    learner_flags: tuple[tuple[str, str], ...]  # names and values
    replay_flags: tuple[tuple[str, str], ...]
    vpc_id: str
    subnet_ids: tuple[str, ...]

    @property
    def spot_hosts(self) -> int:
        """The number of actor hosts that are spot instances."""
        return self.actor_hosts - self.actor_on_demand_hosts

    @property
    def instance_types(self) -> tuple[str, ...]:
        """The types of all hosts, each once."""
        own = (self.replay_instance_type, *self.learner_instance_types)
        return tuple(dict.fromkeys((*own, *self.actor_instance_types)))


def read_cluster(plan: Path | None = None, given: Sequence[str] = ()) -> Cluster:
    """Returns a cluster's variables.

    Args:
      plan: a file to read in place of terraform.tfvars, of a cluster that is not described yet.
      given: further arguments of Terraform, such as `-var name=value`, which win.
    Raises: DeployError when Terraform refuses a variable, or is not there.
    """
    described = [plan] if plan else [CONFIGURATION / f"terraform.tfvars{suffix}" for suffix in ("", ".json")]
    own = {f"terraform.tfvars{'.json' if path.suffix == '.json' else ''}": path for path in described if path.exists()}
    own |= {path.name: path for pattern in ("", ".json") for path in CONFIGURATION.glob(f"*.auto.tfvars{pattern}")}
    values = {name: f"${{var.{name}}}" for name in Cluster._fields}
    files = own | {name: CONFIGURATION / name for name in DECLARING}
    variables = {"TF_VAR_results_bucket": NO_BUCKET} | os.environ  # of all places this one counts least
    found = _evaluate({"output": {"values": {"value": values}}}, files, variables, given)
    return Cluster(**{name: _hashable(value) for name, value in found.items()})


def values_in(path: Path, *names: str) -> dict[str, Any]:
    """Returns what a file of variables itself gives, None for those that it does not.

    Raises: DeployError when Terraform cannot read it.
    """
    declared = {name: {"type": "any", "default": None} for name in names}
    output = {"values": {"value": {name: f"${{var.{name}}}" for name in names}}}
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TF_VAR_")}
    return _evaluate({"variable": declared, "output": output}, {"terraform.tfvars": path}, variables)


@functools.cache
def packer_default(name: str) -> str:
    """Returns the default of a variable of the images, as it is written."""
    text = PACKER_VARIABLES.read_text(encoding="utf-8")
    return re.findall(rf'^variable "{name}" {{.*?^  default += ([^\n]*)', text, re.MULTILINE | re.DOTALL)[0].strip('"')


def _evaluate(
    configuration: dict[str, Any], files: Mapping[str, Path], variables: Mapping[str, str], given: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the output `values` of a configuration that stands beside some files.

    Raises: DeployError with what Terraform says of them.
    """
    environment = {name: text for name, text in variables.items() if name[:3] != "TF_" or name[:7] == "TF_VAR_"}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files.items():
            shutil.copyfile(path, Path(folder, name))
        Path(folder, "values.tf.json").write_text(json.dumps(configuration), encoding="utf-8")
        try:
            done = subprocess.run(
                ["terraform", f"-chdir={folder}", *EVALUATE, *given],
                env=environment | {"CHECKPOINT_DISABLE": "1"},
                capture_output=True,
                text=True,
                timeout=EVALUATE_SECONDS,
                check=False,
            )
        except FileNotFoundError as error:
            raise DeployError(f"terraform reads the variables, and is not installed: {TOOLS['terraform']}") from error
        except subprocess.TimeoutExpired as error:
            raise DeployError(f"terraform did not read the variables within {EVALUATE_SECONDS:.0f} s") from error
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    unknown = () if "variable" in configuration else (UNDECLARED,)
    problems = [each["diagnostic"] for each in told if each["type"] == "diagnostic"]
    texts = [_text(each) for each in problems if each["severity"] == "error" or each["summary"] in unknown]
    values = [each["outputs"]["values"].get("value") for each in told if each["type"] == "outputs"]
    if texts or not values:
        raise DeployError("; ".join(dict.fromkeys(texts)) or f"terraform cannot read the variables: {done.stderr}")
    return dict(values[-1])


def _text(diagnostic: dict[str, Any]) -> str:
    """Returns one line of a diagnostic of Terraform: where, what, and the value."""
    detail = diagnostic.get("detail", "")
    end = re.search(r"\n\nThis was checked by|\. If you meant to use|\n\nTo silence|\n\n.*-var-file", detail)
    text = " ".join((detail[: end.start()] if end else detail or diagnostic["summary"]).split())
    file = diagnostic.get("range", {}).get("filename", "")
    values = (diagnostic.get("snippet") or {}).get("values") or []
    shown = ", ".join(f"{value['traversal']} {value['statement']}" for value in values)
    place = f"{file}:{diagnostic['range']['start']['line']}: " if file.endswith(("tfvars", "tfvars.json")) else ""
    return f"{place}{text}{f' ({shown})' if shown else ''}"


def _hashable(value: Any) -> Any:
    """Returns null as an empty text, lists as tuples, and maps as tuples of pairs."""
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else "" if value in (None, NO_BUCKET) else value
