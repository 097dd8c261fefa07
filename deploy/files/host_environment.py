"""What Terraform says about this host: the variables of /etc/apexrl/role.env, which its units hand on."""

import os
import re


class HostError(Exception):
    """Something that a person has to mend; the message says how."""


def variable(name: str, pattern: str = r".+") -> str:
    """Returns a variable of role.env.

    Raises: HostError when it is missing or malformed.
    """
    value = os.environ.get(name, "")
    if not re.fullmatch(pattern, value):
        raise HostError(f"{name}={value!r} in /etc/apexrl/role.env: it has to be set, and to match {pattern}")
    return value


def role() -> str:
    """Returns what this host is for."""
    return variable("APEXRL_ROLE", "replay|learner|actor")
