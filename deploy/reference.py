"""Lists of flags, metrics and Python names in docs/: `python -m deploy flags` writes them anew, from the code.

They are tables, which GitHub shows as the site does. A page says in comments where its lists begin and end; api.md has
the names of each list in a comment, which the site turns into the docstrings.
"""

import dataclasses
import importlib
import inspect
import itertools
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from apexrl.__main__ import COMMANDS
from apexrl.agents.families import FAMILIES
from apexrl.config.commands import ActorCommand, Command, OfflineCommand, ReplayCommand, RunCommand
from apexrl.config.fields import range_of
from apexrl.config.flags import FAMILY_SECTIONS, default_command
from apexrl.config.help import texts_of
from apexrl.config.sections import GREATEST, Range
from apexrl.config.words import flag_of
from apexrl.learning.record.metric_texts import TEXTS
from apexrl.running.ray_flags import RayConfig
from deploy.flags import PRESETS, agents
from deploy.steps import ROOT

PAGES = tuple(ROOT / "docs" / name for name in ("flags.md", "metrics.md", "api.md"))
BEGIN, END = "<!-- from the code: `python -m deploy flags` writes it anew -->\n", "<!-- so far -->"
LIST = re.compile(f"{BEGIN}.*?{END}", re.DOTALL)
DOCSTRINGS = re.compile(r"<!-- the site has here:\n(.*?)-->\n", re.DOTALL)
ROLES: dict[str, type[Command]] = {
    "train": RunCommand, "actor": ActorCommand, "learner": OfflineCommand, "replay": ReplayCommand,
}  # fmt: skip
TITLES = {
    "env": "Environment", "wires": "Hosts, ports and keys", "acting": "Actors", "replay": "Replay",
    "learning": "The learner's process", "evaluation": "Evaluations",
}  # fmt: skip
"""By the name of a section; a section without a title has its name."""
FLAG = re.compile(r"--[a-z][a-z-]*[a-z]")


def write() -> None:
    """Writes the lists into their pages."""
    for page in PAGES:
        page.write_text(text_of(page), encoding="utf-8")
        print(page)


def text_of(page: Path) -> str:
    """Returns a page with its lists as the code has them now."""
    text = page.read_text(encoding="utf-8")
    if page.name == "api.md":
        lists = [_names(block) for block in DOCSTRINGS.findall(text)]
    else:
        lists = [flags() if page.name == "flags.md" else metrics()]
    assert len(LIST.findall(text)) == len(lists), page
    return LIST.sub(lambda _: f"{BEGIN}\n{lists.pop(0).strip()}\n\n{END}", text)


def metrics() -> str:
    """Returns a table of the metrics for each part that reports them."""
    parts = []
    for part, texts in itertools.groupby(TEXTS, key=lambda text: text.tag.partition("/")[0]):
        title = "Other learners of a team" if part == "learner_*" else part.capitalize()
        rows = [f"| `{text.tag}` | {text.unit} | {text.text} |" for text in texts]
        parts += [f"\n## {title}\n", "| metric | unit | meaning |\n| --- | --- | --- |", *rows]
    return "\n".join(parts)


def flags() -> str:
    """Returns tables of the flags of all commands: of each command alone, by section, of the algorithms, of presets."""
    parts = ["\n## Which command has which\n", _sections_table()]
    parts += ["\n## All of these commands\n", *_table(default_command(RunCommand), fields_of(Command))]
    for name, role in ROLES.items():
        if own := [field for field in fields_of(role) if field not in fields_of(Command)]:
            parts += [f"\n## `{name}` alone\n", *_table(default_command(role), own)]
    for name, config in _sections().items():
        parts += [f"\n## {_title(name)}\n", inspect.getdoc(type(config)) or "", "", *_table(config, fields_of(config))]
    for section in FAMILY_SECTIONS:
        parts += [f"\n## {_title(section)}\n", *_table_of_families(section)]
    parts += ["\n## Presets\n", *_preset_tables()]
    parts += ["\n## Runs on Ray\n", inspect.getdoc(RayConfig) or "", "", *_table(RayConfig(), fields_of(RayConfig))]
    others = [f"| `{name}` | {COMMANDS[name].text} |" for name in _others()]
    told = "`apexrl COMMAND --help` tells their flags; `apexrl resume RUN` takes `train`'s."
    parts += ["\n## The other commands\n", f"{told}\n"]
    return "\n".join([*parts, "| command | does |\n| --- | --- |", *others])


def fields_of(config: Any) -> list[str]:
    """Returns the names of a dataclass's fields that are flags, not sections of flags."""
    hints = typing.get_type_hints(config if isinstance(config, type) else type(config))
    return [field.name for field in dataclasses.fields(config) if not dataclasses.is_dataclass(hints[field.name])]


def _sections() -> dict[str, Any]:
    """Returns the sections that all algorithms share, by name, with their defaults."""
    found: dict[str, Any] = {}
    for role in ROLES.values():
        default = default_command(role)
        for field in dataclasses.fields(role):
            value = getattr(default, field.name)
            if dataclasses.is_dataclass(value) and field.name not in FAMILY_SECTIONS:
                found.setdefault(field.name, value)
    return found


def _sections_table() -> str:
    """Returns a table that tells which command has the flags of which section."""
    links = {name: f"[{_title(name)}](#{anchor_of(_title(name))})" for name in (*_sections(), *FAMILY_SECTIONS)}
    rows = ["| flags | " + " | ".join(f"`{name}`" for name in ROLES) + " |", "| --- " * (len(ROLES) + 1) + "|"]
    for name, link in links.items():
        has = ["yes" if name in role.__dataclass_fields__ else "" for role in ROLES.values()]
        rows.append(f"| {link} | " + " | ".join(has) + " |")
    return "\n".join(rows)


