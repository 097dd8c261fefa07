"""A run refuses a module that begins a run when it is imported, as a script without a guard does.

It would begin itself without end.
"""

import contextlib
import os
from collections.abc import Iterator

from apexrl.errors import ConfigError

IMPORTS_VARIABLE = "APEXRL_IMPORTS"  # holds the name of a module of the user's while a run imports it
GUARD = 'put that below `if __name__ == "__main__":`'


@contextlib.contextmanager
def importing(module: str) -> Iterator[None]:
    """Lets `check_not_imported` know that a run imports a module of the user's, also in processes that it starts."""
    before = os.environ.get(IMPORTS_VARIABLE)
    os.environ[IMPORTS_VARIABLE] = module
    try:
        yield
    finally:
        os.environ.pop(IMPORTS_VARIABLE, None)
        os.environ |= {} if before is None else {IMPORTS_VARIABLE: before}


def check_not_imported() -> None:
    """Raises ConfigError while a run imports a module of the user's."""
    if module := os.environ.get(IMPORTS_VARIABLE):
        raise ConfigError(f"{module} starts a run when it is imported: {GUARD}")
