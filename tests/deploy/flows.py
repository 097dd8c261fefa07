"""Connections that the roles may make, by the security-group rules in a plan or state."""

from typing import Any, NamedTuple

from tests.deploy.terraform import resources

ROLES = ("replay", "learner", "actor")


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
