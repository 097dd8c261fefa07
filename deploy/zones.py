"""`terraform apply` in one zone after another, until EC2 has capacity for the cluster."""

import re

from deploy import place
from deploy.cluster import Cluster, values_in
from deploy.findings import zones_for
from deploy.place import CLUSTER, terraform
from deploy.steps import StepError, failure, run_and_hear

APPLY_SECONDS = 3600.0
NO_CAPACITY = re.compile("InsufficientInstanceCapacity|do not have sufficient [^ ]+ capacity")  # of EC2, of a group
CURE = "give other learner_instance_types or replay_instance_type, or use_placement_group = false"


def apply(*arguments: str) -> None:
    """Runs `terraform apply`. Where EC2 has no capacity it goes on in the next zone that offers all types.

    It stays in a zone that somebody has named, and where the journal may hold experience: that is lost by a move.

    Raises: StepError when it fails, or no zone is left.
    """
    command = terraform(CLUSTER, "apply", *arguments)
    tried: list[str] = []
    while True:
        status, errors = run_and_hear(*command, seconds=APPLY_SECONDS)
        if not status:
            return
        if not NO_CAPACITY.search(" ".join(errors.replace("│", " ").split())):  # Terraform breaks its lines
            raise failure(command, status)
        cluster = place.described()
        zones = zones_for(cluster)
        tried.append(cluster.availability_zone or zones[0])
        left = [zone for zone in zones if zone not in tried]
        stays = _reason_to_stay(cluster)
        if stays or not left:
            told = stays or "no other zone offers all types, and another region may have them"
            raise StepError(
                f"EC2 has no capacity in {', '.join(tried)} ({told}): try again later, or {CURE}; what has started "
                "costs until `python -m deploy down`"
            )
        place.write_variable(place.ZONE, "availability_zone", left[0])


def _reason_to_stay(cluster: Cluster) -> str:
    if cluster.availability_zone and not place.ZONE.exists():
        return "availability_zone names it; without it `up` tries others"
    if place.may_hold_experience():
        return "the cluster's experience is there"
    return ""


def heed_named_zone() -> None:
    """Forgets a zone that was chosen here, when terraform.tfvars names one."""
    if values_in(place.VARIABLES, "availability_zone")["availability_zone"]:
        place.ZONE.unlink(missing_ok=True)
