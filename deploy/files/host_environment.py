"""The facts of a host: by the variables of /etc/apexrl/role.env, and by EC2's instance metadata service.

Terraform writes the variables, and the systemd units pass them on.
"""

import os
import re
import urllib.request

METADATA_SECONDS = 2.0


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


def host_rank() -> int:
    """Returns which of the learner hosts this one is.

    Raises: HostError when APEXRL_HOST_RANK is not a number from 0 to 63.
    """
    return int(variable("APEXRL_HOST_RANK", r"[0-9]|[1-5][0-9]|6[0-3]"))


def keeps_the_run() -> bool:
    """Returns whether the run is written on this host: on the first learner host."""
    return role() == "learner" and host_rank() == 0


def metadata(path: str) -> str:
    """Returns what the instance metadata service, version 2, has at a path.

    Raises: OSError when the service does not answer, or answers with an error.
    """
    url = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    token = _ask(f"{url}/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    return _ask(f"{url}/latest/meta-data/{path}", "GET", {"X-aws-ec2-metadata-token": token})


def _ask(url: str, method: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(url, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=METADATA_SECONDS) as answer:
        return str(answer.read().decode()).strip()
