"""The schema of hashicorp/aws without its binary: from the package cdktf-cdktf-provider-aws, generated from it.

The package holds one generated TypeScript file for each resource type, inside the source maps of its JavaScript. There,
every argument has a line `// name - computed: .., optional: .., required: ..`, above a getter that tells its type.

The package cannot tell limits on the number of blocks above one, which values an argument takes (`aws_values.py`),
which arguments exclude each other, and which changes replace a resource (`provider.py`).
"""

import base64
import json
import re
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BUNDLE = "cdktf_cdktf_provider_aws/_jsii/provider-aws@21.22.1.jsii.tgz"
PROVIDER_VERSION = "6.25.0"
"""The version of hashicorp/aws from which this version of the package was generated."""

ATTRIBUTE = re.compile(r"^  // (\w+) - computed: (true|false), optional: (true|false), required: (true|false)$", re.M)
CLASS = re.compile(r"^export class (\w+) extends cdktf\.(\w+) \{$", re.M)
SOURCE_MAP = re.compile(rb"sourceMappingURL=data:application/json;base64,([A-Za-z0-9+/=]+)")
PRIMITIVES = {"String": "string", "Number": "number", "Boolean": "bool"}

TEXT = {"computed": False, "optional": True, "required": False}
PROVIDER = {
    "attributes": {"region": {"type": "string", **TEXT}},
    "blocks": {
        "default_tags": {
            "nesting": "list",
            "block": {"attributes": {"tags": {"type": ["map", "string"], **TEXT}}, "blocks": {}},
            **{"min": 0, "max": 0},
        }
    },
}
Block = dict[str, Any]  # {"attributes": {name: {"type": .., "computed": ..}}, "blocks": {name: {"nesting": .., ..}}}


def extract(wheel: Path, types: Iterable[str]) -> dict[str, Any]:
    """Returns the schema of the provider, as far as we configure it, and of these types.

    Args:
      types: resources as `aws_vpc`, data sources as `data.aws_ami`.
    Raises: KeyError when the package has no such type.
    """
    folders = {_folder(name): name for name in types}
    sources = _read_sources(wheel, set(folders))
    missing = sorted(name for folder, name in folders.items() if folder not in sources)
    if missing:
        raise KeyError(f"hashicorp/aws {PROVIDER_VERSION} has no {', '.join(missing)}")
    schema: dict[str, Any] = {"provider": PROVIDER, "resource": {}, "data": {}}
    for folder, name in folders.items():
        kind, _, bare = name.rpartition(".")
        schema[kind or "resource"][bare] = _Source(sources[folder]).top()
    return schema


def _folder(name: str) -> str:
    kind, _, bare = name.rpartition(".")
    return ("data-aws-" if kind else "") + bare.removeprefix("aws_").replace("_", "-")


def _read_sources(wheel: Path, folders: set[str]) -> dict[str, str]:
    """Returns the TypeScript of each folder that the package has, in one pass over the archive."""
    sources = {}
    with (
        zipfile.ZipFile(wheel) as package,
        package.open(BUNDLE) as bundle,
        tarfile.open(fileobj=bundle, mode="r|gz") as archive,
    ):
        for member in archive:
            parts = member.name.split("/")
            if parts[1:2] != ["lib"] or parts[3:] != ["index.js"] or parts[2] not in folders:
                continue
            file = archive.extractfile(member)
            found = SOURCE_MAP.search(file.read()) if file else None
            assert found, f"{member.name} has no source map"
            sources[parts[2]] = json.loads(base64.b64decode(found[1]))["sourcesContent"][0]
    return sources


class _Source:
    """One generated TypeScript file."""

    def __init__(self, text: str):
        found = list(CLASS.finditer(text))
        ends = [match.start() for match in found[1:]] + [len(text)]
        self._text = text
        self._bases = {match[1]: match[2] for match in found}
        self._bodies = {match[1]: text[match.end() : end] for match, end in zip(found, ends, strict=True)}

    def _only(self, *bases: str) -> str:
        [name] = [name for name, base in self._bases.items() if base in bases]
        return name

    def top(self) -> Block:
        """Returns the block of the resource or data source."""
        return self._block(self._only("TerraformResource", "TerraformDataSource"))

    def _block(self, name: str) -> Block:
        body = self._bodies[name]
        found = list(ATTRIBUTE.finditer(body))
        ends = [match.start() for match in found[1:]] + [len(body)]
        block: Block = {"attributes": {}, "blocks": {}}
        for match, end in zip(found, ends, strict=True):
            flags = {
                flag: match[number] == "true" for number, flag in enumerate(("computed", "optional", "required"), 2)
            }
            code = body[match.end() : end]
            kind = _attribute_type(match[1], code)
            if kind is not None:
                block["attributes"][match[1]] = {"type": kind, **flags}
                continue
            nested = self._nested(match[1], code)
            if flags["computed"]:  # data that the provider fills in is an attribute, not a block
                block["attributes"][match[1]] = {"type": _object_type(nested), **flags}
            else:
                block["blocks"][match[1]] = nested | {"min": int(flags["required"])}
        return block

    def _nested(self, name: str, code: str) -> dict[str, Any]:
        pattern = rf'new (\w+?)(OutputReference|List|Map)\(this, "{name}"(?:, (true|false))?\)'
        found = re.search(pattern, code)
        assert found, f"{name} cannot be read:\n{code[:400]}"
        reference = f"{found[1]}OutputReference"
        is_single = "super(terraformResource, terraformAttribute, false, 0)" in self._bodies[reference]
        if found[2] == "List":
            nesting = "set" if found[3] == "true" else "list"
        elif found[2] == "Map":
            nesting = "map"
        else:
            nesting = "list" if is_single else "single"
        most = 1 if found[2] == "OutputReference" and is_single else 0
        return {"nesting": nesting, "block": self._block(reference), "max": most}


def _attribute_type(name: str, code: str) -> Any:
    """Returns the type of an attribute as Terraform writes it in JSON; None when it is nested."""
    found = re.search(rf"(?<!public )this\.get(\w+?)Attribute\('{name}'\)", code)
    if found:
        getter, many = found[1], "set" if "Fn.tolist(" in code else "list"
        if getter in PRIMITIVES:
            return PRIMITIVES[getter]
        if getter.endswith("Map"):
            return ["map", PRIMITIVES.get(getter.removesuffix("Map"), "string")]
        return [many, "number" if getter == "NumberList" else "string"]
    found = re.search(rf'new cdktf\.(String|Number|Boolean)Map(List)?\(this, "{name}"', code)
    if found:
        kind = ["map", PRIMITIVES[found[1]]]
        return ["list", kind] if found[2] else kind
    return "dynamic" if "interpolationForAttribute" in code else None


def _object_type(nested: dict[str, Any]) -> Any:
    inner = nested["block"]
    fields = {name: attribute["type"] for name, attribute in inner["attributes"].items()}
    fields |= {name: _object_type(block) for name, block in inner["blocks"].items()}
    return ["object", fields] if nested["nesting"] == "single" else [nested["nesting"], ["object", fields]]
