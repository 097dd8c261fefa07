"""deploy/terraform/cluster as a place that one cluster occupies: the file that describes it, and Terraform's state.

Nothing else is kept. Each question is asked of these files, of the state, or of AWS.
"""

import difflib
import json
import re
import shutil
from pathlib import Path
from typing import Any

from deploy.cluster import Cluster, read_cluster, values_in
from deploy.steps import ROOT, DeployError, must_read, run, show

EXAMPLES = ROOT / "deploy" / "examples"
CLUSTER = "deploy/terraform/cluster"
BOOTSTRAP = "deploy/terraform/bootstrap"
VARIABLES = ROOT / CLUSTER / "terraform.tfvars"
BACKEND = ROOT / CLUSTER / "backend.hcl"
CHOICE = ROOT / CLUSTER / "software.auto.tfvars"
"""The choice of `up` between a release and images, for the cluster that is described."""
ZONE = ROOT / CLUSTER / "zone.auto.tfvars"
"""The zone that `up` has chosen, because EC2 had no capacity in the one before."""
EXPERIENCE = {("aws_autoscaling_group", "actor"), ("terraform_data", "experience")}
"""The actor hosts, and the mark that they leave in the state while those of another run are made."""
INIT_SECONDS = 900.0


def terraform(directory: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command that runs Terraform in a directory."""
    return ("terraform", f"-chdir={directory}", *arguments)


def find_plan(name: str) -> Path:
    """Returns the file of a plan.

    Raises: DeployError when there is none of this name.
    """
    names = [path.stem for path in sorted(EXAMPLES.glob("*.tfvars"))]
    if name in names:
        return EXAMPLES / f"{name}.tfvars"
    if Path(name).is_file():
        return Path(name).resolve()
    near = difflib.get_close_matches(name, names, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise DeployError(f"there is no plan {name}: {meant}deploy/examples has {', '.join(names)}; or give a file")


def initialize() -> None:
    """Runs `terraform init` with the state that backend.hcl names."""
    configured = ("-backend-config=backend.hcl", "-reconfigure", "-input=false")
    run(*terraform(CLUSTER, "init", *configured), seconds=INIT_SECONDS)


def _state() -> dict[str, Any]:
    """Returns Terraform's state, empty where nothing was made from here. Without .terraform backend.hcl tells of it."""
    if not (ROOT / CLUSTER / ".terraform").exists():
        if not BACKEND.exists():
            return {}
        initialize()
    return dict(json.loads(must_read(*terraform(CLUSTER, "state", "pull")) or "{}"))


def _made() -> list[tuple[str, str]]:
    """Returns the type and the name of all that Terraform has made from here and not destroyed."""
    return [(one["type"], one["name"]) for one in _state().get("resources", []) if one["mode"] == "managed"]


def exists() -> bool:
    """Returns whether Terraform has made anything from here that it has not destroyed."""
    return bool(_made())


def may_hold_experience() -> bool:
    """Returns whether there have been actor hosts: before them the journal is empty."""
    return not EXPERIENCE.isdisjoint(_made())


def zone() -> str:
    """Returns the zone that the cluster is in, empty before Terraform has chosen one."""
    found = [one for one in _state().get("resources", []) if (one["type"], one["name"]) == ("terraform_data", "zone")]
    return str(found[0]["instances"][0]["attributes"]["input"]["value"]) if found else ""


def outputs() -> dict[str, Any]:
    """Returns the outputs of the cluster that is up, none where none is."""
    return {name: entry["value"] for name, entry in _state().get("outputs", {}).items()}


def describe(plan: str) -> None:
    """Makes terraform.tfvars describe a plan. A file that describes the same cluster is kept as it is.

    Raises: DeployError when another cluster is up.
    """
    if not plan:
        if not VARIABLES.exists():
            raise DeployError("no cluster is described yet: name a plan, such as `python -m deploy up smoke`")
        return
    path = find_plan(plan)
    if not VARIABLES.exists():
        _copy(path)
        return
    if path.samefile(VARIABLES) or path.read_bytes() == VARIABLES.read_bytes():
        return
    held, wanted = _name_in(VARIABLES), _name_in(path)
    if held == wanted:
        print(f"{CLUSTER}/terraform.tfvars describes {held} already, and differs from {plan}: it is kept as it is")
        return
    if exists():
        raise DeployError(
            f"the cluster {held} is up: `python -m deploy down` destroys it; for a second one use another clone"
        )
    VARIABLES.rename(VARIABLES.with_name(f"{held}.tfvars"))
    print(f"{CLUSTER}/terraform.tfvars was of {held}, and is now {CLUSTER}/{held}.tfvars")
    CHOICE.unlink(missing_ok=True)  # another cluster begins with the commit that is checked out
    ZONE.unlink(missing_ok=True)
    kept = VARIABLES.with_name(f"{wanted}.tfvars")  # of an earlier switch from it to another
    if kept.exists():
        kept.rename(VARIABLES)
        print(f"{CLUSTER}/{kept.name} is {CLUSTER}/terraform.tfvars again")
    else:
        _copy(path)


def _copy(path: Path) -> None:
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    show("cp", str(shown), f"{CLUSTER}/terraform.tfvars")
    shutil.copyfile(path, VARIABLES)


def _name_in(path: Path) -> str:
    return str(values_in(path, "name")["name"] or "apexrl")


def described() -> Cluster:
    """Returns the variables of the cluster that terraform.tfvars describes.

    Raises: DeployError when none is described, or a variable is wrong.
    """
    if not VARIABLES.exists():
        raise DeployError("no cluster is described here: `python -m deploy up smoke` starts the smallest")
    return read_cluster()


def write_variable(path: Path, name: str, value: str) -> None:
    """Writes a file of one variable, and shows how."""
    line = f'{name} = "{value}"'
    print(f"\n$ echo '{line}' > {path.relative_to(ROOT)}")
    path.write_text(f"{line}\n", encoding="utf-8")


def set_actor_hosts(hosts: int) -> None:
    """Writes a number of actor hosts into terraform.tfvars.

    Raises: DeployError when it is out of range, or another file overrules it; then the file is as it was.
    """
    before = VARIABLES.read_text(encoding="utf-8")
    line = f"actor_hosts = {hosts}"
    changed, count = re.subn(r"^[ \t]*actor_hosts[ \t]*=.*$", line, before, flags=re.MULTILINE)
    VARIABLES.write_text(changed if count else f"{before.rstrip()}\n{line}\n", encoding="utf-8")
    try:
        if described().actor_hosts != hosts:
            raise DeployError(f"another file of variables in {CLUSTER} overrules actor_hosts: change it there")
    except DeployError:
        VARIABLES.write_text(before, encoding="utf-8")
        raise
