"""Settings of the process that foreign code may change, such as an environment: it has them for itself, we keep ours.

Torch counts where the process has loaded it. Random generators are no settings.
"""

import contextlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from apexrl.errors import reason_of

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
OURS = __package__  # the name of our loggers


class Closable(Protocol):
    """Something that has to be closed."""

    def close(self) -> object:
        """Frees what it holds."""


C = TypeVar("C", bound=Closable)


class Setting(NamedTuple):
    """Something of the process that has a value."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    is_lent: bool = True  # foreign code finds its own value again when it goes on; else ours is put back for good


class Apart:
    """A context around each call of some foreign code. One thread uses it, the main one where there are signals.

    The settings are ours again behind it. The working directory, torch's defaults and what numpy does about errors are
    those of the foreign code in the next call. Signals, warnings and our log stay ours.
    """

    def __init__(self, *, has_signals: bool = True):
        """Keeps all settings, or all but the signals: to look at them takes as long as to look at all others."""
        self._settings = SETTINGS if has_signals else SETTINGS[:-1]
        self._theirs: dict[Setting, Any] = {}  # those that differ from ours
        self._ours: list[Any] = []

    @property
    def has_own(self) -> bool:
        """Whether the foreign code has settings that differ from ours."""
        return bool(self._theirs)

    def put_back(self) -> None:
        """Takes what foreign code has changed outside of the context as its own, and has ours again."""
        self.__exit__()

    def __enter__(self) -> None:
        self._ours = [setting.read() for setting in self._settings]
        for setting, value in self._theirs.items():
            setting.write(value)

    def __exit__(self, *_: object) -> None:
        self._theirs.clear()
        for setting, ours in zip(self._settings, self._ours, strict=True):
            if (value := setting.read()) == ours:
                continue
            if setting.is_lent:
                self._theirs[setting] = value
            setting.write(ours)


@contextlib.contextmanager
def to_be_closed(env: C, name: str) -> Iterator[C]:
    """Closes an environment in the end, and says where it cannot be: nobody needs it any more."""
    try:
        yield env
    finally:
        try:
            env.close()
        except (Exception, SystemExit) as error:
            logger.warning("environment %r cannot be closed: %s", name, reason_of(error))


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _change_directory(path: str) -> None:
    with contextlib.suppress(OSError):
        os.chdir(path)


def _handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


def _set_handlers(handlers: list[Any]) -> None:
    for number, handler in zip(SIGNALS, handlers, strict=True):
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _log() -> tuple[Any, ...]:
    root, own = logging.root, logging.getLogger(OURS)
    return root.handlers[:], root.manager.disable, own.level, own.disabled, own.propagate, own.handlers[:]


def _set_log(log: tuple[Any, ...]) -> None:
    """Puts our handlers and loggers back; handlers of others stay."""
    handlers, level, own_level, is_disabled, propagates, own_handlers = log
    logging.disable(level)
    for handler in handlers:
        logging.root.addHandler(handler)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith(f"{OURS}.") and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            logger.setLevel(logging.NOTSET)
    own = logging.getLogger(OURS)
    own.disabled, own.propagate, own.handlers[:] = is_disabled, propagates, own_handlers
    own.setLevel(own_level)


def _set_warnings(filters: list[Any]) -> None:
    warnings.resetwarnings()
    cast(list[Any], warnings.filters)[:] = filters


def _torch_defaults() -> tuple[Any, ...] | None:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    made = torch.empty(0)
    return made.dtype, made.device, torch.is_grad_enabled(), torch.get_num_threads()


def _set_torch_defaults(defaults: tuple[Any, ...] | None) -> None:
    torch: Any = sys.modules.get("torch")
    if defaults is None or torch is None:
        return
    dtype, device, has_gradients, num_threads = defaults
    torch.set_default_dtype(dtype)
    torch.set_default_device(None if device.type == "cpu" else device)
    torch.set_grad_enabled(has_gradients)
    torch.set_num_threads(num_threads)


SETTINGS = (
    Setting(_directory, _change_directory),
    Setting(_torch_defaults, _set_torch_defaults),
    Setting(np.geterr, lambda errors: np.seterr(**errors)),
    Setting(_log, _set_log, is_lent=False),
    Setting(lambda: warnings.filters[:], _set_warnings, is_lent=False),
    Setting(_handlers, _set_handlers, is_lent=False),
)
