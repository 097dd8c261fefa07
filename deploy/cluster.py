"""The description of a cluster: Terraform's variables, from the places where Terraform looks for them.

Later places win: defaults in variables.tf, TF_VAR_name, terraform.tfvars, *.auto.tfvars, --var-file, flags. With --plan
another file takes the place of terraform.tfvars.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

from tfvars import DeployError, read_defaults, read_literal, read_tfvars

CONFIGURATION = Path(__file__).resolve().parent / "terraform" / "cluster"
DECLARING = ("variables.tf", "flags.tf", "release.tf")
RANGES = {
    "actor_hosts": (0, 200),
    "actor_workers_per_host": (0, 1024),
    "replay_shards": (0, 16),
    "replay_volume_gib": (8, 16384),
    "learner_volume_gib": (8, 16384),
    "max_hours": (1, 168),
}
"""The ranges that the validations in variables.tf allow."""
LEARNER_GPUS = LEARNER_HOSTS = (1, 2, 4, 8)
"""The values that variables.tf allows."""
LEARNERS = 16
"""The most that variables.tf allows on all hosts."""
LEARNER_FAMILIES = ("g4dn", "g5", "g6", "gr6", "g6e", "g7e", "p4d", "p4de", "p5", "p5e", "p5en")
"""Families of whole NVIDIA GPUs that the open driver of the image drives, as images.tf lists them."""
RELEASES = "releases"
"""The directory of releases in the bucket, which no cluster can be called."""
NEWEST = "latest"
"""The image_version that follows new images."""


@dataclasses.dataclass(frozen=True)
class ClusterFlags:
    """The files that describe a cluster, and flags that override their variables."""

    var_file: tuple[Path, ...] = ()
    """Files of variables, as for `terraform apply -var-file`."""
    plan: Path | None = None
    """A file to read in place of terraform.tfvars: a cluster that is not described yet."""
    cluster: str | None = None
    """Name of the cluster (variable `name`)."""
    region: str | None = None
    """Region of the cluster."""
    availability_zone: str | None = None
    """Zone of all its hosts."""
    image_version: str | None = None
    """Version of the images."""
    release: str | None = None
    """Version that hosts install at their first start, instead of images."""
    replay_instance_type: str | None = None
    """Instance type of the replay host."""
    learner_instance_types: tuple[str, ...] | None = None
    """Instance types of each learner host, the preferred one first."""
    learner_gpus: int | None = None
    """GPUs of each learner host that make every update together."""
    learner_hosts: int | None = None
    """Learner hosts of so many GPUs each."""
    replay_shards: int | None = None
    """Replay servers of the replay host; 0: as many as there are learner GPUs."""
    actor_instance_types: tuple[str, ...] | None = None
    """Instance types of the actor hosts, the preferred one first."""
    actor_hosts: int | None = None
    """Number of actor hosts."""
    actor_on_demand_hosts: int | None = None
    """Number of actor hosts that are not spot instances."""
    actor_workers_per_host: int | None = None
    """Actor processes of a host; 0: one per vCPU."""
    replay_volume_gib: int | None = None
    """Volume of the replay host."""
    learner_volume_gib: int | None = None
    """Volume of each learner host."""
    use_placement_group: bool | None = None
    """Whether replay and learner share a cluster placement group."""
    operator_cidrs: tuple[str, ...] | None = None
    """Addresses that may open TensorBoard."""
    results_bucket: str | None = None
    """Bucket of checkpoints and event files."""
    max_hours: int | None = None
    """Hours after which everything is stopped."""


class Cluster(NamedTuple):
    """The variables that the scripts use. Where Terraform's value is null, the text is empty."""

    name: str
    region: str
    availability_zone: str
    image_version: str
    release: str
    replay_instance_type: str
    learner_instance_types: tuple[str, ...]
    learner_gpus: int
    learner_hosts: int
    replay_shards: int
    actor_instance_types: tuple[str, ...]
    actor_hosts: int
    actor_on_demand_hosts: int
    actor_workers_per_host: int
    replay_volume_gib: int
    learner_volume_gib: int
    use_placement_group: bool
    operator_cidrs: tuple[str, ...]
    results_bucket: str
    max_hours: int
    agent: str
    preset: str
    learner_flags: tuple[tuple[str, str], ...]  # names and values
    replay_flags: tuple[tuple[str, str], ...]

    @property
    def spot_hosts(self) -> int:
        """The number of actor hosts that are spot instances."""
        return self.actor_hosts - self.actor_on_demand_hosts

    @property
    def instance_types(self) -> tuple[str, ...]:
        """The types of all hosts, each once."""
        own = (self.replay_instance_type, *self.learner_instance_types)
        return tuple(dict.fromkeys((*own, *self.actor_instance_types)))

    @property
    def learners(self) -> int:
        """The number of learners on all hosts."""
        return self.learner_hosts * self.learner_gpus

    @property
    def shards(self) -> int:
        """The number of replay servers."""
        return self.replay_shards or self.learners


