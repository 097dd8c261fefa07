"""`python -m tests.deploy.offline_provider COMMAND ...` runs a command whose Terraform uses the offline provider.

`--serve` instead of a command prints the environment of such commands as JSON, and serves until its input ends.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from tests.deploy.offline_provider import schema
from tests.deploy.offline_provider.protocol import handler
from tests.deploy.offline_provider.provider import Provider
from tests.deploy.tools import find_wheel
from tests.system.processes import ROOT

ADDRESS = "registry.terraform.io/hashicorp/aws"
TYPE = re.compile(r'^(resource|data) "(aws_\w+)"', re.M)
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def types_in(directory: Path) -> list[str]:
    """Returns the types that the configurations below a directory use; data sources as `data.TYPE`."""
    texts = [path.read_text() for path in sorted(directory.rglob("*.tf"))]
    found = {(kind, name) for text in texts for kind, name in TYPE.findall(text)}
    return sorted(name if kind == "resource" else f"data.{name}" for kind, name in found)


def load_schema(wheel: Path, types: list[str]) -> dict[str, Any]:
    """Returns the schema of the types. A schema that was extracted once is kept beside the wheel."""
    made_by = Path(schema.__file__).read_bytes() + " ".join(types).encode()
    cache = wheel.with_name(f"schema-{hashlib.sha256(made_by).hexdigest()[:16]}.json")
    if not cache.exists():
        partial = cache.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(schema.extract(wheel, types)))
        partial.replace(cache)
    return json.loads(cache.read_text())


def main(arguments: list[str]) -> int:
    """Serves, and runs the command."""
    server = grpc.server(futures.ThreadPoolExecutor(4), options=UNLIMITED)
    provider = Provider(load_schema(find_wheel(), types_in(ROOT / "deploy" / "terraform")))
    server.add_generic_rpc_handlers((handler(provider.answers()),))
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/provider.sock"
        server.add_insecure_port(f"unix://{path}")
        server.start()
        address = {"Network": "unix", "String": path}
        reattach = {"Protocol": "grpc", "ProtocolVersion": 6, "Pid": os.getpid(), "Test": True, "Addr": address}
        environment = {"TF_REATTACH_PROVIDERS": json.dumps({ADDRESS: reattach})}
        try:
            if arguments == ["--serve"]:
                print(json.dumps(environment), flush=True)
                sys.stdin.read()
                return 0
            return subprocess.run(arguments, env=os.environ | environment, check=False).returncode
        finally:
            server.stop(0)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
