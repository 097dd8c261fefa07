"""The command `apexrl`: `apexrl train`, `apexrl watch` and others. `python -m apexrl` is the same.

Each command is a module of its own that loads when it is wanted. What a person has typed stands in sys.argv[0], for the
messages of that module.
"""

import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from apexrl.config.help import HELP
from apexrl.config.words import program
from apexrl.errors import ApexError, ConfigError
from apexrl.lifecycle import exit_status, run_program
from apexrl.lines import say
from apexrl.runs import RUNS, newest_run

ENVIRONMENT = re.compile(r"\S+-v\d+")  # whose --env was forgotten
PROGRAM_VARIABLE = "APEXRL_PROGRAM"  # the name of run.sh, by which it was called


class Entry(NamedTuple):
    """A command: the function that runs it, and its line in the list."""

    function: str
    text: str


COMMANDS = {
    "train": Entry("apexrl.running.launch:main", "trains on this machine"),
    "watch": Entry("apexrl.roles.watch:run", "plays the best network of the newest run, or of RUN, and films it"),
    "resume": Entry("apexrl.running.launch:main", "goes on with the newest run, or with RUN"),
    "runs": Entry("apexrl.tools.runs:main", "lists the runs in ./runs"),
    "compare": Entry("apexrl.tools.compare:main", "compares runs: a table and a picture"),
    "sweep": Entry("apexrl.tools.sweep:main", "makes runs of variants and seeds"),
    "replay": Entry("apexrl.roles.replay:run", "the replay server alone"),
    "learner": Entry("apexrl.roles.learner:run", "the learner alone"),
    "actor": Entry("apexrl.roles.actor:run", "actors alone, or an evaluator"),
    "keys": Entry("apexrl.tools.keys:main", "makes keys, for encryption between hosts"),
    "export": Entry("apexrl.roles.export:run", "writes the network of a checkpoint as ONNX"),
    "card": Entry("apexrl.tools.card:main", "writes a model card of a run, to publish beside its network"),
    "version": Entry("apexrl.tools.version:main", "its version, torch's, and the device; --version is the same"),
    "inspect": Entry("apexrl.tools.replay_tool:main", "reads, checks and exports the experience of a run"),
    "deploy": Entry("apexrl.tools.deploy:main", "a cluster on EC2, from a checkout"),
}


def main() -> int:
    """Runs the command line; returns the exit status."""
    return run_program(_run)


def _run() -> int:
    typed = os.environ.pop(PROGRAM_VARIABLE, "") or program()
    if not typed.startswith(("python ", "bash ")):
        typed = Path(typed).name
    words = sys.argv[1:]
    if not words or words[0] in (*HELP, "help"):
        say(listing(typed))
        return 0 if words else 2
    name, *rest = ["version" if words[0] == "--version" else words[0], *words[1:]]
    if name not in COMMANDS:
        near = [f"--env {name}"] if ENVIRONMENT.fullmatch(name) else difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        say(f"{typed} {name}: there is no such command; {meant}`{typed} help` lists them", file=sys.stderr)
        return 2
    if name == "train" and rest and ENVIRONMENT.fullmatch(rest[0]):
        say(f"{typed} {name} {rest[0]}: did you mean --env {rest[0]}?", file=sys.stderr)
        return 2
    # `bash run.sh FLAGS` trains.
    sys.argv = [typed if name == "train" and typed.startswith("bash ") else f"{typed} {name}", *rest]
    try:
        if name == "resume" and HELP.intersection(rest):
            say(f"usage: {typed} resume [RUN] [FLAGS]\n\nGoes on with a run, the newest one unless told otherwise.")
            say(f"FLAGS are those of training: {typed} train --help")
            return 0
        check_current_directory()
        if name == "resume":
            sys.argv[1:] = resuming(rest)
        module, _, function = COMMANDS[name].function.partition(":")
        run: Callable[[], int] = getattr(importlib.import_module(module), function)
        return run()
    except ApexError as error:
        say(f"cannot run: {error}", file=sys.stderr)
        return exit_status(error)


def check_current_directory() -> None:
    """Raises ConfigError where somebody has removed the directory that this shell is in."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("the current directory is gone: change to another one, by cd") from error


def listing(typed: str) -> str:
    """Returns the commands with a line for each."""
    lines = [f"  {name:8} {entry.text}" for name, entry in COMMANDS.items()]
    return "\n".join([f"usage: {typed} COMMAND [FLAGS]", "", *lines, "", f"{typed} COMMAND --help tells its flags."])


def resuming(words: Sequence[str]) -> list[str]:
    """Returns the flags of training that go on with the named run, or with the newest one.

    Raises: ConfigError when there is no run.
    """
    if words and not words[0].startswith("-"):
        return ["--resume", words[0], *words[1:]]
    directory = newest_run(RUNS)
    say(f"resumes {directory}", flush=True)
    return ["--resume", str(directory), *words]


if __name__ == "__main__":
    sys.exit(main())
