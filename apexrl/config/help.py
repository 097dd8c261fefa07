"""The help of a command: its daily flags first, then the others by section. It leaves out flags of no use to a person.

The defaults that it shows are those of the command that it is given: of a preset, or of a saved run.
"""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from typing import Annotated, Any, NoReturn

import tyro

HELP = frozenset({"-h", "--help"})
DAILY = (
    *("env", "agent", "preset", "run_dir", "resume", "fork", "guest", "from_journal", "evaluate", "checkpoint"),
    *("env_kwargs", "wrapper", "frame_stack"),
    *("total_frames", "total_updates", "max_seconds", "seed", "num_workers", "num_learners", "device"),
    *("learning_rate", "batch_size", "capacity", "replay_host", "learner_host", "bind_host", "journal_dir", "keys"),
    *("record_dir", "evaluator", "tensorboard", "tensorboard_port", "wandb", "mlflow", "smoke"),
)
"""Names of fields, in the order of the help."""
HIDDEN = {
    "RunCommand": {"replay_host", "learner_host", "checkpoint"},
    "ActorCommand": {"bind_host", "batch_port", "meeting_port"},
    "WorkerCommand": {"bind_host", "batch_port", "meeting_port", "worker_index", "parameter_endpoint"},
    "LearnerCommand": {"actor_port"},
    "OfflineCommand": {"learner_host", "learner_hosts", "learner_host_rank", "actor_port"},
    "ReplayCommand": {"replay_host", "parameter_port", "meeting_port"},
}
"""By the name of a command, the fields that it has from a section shared with others, and does not use."""


def show_help(default: Any, prog: str, **options: Any) -> NoReturn:
    """Prints the help of a command with these defaults, and ends the program.

    Args:
      options: further arguments of tyro.cli, those with which the command is parsed.
    """
    command, sections = type(default), {}
    entries: dict[str, list[tuple[str, Any, Any]]] = {"daily": [], "other": []}
    for field in dataclasses.fields(command):
        value = getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            sections[field.name] = inspect.getdoc(type(value)) or ""
            entries[field.name] = _entries(value, [inner.name for inner in dataclasses.fields(value)])
        else:
            entries["other"] += _entries(default, [field.name])
    hidden = HIDDEN.get(command.__name__, set())
    shown = {name: [entry for entry in of if entry[0] not in hidden] for name, of in entries.items()}
    daily = {entry[0]: entry for entry in itertools.chain(*shown.values()) if entry[0] in DAILY}
    fields: list[Any] = [daily[name] for name in DAILY if name in daily]
    sections["other"] = "Flags of this command alone."
    for name, text in sections.items():
        if rest := [entry for entry in shown[name] if entry[0] not in daily]:
            section = dataclasses.make_dataclass(name, rest, namespace={"__doc__": text}, frozen=True)
            fields.append(
                (f"{name}_", Annotated[section, tyro.conf.arg(name=name)], dataclasses.field(default=section()))
            )
    whole = dataclasses.make_dataclass(
        command.__name__, fields, namespace={"__doc__": inspect.getdoc(command)}, frozen=True
    )
    tyro.cli(whole, args=["--help"], prog=prog, **options)
    raise AssertionError("tyro has printed the help and ended the program")


def _entries(config: Any, names: list[str]) -> list[tuple[str, Any, Any]]:
    """Returns name, type with the text of its help, and default of some fields."""
    hints, texts = typing.get_type_hints(type(config), include_extras=True), texts_of(type(config))
    return [
        (
            name,
            Annotated[hints[name], tyro.conf.arg(help=texts.get(name, ""))],
            dataclasses.field(default=getattr(config, name)),
        )
        for name in names
    ]


def texts_of(kind: type) -> dict[str, str]:
    """Returns the text that stands under each field of a dataclass, by the field's name."""
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(one):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, SyntaxError):  # it was made by a program, and has no text
            continue
        definition = tree.body[0]
        assert isinstance(definition, ast.ClassDef)
        for field, text in itertools.pairwise(definition.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts
