"""The variables of /etc/apexrl/role.env, by which Terraform describes this host. The systemd units pass them on."""

import os
import re


class HostError(Exception):
    """A fault that a person has to mend. The message says how."""


def variable(name: str, pattern: str = r".+") -> str:
    """Returns a variable of role.env.

    Raises: HostError when it is missing or malformed.
    """
    value = os.environ.get(name, "")
    if not re.fullmatch(pattern, value):
        raise HostError(f"{name}={value!r} in /etc/apexrl/role.env: it has to be set, and to match {pattern}")
    return value


def role() -> str:
    """Returns the role of this host."""
    return variable("APEXRL_ROLE", "replay|learner|actor")
