"""`apexrl keys DIR [NAME ...]`: makes CURVE keys. `net/keyring.py` explains the files."""

import sys
from pathlib import Path

import tyro

from apexrl.config.words import program
from apexrl.errors import ApexError, ConfigError
from apexrl.lifecycle import exit_status, run_program
from apexrl.lines import say
from apexrl.net.keyring import ROLES, make_keys


def main(directory: tyro.conf.Positional[Path], names: tyro.conf.Positional[tuple[str, ...]] = ROLES) -> int:
    """Makes a pair of keys for each name.

    Args:
      directory: The directory of the keys. A host gets all .public files, and the .secret files of its own roles.
      names: replay, learner, actor, or one of these with a dash and more for a further key of that role.
    """
    try:
        for name in names:
            role, dash, further = name.partition("-")
            if role not in ROLES or (dash and not further):
                raise ConfigError(f"{name}: a key is of {', '.join(ROLES)}, or one of these with -anything behind it")
        for path in make_keys(directory, tuple(dict.fromkeys(names))):
            say(path)
    except ApexError as error:
        say(f"cannot make keys: {error}", file=sys.stderr)
        return exit_status(error)
    return 0


def run() -> int:
    """Runs the command line; returns the exit status."""
    return tyro.cli(main, prog=program())


if __name__ == "__main__":
    sys.exit(run_program(run))
