"""The instance metadata service of EC2, version 2: what a host may know of itself."""

import os
import urllib.error
import urllib.request

METADATA_SECONDS = 2.0
TOKEN_SECONDS = 21600


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
