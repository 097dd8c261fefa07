"""Reads the values of Terraform variables: .tfvars, .tfvars.json, and the defaults in variables.tf.

It reads literals only, as a .tfvars file may hold nothing else: strings, numbers, true, false, null, lists and maps.
"""

import json
import re
from pathlib import Path
from typing import Any

import hcl2
from lark.exceptions import LarkError

PLAIN = hcl2.SerializationOptions(with_comments=False, explicit_blocks=False)
TEMPLATE = re.compile(r"(?<![$%])[$%]\{")


class DeployError(Exception):
    """A script cannot do its work. The message says what to change."""


def read_tfvars(path: Path) -> dict[str, Any]:
    """Returns the values in a .tfvars or .tfvars.json file.

    Raises: DeployError when the file cannot be read, or holds more than literals.
    """
    text = _text_of(path)
    if path.suffix != ".json":
        return {name: _literal(value, f"{path}: {name}") for name, value in _parse(text, str(path)).items()}
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise DeployError(f"{path}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise DeployError(f"{path}: an object of variables was expected")
    return values


def read_defaults(path: Path) -> dict[str, Any]:
    """Returns the variables that a .tf or .pkr.hcl file declares with their defaults, None without a default.

    Raises: DeployError when the file cannot be read, or a default is not a literal.
    """
    return {
        _string(label, str(path)): _literal(body.get("default"), f"{path}: default of {label}")
        for block in _parse(_text_of(path), str(path)).get("variable", [])
        for label, body in block.items()
    }


def read_literal(text: str, source: str) -> Any:
    """Returns the value of a literal.

    Raises: DeployError when the text is no literal.
    """
    return _literal(_parse(f"value = {text}\n", source).get("value"), source)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DeployError(f"{path} cannot be read: {error}") from error


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return hcl2.loads(text, serialization_options=PLAIN)
    except LarkError as error:
        message = str(error).partition("\n")[0]
        raise DeployError(f"{source}: Terraform's language was expected: {message}") from error


def _literal(value: Any, source: str) -> Any:
    """Returns the value of an hcl2 value. hcl2 keeps the quotes of strings and gives non-literals as ${...}."""
    match value:
        case dict():
            return {
                _string(name, source) if name.startswith('"') else name: _literal(inner, source)
                for name, inner in value.items()
            }
        case list():
            return [_literal(inner, source) for inner in value]
        case str() if value.startswith('"'):
            return _string(value, source)
        case str():
            try:
                return float(value.removeprefix("${").removesuffix("}"))  # 1e3: hcl2 does not convert it
            except ValueError:
                raise DeployError(f"{source}: {value} is not a literal, and only literals can stand here") from None
    return value


def _string(quoted: str, source: str) -> str:
    if TEMPLATE.search(quoted) or "\n" in quoted:
        raise DeployError(f"{source}: {quoted}: templates and heredocs are not read here: give plain text")
    try:
        return str(json.loads(quoted, strict=False)).replace("$${", "${").replace("%%{", "%{")
    except json.JSONDecodeError as error:
        raise DeployError(f"{source}: {quoted} is not a string ({error.msg})") from error
