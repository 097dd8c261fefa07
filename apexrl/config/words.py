"""The words of a command line: its flags before they are parsed, the words that give a value, and its program."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from apexrl.config.presets import usual_agent


class Basis(NamedTuple):
    """The flags that decide the defaults of all others, as they are written; empty where they are not given."""

    agent: str
    env: str
    preset: str
    resume: str
    fork: str
    at: str
    guest: str
    from_journal: str

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Basis":
        """Returns those of a command line."""
        return cls(*(value_given(flag_of(name), arguments) for name in cls._fields))

    @property
    def algorithm(self) -> str:
        """The algorithm that --agent names, else the usual one of --env."""
        return self.agent or usual_agent(self.env)

    @property
    def run(self) -> str:
        """The directory of the run that goes on or is forked; empty for a new one."""
        return self.resume or self.fork


def program() -> str:
    """Returns the command that this program was started with, as a person types it."""
    path, package = Path(sys.argv[0]), Path(__file__).parents[1]
    if not path.is_relative_to(package):
        return sys.argv[0]
    module = path.relative_to(package.parent).with_suffix("")
    return "python -m " + ".".join(part for part in module.parts if part != "__main__")


def sister(name: str) -> str:
    """Returns another command of `apexrl`, as a person types it who has typed this one."""
    typed = program()
    if typed.startswith("bash ") and typed.endswith(".sh"):
        return f"{typed} {name}"
    head, _, last = typed.rpartition(" ")
    return f"{head} {name}" if last in ("train", "resume") else f"python -m apexrl {name}"


def flag_of(name: str) -> str:
    """Returns the flag of a field."""
    return "--" + name.replace("_", "-")


def words_of(flag: str, value: Any) -> list[str]:
    """Returns the words that give a flag a value."""
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    return [flag, *map(str, value if isinstance(value, list | tuple) else [value])]


def flags_in(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each flag, given as `--flag value ...` or `--flag=value`, with its values."""
    flag, values = "", list[str]()
    for word in arguments:
        if not word.startswith("--"):
            values.append(word)
            continue
        if flag:
            yield flag, values
        flag, has_value, value = word.partition("=")
        values = [value] if has_value else []
    if flag:
        yield flag, values


def value_given(flag: str, arguments: Sequence[str]) -> str:
    """Returns the value of a flag, the first one where it was given last; empty when there is none."""
    given = [values for name, values in flags_in(arguments) if name == flag]
    return given[-1][0] if given and given[-1] else ""


def gathered(arguments: Sequence[str], flag: str) -> list[str]:
    """Returns the arguments with one flag that has the values of all its occurrences, in their order."""
    values: list[str] = []
    others: list[str] = []
    is_given = is_value = False
    for word in arguments:
        if word == flag or word.startswith(f"{flag}="):
            is_given, is_value = True, word == flag
            values += [] if is_value else [word.removeprefix(f"{flag}=")]
        else:
            is_value = is_value and not word.startswith("--")
            (values if is_value else others).append(word)
    return [*others, flag, *values] if is_given else others
