"""Modules of the user's own, by their names: installed ones, and those of the current directory."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from apexrl.errors import ConfigError, reason_of
from apexrl.guard import importing


def import_own(module: str, asked: str) -> ModuleType:
    """Imports a module, and lets it find others of the current directory, behind all that is installed.

    Args:
      asked: the flag and the value that name it, for the error.

    Raises: ConfigError when the import fails, however it does.
    """
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        with importing(module):
            return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # somebody else's module may raise anything
        searched = f" (searched in {directory}, too)" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{asked}: {module} cannot be imported: {reason_of(error)}{searched}") from error


def own(path: str, flag: str) -> Any:
    """Returns the thing that the value `module:name` of a flag names.

    Raises: ConfigError when there is none.
    """
    module, _, name = path.rpartition(":")
    if not module:
        raise ConfigError(f"{flag} {path}: {path} has no colon: give module:name")
    imported = import_own(module, f"{flag} {path}")
    if not hasattr(imported, name):
        raise ConfigError(f"{flag} {path}: {module} has no {name}: give the name of something that it defines")
    return getattr(imported, name)
