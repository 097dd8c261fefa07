"""Small files that others read while they are written."""

from pathlib import Path

import msgspec


def write_json(path: Path, value: object) -> None:
    """Replaces a JSON file; readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    temporary.replace(path)
