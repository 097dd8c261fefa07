"""The lists of flags and metrics, made from the code: the dataclasses of the commands, and the metrics' texts."""

import dataclasses
import inspect
import itertools
import math
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from markdown.extensions.toc import slugify

from apexrl.__main__ import COMMANDS
from apexrl.agents.families import FAMILIES
from apexrl.config.commands import ActorCommand, Command, OfflineCommand, ReplayCommand, RunCommand
from apexrl.config.flags import FAMILY_SECTIONS, default_command, flag_of, range_of
from apexrl.config.help import texts_of
from apexrl.config.sections import PresetName, Range
from apexrl.learning.record.metric_texts import TEXTS
from apexrl.running.ray_flags import RayConfig

ROOT = Path(__file__).parents[2]
ROLES: dict[str, type[Command]] = {
    "train": RunCommand, "actor": ActorCommand, "learner": OfflineCommand, "replay": ReplayCommand,
}  # fmt: skip
PRESETS = [name for name in typing.get_args(PresetName) if name != "auto"]
TITLES = {
    "env": "Environment", "wires": "Hosts, ports and keys", "acting": "Actors", "replay": "Replay",
    "learning": "The learner's process", "evaluation": "Evaluations",
}  # fmt: skip
"""By the name of a section; a section without a title has its name."""
FLAG = re.compile(r"--[a-z][a-z-]*[a-z]")


def metrics() -> str:
    """Returns a table of the metrics for each part that reports them."""
    parts = []
    for part, texts in itertools.groupby(TEXTS, key=lambda text: text.tag.partition("/")[0]):
        title = "Other learners of a team" if part == "learner_*" else part.capitalize()
        rows = [f"| `{text.tag}` | {text.unit} | {text.text} |" for text in texts]
        parts += [f"\n## {title}\n", "| metric | unit | meaning |\n| --- | --- | --- |", *rows]
    return "\n".join(parts) + "\n"


def flags() -> str:
    """Returns the flags of all commands: by section where commands share them, then by algorithm, then by command."""
    writer, parts = _Writer(), ["\n## Which command has which\n", _sections_table()]
    parts += ["\n## All of these commands\n", *writer.flags(default_command(RunCommand), fields_of(Command))]
    for name, role in ROLES.items():
        if own := [field for field in fields_of(role) if field not in fields_of(Command)]:
            parts += [f"\n## `{name}` alone\n", *writer.flags(default_command(role), own, name)]
    for name, config in _sections().items():
        title = TITLES.get(name, name.capitalize())
        parts += [f"\n## {title}\n", inspect.getdoc(type(config)) or "", *writer.flags(config, fields_of(config), name)]
    for agent, family in FAMILIES.items():
        parts += [f"\n## `--agent {agent}`\n"]
        for name in FAMILY_SECTIONS:
            config = getattr(family, name)
            parts += [f"\n### {agent}: {name}\n", inspect.getdoc(type(config)) or ""]
            parts += writer.flags(config, fields_of(config), agent)
    parts += ["\n## Presets\n", *_preset_tables()]
    parts += ["\n## Runs on Ray\n", inspect.getdoc(RayConfig) or "", *writer.flags(RayConfig(), fields_of(RayConfig))]
    parts += ["\n## The other commands\n", *_helps([name for name in COMMANDS if name not in (*ROLES, "resume")])]
    return "\n".join(parts) + "\n"


def fields_of(config: Any) -> list[str]:
    """Returns the names of a dataclass's fields that are flags, not sections of flags."""
    hints = typing.get_type_hints(config if isinstance(config, type) else type(config))
    return [field.name for field in dataclasses.fields(config) if not dataclasses.is_dataclass(hints[field.name])]


def _sections() -> dict[str, Any]:
    """Returns the sections that all algorithms share, by name, with their defaults."""
    found = {}
    for role in ROLES.values():
        default = default_command(role)
        for field in dataclasses.fields(role):
            value = getattr(default, field.name)
            if dataclasses.is_dataclass(value) and field.name not in FAMILY_SECTIONS:
                found.setdefault(field.name, value)
    return found


