"""The schema of hashicorp/aws without its binary: schema.json, as `terraform providers schema -json` has it.

It has the types that our configurations use, each in a line. Where they use another one, or a newer provider, somebody
who can reach registry.terraform.io writes it anew:

    terraform -chdir=deploy/terraform/cluster init -backend=false
    terraform -chdir=deploy/terraform/cluster providers schema -json | python -m tests.deploy.offline_provider.schema

A schema cannot tell which values an argument takes (`aws_values.py`), which arguments exclude each other, and which
changes replace a resource (`provider.py`).
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.system.processes import ROOT

FILE = Path(__file__).with_name("schema.json")
KINDS = {"resource": "resource_schemas", "data": "data_source_schemas"}
Block = dict[str, Any]  # {"attributes": {name: {"type": .., "computed": ..}}, "block_types": {name: {"block": .., ..}}}


def load() -> dict[str, Any]:
    """Returns the schema of the provider, as far as we configure it, and of our types."""
    return dict(json.loads(FILE.read_text()))


def write(printed: dict[str, Any]) -> None:
    """Writes schema.json anew from what Terraform prints."""
    [schema] = printed["provider_schemas"].values()
    texts = [path.read_text() for path in sorted((ROOT / "deploy" / "terraform").rglob("*.tf"))]
    used = {pair for text in texts for pair in re.findall(r'^(resource|data) "(aws_\w+)"', text, re.M)}
    parts = [f'"provider":{json.dumps(schema["provider"], separators=(",", ":"))}']
    for kind, name in KINDS.items():
        rows = [
            f'"{each}":{json.dumps(schema[name][each], separators=(",", ":"))}'
            for each in sorted(each for of, each in used if of == kind)
        ]
        parts.append(f'"{name}":{{\n' + ",\n".join(rows) + "\n}")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    write(json.load(sys.stdin))
