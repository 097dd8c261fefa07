"""Code of the user's own that hears of a run, by its files."""

import dataclasses
import os
import time
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from apexrl.errors import ConfigError
from apexrl.learning.record.status_file import Status
from apexrl.networks.headers import Counters
from apexrl.running import callbacks
from apexrl.running.callbacks import News, is_end
from apexrl.runs import CURVE_FILE, STATUS_FILE, CurvePoint


def evaluated(directory, *means):
    lines = [",".join(CurvePoint._fields), *(f"{i},{i},{i},10,{mean},0,0,0" for i, mean in enumerate(means))]
    (directory / CURVE_FILE).write_text("\n".join(lines) + "\n")
    os.utime(directory / CURVE_FILE, (time.time(), time.time() + len(means)))


def wrote_status(directory, frames):
    status, path = Status("Catch-v0", frames, Counters(), {}, ""), directory / STATUS_FILE
    path.write_bytes(msgspec.json.encode(status))
    os.utime(path, (soon := time.time() + 1, soon))  # many kernels give a new file the time of the last tick


def test_news_are_told_once_and_those_of_earlier_starts_never(tmp_path):
    evaluated(tmp_path, 1.0)
    news = News(tmp_path)
    assert list(news()) == []
    evaluated(tmp_path, 1.0, 2.0, 2.0)
    wrote_status(tmp_path, 5)
    first, second, status = news()
    assert (first.mean, second.updates, status.frames) == (2.0, 2, 5)
    assert list(news()) == []
    wrote_status(tmp_path, 6)
    assert [status.frames for status in news()] == [6]


def test_a_function_that_returns_true_ends_and_others_do_not(tmp_path):
    news, heard = News(tmp_path), []
    wrote_status(tmp_path, 1)
    assert not is_end(news, heard.append, None) and heard[0].frames == 1
    evaluated(tmp_path, 3.0)
    assert not is_end(news, None, lambda evaluation: 1)  # a number is no order
    evaluated(tmp_path, 3.0, 4.0)
    assert is_end(news, None, lambda evaluation: evaluation.mean == 4.0)
    evaluated(tmp_path, 3.0, 4.0, 5.0)
    assert not is_end(news, None, lambda evaluation: np.mean([evaluation.mean]) >= 6)
    evaluated(tmp_path, 3.0, 4.0, 5.0, 6.0)
    assert is_end(news, None, lambda evaluation: np.mean([evaluation.mean]) >= 6)


class Told:
    """Hears of evaluations until one is good enough."""

    heard: ClassVar = []

    def __init__(self, directory):
        self.directory = directory

    def on_evaluation(self, evaluation):
        self.heard.append(evaluation.mean)
        if evaluation.mean < 0:
            raise KeyError("negative")
        return evaluation.mean >= 5


class Deaf:
    def __init__(self, directory):
        pass


class Once(Deaf):
    """Ends a run after its first update."""

    def on_status(self, status):
        return status.counters.updates > 0


class Waits:
    """A stop that writes an evaluation at each look, and is set after the last one."""

    def __init__(self, directory, means):
        self._directory, self._means, self._written = directory, means, []

    def wait(self, seconds):
        if self._means:
            self._written.append(self._means.pop(0))
            evaluated(self._directory, *self._written)
        return not self._means


def role(monkeypatch, directory, name, *means):
    monkeypatch.setattr("sys.argv", ["callbacks", str(directory), f"tests.running.test_callbacks:{name}"])
    callbacks.main(Waits(directory, [*means]))


def test_a_role_hears_all_to_the_last_and_ends_by_itself_when_it_wants(tmp_path, monkeypatch):
    from tests.running.test_callbacks import Told  # as the role imports it

    monkeypatch.setattr(Told, "heard", [])
    role(monkeypatch, tmp_path, "Told", 1.0, 2.0, 5.0, 6.0)
    assert Told.heard == [1.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Told", "--callback tests.running.test_callbacks:Told failed: KeyError: 'negative'"),
        ("Deaf", "neither on_status nor on_evaluation"),
        ("Nobody", "has no Nobody"),
        ("dataclasses", "failed: TypeError: 'module' object is not callable"),
    ],
)
def test_what_is_wrong_with_a_callback_is_said_in_its_line(tmp_path, monkeypatch, name, line):
    assert dataclasses
    with pytest.raises(ConfigError, match=line):
        role(monkeypatch, tmp_path, name, -1.0)


def test_evaluations_that_cannot_be_read_for_a_moment_end_no_run(tmp_path, caplog, monkeypatch):
    evaluated(tmp_path, 1.0)
    news = News(tmp_path)
    (tmp_path / CURVE_FILE).write_text("seconds;frames\n1;2\n")
    os.utime(tmp_path / CURVE_FILE, (1, 1))
    assert list(news()) == [] and "line 2 is no evaluation: mend or remove that line" in caplog.text
    with pytest.raises(ConfigError, match="mend or remove that line"):  # else a later start would hear of all of them
        News(tmp_path)
    evaluated(tmp_path, 1.0, 2.0)
    with monkeypatch.context() as broken:
        broken.setattr(callbacks, "CURVE_FILE", "x" * 300)  # the disk fails for another reason than a missing file
        assert list(news()) == [] and "cannot be read" in caplog.text
    assert [evaluation.mean for evaluation in news()] == [2.0]
