"""The instance metadata service as EC2 serves it to instances that require version 2: no token, no answer."""

import contextlib
import ctypes
import functools
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer

from tests.deploy.commands import answering

PROFILE = "/latest/meta-data/iam/security-credentials/"
CREDENTIALS = {
    **{"Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": "testing", "SecretAccessKey": "testing", "Token": "t"},
    **{"LastUpdated": "2026-01-01T00:00:00Z", "Expiration": "2100-01-01T00:00:00Z"},
}
SETNS_SECONDS = 30
CLONE_NEWNET = 0x40000000  # of <linux/sched.h>


class MetadataService:
    """A metadata service, whose facts a test may change at any time."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.facts = {PROFILE: "host", f"{PROFILE}host": json.dumps(CREDENTIALS)}
        self._tokens: set[str] = set()

    def answer(self, method: str, path: str, headers, _: bytes) -> tuple[int, str]:
        """Returns status and body."""
        if method == "PUT" and path == "/latest/api/token":
            if not 1 <= int(headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21600:
                return 400, ""
            self._tokens.add(token := secrets.token_urlsafe(32))
            return 200, token
        if headers.get("X-aws-ec2-metadata-token") not in self._tokens:
            return 401, ""
        return (200, self.facts[path]) if path in self.facts else (404, "")


@contextlib.contextmanager
def metadata_service(address: str = "127.0.0.1", port: int = 0, namespace: str = "") -> Iterator[MetadataService]:
    """Serves on this machine, or in a network namespace; the endpoint is for AWS_EC2_METADATA_SERVICE_ENDPOINT."""
    service = MetadataService()

    inside = functools.partial(_in_namespace, namespace) if namespace else None
    with answering(service.answer, address, port, inside) as service.endpoint:
        yield service


def _in_namespace(name: str, make: Callable[[], ThreadingHTTPServer]) -> ThreadingHTTPServer:
    """Returns what is made in a thread that has entered a network namespace: a socket stays where it was made."""
    made: list[ThreadingHTTPServer] = []

    def enter_and_make() -> None:
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"the network namespace {name} cannot be entered")
        made.append(make())

    thread = threading.Thread(target=enter_and_make)
    thread.start()
    thread.join(SETNS_SECONDS)
    [server] = made
    return server
