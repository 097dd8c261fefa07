"""The fields of a command, flat over its sections: their names are unique, so a name alone says which one is meant."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from apexrl.config.schedules import Schedule
from apexrl.config.sections import Changing, Range
from apexrl.config.words import flag_of
from apexrl.errors import ConfigError

D = TypeVar("D")
_SCALARS = (bool, int, float, str, type(None))


def values_of(config: Any) -> dict[str, Any]:
    """Returns the values of a command's, or a section's, fields by name, with those of its sections."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values |= values_of(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def types_of(config: Any) -> dict[str, Any]:
    """Returns the types of a command's, or a section's, fields by name, with those of its sections."""
    hints, found = typing.get_type_hints(type(config)), dict[str, Any]()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        found |= types_of(value) if dataclasses.is_dataclass(value) else {field.name: hints[field.name]}
    return found


def is_of_words(kind: Any, is_part: bool = False) -> bool:
    """Returns whether a command line can give each value of a type, or of a part of it: scalars, and tuples of them."""
    parts, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is typing.Literal:
        return all(type(part) in _SCALARS[1:] for part in parts)
    if origin in (typing.Union, types.UnionType):
        return bool not in parts and all(is_of_words(part, is_part) for part in parts)
    if origin in (tuple, list) and not is_part:
        return all(part is ... or is_of_words(part, is_part=True) for part in parts)
    return kind in _SCALARS


def with_values(config: D, values: Mapping[str, Any]) -> D:
    """Returns a command with other values of some fields, in whichever section they are.

    Raises: TypeError when it has no field of a name.
    """
    if unknown := values.keys() - values_of(config):
        raise TypeError(f"{type(config).__name__} has no field {' or '.join(sorted(unknown))}")
    return _replaced(config, values)


def _replaced(config: Any, values: Mapping[str, Any]) -> Any:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = _replaced(value, values)
        elif field.name in values:
            changes[field.name] = values[field.name]
    return dataclasses.replace(config, **changes)


def check_ranges(config: Any) -> None:
    """Raises ConfigError when a number is outside the range of its field."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_ranges(value)
            continue
        if isinstance(value, str) and getattr(hints[field.name], "__origin__", hints[field.name]) == Changing:
            try:
                schedule = Schedule.of(value)
            except ValueError as error:
                raise ConfigError(f"{flag_of(field.name)} {error}") from error
            if wanted := Range(0).wanted(schedule.frames):
                raise ConfigError(f"{flag_of(field.name)} {value} makes no sense: its frames have to be {wanted}")
            value = schedule.ends
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, str) and "\0" in number:
                raise ConfigError(f"{flag_of(field.name)} {number!r} makes no sense: no text has a NUL")
            if isinstance(number, int | float) and not isinstance(number, bool):
                if isinstance(number, float) and _is_whole(hints[field.name]):
                    raise ConfigError(f"{flag_of(field.name)} {number} makes no sense: it has to be a whole number")
                check_range(field.name, number, range_of(hints[field.name]))


def _is_whole(hint: Any) -> bool:
    return getattr(hint, "__origin__", hint) is int


def check_range(name: str, number: float, allowed: Range) -> None:
    """Raises ConfigError when the number of a field, or of an argument that is a flag, is outside its range."""
    if wanted := allowed.wanted(number):
        raise ConfigError(f"{flag_of(name)} {number} makes no sense: it has to be {wanted}")


def range_of(hint: Any) -> Range:
    """Returns the range that a field's type is annotated with, else the one of fields without."""
    return next((note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Range)), Range())
