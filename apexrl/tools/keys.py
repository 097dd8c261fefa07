"""`apexrl keys DIR [NAME ...]`: makes CURVE keys. `net/keyring.py` explains the files."""

import re
from pathlib import Path

import tyro

from apexrl.config.words import program
from apexrl.errors import ConfigError
from apexrl.lifecycle import attempt
from apexrl.lines import say
from apexrl.net.keyring import ROLES, make_keys

FURTHER = re.compile(r"[\w.-]+")  # behind the name of a role: a part of a file's name


def make(directory: tyro.conf.Positional[str], names: tyro.conf.Positional[tuple[str, ...]] = ROLES) -> int:
    """Makes a pair of keys for each name.

    Args:
      directory: The directory of the keys. A host gets all .public files, and the .secret files of its own roles.
      names: replay, learner, actor, or one of these with a dash and more for a further key of that role.
    """
    if not directory:
        raise ConfigError("DIR is empty: give the directory of the keys")
    for name in names:
        role, dash, further = name.partition("-")
        if role not in ROLES or (dash and not FURTHER.fullmatch(further)):
            raise ConfigError(
                f"{name}: a key is of {', '.join(ROLES)}, or one of these with a dash and a name behind it"
            )
    for path in make_keys(Path(directory), tuple(dict.fromkeys(names))):
        say(path)
    return 0


def main() -> int:
    """Runs the command line; returns the exit status."""
    return attempt("make keys", lambda: tyro.cli(make, prog=program()))
