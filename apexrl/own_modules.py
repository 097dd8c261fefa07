"""Modules of the user's own, by their names: installed ones, and those of the current directory."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from apexrl.errors import ConfigError, reason_of


def import_own(module: str) -> ModuleType:
    """Imports a module, and lets it find others of the current directory, behind all that is installed.

    Raises: ConfigError when the import fails, however it does.
    """
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # somebody else's module may raise anything
        searched = f" (searched in {directory}, too)" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{module} cannot be imported: {reason_of(error)}{searched}") from error


def own(path: str) -> Any:
    """Returns the thing that `module:name` names.

    Raises: ConfigError when there is none.
    """
    module, _, name = path.rpartition(":")
    if not module:
        raise ConfigError(f"{path} has no colon: give module:name")
    imported = import_own(module)
    if not hasattr(imported, name):
        raise ConfigError(f"{module} has no {name}: give the name of something that it defines")
    return getattr(imported, name)
