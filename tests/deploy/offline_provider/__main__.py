"""`python -m tests.deploy.offline_provider COMMAND ...` runs a command whose Terraform uses the offline provider.

`--serve` instead of a command prints the environment of such commands as JSON, and serves until its input ends.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent import futures

import grpc

from tests.deploy.offline_provider import schema
from tests.deploy.offline_provider.protocol import handler
from tests.deploy.offline_provider.provider import Provider

ADDRESS = "registry.terraform.io/hashicorp/aws"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def main(arguments: list[str]) -> int:
    """Serves, and runs the command."""
    server = grpc.server(futures.ThreadPoolExecutor(4), options=UNLIMITED)
    provider = Provider(schema.load())
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