def _title(section: str) -> str:
    return f"Of the algorithms: {section}" if section in FAMILY_SECTIONS else TITLES.get(section, section.capitalize())


def anchor_of(title: str) -> str:
    """Returns the anchor of a heading, which is the same on GitHub and on the site."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def _table(config: Any, names: list[str]) -> Iterator[str]:
    """Yields a table of flags: the values that they take, their defaults, their meanings."""
    hints, texts = typing.get_type_hints(type(config), include_extras=True), texts_of(type(config))
    yield "| flag | value | default | meaning |\n| --- | --- | --- | --- |"
    for name in names:
        value = default_of(getattr(config, name))
        yield f"| `{flag_of(name)}` | {values_of(hints[name])} | {value} | {escaped(texts[name])} |"


def _table_of_families(section: str) -> Iterator[str]:
    """Yields a table of a section's flags. Algorithms whose flag means the same share a row."""
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for agent in agents():
        config = getattr(FAMILIES[agent], section)
        hints, texts = typing.get_type_hints(type(config), include_extras=True), texts_of(type(config))
        for name in fields_of(config):
            defaults = rows.setdefault((flag_of(name), values_of(hints[name]), escaped(texts[name])), {})
            defaults.setdefault(default_of(getattr(config, name)), []).append(agent)
    yield "| flag | of | value | default | meaning |\n| --- | --- | --- | --- | --- |"
    flags_in_order = list(dict.fromkeys(flag for flag, *_ in rows))
    for (flag, values, text), defaults in sorted(rows.items(), key=lambda row: flags_in_order.index(row[0][0])):
        of = [agent for owners in defaults.values() for agent in owners]
        usual = max(defaults, key=lambda value: len(defaults[value]))
        told = [usual, *(f"{value} ({', '.join(defaults[value])})" for value in defaults if value != usual)]
        owners = "all" if len(of) == len(agents()) else ", ".join(of)
        yield f"| `{flag}` | {owners} | {values} | {'; '.join(told)} | {text} |"


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
        return " above 0" if allowed.most == GREATEST else f" above 0, {allowed.most:g} at most"
    return f" from {allowed.least:g}" + ("" if allowed.most == GREATEST else f" to {allowed.most:g}")


def default_of(value: Any) -> str:
    """Returns a default as it is typed; empty where it is nothing."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return f"`{typed(value)}`" if value != "" else ""


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
    return "`".join(parts).replace("|", r"\|")  # also in code: it would end the cell of a table


def _preset_tables() -> Iterator[str]:
    """Yields for each algorithm a table of the flags that a preset changes."""
    for agent in agents():
        family = FAMILIES[agent]
        own = default_command(RunCommand, agent)
        sections = [section for preset in family.presets.values() for section in preset.items()]
        changed = dict.fromkeys((section, name) for section, values in sections for name in values)
        names = dict.fromkeys([*PRESETS, *family.presets])
        yield f"\n**{agent}**\n\n| flag | " + " | ".join(names) + " |\n" + "| --- " * (len(names) + 1) + "|"
        for section, name in changed:
            usual = getattr(getattr(own, section), name)
            values = [family.presets.get(preset, {}).get(section, {}).get(name, usual) for preset in names]
            yield f"| `{flag_of(name)}` | " + " | ".join(map(default_of, values)) + " |"


def _others() -> list[str]:
    return [name for name in COMMANDS if name not in (*ROLES, "resume")]


def helps() -> str:
    """Returns the help of the other commands, as they print it; the site has it below their table."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "APEXRL_PROGRAM": "apexrl"}
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "apexrl", name, "--help"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        for name in _others()
    }
    parts = []
    for name, process in running.items():
        text, _ = process.communicate(timeout=120)
        if process.returncode:
            raise RuntimeError(f"apexrl {name} --help ended with status {process.returncode}")
        parts.append(f"\n### `{name}`\n\n```\n{text.strip()}\n```")
    return "\n".join(parts) + "\n"


def _names(block: str) -> str:
    """Returns a table of Python names with their parameters and the first lines of their docstrings."""
    rows = ["| name | what it does |\n| --- | --- |"]
    for entry in block.split("::: ")[1:]:
        path, shown = entry.split(maxsplit=1)[0], re.search(r"(?m)^ +heading: (\S+)", entry)
        members = re.search(r"members: \[(.*?)\]", entry, re.DOTALL)
        found = _import(path)
        title = shown[1] if shown else path
        rows.append(_row(title, found))
        for name in re.findall(r"\w+", members[1] if members else ""):
            prefix = "" if inspect.ismodule(found) else title.rpartition(".")[2] + "."
            rows.append(_row(prefix + name, inspect.getattr_static(found, name)))
    return "\n".join(rows)


def _import(path: str) -> Any:
    """Returns a module, or a name of it."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def _row(title: str, found: Any) -> str:
    parameters = _parameters(found) if callable(found) else ""
    return f"| `{title}{parameters}` | {escaped((inspect.getdoc(found) or '').partition(chr(10))[0])} |"


def _parameters(found: Any) -> str:
    """Returns the parameters of a function, or of a class that a program makes, without their types."""
    if inspect.isclass(found) and (inspect.isabstract(found) or getattr(found, "_is_protocol", False)):
        return ""
    signature = inspect.signature(found)
    plain = [one.replace(annotation=one.empty) for one in signature.parameters.values() if one.name != "self"]
    text = str(inspect.Signature(plain)).replace("mappingproxy({})", "{}")
    return re.sub(r"<function .*? at 0x[0-9a-f]+>", "...", text)
