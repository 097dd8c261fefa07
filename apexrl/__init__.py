"""Distributed replay: Ape-X, IMPALA and LASER on one durable log. Six names are the library, loaded when asked for."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apexrl.library import Run, load, train
    from apexrl.net import InsertClient, RecordClient, ReplayClient

__version__ = "0.2.0"
__all__ = ["InsertClient", "RecordClient", "ReplayClient", "Run", "load", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "apexrl.net" if name.endswith("Client") else "apexrl.library"
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        from apexrl.extras import why_missing  # noqa: PLC0415 - seldom needed

        raise ModuleNotFoundError(why_missing(error) or str(error), name=error.name) from None