def _sections_table() -> str:
    """Returns a table that tells which command has the flags of which section."""
    titles = {name: TITLES.get(name, name.capitalize()) for name in _sections()}
    links = {name: f"[{title}](#{slugify(title, '-')})" for name, title in titles.items()}
    links |= {name: f"Those of the algorithm: {name}" for name in FAMILY_SECTIONS}
    rows = ["| flags | " + " | ".join(f"`{name}`" for name in ROLES) + " |", "| --- " * (len(ROLES) + 1) + "|"]
    for name, link in links.items():
        has = ["yes" if name in role.__dataclass_fields__ else "" for role in ROLES.values()]
        rows.append(f"| {link} | " + " | ".join(has) + " |")
    return "\n".join(rows)


class _Writer:
    """Writes definition lists of flags; each flag has an anchor of its own."""

    def __init__(self) -> None:
        self._anchors: set[str] = set()

    def flags(self, config: Any, names: list[str], prefix: str = "") -> Iterator[str]:
        """Yields a definition of each flag: the values that it takes, its default, its meaning."""
        hints, texts = typing.get_type_hints(type(config), include_extras=True), texts_of(type(config))
        for name in names:
            flag = flag_of(name)
            anchor = flag.lstrip("-") if flag.lstrip("-") not in self._anchors else f"{prefix}-{flag.lstrip('-')}"
            self._anchors.add(anchor)
            details = [values_of(hints[name]), default_of(getattr(config, name))]
            yield f"\n`{flag}`{{ #{anchor} }} {' · '.join(filter(None, details))}\n:   {escaped(texts[name])}"


def values_of(hint: Any) -> str:
    """Returns the values that a flag takes, in words."""
    kind = typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    if typing.get_origin(kind) is Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        inner = next(one for one in typing.get_args(kind) if one is not types.EllipsisType)
        return f"several: {values_of(inner)}"
    if kind is bool:
        return "switch"
    if kind is str:
        return "text"
    return f"{'whole number' if kind is int else 'number'}{range_text(range_of(hint))}"


def range_text(allowed: Range) -> str:
    """Returns the range of a number, in words."""
    if allowed.least is None:
        return " above 0" if math.isinf(allowed.most) else f" above 0, {allowed.most:g} at most"
    return f" from {allowed.least:g}" + ("" if math.isinf(allowed.most) else f" to {allowed.most:g}")


def default_of(value: Any) -> str:
    """Returns a default as it is typed; empty where it is nothing."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return f"default `{typed(value)}`" if value != "" else ""


def typed(value: Any) -> str:
    """Returns a value as a person types it."""
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:_}" if isinstance(value, int) and value >= 100_000 else str(value)


def escaped(text: str) -> str:
    """Returns a text whose characters mean nothing to Markdown, and whose flags are code."""
    parts = text.split("`")  # code stays as it is
    for i, part in enumerate(parts[::2]):
        plain = part.replace("*", r"\*").replace("<", "&lt;").replace("_", r"\_")
        parts[2 * i] = FLAG.sub(r"`\g<0>`", plain)
    return "`".join(parts)


def _preset_tables() -> Iterator[str]:
    """Yields for each algorithm a table of the flags that a preset changes."""
    for agent, family in FAMILIES.items():
        own = default_command(RunCommand, agent)
        sections = [section for preset in family.presets.values() for section in preset.items()]
        changed = dict.fromkeys((section, name) for section, values in sections for name in values)
        names = dict.fromkeys([*PRESETS, *family.presets])
        yield f"\n**{agent}**\n\n| flag | " + " | ".join(names) + " |\n" + "| --- " * (len(names) + 1) + "|"
        for section, name in changed:
            usual = getattr(getattr(own, section), name)
            values = [family.presets.get(preset, {}).get(section, {}).get(name, usual) for preset in names]
            yield f"| `{flag_of(name)}` | " + " | ".join(default_of(v).removeprefix("default ") for v in values) + " |"


def _helps(names: list[str]) -> Iterator[str]:
    """Yields the help of commands, as they print it."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "APEXRL_PROGRAM": "apexrl"}
    commands = {name: [sys.executable, "-m", "apexrl", name, "--help"] for name in names}
    running = {
        name: subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        for name, command in commands.items()
    }
    for name, process in running.items():
        text, _ = process.communicate(timeout=120)
        if process.returncode:
            raise RuntimeError(f"apexrl {name} --help ended with status {process.returncode}")
        title = COMMANDS[name].text
        yield f"\n### `{name}`\n\n{title[0].upper()}{title[1:]}.\n\n```\n{text.strip()}\n```"
