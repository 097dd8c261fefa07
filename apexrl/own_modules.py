"""Modules of the user's own, by their names: installed ones, and those of the current directory.

To import a module is to run its code. So a name out of a file or a message, which may be anybody's, passes `Trust`
before it is imported.
"""

import importlib
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from apexrl.config.words import flags_in
from apexrl.errors import ConfigError, reason_of
from apexrl.guard import importing

NAMING = ("--env", "--wrapper", "--agent", "--network", "--callback")  # the flags whose values may be module:name


class Trust(NamedTuple):
    """The modules that files may name: those that a person has named and their parts, that are loaded, or all."""

    modules: Collection[str] = ()
    is_blind: bool = False  # --trust: all
    cure: str = "--trust"  # the words that make it so

    @classmethod
    def of(cls, arguments: Sequence[str], cure: str) -> "Trust":
        """Returns the trust that a command line tells."""
        named = (name for flag, values in flags_in(arguments) if flag in NAMING for name in values)
        return cls(frozenset(name.rpartition(":")[0] for name in named), "--trust" in arguments, cure)

    def check(
        self, source: object, agent: str = "", env: str = "", wrapper: Sequence[str] = (), network: str = ""
    ) -> None:
        """Raises ConfigError when the names that came out of a source are of a module that nobody has named."""
        named = [("--agent", agent), ("--env", env), ("--network", network), *(("--wrapper", name) for name in wrapper)]
        for flag, module in ((flag, value.rpartition(":")[0]) for flag, value in named):
            if not module or self.is_blind or self._has_named(module) or _is_loaded(module):
                continue
            if not all(part.isidentifier() for part in module.split(".")):
                raise ConfigError(f"{source} names a module in {flag} that can be none")
            raise ConfigError(
                f"{source} names the module {module} ({flag}), whose code would run here: "
                f"where you trust it, say {self.cure}"
            )

    def _has_named(self, module: str) -> bool:
        """Returns whether a person has named a module, or the package that it is a part of."""
        return any(module == named or module.startswith(f"{named}.") for named in self.modules if named)


NOBODY = Trust()  # has named anything


def _is_loaded(module: str) -> bool:
    """Returns whether a module is gymnasium's, or this program has imported it itself.

    Those of Python's own library have functions that nobody means.
    """
    package = module.partition(".")[0]
    return package == "gymnasium" or (module in sys.modules and package not in sys.stdlib_module_names)


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
    if not module or not name:
        lack = "has an empty part" if ":" in path else "has no colon"
        raise ConfigError(f"{flag} {path}: {path} {lack}: give module:name")
    imported = import_own(module, f"{flag} {path}")
    if not hasattr(imported, name):
        raise ConfigError(f"{flag} {path}: {module} has no {name}: give the name of something that it defines")
    return getattr(imported, name)
