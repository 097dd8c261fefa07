"""Reads the values of Terraform variables: .tfvars, .tfvars.json, and the defaults in variables.tf.

Literals only, which is all that a .tfvars file may hold: strings, numbers, true, false, null, lists and maps.
Functions, references, templates and heredocs are refused with their line.
"""

import json
import re
from pathlib import Path
from typing import Any

TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|\#[^\n]*|//[^\n]*|/\*.*?\*/)
      | (?P<newline>\n)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
      | (?P<name>[A-Za-z_][\w-]*)
      | (?P<mark>[=:,{}\[\]])""",
    re.VERBOSE | re.DOTALL,
)
DEFAULT = re.compile(r'^variable "(\w+)" \{$|^  default +=', re.MULTILINE)
WORDS = {"true": True, "false": False, "null": None}


class DeployError(Exception):
    """A script cannot do what was asked; the message says what to change."""


def read_tfvars(path: Path) -> dict[str, Any]:
    """Returns the values in a .tfvars or .tfvars.json file.

    Raises: DeployError when it cannot be read, or holds more than literals.
    """
    text = _text_of(path)
    if path.suffix != ".json":
        return _Reader(text, str(path)).assignments()
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise DeployError(f"{path}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise DeployError(f"{path}: an object of variables was expected")
    return values


def read_defaults(path: Path) -> dict[str, Any]:
    """Returns the variables that a file as `terraform fmt` leaves it declares; None for those without a default.

    Raises: DeployError when it cannot be read, or a default is not a literal.
    """
    text = _text_of(path)
    defaults: dict[str, Any] = {}
    name = ""
    for found in DEFAULT.finditer(text):
        if found[1]:
            name = found[1]
            defaults[name] = None
        else:
            defaults[name] = _Reader(text, str(path), found.end()).value()
    return defaults


def read_literal(text: str, source: str) -> Any:
    """Returns the value of a literal.

    Raises: DeployError when it is none.
    """
    return _Reader(text, source).value()


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DeployError(f"{path} cannot be read: {error}") from error


class _Reader:
    """Reads literals from a text, left to right."""

    def __init__(self, text: str, source: str, position: int = 0):
        self._text = text
        self._source = source
        self._position = position

    def assignments(self) -> dict[str, Any]:
        """Returns NAME = VALUE lines up to the end of the text."""
        values: dict[str, Any] = {}
        while self._peek(skip_newlines=True)[0] != "end":
            name = self._take("name", "the name of a variable", skip_newlines=True)
            if name in values:
                raise self._error(f"{name} is given twice")
            self._take("mark", "=", only="=")
            values[name] = self.value()
            if self._peek()[0] not in ("newline", "end"):
                raise self._error("one variable a line was expected")
        return values

    def value(self) -> Any:
        """Returns the literal that begins here."""
        kind, text = self._next(skip_newlines=True)
        if kind == "string":
            return self._string(text)
        if kind == "number":
            return float(text) if re.search(r"[.eE]", text) else int(text)
        if kind == "name" and text in WORDS:
            return WORDS[text]
        if text == "[":
            return self._list()
        if text == "{":
            return self._map()
        raise self._error(f"a literal was expected, not {text or 'the end'}")

    def _list(self) -> list[Any]:
        values = []
        while self._peek(skip_newlines=True)[1] != "]":
            values.append(self.value())
            if self._peek(skip_newlines=True)[1] == ",":
                self._next(skip_newlines=True)
            elif self._peek(skip_newlines=True)[1] != "]":
                raise self._error(", or ] was expected")
        self._next(skip_newlines=True)
        return values

    def _map(self) -> dict[str, Any]:
        values = {}
        while self._peek(skip_newlines=True)[1] != "}":
            kind, name = self._next(skip_newlines=True)
            if kind not in ("name", "string"):
                raise self._error(f"a key was expected, not {name or 'the end'}")
            if self._next()[1] not in ("=", ":"):
                raise self._error(f"= was expected after {name}")
            values[self._string(name) if kind == "string" else name] = self.value()
            kind, mark = self._peek()
            if mark == ",":
                self._next()
            elif kind != "newline" and mark != "}":
                raise self._error(", or } was expected")
        self._next(skip_newlines=True)
        return values

    def _string(self, quoted: str) -> str:
        if re.search(r"(?<![$%])[$%]\{", quoted):
            raise self._error("a template: only plain text can stand here")
        try:
            return json.loads(quoted).replace("$${", "${").replace("%%{", "%{")
        except json.JSONDecodeError as error:
            raise self._error(f"{quoted} is not a string ({error.msg})") from error

    def _take(self, kind: str, expected: str, only: str = "", skip_newlines: bool = False) -> str:
        found, text = self._next(skip_newlines)
        if found != kind or (only and text != only):
            raise self._error(f"{expected} was expected, not {text.strip() or 'the end of the line'}")
        return text

    def _peek(self, skip_newlines: bool = False) -> tuple[str, str]:
        position = self._position
        token = self._next(skip_newlines)
        self._position = position
        return token

    def _next(self, skip_newlines: bool = False) -> tuple[str, str]:
        while self._position < len(self._text):
            found = TOKEN.match(self._text, self._position)
            if found is None:
                raise self._error(f"{self._text[self._position]!r} was not expected: only literals can stand here")
            self._position = found.end()
            kind = str(found.lastgroup)
            if kind != "space" and not (kind == "newline" and skip_newlines):
                return kind, found[0]
        return "end", ""

    def _error(self, message: str) -> DeployError:
        line = self._text.count("\n", 0, self._position) + 1
        return DeployError(f"{self._source}, about line {line}: {message}")
