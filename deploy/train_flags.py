"""The types of `apexrl.train`'s flags, for editors and mypy: `python -m deploy flags` writes train_flags.py anew."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apexrl.agents.families import FAMILIES
from apexrl.config.commands import RunCommand
from deploy.flags import agents

TYPES_FILE = Path(__file__).resolve().parents[1] / "apexrl" / "train_flags.py"
HEAD = '''"""The flags of `apexrl.train` with their types, of all algorithms. Written by `python -m deploy flags`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class TrainFlags(TypedDict, total=False):
    """Any of them may be left out; `apexrl train --help` says what they do."""

'''
GIVEN_OTHERWISE = {"env"}  # `train` has a parameter of its own for it
OTHERS = {"env_kwargs": "str | Mapping[str, Any]"}


def text_of_types() -> str:
    """Returns the content of train_flags.py."""
    found: dict[str, list[str]] = {}
    families = [FAMILIES[name] for name in agents()]
    own = [type(part) for family in families for part in (family.algorithm, family.network, family.update)]
    for name, kind in (field for part in (RunCommand, *own) for field in _fields(part)):
        text = OTHERS.get(name) or _text_of(kind)
        if name not in GIVEN_OTHERWISE and text not in found.setdefault(name, []):
            found[name].append(text)
    return HEAD + "".join(f"    {name}: {' | '.join(kinds)}\n" for name, kinds in sorted(found.items()))


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(kind := hints[field.name]):
            yield from _fields(kind)
        else:
            yield field.name, kind


def _text_of(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"Literal{str(list(arguments)).replace(chr(39), chr(34))}"
    if origin is tuple:
        of = _text_of(arguments[0])
        return f"{of} | Sequence[{of}]" if Ellipsis in arguments else f"Sequence[{of}]"
    if origin is types.UnionType:  # None is what is not given
        return " | ".join(_text_of(part) for part in arguments if part is not types.NoneType)
    return kind.__name__


def write() -> None:
    """Writes the file."""
    TYPES_FILE.write_text(text_of_types(), encoding="utf-8")
    print(TYPES_FILE)
