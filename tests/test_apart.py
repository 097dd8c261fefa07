"""Settings of the process that foreign code has changed: its own where it goes on, ours everywhere else."""

import logging
import logging.config
import os
import signal
import warnings

import numpy as np
import pytest
import torch

from apexrl.apart import Apart

OWN = logging.getLogger("apexrl.acting.loop")


def settings():
    defaults = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads()
    return os.getcwd(), defaults, np.geterr()


@pytest.fixture
def untouched():
    """Whatever a test leaves is ours again behind it, by hand."""
    directory, (dtype, _, _, threads), errors = settings()
    handlers, level = logging.root.handlers[:], logging.root.level
    loggers = [found for found in logging.root.manager.loggerDict.values() if isinstance(found, logging.Logger)]
    enabled = [logger for logger in loggers if not logger.disabled]
    with warnings.catch_warnings():
        yield
    os.chdir(directory)
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)
    np.seterr(**errors)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    for logger in enabled:
        logger.disabled = False


def take_over(tmp_path):
    os.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(7)
    np.seterr(all="raise")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("error")
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": True, "root": {"level": 50, "handlers": []}})
    logging.disable(logging.CRITICAL)


def test_foreign_code_finds_its_settings_again_and_we_ours(tmp_path, untouched, caplog):
    apart, ours = Apart(), settings()
    handler, filters = signal.getsignal(signal.SIGTERM), warnings.filters[:]
    OWN.setLevel(logging.NOTSET)
    logging.getLogger("apexrl").setLevel(logging.INFO)
    for call in range(3):
        with apart:
            if call == 0:
                take_over(tmp_path)
            theirs = settings()
            assert theirs[0] == str(tmp_path) and theirs[1] == (torch.float64, torch.device("meta"), False, 7)
            assert set(theirs[2].values()) == {"raise"}
        assert settings() == ours
        assert signal.getsignal(signal.SIGTERM) == handler and warnings.filters[:] == filters
        OWN.info("call %d", call)
    assert [record.message for record in caplog.records if record.name == OWN.name] == ["call 0", "call 1", "call 2"]
    logging.getLogger("apexrl").setLevel(logging.NOTSET)


def test_an_error_of_foreign_code_leaves_our_settings(tmp_path, untouched):
    ours = settings()
    with pytest.raises(ZeroDivisionError), Apart():
        os.chdir(tmp_path)
        torch.set_default_dtype(torch.float64)
        raise ZeroDivisionError
    assert settings() == ours


def test_a_directory_that_is_gone_ends_nothing(tmp_path, untouched):
    apart, ours, gone = Apart(), settings(), tmp_path / "gone"
    gone.mkdir()
    with apart:
        os.chdir(gone)
        gone.rmdir()
    assert settings() == ours
    with apart:
        pass
    assert settings() == ours


def test_handlers_of_others_stay_beside_ours(untouched):
    ours, theirs = logging.root.handlers[:], logging.NullHandler()
    with Apart():
        logging.root.handlers[:] = [theirs]
    assert logging.root.handlers == [theirs, *ours]