def read_cluster(flags: ClusterFlags) -> Cluster:
    """Returns a cluster's variables.

    Raises: DeployError when a file cannot be read, or a variable is unknown, has another type or is out of its range.
    """
    values = {name: value for file in DECLARING for name, value in read_defaults(CONFIGURATION / file).items()}
    described = [CONFIGURATION / f"terraform.tfvars{suffix}" for suffix in ("", ".json")]
    files = [flags.plan] if flags.plan else described
    files += sorted([*CONFIGURATION.glob("*.auto.tfvars"), *CONFIGURATION.glob("*.auto.tfvars.json")])
    given = _environment(values)
    for path in [*(path for path in files if path == flags.plan or path.exists()), *flags.var_file]:
        for name, value in read_tfvars(path).items():
            if name not in values:
                raise DeployError(f"{path}: there is no variable {name} in {CONFIGURATION}")
            given[name] = value
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if field.name not in ("var_file", "plan") and value is not None:
            given["name" if field.name == "cluster" else field.name] = value
    values |= {name: value for name, value in given.items() if value is not None}
    cluster = Cluster(**{name: _typed(name, values.get(name), kind) for name, kind in Cluster.__annotations__.items()})
    _check(cluster)
    return cluster


def _check(cluster: Cluster) -> None:
    """Raises DeployError when a variable is not as Terraform allows it."""
    if cluster.name == RELEASES:
        raise DeployError(f"variable name is {RELEASES}: there the bucket keeps the releases; choose another")
    for name, (least, most) in RANGES.items():
        if not least <= getattr(cluster, name) <= most:
            raise DeployError(f"variable {name} is {getattr(cluster, name)}: it has to be from {least} to {most}")
    for name in ("learner_instance_types", "actor_instance_types"):
        if not getattr(cluster, name):
            raise DeployError(f"variable {name} is empty: name at least one type")
    if not 0 <= cluster.actor_on_demand_hosts <= cluster.actor_hosts:
        wrong, most = cluster.actor_on_demand_hosts, cluster.actor_hosts
        raise DeployError(f"variable actor_on_demand_hosts is {wrong}: it has to be from 0 to actor_hosts ({most})")
    if cluster.learner_gpus not in LEARNER_GPUS:
        raise DeployError(f"variable learner_gpus is {cluster.learner_gpus}: it has to be 1, 2, 4 or 8")
    if cluster.learner_hosts not in LEARNER_HOSTS or cluster.learners > LEARNERS:
        wrong, gpus = cluster.learner_hosts, cluster.learner_gpus
        bound = f"with {gpus} GPUs each at most {LEARNERS} in all"
        raise DeployError(f"variable learner_hosts is {wrong}: it has to be 1, 2, 4 or 8, {bound}")
    if cluster.replay_shards % cluster.learners:
        wrong, unit = cluster.replay_shards, cluster.learners
        raise DeployError(f"variable replay_shards is {wrong}: it has to be a multiple of the {unit} learners")
    if 0 < cluster.actor_workers_per_host < cluster.shards:
        wrong, least = cluster.actor_workers_per_host, cluster.shards
        raise DeployError(f"variable actor_workers_per_host is {wrong}: it has to be 0, or at least {least}")


def _environment(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of TF_VAR_ variables. As in Terraform, a variable of type text takes the text as it is."""
    given: dict[str, Any] = {}
    for name in values.keys() & {key.removeprefix("TF_VAR_") for key in os.environ if key.startswith("TF_VAR_")}:
        text = os.environ[f"TF_VAR_{name}"]
        given[name] = text if Cluster.__annotations__.get(name, str) is str else read_literal(text, f"TF_VAR_{name}")
    return given


def _typed(name: str, value: Any, kind: Any) -> Any:
    """Returns a value as the type that `Cluster` declares.

    Raises: DeployError when it is of another type.
    """
    if kind is str:
        if value is None or isinstance(value, str):
            return value or ""
        expected = "a text"
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        expected = "a whole number"
    elif kind is bool:
        if isinstance(value, bool):
            return value
        expected = "true or false"
    elif kind == tuple[tuple[str, str], ...]:
        if isinstance(value, dict):
            return tuple((flag, str(text)) for flag, text in value.items())
        expected = "a map of flags"
    else:
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
        expected = "a list of texts"
    flag = "--" + ("cluster" if name == "name" else name).replace("_", "-")
    raise DeployError(f"variable {name} is {value!r}, {expected} was expected: give {flag}, or {name} in a var-file")
