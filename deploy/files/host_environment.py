"""The facts of a host: by the variables of /etc/apexrl/role.env, and by EC2's instance metadata service.

Terraform writes the variables, and the systemd units pass them on.
"""

import os
import re
import urllib.error
import urllib.request

METADATA_SECONDS = 2.0
TOKEN_SECONDS = 21600


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


def own_address() -> str:
    """Returns the private address by which this learner host is known.

    Raises: HostError when APEXRL_ADDRESS is no IPv4 address.
    """
    return variable("APEXRL_ADDRESS", r"([0-9]{1,3}\.){3}[0-9]{1,3}")


def keeps_the_run() -> bool:
    """Returns whether the run is written on this host: on the first learner host."""
    return role() == "learner" and host_rank() == 0


class Metadata:
    """A client of the instance metadata service, version 2."""

    def __init__(self) -> None:
        self._url = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
        self._token = ""
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def get(self, path: str) -> str | None:
        """Returns the text at a path, None when there is none.

        Raises: OSError when the service does not answer, or answers with an error.
        """
        if not self._token:
            self._token = self._ask("PUT", "/latest/api/token", "ttl-seconds", str(TOKEN_SECONDS))
        try:
            return self._ask("GET", path, "", self._token)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            self._token = ""  # 401: the token has expired
            raise

    def _ask(self, method: str, path: str, header: str, value: str) -> str:
        name = f"X-aws-ec2-metadata-token-{header}".rstrip("-")
        request = urllib.request.Request(self._url + path, method=method, headers={name: value})
        with self._open(request, timeout=METADATA_SECONDS) as answer:
            return str(answer.read().decode())
