"""Runs a program where only the packages of the base installation are found: `python -m tests.base_only FILE WORDS`."""

import runpy
import sys

BASE = ("msgspec", "numpy", "psutil", "tyro", "zmq", "zstandard")
OF_TYRO = ("docstring_parser", "typeguard", "typing_extensions")
FOUND = {*sys.stdlib_module_names, *BASE, *OF_TYRO, "apexrl"}


class BaseOnly:
    """An import hook that refuses all other packages, wherever they are wanted."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in FOUND:
            raise ModuleNotFoundError(f"{name} is not of the base installation", name=name)


if __name__ == "__main__":
    del sys.argv[0]
    sys.meta_path.insert(0, BaseOnly())
    runpy.run_path(sys.argv[0], run_name="__main__")
